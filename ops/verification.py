"""Verification: journal, books, audit trail and Redis against each other, at one and the same point.

1. what Redis has, with the seq it had it at · 2. wait until journal and read models have come that far · 3. one snapshot of
PostgreSQL · 4. read the whole journal, chain it, and fold it up to the cursors of that snapshot · 5. compare.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
from psycopg import AsyncConnection, IsolationLevel

from lua.keys import KeySpace
from models.events import decode_event
from models.journal import Corrupt, Cursor, Gap, parse_block
from models.transfers import GUARDED_ACCOUNTS, transfers_of
from ops.connections import key_space, open_redis
from ops.settings import Settings
from projections import set_aside
from projections.cursors import load, stopped
from projections.migrate import PROJECTIONS, use_schema
from projections.proof import Gaps
from projections.set_aside import SetAside
from streams.journal import JournalReader, open_reader
from streams.topics import Topics

POLL_SECONDS = 0.1
PROBLEMS_SHOWN_MAX = 5


class Check(NamedTuple):
    """One thing that was checked: how many of what, what is wrong (empty: nothing), and what is known and was decided by somebody."""

    name: str
    checked: int
    of_what: str
    problems: list[str]
    notes: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems


class RedisShard(NamedTuple):
    """A shard as Redis has it: its seq, and (amount left, held, grabs) of every offer at that seq."""

    seq: int
    offers: dict[str, tuple[int, int, int]]


Report = Callable[[str], None]


async def verify(settings: Settings, wait_seconds: float = 30.0, report: Report = lambda line: None) -> list[Check]:
    """Runs every check and returns them all; raises the clients' own errors when a server cannot be reached."""
    report("reading Redis")
    redis = open_redis(settings)
    try:
        shards = await redis_shards(redis, key_space(settings))
    finally:
        await redis.aclose()
    connection = await AsyncConnection.connect(settings.postgres, autocommit=True, connect_timeout=5)
    async with connection, open_reader(settings.kafka, Topics(settings.prefix).journal) as reader:
        await use_schema(connection, settings.schema_)
        report("waiting for the read models")
        checks = [await _caught_up(connection, shards, wait_seconds)]
        await connection.set_isolation_level(IsolationLevel.REPEATABLE_READ)
        async with connection.transaction():
            positions = {name: await load(connection, name) for name in PROJECTIONS}
            aside = await set_aside.load(connection)
            gaps = {shard: Gaps(aside, shard) for shard in range(settings.shards)}
            report("reading the journal")
            checks += await _journal_checks(connection, reader, positions, gaps, aside)
            report("checking the books")
            checks += [await _books(connection), await _accounts_of_transfers(connection)]
            checks.append(await _redis_check(connection, shards, positions["ledger"], gaps))
            if aside:
                checks.append(Check("set aside by operators", len(aside), "records", [], [one.in_words() for one in aside]))
    return checks


async def redis_shards(redis: Any, keys: KeySpace) -> dict[int, RedisShard]:
    """Every shard's offers and seq, each shard read in one transaction."""
    shards = {}
    for number in range(keys.shards):
        of_shard = keys.shard(number)
        names = sorted(name.decode() for name in await redis.smembers(of_shard.offers))
        async with redis.pipeline(transaction=True) as pipe:
            pipe.hget(of_shard.state, "seq")
            for name in names:
                pipe.hmget(of_shard.offer(name), ["amount_left", "held", "places"])
            seq, *offers = await pipe.execute()
        states = {name: (int(left), int(held or 0), int(places)) for name, (left, held, places) in zip(names, offers, strict=True)}
        shards[number] = RedisShard(int(seq or 0), states)
    return shards


async def _caught_up(connection: AsyncConnection[Any], shards: dict[int, RedisShard], wait_seconds: float) -> Check:
    deadline = time.monotonic() + wait_seconds
    while True:
        behind, halted = [], []
        for name in PROJECTIONS:
            cursors = await load(connection, name)
            at_rest = await stopped(connection, name)
            halted += [f"{name} has stopped at shard {shard}, seq {cursors[shard].seq}: see status" for shard in sorted(at_rest)]
            behind += [
                f"{name} is at seq {cursors[number].seq} of shard {number}, Redis at {shard.seq}"
                for number, shard in shards.items()
                if number not in at_rest and cursors[number].seq < shard.seq
            ]
        if not behind or time.monotonic() > deadline:
            return Check("read models have caught up", len(shards) * len(PROJECTIONS), "cursors", halted + behind)
        await asyncio.sleep(POLL_SECONDS)


async def _journal_checks(
    connection: AsyncConnection[Any], reader: JournalReader, positions: dict[str, dict[int, Cursor]], gaps: dict[int, Gaps],
    aside: Sequence[SetAside],
) -> list[Check]:  # fmt: skip
    """Chains every shard, compares the audit trail line by line, and the accounts with a fold of the journal."""
    chain_problems: list[str] = []
    audit_problems: list[str] = []
    events = audited = 0
    accounts: defaultdict[tuple[str, str], int] = defaultdict(int)
    for shard, of_shard in gaps.items():
        past = {one.journal_offset: one.behind for one in aside if one.shard == shard}
        audit = _audit_rows(connection, shard)
        ledger_seq, audit_seq = positions["ledger"][shard].seq, positions["audit"][shard].seq
        try:
            async with aclosing(_accepted(reader, shard, past)) as accepted, aclosing(audit):
                async for seq, line, hash_ in accepted:
                    events += 1
                    if seq <= ledger_seq and not of_shard.not_in_ledger(seq):
                        for asset, debit, credit, amount in transfers_of(decode_event(line)):
                            accounts[debit, asset] -= amount
                            accounts[credit, asset] += amount
                    if seq <= audit_seq and not of_shard.not_in_audit(seq):
                        row = await anext(audit, None)
                        audited += 1
                        if row is None or (row[0], row[1].encode(), bytes(row[2])) != (seq, line, hash_):
                            audit_problems.append(f"shard {shard}, seq {seq}: the audit trail differs from the journal")
                            break
                if await anext(audit, None) is not None:
                    audit_problems.append(f"shard {shard}: the audit trail has rows that the journal has not")
        except (Corrupt, Gap, msgspec.DecodeError) as error:
            chain_problems.append(f"shard {shard}: {error}")
    found = await connection.execute("SELECT account, asset, posted FROM accounts")
    booked = {(account, asset): posted for account, asset, posted in await found.fetchall()}
    differing = [key for key in accounts.keys() | booked.keys() if accounts.get(key, 0) != booked.get(key, 0)]
    account_problems = [
        f"{account} {asset}: {booked.get((account, asset), 0)} in the ledger, {accounts.get((account, asset), 0)} by the journal"
        for account, asset in sorted(differing)
    ]
    return [
        Check("chain of every shard", events, "events", chain_problems),
        Check("audit bytes = journal", audited, "events", audit_problems),
        Check("ledger = fold of the journal", len(accounts), "accounts", account_problems),
    ]


async def _accepted(reader: JournalReader, shard: int, past: Mapping[int, Cursor]) -> AsyncGenerator[tuple[int, bytes, bytes], None]:
    """The events that count; a record that contradicts itself is passed over where operators have set it aside."""
    cursor = Cursor()
    async with aclosing(reader.read(shard, 0, await reader.end(shard))) as lists:
        async for records in lists:
            for record in records:
                try:
                    cursor, accepted = cursor.feed(record.offset, parse_block(record.headers, record.value))
                except Corrupt:
                    if record.offset not in past:
                        raise
                    cursor, accepted = past[record.offset], ()
                for one in accepted:
                    yield one.seq, one.line, one.hash


async def _audit_rows(connection: AsyncConnection[Any], shard: int) -> AsyncGenerator[tuple[int, str, bytes], None]:
    async with connection.cursor(f"audit_{shard}") as rows:
        rows.itersize = 5_000
        await rows.execute("SELECT seq, body, hash FROM audit WHERE shard = %s ORDER BY seq", (shard,))
        async for row in rows:
            yield row


async def _books(connection: AsyncConnection[Any]) -> Check:
    """Per asset the sum over all accounts is 0, and no guarded account is below 0."""
    found = await connection.execute("SELECT asset, sum(posted), count(*) FROM accounts GROUP BY asset ORDER BY asset")
    rows = await found.fetchall()
    problems = [f"{asset}: all accounts together are {total}, not 0" for asset, total, _ in rows if total != 0]
    found = await connection.execute(
        "SELECT account, asset, posted FROM accounts WHERE posted < 0 AND account LIKE ANY(%s)",
        ([f"{start}%" for start in GUARDED_ACCOUNTS],),
    )
    problems += [f"{account} {asset} is below 0: {posted}" for account, asset, posted in await found.fetchall()]
    return Check("books balance", sum(count for *_, count in rows), "accounts", problems)


async def _accounts_of_transfers(connection: AsyncConnection[Any]) -> Check:
    """What stands on an account is the sum of its transfers."""
    found = await connection.execute(
        "WITH sums AS (SELECT account, asset, sum(change) AS posted FROM ("
        "SELECT debit AS account, asset, -amount AS change FROM transfers UNION ALL "
        "SELECT credit, asset, amount FROM transfers) AS legs GROUP BY account, asset) "
        "SELECT account, asset, a.posted, s.posted FROM accounts AS a FULL JOIN sums AS s USING (account, asset) "
        "WHERE coalesce(a.posted, 0) <> coalesce(s.posted, 0) LIMIT 100"
    )
    problems = [f"{account} {asset}: {posted} posted, {total} by its transfers" for account, asset, posted, total in await found.fetchall()]
    [count] = await (await connection.execute("SELECT count(*) FROM transfers")).fetchone() or [0]
    return Check("accounts = their transfers", int(count), "transfers", problems)


async def _redis_check(
    connection: AsyncConnection[Any], shards: dict[int, RedisShard], cursors: dict[int, Cursor], gaps: dict[int, Gaps]
) -> Check:  # fmt: skip
    """What Redis has left of every offer is what the ledger had at the same seq; so is the number of grabs.

    Offers with events that were set aside are left out: the ledger is short by these.
    """
    problems = []
    offers = 0
    for number, shard in shards.items():
        if cursors[number].seq < shard.seq:
            problems.append(f"shard {number}: the ledger is at seq {cursors[number].seq}, Redis at {shard.seq}")
            continue
        booked = await _booked_offers(connection, number, shard.seq)
        for offer, state in shard.offers.items():
            if gaps[number].unreadable or offer in gaps[number].offers:
                continue
            offers += 1
            if booked.get(offer) != state:
                problems.append(
                    f"{offer}: Redis has (left, held, grabs) {state}, the ledger {booked.get(offer)} at seq {shard.seq}",
                )
        absent = booked.keys() - shard.offers.keys() - gaps[number].offers if not gaps[number].unreadable else ()
        problems += [f"{offer}: in the ledger, but not in Redis" for offer in sorted(absent)]
    return Check("Redis = ledger", offers, "offers", problems)


async def _booked_offers(connection: AsyncConnection[Any], shard: int, seq: int) -> dict[str, tuple[int, int, int]]:
    """(left, held, grabs) of every offer that had not retired at a seq: by the ledger's transfers, and the audit trail's events."""
    found = await connection.execute(
        "WITH moved AS (SELECT offer, "
        "sum(CASE WHEN credit = 'offer:' || offer THEN amount WHEN debit = 'offer:' || offer THEN -amount ELSE 0 END) AS left_over, "
        "sum(CASE WHEN credit LIKE 'hold:%%' THEN amount WHEN debit LIKE 'hold:%%' THEN -amount ELSE 0 END) AS held "
        "FROM transfers WHERE shard = %(shard)s AND seq <= %(seq)s GROUP BY offer), "
        "told AS (SELECT offer, count(*) FILTER (WHERE type IN ('grab.granted', 'grab.held')) AS grabs, "
        "bool_or(type = 'offer.retired') AS retired FROM audit WHERE shard = %(shard)s AND seq <= %(seq)s GROUP BY offer) "
        "SELECT offer, left_over::bigint, held::bigint, grabs FROM moved JOIN told USING (offer) WHERE NOT retired",
        {"shard": shard, "seq": seq},
    )
    return {offer: (int(left), int(held), int(grabs)) for offer, left, held, grabs in await found.fetchall()}
