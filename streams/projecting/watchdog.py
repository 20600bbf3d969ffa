"""The watchdog of the read models: detects lag without progress.

After some restarts of a broker, Faust stops without an error: its assignor may meet a broker that does not
know the topic yet, assign nothing, and wait for ever. Restarting Faust costs the group a rebalance, so the
watchdog ignores lag that Faust does not cause: a projector that waits for PostgreSQL, or partitions that were
assigned just now.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from psycopg import AsyncConnection

from grabstream.lua.trouble import is_trouble
from grabstream.projections import cursors
from grabstream.projections.database.sessions import connect
from grabstream.projections.versions import NoReadModel, use_read_model
from grabstream.streams.clients import in_words
from grabstream.streams.journal import JournalReader, open_reader
from grabstream.streams.projecting.projector import Projector

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 2.0
#: Longer than the group waits for a member that has ended.
STALLED_SECONDS: Final = 15.0
#: A projector that has tried to write one group for this long waits for PostgreSQL …
WAITS_SECONDS: Final = 2.0
#: … and after this long it is stalled.
LOST_SECONDS: Final = 90.0


async def until_stalled(
    kafka: str,
    journal: str,
    shards: int,
    postgres: str,
    schema: str,
    projectors: Sequence[Projector],
    assigned_at: Callable[[], float],
) -> str:
    """Waits until a cursor has not moved for STALLED_SECONDS although the journal has more records; returns
    which one, in words.

    `assigned_at` returns when partitions were last assigned, on the monotonic clock; earlier time does not
    count.
    """
    lagging: dict[tuple[str, int], tuple[int, float]] = {}
    while True:
        try:
            async with (
                open_reader(kafka, journal) as reader,
                await connect(postgres, schema) as connection,
            ):
                while True:
                    reason = await _find_stalled(
                        reader, connection, schema, shards, projectors, lagging, assigned_at()
                    )
                    if reason is not None:
                        return reason
                    await asyncio.sleep(POLL_SECONDS)
        except BaseException as error:
            if not is_trouble(error):
                raise
            # A server is down: no projector can make progress, and each logs that itself.
            log.info("watchdog: %s", in_words(error))
            lagging.clear()
            await asyncio.sleep(POLL_SECONDS)


async def _find_stalled(
    reader: JournalReader,
    connection: AsyncConnection[object],
    schema: str,
    shards: int,
    projectors: Sequence[Projector],
    lagging: dict[tuple[str, int], tuple[int, float]],
    assigned_at: float,
) -> str | None:
    now = time.monotonic()
    ends = [await reader.end(shard) for shard in range(shards)]
    for projector in projectors:
        name = projector.name
        waiting = WAITS_SECONDS < projector.seconds_writing() < LOST_SECONDS
        try:
            await use_read_model(connection, schema, name)
        except NoReadModel:
            continue  # its projector waits, and logs that
        stopped = await cursors.stopped(connection, name)
        for shard, cursor in (await cursors.load(connection, name)).items():
            if waiting or shard in stopped or shard >= shards or cursor.next_offset >= ends[shard]:
                lagging.pop((name, shard), None)
                continue
            offset, since = lagging.setdefault((name, shard), (cursor.next_offset, now))
            seconds = now - max(since, assigned_at)
            if offset != cursor.next_offset:
                lagging[name, shard] = (cursor.next_offset, now)
            elif seconds > STALLED_SECONDS:
                return (
                    f"{name} has been at offset {offset} of shard {shard} for {seconds:.0f} s, the "
                    f"journal ends at {ends[shard]}"
                )
    return None
