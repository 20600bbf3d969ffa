"""Streams of events (Server-Sent Events): the events of an offer, and those that name a user, as they arrive
in the audit trail.

One reader follows the audit trail for all streams of a gateway, while there are any. A stream that resumes
first reads what it has missed, up to the reader's place; from there, the reader gives it every event. So no
event is lost, and none comes twice.

A position is `<shard>-<seq>` in the stream of an offer, and the seq of every shard, with dots between, in
that of a user, whose offers may be in all shards.

The stream of a waiting user also has positions on waiting lists (`positions.py`).
"""

import asyncio
import logging
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from starlette.types import Receive, Send

from grabstream.gateway.bounds import (
    AFTER_SECONDS_MAX,
    STREAM_ADMISSION_SECONDS,
    STREAM_BYTES_MAX,
    STREAM_HEARTBEAT_SECONDS,
    STREAM_MISSED_SEQS_MAX,
    STREAM_SECONDS_MAX,
    STREAMS_BYTES_MAX,
    STREAMS_JOINING_MAX,
    STREAMS_MAX,
    STREAMS_READING_MAX,
    STREAMS_USER_MAX,
    WRITE_SECONDS_MAX,
)
from grabstream.gateway.measures import StreamMeasures
from grabstream.gateway.positions import WaitingPositions
from grabstream.gateway.problems import (
    NOT_KEPT,
    SECURE_HEADERS,
    Header,
    Problem,
    Reply,
    invalid,
    retry_soon,
)
from grabstream.gateway.requests import Gone, Request, query_of
from grabstream.gateway.view_reader import Row, ViewReader
from grabstream.models.bounds import quoted
from grabstream.models.events import encode_event
from grabstream.models.identifiers import campaign_of, shard_of
from grabstream.models.runs import LINES, RUN_GRABS_MAX, AnyRun, is_run, singles

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.25
#: How many seqs of a shard one question reads.
ROUND_SEQS: Final = 1_000
MISSED_LINES: Final = 200
#: What a client must take within WRITE_SECONDS_MAX.
PIECE_BYTES: Final = 64 * 1024
#: When a client whose stream has ended connects again, in ms: not all of them at the same time.
RETRY_MS: Final = (500, 3_000)

_match_offer_position = re.compile(r"([0-9]{1,4})-([0-9]{1,16})\Z").match
_match_user_position = re.compile(r"[0-9]{1,16}(?:\.[0-9]{1,16}){0,1023}\Z").match
_HEADERS: Final[tuple[Header, ...]] = (
    (b"content-type", b"text/event-stream"),
    NOT_KEPT,
    # Proxies such as nginx would keep back what comes.
    (b"x-accel-buffering", b"no"),
    *SECURE_HEADERS,
)

_NEWEST: Final = "SELECT shard, seq FROM cursors WHERE projection = 'audit'"
_LINES: Final = """
    SELECT line.shard, line.seq, line.seqs, line.type, line.offer, line.body
    FROM unnest(%s::integer[], %s::bigint[], %s::bigint[]) AS part (shard, after, upto),
         LATERAL (
            SELECT shard, seq, seqs, type, offer, body FROM audit
            WHERE audit.shard = part.shard AND audit.seq > part.after AND audit.seq <= part.upto
              AND (%s OR audit.offer = ANY(%s::text[]))
         ) AS line
    ORDER BY line.shard, line.seq
"""
#: The lines between two seqs. The first one may be a run that began up to RUN_GRABS_MAX seqs before.
_MISSED: Final = """
    SELECT shard, seq, seqs, type, offer, body FROM audit
    WHERE shard = %s AND seq > %s AND seq <= %s AND seq + seqs - 1 > %s
"""
_MISSED_OF_OFFER: Final = _MISSED + " AND offer = %s ORDER BY seq LIMIT %s"
_MISSED_OF_USER: Final = _MISSED + " AND strpos(body, %s) > 0 ORDER BY seq LIMIT %s"
_COUNT_MISSED: Final = """
    SELECT coalesce(sum(seqs), 0) AS missed FROM (
        SELECT seqs FROM audit WHERE offer = %s AND shard = %s AND seq > %s AND seq <= %s LIMIT %s
    ) AS lines
"""

#: The seq of every shard.
Position = list[int]


class Streamed(NamedTuple):
    """An answer whose body is a stream."""

    status: int
    body: bytes
    headers: tuple[Header, ...]
    stream: "Stream"


class Single(NamedTuple):
    """A single event, as on `grab.events`."""

    seq: int
    type: str
    user: str | None
    text: bytes


class Watch:
    """What one stream follows: an offer or a user. `chunks` are messages not sent yet; when they are full, it
    is cut. `position` is the place of the reader at the first of them.
    """

    def __init__(self, offer: str | None, user: str | None, wanted: Position | None) -> None:
        self.offer = offer
        self.user = user
        #: The place that the reader must have reached before the stream can begin, and until when it may.
        self.wanted = wanted
        self.until = asyncio.get_running_loop().time() + AFTER_SECONDS_MAX
        self.position: Position | None = None
        self.is_late = False
        self.is_cut = False
        self.changed = asyncio.Event()
        self.chunks: list[bytes] = []
        self.bytes = 0


class EventStreams:
    """The handlers of streams, and the reader of the audit trail that they share."""

    def __init__(self, books: ViewReader, shards: int) -> None:
        self._books = books
        self._shards = shards
        self._position: Position = [0] * shards
        self._joining: list[Watch] = []
        self._by_offer: dict[str, set[Watch]] = {}
        self._by_user: dict[str, set[Watch]] = {}
        self._asked = asyncio.Event()
        self._bytes = 0
        #: Questions about what streams have missed: the sessions are for others, too.
        self._reading = asyncio.Semaphore(STREAMS_READING_MAX)
        self.count = 0
        self._streams_by_user = Counter[str]()
        self.is_ending = False
        #: Sends waiting users their positions.
        self.positions = WaitingPositions(books, lambda watch, message: self._add([watch], message))
        self.measures = StreamMeasures()
        #: Requests refused for lack of room, as the gateway counts them.
        self.shed: dict[str, int] = {}

    # -- requests --------------------------------------------------------------------------------------------

    async def offer_events(self, request: Request, body: bytes) -> Reply | Streamed:
        """GET /v1/offers/{offer}/events"""
        offer = request.path["offer"]
        shard = shard_of(campaign_of(offer), self._shards)
        return await self._open(request, lambda text: _position_of_offer(text, shard, self._shards), offer)

    async def user_events(self, request: Request, body: bytes) -> Reply | Streamed:
        """GET /v1/users/{user}/events"""
        return await self._open(
            request, lambda text: _position_of_user(text, self._shards), None, request.path["user"]
        )

    async def _open(
        self, request: Request, read: Any, offer: str | None = None, user: str | None = None
    ) -> Reply | Streamed:
        asked = query_of(request, ("after",))
        known = request.header(b"last-event-id")
        wanted: Position | None = None
        reason = ""
        if "after" in asked:
            wanted = read(asked["after"])
            if wanted is None:
                raise invalid(
                    f"after: is not a position of this stream, got {quoted(asked['after'])}", "after"
                )
        if known is not None:
            # A browser sends it on its own initiative, and would give up if it were refused.
            wanted = read(known.decode("latin-1"))
            reason = "" if wanted else "it is not a position of this stream"
        if request.scope["method"] == "HEAD":
            return Reply(200, b"", _HEADERS)
        if self.count >= STREAMS_MAX or self.is_ending:
            raise self._no_room(f"The gateway has {STREAMS_MAX} streams, its maximum.")
        if len(self._joining) >= STREAMS_JOINING_MAX:
            raise self._no_room(
                f"The gateway is opening {STREAMS_JOINING_MAX} streams, its maximum at a time."
            )
        caller = request.user
        if caller is not None and self._streams_by_user[caller] >= STREAMS_USER_MAX:
            raise self._no_room(
                f"{caller} has {STREAMS_USER_MAX} streams at this gateway, the maximum of a user."
            )
        gone = asyncio.create_task(_until_gone(request.receive))
        stream = Stream(self, Watch(offer, user, wanted), wanted, reason, gone, caller, request.is_admitted)
        self.count += 1
        if caller is not None:
            self._streams_by_user[caller] += 1
        try:
            await self.join(stream.watch, gone)
        except BaseException:
            self.ended(stream)
            raise
        return Streamed(200, b"", _HEADERS, stream)

    def _no_room(self, detail: str) -> Problem:
        self.shed["streams"] = self.shed.get("streams", 0) + 1
        return retry_soon("busy", detail)

    def ended(self, stream: "Stream") -> None:
        """Frees the slot of a stream."""
        self.leave(stream.watch)
        stream.gone.cancel()
        self.count -= 1
        if stream.caller is not None:
            self._streams_by_user[stream.caller] -= 1
            if not self._streams_by_user[stream.caller]:
                del self._streams_by_user[stream.caller]

    # -- the reader ------------------------------------------------------------------------------------------

    async def join(self, watch: Watch, gone: asyncio.Task[None]) -> None:
        """Returns when the reader gives a watch all events after `watch.position`. Raises Problem when
        PostgreSQL cannot be asked, Gone when the client disconnects meanwhile.
        """
        gone.add_done_callback(lambda _: watch.changed.set())
        self._joining.append(watch)
        self._asked.set()
        try:
            async with asyncio.timeout(AFTER_SECONDS_MAX + 2):
                while watch.position is None:
                    await watch.changed.wait()
                    watch.changed.clear()
                    if gone.done():
                        raise Gone
                    if self.is_ending:
                        raise retry_soon("unavailable", "The gateway is shutting down.")
        except TimeoutError:
            self.leave(watch)
            raise retry_soon("unavailable", "PostgreSQL cannot be reached now.") from None
        except BaseException:
            self.leave(watch)
            raise

    def leave(self, watch: Watch) -> None:
        """Forgets a watch."""
        if watch in self._joining:
            self._joining.remove(watch)
        self.positions.left(watch)
        for watches, name in ((self._by_offer, watch.offer), (self._by_user, watch.user)):
            if name is not None and name in watches:
                watches[name].discard(watch)
                if not watches[name]:
                    del watches[name]
        self.taken(watch)

    def taken(self, watch: Watch) -> bytes:
        """What a watch has to send."""
        taken = b"".join(watch.chunks)
        self._bytes -= watch.bytes
        watch.chunks.clear()
        watch.bytes = 0
        return taken

    @property
    def position(self) -> Position:
        """The place of the reader, also of a stream that has sent all of its chunks."""
        return self._position

    async def keep_reading(self) -> None:
        """Reads for all streams until cancelled."""
        while True:
            if not (self._joining or self._by_offer or self._by_user):
                await self._asked.wait()
            self._asked.clear()
            is_at_end = True
            try:
                is_at_end = await self._round()
            except Problem as problem:
                log.info("streams of events get no events now: %s", problem)
            except Exception:
                # Streams resume; the reader must not end.
                log.exception("events cannot be read for streams; all streams are closed")
                self._cut_all()
            if is_at_end:
                try:
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._asked.wait()
                except TimeoutError:
                    pass

    async def end_after(self, stop: asyncio.Event) -> None:
        """Ends all streams when the gateway is stopped."""
        await stop.wait()
        self.is_ending = True
        for watch in self._all():
            watch.changed.set()

    def _all(self) -> list[Watch]:
        groups = (*self._by_offer.values(), *self._by_user.values())
        return [*self._joining, *(watch for group in groups for watch in group)]

    def _cut_all(self) -> None:
        for watch in self._all():
            watch.is_cut = True
            watch.changed.set()

    async def _round(self) -> bool:
        """Reads what is new, at most ROUND_SEQS of each shard; returns whether that was all."""
        newest = {row["shard"]: row["seq"] for row in await self._books.rows(_NEWEST)}
        if not (self._by_offer or self._by_user):
            self._position = [newest.get(shard, 0) for shard in range(self._shards)]
        self._admit()
        before = self._position
        upto = [min(newest.get(shard, 0), seq + ROUND_SEQS) for shard, seq in enumerate(before)]
        moving = [shard for shard, seq in enumerate(before) if upto[shard] > seq]
        if not moving or not (self._by_offer or self._by_user):
            return True
        rows = await self._books.rows(
            _LINES,
            [
                moving, [before[shard] for shard in moving], [upto[shard] for shard in moving],
                bool(self._by_user), list(self._by_offer),
            ],
        )  # fmt: skip
        position = list(before)
        by_shard: dict[int, list[Row]] = {shard: [] for shard in moving}
        for row in rows:
            by_shard[row["shard"]].append(row)
        for shard, shard_rows in by_shard.items():
            for row in shard_rows:
                self._give(row, position)
            # A run may end after the last requested seq.
            last = shard_rows[-1]["seq"] + shard_rows[-1]["seqs"] - 1 if shard_rows else 0
            position[shard] = max(upto[shard], last)
        self._position = position
        return all(newest.get(shard, 0) <= seq for shard, seq in enumerate(position))

    def _admit(self) -> None:
        """Lets watches begin at the place of the reader."""
        now = asyncio.get_running_loop().time()
        joining, self._joining = self._joining, []
        for watch in joining:
            is_there = watch.wanted is None or all(
                seq <= ours for seq, ours in zip(watch.wanted, self._position, strict=True)
            )
            if not is_there and now < watch.until:
                self._joining.append(watch)
                continue
            watch.is_late = not is_there
            watch.position = list(self._position)
            if watch.offer is not None:
                self._by_offer.setdefault(watch.offer, set()).add(watch)
            if watch.user is not None:
                self._by_user.setdefault(watch.user, set()).add(watch)
                self.positions.joined(watch, watch.user, self._position)
            watch.changed.set()

    def _give(self, row: Row, position: Position) -> None:
        """Gives the events of a line to its watchers; moves the position in its shard."""
        shard = row["shard"]
        offer_watches = self._by_offer.get(row["offer"])
        messages: list[bytes] = []
        for one in _singles_of(row, self._by_user if offer_watches is None else None):
            position[shard] = one.seq
            if offer_watches is not None:
                messages.append(_message(f"{shard}-{one.seq}", one.type, one.text))
            user_watches = self._by_user.get(one.user) if one.user is not None else None
            if user_watches is not None:
                self._add(user_watches, _message(_text_of(position), one.type, one.text))
                for watch in user_watches:
                    self.positions.named(watch, one.type, shard, one.seq)
        self.positions.moved(row["offer"], shard, row["seq"] + row["seqs"] - 1)
        if offer_watches is not None and messages:
            self._add(offer_watches, b"".join(messages))

    def _add(self, watches: Iterable[Watch], chunk: bytes) -> None:
        for watch in watches:
            if watch.is_cut:
                continue
            if watch.bytes + len(chunk) > STREAM_BYTES_MAX or self._bytes + len(chunk) > STREAMS_BYTES_MAX:
                watch.is_cut = True
                self.measures.slow["behind"] += 1
                self.taken(watch)
            else:
                watch.chunks.append(chunk)
                watch.bytes += len(chunk)
                self._bytes += len(chunk)
            watch.changed.set()

    # -- what a stream has missed ----------------------------------------------------------------------------

    async def is_too_far(self, watch: Watch, since: Position, upto: Position) -> bool:
        """Whether a stream has missed more than it may read."""
        if watch.user is not None:
            return sum(max(0, end - start) for start, end in zip(since, upto, strict=True)) > (
                STREAM_MISSED_SEQS_MAX
            )
        assert watch.offer is not None
        shard = shard_of(campaign_of(watch.offer), self._shards)
        [row] = await self._books.rows(
            _COUNT_MISSED,
            [watch.offer, shard, since[shard], upto[shard], STREAM_MISSED_SEQS_MAX + 1],
        )
        return bool(row["missed"] > STREAM_MISSED_SEQS_MAX)

    async def missed(self, watch: Watch, since: Position, upto: Position) -> AsyncIterator[bytes]:
        """The messages between two positions, in chunks; moves `since`."""
        if watch.offer is not None:
            shards: Iterable[int] = (shard_of(campaign_of(watch.offer), self._shards),)
            query, named = _MISSED_OF_OFFER, watch.offer
        else:
            shards, query, named = range(self._shards), _MISSED_OF_USER, f'"{watch.user}"'
        for shard in shards:
            while since[shard] < upto[shard]:
                start = since[shard]
                async with self._reading:
                    rows = await self._books.rows(
                        query, [shard, start - RUN_GRABS_MAX, upto[shard], start, named, MISSED_LINES]
                    )
                messages = []
                for row in rows:
                    for one in _singles_of(row, None if watch.user is None else {watch.user: ()}):
                        if one.seq <= start or (watch.user is not None and one.user != watch.user):
                            continue
                        since[shard] = one.seq
                        place = _text_of(since) if watch.user is not None else f"{shard}-{one.seq}"
                        messages.append(_message(place, one.type, one.text))
                if len(rows) < MISSED_LINES:
                    since[shard] = upto[shard]
                else:
                    since[shard] = rows[-1]["seq"] + rows[-1]["seqs"] - 1
                yield b"".join(messages)

    def place_of(self, watch: Watch, position: Position) -> str:
        """A position as the id of a message."""
        if watch.offer is None:
            return _text_of(position)
        shard = shard_of(campaign_of(watch.offer), self._shards)
        return f"{shard}-{position[shard]}"


class Stream:
    """One stream to one client, of a user if `caller` is one. `gone` is done when the client is. The stream
    ends when its key or token does, by `is_admitted`; None: it has none.
    """

    def __init__(
        self, streams: EventStreams, watch: Watch, wanted: Position | None, reason: str,
        gone: asyncio.Task[None], caller: str | None,
        is_admitted: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:  # fmt: skip
        self.watch = watch
        self.gone = gone
        self.caller = caller
        self._streams = streams
        self._is_admitted = is_admitted
        self._wanted = wanted
        self._reason = reason

    async def send(self, send: Send, abort: Any) -> None:
        """Sends events until the client is gone, too slow, or no longer admitted, or the time limit is
        reached. The head has been sent.
        """
        try:
            async with asyncio.timeout(STREAM_SECONDS_MAX) as limit:
                checking = asyncio.create_task(self._end_when_refused(limit))
                try:
                    await self._send_all(send)
                finally:
                    checking.cancel()
        except Gone:
            pass  # as `gone` says
        except _TooSlow:
            self._streams.measures.slow["ended"] += 1
            abort()
        except TimeoutError:
            pass  # the client connects again, and resumes if it may
        except Problem as problem:
            log.info("a stream of events is closed: %s", problem)
        finally:
            is_gone = self.gone.done()
            self._streams.ended(self)
        if not is_gone:
            try:
                await _within_time(send({"type": "http.response.body", "body": b""}))
            except _TooSlow:
                abort()

    async def _end_when_refused(self, limit: asyncio.Timeout) -> None:
        """Lets the time of the stream be over when its key or token is no longer valid."""
        if self._is_admitted is None:
            return
        try:
            is_admitted = await self._is_admitted()
            while is_admitted:
                await asyncio.sleep(STREAM_ADMISSION_SECONDS)
                is_admitted = await self._is_admitted()
        except Exception:
            log.exception("cannot check whether a stream is still permitted; it is closed")
        if not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time())

    async def _send_all(self, send: Send) -> None:
        async def write(data: bytes) -> None:
            for start in range(0, len(data), PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                await _within_time(send({"type": "http.response.body", "body": piece, "more_body": True}))
            # Texts of events have no line ends. A position is not an event, and has no line before it.
            streams.measures.events += data.count(b"\nevent: ") - data.count(b"\n\nevent: ")

        streams = self._streams
        position = await self._begin(write)
        while True:
            assert self.watch.position is not None
            async for chunk in streams.missed(self.watch, position, self.watch.position):
                await write(chunk)
            if not self.watch.is_cut:
                break
            # Too much came while it read what it had missed: it reads that, too.
            position = list(self.watch.position)
            await self._join_again()
        while not (self.gone.done() or self.watch.is_cut or streams.is_ending):
            self.watch.changed.clear()
            if data := streams.taken(self.watch):
                await write(data)
                continue
            try:
                async with asyncio.timeout(STREAM_HEARTBEAT_SECONDS):
                    await self.watch.changed.wait()
            except TimeoutError:
                # The position moves while nothing comes, so that a client that resumes reads little. A stream
                # that was cut in this moment has lost what came for it.
                if not (self.watch.chunks or self.watch.is_cut):
                    place = streams.place_of(self.watch, streams.position)
                    await write(f": \nid: {place}\n\n".encode())
        if not (self.gone.done() or self.watch.is_cut):
            await write(streams.taken(self.watch))

    async def _begin(self, write: Any) -> Position:
        """Sends the position after which events come, and returns it."""
        streams, watch = self._streams, self.watch
        assert watch.position is not None
        head = f"retry: {random.randint(*RETRY_MS)}\n"
        position = self._wanted
        if self._reason:
            reason = self._reason
        elif watch.is_late:
            reason = "it is after the newest event"
        elif position is not None and await streams.is_too_far(watch, position, watch.position):
            reason = f"it is more than {STREAM_MISSED_SEQS_MAX} events ago"
        else:
            reason = ""
        if position is None or reason:
            position = list(watch.position)
        place = streams.place_of(watch, position)
        if reason:
            text = msgspec.json.encode({"reason": f"The stream cannot resume: {reason}."})
            await write(head.encode() + _message(place, "reset", text))
        else:
            await write(f"{head}id: {place}\n\n".encode())
        return list(position)

    async def _join_again(self) -> None:
        before = self.watch
        self._streams.leave(before)
        self.watch = Watch(before.offer, before.user, None)
        await self._streams.join(self.watch, self.gone)


class _TooSlow(Exception):
    """The client takes nothing."""


async def _within_time(sending: Any) -> None:
    try:
        async with asyncio.timeout(WRITE_SECONDS_MAX):
            await sending
    except TimeoutError:
        raise _TooSlow from None


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _singles_of(row: Row, users: Mapping[str, Any] | None) -> Iterator[Single]:
    """The single events of a line. With `users`, only those of a line that may name one of them."""
    line: bytes = row["body"].encode()
    if not is_run(line):
        yield Single(row["seq"], row["type"], _user_of(line), line)
        return
    run = LINES.decode(line)
    assert isinstance(run, AnyRun)
    if users is not None and users.keys().isdisjoint(run.users):
        return
    for one in singles(run):
        yield Single(one.seq, row["type"], getattr(one, "user", None), encode_event(one))


class _LineUser(msgspec.Struct):
    user: str | None = None


_decode_named = msgspec.json.Decoder(_LineUser).decode


def _user_of(line: bytes) -> str | None:
    """The user whom an event names, also in a version that this program does not know."""
    return _decode_named(line).user if b'"user"' in line else None


def _message(place: str, type_: str, text: bytes) -> bytes:
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (place.encode(), type_.encode(), text)


def _text_of(position: Sequence[int]) -> str:
    return ".".join(map(str, position))


def _position_of_offer(text: str, shard: int, shards: int) -> Position | None:
    if text == "0":
        return [0] * shards
    found = _match_offer_position(text)
    if found is None or int(found[1]) != shard:
        return None
    position = [0] * shards
    position[shard] = int(found[2])
    return position


def _position_of_user(text: str, shards: int) -> Position | None:
    position = [int(seq) for seq in text.split(".")] if _match_user_position(text) else []
    return position if len(position) == shards else None
