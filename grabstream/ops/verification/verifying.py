"""Verification: compares read models, audit trail and Redis with the journal.

1. Wait until the read models have applied what Redis had decided at the start.
2. Take one snapshot of PostgreSQL.
3. Read the whole journal, check its chain, compare every line with the audit trail, and compute in temporary
   tables what the read models must be at the snapshot's cursors.
4. Compare the read models with these tables, row by row.
5. Shard by shard, build a copy of Redis' keys from the journal, and compare the two.

Everything is compared with the journal, so a fault is reported only where it is.

This answers whether every row and key now follows from the journal. The verifier of a worker
(`streams/projecting/verifier.py`) answers whether a number has since diverged from its events, by its own
sums, for a share of the time; it compares rows and keys with the same code as step 4 and 5.
"""

import asyncio
import time
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection, IsolationLevel

from grabstream.connections.opening import key_space, open_redis
from grabstream.ops.verification.checkpoints import Against, Given
from grabstream.ops.verification.checks import (
    POLL_SECONDS,
    UNREADABLE,
    RedisShard,
    VerificationCheck,
    VerificationProgress,
    no_progress,
)
from grabstream.ops.verification.read_model_comparison import ReadModelComparison
from grabstream.ops.verification.redis_keys import redis_check
from grabstream.projections.cursors import load_all, stopped
from grabstream.projections.database.migrate import PROJECTIONS, use_schema
from grabstream.projections.database.sessions import connect
from grabstream.settings import Settings
from grabstream.streams.history.archive_source import open_archive_of_journal
from grabstream.streams.history.stores import Store
from grabstream.streams.journal import open_reader
from grabstream.streams.topics import Topics

#: What a shard stores of its position, in the order of `RedisShard`.
POSITION_FIELDS: Final = (
    "seq", "journaled_seq", "journaled_head", "journaled_offset", "journaled_term", "journaled_owner",
    "server_epoch",
)  # fmt: skip


async def verify(
    settings: Settings, wait_seconds: float = 30.0, report: VerificationProgress = no_progress,
    quick: bool = False, share: float = 0.5, checkpoint: Given | None = None, archive: Store | None = None
) -> list[VerificationCheck]:  # fmt: skip
    """Runs and returns all checks; raises the clients' errors when a server cannot be reached.

    Waits up to `wait_seconds` for read models that lag. `report` is called with each step and its progress.
    `quick` skips step 5, which needs room in Redis for a copy of one shard at a time. Step 5 uses at most
    this `share` of the time, so that users are served; 1 where there are no users. With a `checkpoint`, the
    history must be the one that it names. The lines that are in an `archive` are read there; raises
    BadArchive if it is of another system, or lacks a file.
    """
    report("reading Redis")
    redis = open_redis(settings)
    try:
        shards = await redis_shards(redis, settings)
        connection = await connect(settings.postgres, settings.schema_)
        journal = Topics(settings.prefix).journal
        async with connection, open_reader(settings.brokers, journal) as reader:
            opened = None
            if archive is not None:
                opened = await open_archive_of_journal(
                    archive, settings.prefix, settings.shards, settings.brokers, journal
                )
            await use_schema(connection, settings.schema_)
            report("waiting for the read models")
            lags = await _wait_for_read_models(connection, shards, wait_seconds)
            await connection.set_isolation_level(IsolationLevel.REPEATABLE_READ)
            async with connection.transaction():
                against = None if checkpoint is None else Against(checkpoint)
                books = ReadModelComparison(connection, reader, settings, shards, report, against, opened)
                book_checks = await books.checks()
            checks = [_caught_up_check(lags, books), *book_checks]
            if quick:
                notes = ["skipped: --quick"]
                checks.append(VerificationCheck("Redis = fold of the journal", 0, "keys", [], notes))
            else:
                checks.append(await redis_check(settings, redis, reader, books, wait_seconds, report, share))
            if books.aside:
                notes = [record.in_words() for record in books.aside]
                checks.append(
                    VerificationCheck("set aside by operators", len(books.aside), "records", [], notes)
                )
    finally:
        await redis.aclose()
    return checks


async def redis_shards(redis: Any, settings: Settings) -> dict[int, RedisShard]:
    """The position of every shard in Redis."""
    shards = {}
    for number in range(settings.shards):
        seq, journaled, head, offset, term, owner, server_epoch = await redis.hmget(
            key_space(settings).shard(number).state, POSITION_FIELDS
        )
        shards[number] = RedisShard(
            _number(seq), _number(journaled, UNREADABLE), _hash(head), _number(offset), _number(term),
            (owner or b"").decode(errors="replace"), server_epoch is not None,
        )  # fmt: skip
    return shards


def _number(value: bytes | None, damaged: int = 0) -> int:
    """A number of a shard. Where it is damaged, a comparison with the journal says so."""
    return damaged if value is not None and not value.isdigit() else int(value or 0)


def _hash(value: bytes | None) -> bytes:
    try:
        return bytes.fromhex((value or b"").decode(errors="replace"))
    except ValueError:
        return b""


class Lags(NamedTuple):
    """How many cursors were compared with Redis, and the (shard, projection, problem) of those that lag."""

    cursors: int
    problems: list[tuple[int, str, str]]


async def _wait_for_read_models(
    connection: AsyncConnection[Any], shards: dict[int, RedisShard], wait_seconds: float
) -> Lags:
    deadline = time.monotonic() + wait_seconds
    while True:
        lagging: list[tuple[int, str, str]] = []
        halted: list[tuple[int, str, str]] = []
        for name, cursors in (await load_all(connection, PROJECTIONS)).items():
            stopped_shards = await stopped(connection, name)
            for shard in sorted(stopped_shards):
                what = (
                    f"{name} has stopped at shard {shard}, seq {cursors[shard].seq}: see `grabstream doctor`"
                )
                halted.append((shard, name, what))
            for shard in sorted(shards.keys() - stopped_shards):
                if (seq := cursors[shard].seq) < shards[shard].seq:
                    what = f"{name} is at seq {seq} of shard {shard}, Redis is at seq {shards[shard].seq}"
                    lagging.append((shard, name, what))
        if not lagging or time.monotonic() > deadline:
            return Lags(len(shards) * len(PROJECTIONS), halted + lagging)
        await asyncio.sleep(POLL_SECONDS)


def _caught_up_check(lags: Lags, books: ReadModelComparison) -> VerificationCheck:
    """Read models that lag, and shards that are not journaled. Lags that follow from a problem of another
    check are left out.
    """
    problems = [
        f"shard {shard}: Redis is at seq {books.shards[shard].seq}, but its journal ends at seq "
        f"{books.ends[shard]}"
        for shard in sorted(books.not_journaled)
    ]
    reported = books.broken | books.ahead | books.not_journaled
    problems += [
        problem
        for shard, name, problem in lags.problems
        if shard not in reported and (name, shard) not in books.wrong_cursors
    ]
    return VerificationCheck("read models have caught up", lags.cursors, "cursors", problems)
