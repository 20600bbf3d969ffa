"""Verification: journal, books, audit trail and Redis against each other.

1. Wait until journal and read models have come as far as Redis was.
2. Take one snapshot of PostgreSQL.
3. Read the whole journal, chain it, compare every line with the audit trail, and build from it, in temporary
   tables, what the read models must be at the snapshot's cursors.
4. Compare them row by row.
5. Shard by shard, build from the journal, beside Redis' keys, what they must be, and compare these.

Each check is made against the journal, so that what is wrong in one place is named there, and nowhere else.
"""

import asyncio
import time
from typing import Any, NamedTuple

from psycopg import AsyncConnection, IsolationLevel

from grabstream.ops.connections.opening import key_space, open_redis
from grabstream.ops.settings import Settings
from grabstream.ops.verification.books import Books
from grabstream.ops.verification.checks import POLL_SECONDS, Check, RedisShard, Say
from grabstream.ops.verification.redis_keys import redis_check
from grabstream.projections.cursors import load, stopped
from grabstream.projections.database.migrate import PROJECTIONS, use_schema
from grabstream.projections.database.sessions import connect
from grabstream.streams.journal import open_reader
from grabstream.streams.topics import Topics


async def verify(
    settings: Settings, wait_seconds: float = 30.0, report: Say = lambda line: None, quick: bool = False,
    share: float = 0.5
) -> list[Check]:  # fmt: skip
    """Runs every check and returns them all; raises the clients' own errors when a server cannot be reached.

    `quick` leaves out what takes room in Redis: a second copy of each shard, one after the other. That takes
    at most this `share` of the time, so that whoever grabs is served; 1 where nobody does.
    """
    report("reading Redis")
    redis = open_redis(settings)
    try:
        shards = await redis_shards(redis, settings)
        connection = await connect(settings.postgres, settings.schema_)
        async with connection, open_reader(settings.kafka, Topics(settings.prefix).journal) as reader:
            await use_schema(connection, settings.schema_)
            report("waiting for the read models")
            caught_up = await _caught_up(connection, shards, wait_seconds)
            await connection.set_isolation_level(IsolationLevel.REPEATABLE_READ)
            async with connection.transaction():
                books = Books(connection, reader, settings, shards, report)
                of_books = await books.checks()
            checks = [_of_the_rest(caught_up, books), *of_books]
            if quick:
                notes = ["left out: --quick"]
                checks.append(Check("Redis = fold of the journal", 0, "keys", [], notes))
            else:
                checks.append(await redis_check(settings, redis, reader, books, wait_seconds, report, share))
            if books.aside:
                checks.append(
                    Check(
                        "set aside by operators",
                        len(books.aside),
                        "records",
                        [],
                        [one.in_words() for one in books.aside],
                    )
                )
    finally:
        await redis.aclose()
    return checks


async def redis_shards(redis: Any, settings: Settings) -> dict[int, RedisShard]:
    """How far every shard is."""
    shards = {}
    for number in range(settings.shards):
        seq, journaled, head, offset, term, owner, server_epoch = await redis.hmget(
            key_space(settings).shard(number).state,
            [
                "seq",
                "journaled_seq",
                "journaled_head",
                "journaled_offset",
                "journaled_term",
                "journaled_owner",
                "life",
            ],
        )
        shards[number] = RedisShard(
            int(seq or 0), int(journaled or 0), bytes.fromhex((head or b"").decode()), int(offset or 0),
            int(term or 0),
            (owner or b"").decode(errors="replace"), server_epoch is not None,
        )  # fmt: skip
    return shards


class Waited(NamedTuple):
    """What has not come as far as Redis was: (shard, projection, in words)."""

    cursors: int
    behind: list[tuple[int, str, str]]


async def _caught_up(
    connection: AsyncConnection[Any], shards: dict[int, RedisShard], wait_seconds: float
) -> Waited:
    deadline = time.monotonic() + wait_seconds
    while True:
        behind: list[tuple[int, str, str]] = []
        halted: list[tuple[int, str, str]] = []
        for name in PROJECTIONS:
            cursors = await load(connection, name)
            at_rest = await stopped(connection, name)
            halted += [
                (shard, name, f"{name} has stopped at shard {shard}, seq {cursors[shard].seq}: see status")
                for shard in sorted(at_rest)
            ]
            behind += [
                (
                    number,
                    name,
                    f"{name} is at seq {cursors[number].seq} of shard {number}, Redis at {shard.seq}",
                )
                for number, shard in shards.items()
                if number not in at_rest and cursors[number].seq < shard.seq
            ]
        if not behind or time.monotonic() > deadline:
            return Waited(len(shards) * len(PROJECTIONS), halted + behind)
        await asyncio.sleep(POLL_SECONDS)


def _of_the_rest(waited: Waited, books: "Books") -> Check:
    """Who is behind; what follows from something that is named elsewhere is left out."""
    problems = [
        f"shard {shard}: Redis is at seq {books.shards[shard].seq}, its journal ends at {books.ends[shard]}"
        for shard in sorted(books.not_journaled)
    ]
    known = books.broken | books.ahead | books.not_journaled
    problems += [
        what
        for shard, name, what in waited.behind
        if shard not in known and (name, shard) not in books.untrue
    ]
    return Check("read models have caught up", waited.cursors, "cursors", problems)
