"""Streams of events of a gateway, without I/O: shared by both clients over HTTP.

A stream lasts as long as its reader wants. When its connection ends, the next one resumes after the last
position received (`Last-Event-ID`), so no event is lost, and none is handed on twice.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from grabstream.client.exchange import ClientRequest, Exchange, not_from_a_gateway
from grabstream.models.events import decode_event
from grabstream.models.vocabulary import Answer, AnyEvent, from_wire

#: A gateway says every 15 s that a stream lives. One that is silent for longer than this is connected again.
SILENT_SECONDS_MAX: Final = 45.0
CONNECT_SECONDS_MAX: Final = 10.0
#: A message of a stream: an event has at most 256 KiB.
MESSAGE_BYTES_MAX: Final = 1024 * 1024
#: The longest wait for which a gateway may ask before its stream is connected again.
_RETRY_SECONDS_MAX: Final = 10.0
_EVENT_STREAM: Final = "text/event-stream"


class ServedEvent(NamedTuple):
    """An event of a stream. `id` is the position after it: `after=id` resumes there, also later, and in
    another process.
    """

    id: str
    event: AnyEvent


class WaitingPosition(NamedTuple):
    """The position of a grab on the waiting list of its offer: 1 is served next."""

    offer: str
    grab: str
    position: int


#: Called with each position in the stream of a user.
Positions = Callable[[WaitingPosition], None]


class StreamReset(Exception):
    """A stream cannot resume where it should, so events are missing. `detail` says why. The gateway continues
    at the position `id`: restart with `after=id`, and read the state.
    """

    def __init__(self, detail: str, id: str) -> None:
        super().__init__(
            f"{detail} Events are missing: begin again with after={id!r}, and ask for the state."
        )
        self.detail = detail
        self.id = id


class EventStreamExchange(Exchange[None]):
    """One stream over all of its connections. `after_reply`, `after_error` and `after_end` return the seconds
    to wait before the next connection.
    """

    def __init__(self, path: str, after: str | int | Answer | None) -> None:
        super().__init__(ClientRequest("GET", path))
        if isinstance(after, Answer):
            after = f"{after.shard}-{after.seq}"
        self._after = None if after is None else str(after)
        self._place: str | None = None
        self._retry_seconds = 0.0
        self._rest = b""
        #: The seq of the last event of each shard.
        self._seqs: dict[int, int] = {}

    def next_request(self) -> ClientRequest:
        """The request of the next connection. Its query has the position of the caller, which may be refused,
        until the stream has its own.
        """
        if self._after is None or self._place is not None:
            return self.request
        return self.request._replace(query={"after": self._after})

    def headers(self) -> dict[str, str]:
        """The headers of the next connection, in addition to those of the client."""
        resumed = {} if self._place is None else {"Last-Event-ID": self._place}
        return {"Accept": _EVENT_STREAM, **resumed}

    def begins(self, status: int, headers: Mapping[str, str]) -> bool:
        """Whether a reply is a stream. The body of any other one is for `after_reply`."""
        self._rest = b""
        return status == 200 and headers.get("content-type", "").startswith(_EVENT_STREAM)

    def messages(self, piece: bytes) -> Iterator[ServedEvent | WaitingPosition]:
        """The events and positions completed by a piece of a stream. Raises StreamReset, and NewerEvent for
        an event of a release that this one cannot read.
        """
        *messages, self._rest = (self._rest + piece).split(b"\n\n")
        if len(self._rest) > MESSAGE_BYTES_MAX:
            raise not_from_a_gateway(200, self.request, f"a message has over {MESSAGE_BYTES_MAX} bytes")
        for message in messages:
            fields = _fields_of(message)
            if fields.get("retry", "").isdecimal():
                self._retry_seconds = min(_RETRY_SECONDS_MAX, int(fields["retry"][:9]) / 1000)
            if "id" not in fields:
                if fields.get("event") == "position":
                    yield self._position_of(fields.get("data", ""))
                continue
            self._attempts = 0
            self._place = fields["id"]
            if fields.get("event") == "reset":
                raise StreamReset(_reason_of(fields.get("data", "")), fields["id"])
            if "data" not in fields:
                continue
            event = from_wire(decode_event(fields["data"].encode()))
            if event.seq > self._seqs.get(event.shard, 0):
                self._seqs[event.shard] = event.seq
                yield ServedEvent(fields["id"], event)

    def _position_of(self, data: str) -> WaitingPosition:
        try:
            found: Any = json.loads(data)
            return WaitingPosition(str(found["offer"]), str(found["grab"]), int(found["position"]))
        except (ValueError, TypeError, KeyError):
            raise not_from_a_gateway(200, self.request, "a position cannot be read") from None

    def after_end(self) -> float:
        """After a stream that its gateway has ended."""
        return self._pause_seconds(self._retry_seconds)

    def _read(self, body: bytes) -> None:
        raise ValueError("the reply is not a stream of events")


def _fields_of(message: bytes) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in message.decode(errors="replace").split("\n"):
        name, _, value = line.partition(":")
        fields[name] = value.removeprefix(" ")
    return fields


def _reason_of(data: str) -> str:
    try:
        found: Any = json.loads(data)
        return str(found["reason"])
    except (ValueError, TypeError, KeyError):
        return "The stream cannot resume."
