"""The watchdog of the read models: sees lag without progress, which Faust shows after some broker restarts and never mends.

(Its assignor may meet a broker that does not know the topic yet, assign nothing, and wait for ever.)
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Final

import psycopg
from aiokafka.errors import KafkaError
from psycopg import AsyncConnection

from projections import cursors
from projections.versions import NoReadModel, use_read_model
from streams.journal import JournalReader, open_reader

log = logging.getLogger(__name__)

LOOK_EVERY_SECONDS: Final = 2.0
STALLED_SECONDS: Final = 10.0


async def until_stalled(kafka: str, journal: str, shards: int, postgres: str, schema: str, names: Sequence[str]) -> str:
    """Returns what is stalled: a cursor that has not moved for STALLED_SECONDS though the journal goes on behind it."""
    lagging: dict[tuple[str, int], tuple[int, float]] = {}
    while True:
        try:
            async with (
                open_reader(kafka, journal) as reader,
                await AsyncConnection.connect(postgres, autocommit=True, connect_timeout=5) as connection,
            ):
                while True:
                    reason = await _look(reader, connection, schema, shards, names, lagging)
                    if reason is not None:
                        return reason
                    await asyncio.sleep(LOOK_EVERY_SECONDS)
        except (psycopg.OperationalError, KafkaError, OSError) as error:
            # A server is away: nobody can make progress, and the projectors say so themselves.
            log.info("watchdog: %s: %s", type(error).__name__, error)
            lagging.clear()
            await asyncio.sleep(LOOK_EVERY_SECONDS)


async def _look(
    reader: JournalReader,
    connection: AsyncConnection[object],
    schema: str,
    shards: int,
    names: Sequence[str],
    lagging: dict[tuple[str, int], tuple[int, float]],
) -> str | None:
    now = time.monotonic()
    ends = [await reader.end(shard) for shard in range(shards)]
    for name in names:
        try:
            await use_read_model(connection, schema, name)
        except NoReadModel:
            continue  # its projector waits, and says so
        at_rest = await cursors.stopped(connection, name)
        for shard, cursor in (await cursors.load(connection, name)).items():
            if shard in at_rest or shard >= shards or cursor.next_offset >= ends[shard]:
                lagging.pop((name, shard), None)
                continue
            offset, since = lagging.setdefault((name, shard), (cursor.next_offset, now))
            if offset != cursor.next_offset:
                lagging[name, shard] = (cursor.next_offset, now)
            elif now - since > STALLED_SECONDS:
                return f"{name} has been at offset {offset} of shard {shard} for {now - since:.0f} s, the journal ends at {ends[shard]}"
    return None
