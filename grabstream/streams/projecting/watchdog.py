"""The watchdog of the read models: detects lag without progress.

After some restarts of a broker, Faust stops without an error: its assignor may meet a broker that does not
know the topic yet, assign nothing, and wait without end. Restarting Faust costs the group a rebalance, so the
watchdog ignores lag that Faust does not cause: a projector that waits for PostgreSQL, partitions that were
assigned just now, and, for a time, those that the group has yet to assign.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from psycopg import AsyncConnection
from psycopg.errors import UndefinedTable

from grabstream.projections import cursors
from grabstream.projections.database.locks import is_held
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import connect
from grabstream.projections.versions import NoReadModel, writable_versions
from grabstream.runtime.ending import running
from grabstream.runtime.ticks import seconds_to_tick
from grabstream.runtime.trouble import is_trouble
from grabstream.streams.clients import error_text
from grabstream.streams.journal import open_reader
from grabstream.streams.projecting.projector import Projector
from grabstream.streams.projecting.publisher import (
    PublishedOffsets,
    Publisher,
    event_source,
    held_lock,
)
from grabstream.streams.topics import Topics

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 2.0
#: How often the cursors are read although the journal has not grown, and no projector lags or writes.
CURSORS_SECONDS: Final = 10.0
STALLED_SECONDS: Final = 15.0
#: Longer than the group waits for a member that has ended, and then needs to assign its partitions, also on a
#: busy machine: until then, a restart would only repeat that.
UNASSIGNED_SECONDS: Final = 45.0
#: A projector that has tried to write one group for this long waits for PostgreSQL …
WAITS_SECONDS: Final = 2.0
#: … and after this long it is stalled.
LOST_SECONDS: Final = 90.0
#: The longest pause after unknown errors.
FAILED_SECONDS_MAX: Final = 30.0


class Assignment(NamedTuple):
    """The shards that Faust has assigned to this process; None while its group moves partitions. `since`:
    when it has last assigned any, or began (monotonic, s); earlier time is not a stall of this assignment.
    """

    since: float
    shards: frozenset[int] | None = None

    def is_elsewhere(self, shard: int) -> bool:
        """Whether a shard is, or may soon be, another process's. If a process got no shard at all, its
        assignor may have met a broker that did not know the topic yet.
        """
        return self.shards is None or (bool(self.shards) and shard not in self.shards)


async def until_stalled(
    kafka: str,
    topics: Topics,
    shards: int,
    postgres: str,
    schema: str,
    projectors: Sequence[Projector],
    assignment: Callable[[], Assignment],
) -> str:
    """Waits until a projector has not moved in a shard for STALLED_SECONDS, or in one that is another
    process's, or is being moved, for UNASSIGNED_SECONDS, although the journal has more for it; returns which
    one, in words. Raises nothing: after any error it tries again.
    """
    # Publishers are watched separately: other programs may write to their topic, and delete its records, and
    # trouble with that must not hide another projector that is stalled.
    publishers = [projector for projector in projectors if isinstance(projector, Publisher)]
    others = [projector for projector in projectors if not isinstance(projector, Publisher)]
    async with running(
        *(
            _watch(kafka, topics, shards, postgres, schema, watched, assignment)
            for watched in (others, publishers)
            if watched
        )
    ) as watching:
        done, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
        return str(done.pop().result())


async def _watch(
    kafka: str,
    topics: Topics,
    shards: int,
    postgres: str,
    schema: str,
    projectors: Sequence[Projector],
    assignment: Callable[[], Assignment],
) -> str:
    lagging: dict[tuple[str, int], tuple[int, float]] = {}
    pause_seconds = POLL_SECONDS
    while True:
        try:
            async with (
                open_reader(kafka, topics.journal) as reader,
                await connect(postgres, schema) as connection,
            ):
                await use_schema(connection, schema)
                published = PublishedOffsets(
                    reader, reader.for_topic(topics.events), event_source(topics.prefix)
                )
                compared, compared_at = dict[int, int](), 0.0
                while True:
                    ends = await reader.ends(range(shards))
                    is_writing = any(projector.seconds_writing() for projector in projectors)
                    is_old = time.monotonic() > compared_at + CURSORS_SECONDS
                    if lagging or is_writing or ends != compared or is_old:
                        reason = await _find_stalled(
                            ends, published, connection, schema, projectors, lagging, assignment()
                        )
                        if reason is not None:
                            return reason
                        compared, compared_at = ends, time.monotonic()
                    pause_seconds = POLL_SECONDS
                    await asyncio.sleep(seconds_to_tick(POLL_SECONDS))
        except BaseException as error:
            if is_trouble(error):
                # A server is down: no projector can make progress, and each logs that itself.
                log.info("watchdog: %s", error_text(error))
                lagging.clear()
                await asyncio.sleep(POLL_SECONDS)
            elif isinstance(error, Exception):
                # Faust may work all the same, so it is not restarted.
                log.critical("watchdog: unknown error; trying again in %.1f s", pause_seconds, exc_info=True)
                lagging.clear()
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(pause_seconds * 2, FAILED_SECONDS_MAX)
            else:
                raise


async def _find_stalled(
    ends: Mapping[int, int],
    published: PublishedOffsets,
    connection: AsyncConnection[object],
    schema: str,
    projectors: Sequence[Projector],
    lagging: dict[tuple[str, int], tuple[int, float]],
    assignment: Assignment,
) -> str | None:
    now = time.monotonic()
    try:
        versions = await writable_versions(connection, schema, [projector.name for projector in projectors])
        positions = await cursors.positions(
            connection, {name: version.schema for name, version in versions.items()}
        )
    except (NoReadModel, UndefinedTable):
        return None  # there are no tables yet, or a version was dropped just now
    for projector in projectors:
        name = projector.name
        waiting = WAITS_SECONDS < projector.seconds_writing() < LOST_SECONDS
        if name not in positions:
            continue  # its projector waits, and logs that
        offsets, stopped = positions[name]
        if isinstance(projector, Publisher):
            # A stopped shard is not read repeatedly.
            offsets = await published.load(
                connection, {shard: end for shard, end in ends.items() if shard not in stopped}
            )
        for shard, offset in offsets.items():
            if waiting or shard in stopped or shard not in ends or offset >= ends[shard]:
                lagging.pop((name, shard), None)
                continue
            before, since = lagging.setdefault((name, shard), (offset, now))
            seconds = now - max(since, assignment.since)
            if offset != before:
                lagging[name, shard] = (offset, now)
            elif seconds > (UNASSIGNED_SECONDS if assignment.is_elsewhere(shard) else STALLED_SECONDS):
                if await _is_held(connection, projector, schema, shard):
                    continue
                return (
                    f"{name} has been at offset {offset} of shard {shard} for {seconds:.0f} s, the "
                    f"journal ends at {ends[shard]}"
                )
    return None


async def _is_held(
    connection: AsyncConnection[object], projector: Projector, schema: str, shard: int
) -> bool:
    """Whether a publisher, of this process or another one, waits until the brokers take a shard's records."""
    return isinstance(projector, Publisher) and await is_held(connection, held_lock(schema, shard))
