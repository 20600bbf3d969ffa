"""Compares the state of a running system with its journal: every key of every shard in Redis must equal a
fold of the shard's events.
"""

import secrets
from contextlib import aclosing
from typing import Any

from grabstream.connections.opening import key_space, open_redis, sealer
from grabstream.lua.keys import KeySpace
from grabstream.models.journal import Cursor
from grabstream.models.runs import decode_line
from grabstream.settings import Settings
from grabstream.streams.journal import open_reader
from grabstream.streams.topics import Topics
from tests.conftest import until
from tests.lua.histories.recovered import contents, differences, fold


async def journal_lines(settings: Settings, shard: int) -> list[bytes]:
    """The valid events of a shard that are in the journal now."""
    cursor, lines = Cursor(), list[bytes]()
    async with (
        open_reader(settings.kafka, Topics(settings.prefix).journal) as reader,
        aclosing(reader.read(shard, 0, await reader.end(shard))) as reading,
    ):
        async for records in reading:
            for record in records:
                cursor, accepted = cursor.feed(record.offset, reader.block(record))
                lines += [event.line for event in accepted]
    return lines


async def assert_state_is_the_journal_s(settings: Settings) -> None:
    """Waits until all events are journaled, then compares every shard. Only the sweeper may still change the
    state.
    """
    redis = open_redis(settings)
    scratch = KeySpace(f"{settings.prefix}-fold-{secrets.token_hex(3)}", settings.shards)
    try:
        for number in range(settings.shards):
            await until(
                lambda number=number: _is_equal(settings, redis, scratch, number),
                30,
                f"shard {number} as the journal has it",
            )
    finally:
        names = [key async for key in redis.scan_iter(match=f"{scratch.prefix}:*", count=1_000)]
        if names:
            await redis.unlink(*names)
        await redis.aclose()


async def _is_equal(settings: Settings, redis: Any, scratch: KeySpace, number: int) -> bool:
    """Raises AssertionError with the differences. Returns False while the shard changes or has events that
    are not journaled.
    """
    keys = key_space(settings).shard(number)
    before = await redis.hmget(keys.state, ["seq", "journaled_seq", "server_epoch"])
    if before[2] is None or (before[0] or b"0") != (before[1] or b"0"):
        return False
    live = await contents(redis, keys)
    if await redis.hmget(keys.state, ["seq", "journaled_seq", "server_epoch"]) != before:
        return False
    lines = await journal_lines(settings, number)
    seq = decode_line(lines[-1]).last_seq if lines else 0
    assert seq == int(before[0] or 0), f"shard {number}: the journal has {seq} events, Redis {before[0]!r}"
    again = KeySpace(f"{scratch.prefix}-{secrets.token_hex(3)}", settings.shards).shard(number)
    await fold(redis, again, lines, sealer(settings), settings.shards)
    differing = differences(live, await contents(redis, again))
    names = [key async for key in redis.scan_iter(match=f"{again.tag}:*", count=1_000)]
    if names:
        await redis.unlink(*names)
    assert not differing, f"shard {number}: Redis / its journal: {differing[:20]}"
    return True
