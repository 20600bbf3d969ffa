"""Streams of chunks of history, and the points at which a stretch begins and ends."""

from bisect import bisect_right
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from grabstream.models.events import AnyEvent
from grabstream.models.runs import AnyRun
from grabstream.projections.cursors import Fact
from grabstream.streams.follower import Chunk


class Point(NamedTuple):
    """The first or last event of a stretch of history, by its seq, or by a time in ms since 1970 UTC.

    Exactly one of the two is set. The events at the point belong to the stretch. Lines are not divided: if
    the point is within a run of grabs, all of the run belongs to the stretch, and code that makes single
    events drops those beyond the point.
    """

    seq: int | None = None
    at: int | None = None

    @property
    def value(self) -> int:
        """The seq, or the time."""
        value = self.at if self.seq is None else self.seq
        assert value is not None
        return value

    def fact_number(self, fact: Fact) -> int:
        """The number of a fact that is compared with `value` where the stretch ends."""
        return self.event_number(fact.event)

    def event_number(self, event: AnyEvent | AnyRun) -> int:
        """The number of an event that is compared with `value` where the stretch ends."""
        return event.at if self.seq is None else event.seq

    def end_number(self, event: AnyEvent | AnyRun) -> int:
        """The number of an event that is compared with `value` where the stretch begins."""
        return event.at if self.seq is None else event.last_seq


async def up_to(chunks: AsyncGenerator[Chunk, None], last: Point | None) -> AsyncGenerator[Chunk, None]:
    """The chunks up to a point, included. The cursor after the last chunk is exactly at that point."""
    async with aclosing(chunks):
        async for chunk in chunks:
            facts = chunk.facts
            count = bisect_right(facts, last.value, key=last.fact_number) if last else len(facts)
            if count == len(facts):
                yield chunk
                continue
            # The offset stays at the record: a later read that resumes here needs the rest of it.
            after = (
                chunk.before._replace(seq=facts[count - 1].event.last_seq, head=facts[count - 1].hash)
                if count
                else chunk.before
            )
            yield chunk._replace(facts=facts[:count], after=after)
            return
