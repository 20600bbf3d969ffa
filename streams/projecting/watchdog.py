"""The watchdog of the read models: sees lag without progress, which Faust shows after some broker restarts
and never mends.

(Its assignor may meet a broker that does not know the topic yet, assign nothing, and wait for ever.)
Beginning anew costs the group a rebalance, so it is not for lag that Faust has no part in: a projector that
waits for PostgreSQL, or partitions that were assigned just now.
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

LOOK_EVERY_SECONDS: Final = 2.0
#: Longer than the group waits for a member that has died.
STALLED_SECONDS: Final = 15.0
#: A projector that has written at one thing for so long waits for PostgreSQL …
WAITS_SECONDS: Final = 2.0
#: … and one that has for so long is lost in it.
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
    """Returns what is stalled: a cursor that has not moved for STALLED_SECONDS though the journal goes on
    behind it.

    `assigned_at` is when partitions were assigned last, on the monotonic clock; the time before it does not
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
                    reason = await _look(
                        reader, connection, schema, shards, projectors, lagging, assigned_at()
                    )
                    if reason is not None:
                        return reason
                    await asyncio.sleep(LOOK_EVERY_SECONDS)
        except BaseException as error:
            if not is_trouble(error):
                raise
            # A server is away: nobody can make progress, and the projectors say so themselves.
            log.info("watchdog: %s", in_words(error))
            lagging.clear()
            await asyncio.sleep(LOOK_EVERY_SECONDS)


async def _look(
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
        waiting = WAITS_SECONDS < projector.seconds_at_it() < LOST_SECONDS
        try:
            await use_read_model(connection, schema, name)
        except NoReadModel:
            continue  # its projector waits, and says so
        at_rest = await cursors.stopped(connection, name)
        for shard, cursor in (await cursors.load(connection, name)).items():
            if waiting or shard in at_rest or shard >= shards or cursor.next_offset >= ends[shard]:
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
