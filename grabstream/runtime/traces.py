"""Traces: the work of each process on an event, and its duration (docs/tracing.md).

All processes know an event by its shard and seq. So nothing has to travel with a command: whether an event is
traced, and the ids of its trace and of the first span in it, follow from (prefix, shard, seq). Without a
setting nothing is traced, and a process spends one comparison for each call, block and transaction.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from typing import Final, Literal, NamedTuple

from grabstream.models.answers import Answer
from grabstream.models.outcomes import Outcome

#: The W3C's `traceparent`, version 00: trace, parent, flags.
TRACEPARENT_BYTES: Final = 55
_is_traceparent: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}").fullmatch

#: The work that a span is about, in the order in which an event passes it.
Work = Literal["decide", "relay", "request", "answer", "project"]


class Ids(NamedTuple):
    """The ids of a trace, 16 bytes, and of its first span, 8 bytes, as numbers above 0."""

    trace: int
    span: int


class Span(NamedTuple):
    """A piece of work on one event. Times are in ns since 1970; `cause` is the `traceparent` that a caller
    gave, or ''.
    """

    work: Work
    shard: int
    seq: int
    began_ns: int
    ended_ns: int
    attributes: Mapping[str, str | int]
    cause: str = ""


def ids_of(prefix: str, shard: int, seq: int) -> Ids:
    """The ids of the trace of an event: the first 16 bytes, and the 8 after them, of the SHA-256 of
    `prefix/shard-seq`.
    """
    digest = sha256(f"{prefix}/{shard}-{seq}".encode()).digest()
    return Ids(int.from_bytes(digest[:16], "big") or 1, int.from_bytes(digest[16:24], "big") or 1)


def traceparent_of(headers: Iterable[tuple[bytes, bytes | None]]) -> str:
    """The header `traceparent` of a request or a record: '' if there is none, more than one, or one of
    another form.
    """
    given = [value for name, value in headers if name == b"traceparent"]
    if len(given) != 1 or given[0] is None or len(given[0]) != TRACEPARENT_BYTES:
        return ""
    text = given[0].decode("latin-1")
    return text if _is_traceparent(text) else ""


class Traces:
    """Traces every event whose seq is a multiple of `one_in`, and gives its spans to `take`, which neither
    waits nor raises.
    """

    def __init__(self, one_in: int, take: Callable[[Span], None]) -> None:
        self.one_in = one_in
        self._take = take

    def range_of(self, first_seq: int, last_seq: int) -> range:
        """The traced seqs from one seq to another, both included."""
        return range(-(-first_seq // self.one_in) * self.one_in, last_seq + 1, self.one_in)

    def add(
        self, work: Work, shard: int, seqs: Iterable[int], seconds: float, cause: str = "",
        **attributes: str | int,
    ) -> None:  # fmt: skip
        """Adds a span of `seconds`, which ends now, for each of the seqs."""
        ended_ns = time.time_ns()
        began_ns = ended_ns - int(seconds * 1e9)
        for seq in seqs:
            self._take(Span(work, shard, seq, began_ns, ended_ns, attributes, cause))

    def answered(
        self, work: Work, answers: Iterable[Answer], seconds: float, cause: str = "", **attributes: str | int
    ) -> None:
        """Adds a span for each traced event that has just been decided; a repeated answer is about an earlier
        event.
        """
        one_in = self.one_in
        for answer in answers:
            seq = answer.seq
            if seq is None or seq % one_in or answer.repeated or answer.shard is None:
                continue
            if answer.code == Outcome.already_taken:
                continue  # it names the event of the part that the user has
            named = {"offer": answer.offer or "", "command": answer.id or "", "outcome": answer.outcome}
            self.add(work, answer.shard, (seq,), seconds, cause, **named, **attributes)


_process_traces: Traces | None = None


def use_traces(traces: Traces | None) -> None:
    """Turns tracing of this process on or off."""
    global _process_traces
    _process_traces = traces


def traces() -> Traces | None:
    """The traces of this process; None when it traces nothing."""
    return _process_traces
