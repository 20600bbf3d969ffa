"""`verify` over one small system with every kind of state: it finds no problem in it, and after each damage
it reports that damage, and nothing else.

Every check, and every kind of state, has damage here that must be reported. State without such a test is not
proven to be verified.
"""

import asyncio
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from pydantic import SecretStr

from grabstream.connections.opening import gate_limits, key_space, open_gate, open_redis, sealer
from grabstream.crypto.tickets import TicketKeys, sign
from grabstream.gate.calls import now_ms
from grabstream.gate.gate import Gate
from grabstream.lua.keys import CAMPAIGN_KEYS, OFFER_KEYS, KeySpace, ShardKeys
from grabstream.lua.packed_values import GRAB_FIELDS
from grabstream.models.commands import (
    Adjust,
    AnyCommand,
    Close,
    Confirm,
    Grab,
    Load,
    Open,
    Redeem,
    Release,
    Return,
)
from grabstream.models.entries import Entry
from grabstream.models.offers import CouponTerms, EnvelopeTerms, Limit, StockTerms
from grabstream.ops.verification import redis_keys, verifying
from grabstream.ops.verification.checks import VerificationCheck
from grabstream.ops.verification.verifying import verify
from grabstream.settings import Settings, child_environment
from grabstream.streams.clients import started
from grabstream.streams.journal import open_reader
from grabstream.streams.projecting.projector import CatchUp
from grabstream.streams.relaying import shadow
from grabstream.streams.topics import Topics, create_topics, retention_ms
from grabstream.workshop.rehearsal.run import open_books, read_progress
from grabstream.workshop.rehearsal.stage import take_down
from tests.conftest import Worker, make_system, some_by_tier, until
from tests.support.command_line import env_of
from tests.support.projecting import (
    LINES,
    SHARD,
    JournalWriter,
    catching_up,
    granted,
    journal,  # noqa: F401 - a fixture
    live_schemas,
    open_tables,
    opened,
    running,
    until_at_seq,
)

SECRET = bytes(range(32))
TICKETS = TicketKeys({"t": SECRET})
#: No hold ends, and no offer closes, during the tests.
LATER_MS = 24 * 3_600_000
FOREVER = {"closes_at": 4_000_000_000_000}
LIMITS = (Limit("user", "offer", 9), Limit("user", "week", 9, scope="campaign"))


def terms(kind: Any, total: int = 10, **rest: Any) -> Any:
    return kind(issuer="shop", total=total, **{**FOREVER, **rest})


class Sale:
    """Sends commands through a gate, each with a new id."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._ids = 0

    async def __call__(self, kind: Any, offer: str, outcome: str, **fields: Any) -> None:
        self._ids += 1
        command: AnyCommand = kind(**{"id": f"{kind.__name__.lower()}{self._ids}", "offer": offer, **fields})
        [answer] = await self._gate.decide([command], patience_ms=20_000, timeout_ms=20_000)
        assert answer.outcome == outcome, answer

    async def play(self, until_retired: Callable[[str], Any]) -> None:
        """Opens offers of every kind, with grabs in every state. One offer is closed, one is retired, and one
        is retired of a campaign that still has offers.
        """
        envelope = {"funding": "pay", "asset": "CNY", **FOREVER}
        gone = {"retire_after_ms": 1, "closes_at": None}
        await self(
            Open,
            "c:envelope",
            "opened",
            terms=EnvelopeTerms(issuer="alice", total=1_000, parts=8, **envelope),
        )
        await self(Open, "c:stock", "opened", terms=terms(
            StockTerms, 4, price=990, currency="CNY", hold_ms=LATER_MS, extensions=2, max_per_grab=2,
            waiting_list=True, limits=LIMITS,
            return_restores=True,
        ))  # fmt: skip
        soon = now_ms() + 2_000
        await self(Open, "c:coupon", "opened", terms=terms(CouponTerms, 6, limits=LIMITS, opens_at=soon))
        await self(
            Load,
            "c:coupon",
            "loaded",
            what="codes",
            chunk=1,
            chunks=1,
            items=tuple(f"code-{number}" for number in range(6)),
        )
        await self(Open, "invited", "opened", terms=terms(CouponTerms, 5, audience="list", opens_at=soon))
        await self(Load, "invited", "loaded", what="audience", chunk=1, chunks=1, items=("u1", "u2"))
        await self(Open, "ticketed", "opened", terms=terms(CouponTerms, 5, audience="ticket"))
        await self(Open, "c:gone", "opened", terms=terms(CouponTerms, 5, **gone))
        await self(Open, "gone", "opened", terms=terms(CouponTerms, 5, **gone))
        for number in range(3):
            await self(Grab, "c:envelope", "granted", user=f"u{number}")
        await until(lambda: now_ms() > soon, 10, "the time")
        for number in range(3):
            await self(Grab, "c:coupon", "granted", user=f"u{number}", id=f"k{number}")
        await self(Redeem, "c:coupon", "redeemed", grab="k0", order="order-1")
        await self(Return, "c:coupon", "returned", grab="k1")
        for number, quantity in enumerate((2, 1, 1)):
            await self(Grab, "c:stock", "held", user=f"u{number}", quantity=quantity, id=f"s{number}")
        await self(Grab, "c:stock", "waiting", user="u3", wait=True, id="s3")
        await self(Grab, "c:stock", "waiting", user="u4", wait=True, quantity=2, id="s4")
        await self(
            Confirm, "c:stock", "confirmed", grab="s0", payment="paid-1", paid=990, currency="CNY", quantity=1
        )
        await self(Confirm, "c:stock", "invalid", grab="s1", payment="paid-2", paid=1, currency="CNY")
        await self(Release, "c:stock", "released", grab="s2")
        await self(Grab, "invited", "granted", user="u1")
        ticket = sign(
            "t", SECRET, user="u1", offer="ticketed", expires_at_ms=FOREVER["closes_at"], once_id="once-1"
        )
        await self(Grab, "ticketed", "granted", user="u1", ticket=ticket)
        entry = Entry(debit="issuer:shop", credit="wallet:u1", asset="CNY", amount=5)
        await self(
            Adjust, "c:envelope", "adjusted", transfers=(entry,), reason="goodwill", approved_by="olga"
        )
        for offer in ("c:gone", "gone"):
            await self(Grab, offer, "granted", user="u1")
            await self(Close, offer, "closed")
            await until_retired(offer)
        await self(Open, "closed", "opened", terms=terms(CouponTerms, 5))
        await self(Grab, "closed", "granted", user="u1")
        await self(Close, "closed", "closed")


async def built(settings: Settings, log: Path) -> None:
    """Builds a system with that history. Its worker stops after the read models have applied every event."""
    await make_system(settings)
    redis = open_redis(settings)
    keys = key_space(settings)
    worker = Worker(settings, "decide,relay,sweep,project", log)
    gate = Gate(redis, keys, sealer(settings), gate_limits(settings), tickets=TICKETS)
    gate.start()

    async def retired(offer: str) -> None:
        of_shard = keys.shard(keys.shard_of_offer(offer))

        async def is_retired() -> bool:
            return not await redis.sismember(of_shard.offers, offer)

        await until(is_retired, 30, f"the retirement of {offer}")

    try:
        await Sale(gate).play(retired)

        async def complete() -> bool:
            async with await open_books(settings) as books:
                return (await read_progress(redis, keys, books)).complete

        await until(complete, 30, "the read models")
    finally:
        await gate.close()
        assert worker.stop() == 0
        await redis.aclose()


@pytest.fixture(scope="module")
def whole(servers: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A system with every kind of state. Tests damage it and repair it."""
    name = f"test{secrets.token_hex(5)}"
    secret = "t:HS256:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
    settings = servers.model_copy(
        update={"prefix": name, "schema_": name, "shards": 2, "ticket_keys": SecretStr(secret)}
    )
    try:
        asyncio.run(built(settings, tmp_path_factory.mktemp("worker") / "worker.log"))
        yield settings
    finally:
        asyncio.run(take_down(settings))


def problems_of(checks: list[VerificationCheck]) -> dict[str, list[str]]:
    return {check.name: check.problems for check in checks if not check.passed}


async def test_a_sound_system_has_no_problems(whole: Settings) -> None:
    checks = await verify(whole, 0)
    assert problems_of(checks) == {}
    assert {check.name for check in checks if not check.checked} == set()
    # The copies of shards are removed.
    redis = open_redis(whole)
    left = [key async for key in redis.scan_iter(match=f"{whole.prefix}/*", count=1_000)]
    await redis.aclose()
    assert left == []


async def test_progress_has_an_end(whole: Settings) -> None:
    shown: dict[str, list[tuple[int, int]]] = {}

    def report(step: str, done: int = 0, total: int = 0) -> None:
        shown.setdefault(step, []).append((done, total))

    await verify(whole, 0, report, share=1)
    assert len(shown) == 6
    redis = open_redis(whole)
    seqs = [int(await redis.hget(key_space(whole).shard(shard).state, "seq")) for shard in range(2)]
    await redis.aclose()
    for step in ("reading the journal", "comparing Redis"):
        done = [progress[0] for progress in shown[step]]
        assert done == sorted(done)
        assert done[-1] == sum(seqs)
        assert len(set(done)) > 2
        assert {total for _, total in shown[step]} == {sum(seqs)}


# -- read models ---------------------------------------------------------------------------------------------


class TableDamage(NamedTuple):
    """A change of one row of a table, the check that must report it, and what its one problem must say."""

    table: str
    change: str
    check: str
    says: str


LEDGER, BALANCES = "ledger = fold of the journal", "balances = fold of the journal"
AUDIT, CURSORS = "audit bytes = journal", "cursors = journal"
TABLES = [
    TableDamage(
        "transfer_runs_1",
        "UPDATE {t} SET amounts[array_position(users, 'u1')] = amounts[array_position(users, 'u1')] + 1 "
        "WHERE 'u1' = ANY(users) AND asset = 'CNY'",
        LEDGER,
        "leg 0): amount is",
    ),
    TableDamage(
        "transfer_runs_1",
        "UPDATE {t} SET users[array_position(users, 'u1')] = 'thief' WHERE shard = 0 AND 'u1' = ANY(users)",
        LEDGER,
        "credit is wallet:thief",
    ),
    TableDamage(
        "transfer_runs_1",
        "DELETE FROM {t} WHERE shard = 0 AND 'u1' = ANY(users)",
        LEDGER,
        "the row is missing",
    ),
    TableDamage(
        "transfers_1",
        "INSERT INTO {t} SELECT shard, seq, 0, offer, asset, debit, credit_kind || users[1], amounts[1], at "
        "FROM transfer_runs_1 WHERE shard = 0 AND users[1] = 'u1' LIMIT 1",
        LEDGER,
        "leg 0): the row exists, but no event creates it",
    ),
    TableDamage(
        "transfers_1",
        "UPDATE {t} SET credit = 'issuer:thief' WHERE leg = 1 AND credit = 'issuer:shop'",
        LEDGER,
        "leg 1): credit is issuer:thief",
    ),
    TableDamage(
        "transfers_1",
        "DELETE FROM {t} WHERE leg = 1 AND credit = 'issuer:shop'",
        LEDGER,
        "leg 1): the row is missing",
    ),
    TableDamage(
        "transfers_1",
        "INSERT INTO {t} VALUES (1, 9, 7, 'c:envelope', 'CNY', 'external:x', 'wallet:thief', 5, 1)",
        LEDGER,
        "transfers (shard 1, seq 9, leg 7): the row exists, but no event creates it",
    ),
    TableDamage(
        "accounts_1",
        "UPDATE {t} SET posted = posted + 1 WHERE (account, asset) = ('issuer:shop', 'CNY')",
        LEDGER,
        "accounts (account issuer:shop, asset CNY): posted is",
    ),
    TableDamage(
        "accounts_1",
        "INSERT INTO {t} VALUES ('wallet:thief', 'CNY', 7)",
        LEDGER,
        "account wallet:thief, asset CNY): the row exists",
    ),
    TableDamage(
        "accounts_1",
        "DELETE FROM {t} WHERE (account, asset) = ('wallet:u2', 'CNY')",
        LEDGER,
        "the row is missing",
    ),
    TableDamage(
        "balances_1",
        "UPDATE {t} SET available = available + 1 WHERE (user_id, asset) = ('u2', 'CNY')",
        BALANCES,
        "balances (user_id u2, asset CNY): available is",
    ),
    TableDamage(
        "balances_1",
        "UPDATE {t} SET held = held + 1 WHERE held > 0 AND user_id = 'u0'",
        BALANCES,
        "held is 2, the journal makes it 1",
    ),
    TableDamage(
        "balances_1",
        "DELETE FROM {t} WHERE (user_id, asset) = ('u2', 'CNY')",
        BALANCES,
        "the row is missing",
    ),
    TableDamage("balances_1", "INSERT INTO {t} VALUES ('thief', 'CNY', 5, 0)", BALANCES, "user_id thief"),
    TableDamage(
        "grabs_1",
        "UPDATE {t} SET asset = 'gold' WHERE grab = 's0'",
        BALANCES,
        "grabs (offer c:stock, grab s0, user_id u0): asset is gold",
    ),
    TableDamage(
        "grabs_1",
        "UPDATE {t} SET held = held - 1 WHERE grab = 's1'",
        BALANCES,
        "grab s1, user_id u1): held is 0, the journal makes it 1",
    ),
    TableDamage(
        "grabs_1",
        "UPDATE {t} SET redeemed = 0 WHERE grab = 'k0'",
        BALANCES,
        "redeemed is 0, the journal makes it 1",
    ),
    TableDamage(
        "grabs_1",
        "UPDATE {t} SET back = 0, uncounted = 0 WHERE grab = 'k1'",
        BALANCES,
        "back is 0, the journal makes it 1",
    ),
    TableDamage(
        "grabs_1",
        "UPDATE {t} SET state = 'released' WHERE grab = 's4'",
        BALANCES,
        "state is released, the journal makes it waiting",
    ),
    TableDamage(
        "grabs_1",
        "UPDATE {t} SET paid = paid + 1 WHERE grab = 's0'",
        BALANCES,
        "paid is 991, the journal makes it 990",
    ),
    TableDamage(
        "grabs_1",
        "DELETE FROM {t} WHERE grab = 'k2'",
        BALANCES,
        "grabs (offer c:coupon, grab k2, user_id u2): the row is missing",
    ),
    TableDamage(
        "offers_1",
        "UPDATE {t} SET units_left = units_left + 1 WHERE offer = 'c:coupon'",
        BALANCES,
        "offers (offer c:coupon): units_left is",
    ),
    TableDamage(
        "offers_1",
        "UPDATE {t} SET given = given - 1 WHERE offer = 'gone'",
        BALANCES,
        "offers (offer gone): given is 0",
    ),
    TableDamage(
        "offers_1",
        "UPDATE {t} SET state = 'open' WHERE offer = 'closed'",
        BALANCES,
        "offers (offer closed): state is open",
    ),
    TableDamage(
        "offers_1",
        "UPDATE {t} SET terms = terms || '{{\"limits\": []}}' WHERE offer = 'c:stock'",
        BALANCES,
        "offers (offer c:stock): terms is",
    ),
    TableDamage(
        "offers_1", "UPDATE {t} SET waiting = waiting + 1 WHERE offer = 'c:stock'", BALANCES, "waiting is"
    ),
    TableDamage(
        "offers_1",
        "UPDATE {t} SET opened_seq = opened_seq + 1, retired_seq = 1 WHERE offer = 'gone'",
        BALANCES,
        "retired_seq is 1, the journal makes it",
    ),
    TableDamage(
        "payments_1",
        "UPDATE {t} SET state = 'refund_due' WHERE payment = 'paid-1'",
        BALANCES,
        "the journal makes it served",
    ),
    TableDamage(
        "payments_1",
        "UPDATE {t} SET refunded = 1 WHERE payment = 'paid-2'",
        BALANCES,
        "refunded is 1, the journal makes it 0",
    ),
    TableDamage("payments_1", "DELETE FROM {t} WHERE payment = 'paid-1'", BALANCES, "the row is missing"),
    TableDamage(
        "audit_1",
        "UPDATE {t} SET body = overlay(body placing 'X' from 30 for 1) WHERE (shard, seq) = (1, 9)",
        AUDIT,
        "shard 1, seq 9: body of the audit trail differs from the journal",
    ),
    TableDamage(
        "audit_1",
        "UPDATE {t} SET hash = set_byte(hash, 3, get_byte(hash, 3) # 1) WHERE (shard, seq) = (1, 9)",
        AUDIT,
        "shard 1, seq 9: hash of the audit trail differs",
    ),
    TableDamage(
        "audit_1",
        "UPDATE {t} SET offer = 'x' WHERE (shard, seq) = (1, 9)",
        AUDIT,
        "shard 1, seq 9: offer of the audit trail differs",
    ),
    TableDamage(
        "audit_1",
        "UPDATE {t} SET type = 'x' WHERE (shard, seq) = (1, 9)",
        AUDIT,
        "shard 1, seq 9: type of the audit trail differs",
    ),
    TableDamage(
        "audit_1",
        "UPDATE {t} SET at = at + 1 WHERE (shard, seq) = (1, 9)",
        AUDIT,
        "shard 1, seq 9: at of the audit trail differs",
    ),
    TableDamage(
        "audit_1",
        "DELETE FROM {t} WHERE (shard, seq) = (1, 9)",
        AUDIT,
        "shard 1, seq 9: the audit trail lacks this event",
    ),
    TableDamage(
        "audit_1",
        "INSERT INTO {t} VALUES (1, 999, 'x', 'grab.granted', 1, '{{}}', '')",
        AUDIT,
        "shard 1, seq 999: the audit trail has a row that is not in the journal",
    ),
    TableDamage(
        "audit_1",
        "INSERT INTO {t} VALUES (1, 0, 'x', 'grab.granted', 1, '{{}}', '')",
        AUDIT,
        "shard 1, seq 0: the audit trail has a row",
    ),
    *(
        TableDamage(
            f"{{{name}}}.projection_cursors",
            f"UPDATE {{t}} SET {change} WHERE shard = 1",
            CURSORS,
            f"{name}, shard 1{says}",
        )
        for name in ("ledger", "balances", "audit")
        for change, says in (
            ("head = set_byte(head, 0, get_byte(head, 0) # 1)", ", the cursor: head is"),
            ("owner = 'x'", ", the cursor: owner is x"),
            ("term = term + 1", ", the cursor: term is"),
            ("seq = seq - 1", ", the cursor: seq is"),
            ("seq = seq + 1", ", the cursor: seq is"),
            ("next_offset = next_offset + 5", ": no record of the journal ends at offset"),
        )
    ),
]


@asynccontextmanager
async def damaged(settings: Settings, damage: TableDamage) -> AsyncIterator[None]:
    """Changes one row, and puts the table back afterwards."""
    async with await open_tables(settings) as connection:
        table = damage.table.format(**await live_schemas(connection))
        await connection.execute(f"CREATE TABLE sound AS TABLE {table}".encode())
        done = await connection.execute(damage.change.format(t=table).encode())
        assert done.rowcount == 1, damage.change
        try:
            yield
        finally:
            await connection.execute(f"DELETE FROM {table}".encode())
            await connection.execute(f"INSERT INTO {table} SELECT * FROM sound".encode())
            await connection.execute(b"DROP TABLE sound")


def assert_only_problem(checks: list[VerificationCheck], name: str, *says: str) -> None:
    """The only problem of all checks is of the check of this name, and contains these texts."""
    problems = problems_of(checks)
    assert list(problems) == [name], problems
    [problem] = problems[name]
    for part in says:
        assert part in problem


@pytest.mark.parametrize(
    "damage", some_by_tier(TABLES, 3), ids=lambda one: f"{one.table.split('.')[0]}: {one.change}"
)
async def test_a_damaged_row_is_reported_and_nothing_else(whole: Settings, damage: TableDamage) -> None:
    async with damaged(whole, damage):
        assert_only_problem(await verify(whole, 0, share=1), damage.check, damage.says)


@pytest.mark.long
async def test_a_grab_of_another_user_is_reported_as_two_rows(whole: Settings) -> None:
    """The user is a part of the key."""
    given = TableDamage("grabs_1", "UPDATE {t} SET user_id = 'thief' WHERE grab = 's0'", BALANCES, "")
    async with damaged(whole, given):
        problems = problems_of(await verify(whole, 0, share=1))
    assert list(problems) == [BALANCES]
    missing, extra = sorted(problems[BALANCES], key=lambda problem: "thief" in problem)
    assert "grabs (offer c:stock, grab s0, user_id u0): the row is missing" in missing
    assert "grabs (offer c:stock, grab s0, user_id thief)" in extra


# -- Redis ---------------------------------------------------------------------------------------------------

Change = Callable[[Any, str], Any]


class KeyDamage(NamedTuple):
    """A change of a key, given by its kind and the offer it belongs to, and what its one problem must say."""

    kind: str
    offer: str
    says: str
    change: Change


def _key(keys: KeySpace, kind: str, offer: str) -> str:
    of_shard = keys.shard(keys.shard_of_offer(offer))
    if kind in OFFER_KINDS:
        return of_shard.offer_keys(offer)[OFFER_KINDS.index(kind)]
    if kind in CAMPAIGN_KINDS:
        return of_shard.campaign_keys(offer.partition(":")[0])[CAMPAIGN_KINDS.index(kind)]
    return str(getattr(of_shard, kind))


OFFER_KINDS = [f"offer {name}" for name in OFFER_KEYS]
CAMPAIGN_KINDS = [f"campaign {name}" for name in CAMPAIGN_KEYS]
SHARD_KINDS = [
    name
    for name, value in vars(ShardKeys).items()
    if isinstance(value, property) and name not in ("tag", "channel")
]


def hset(field: str, value: Any) -> Change:
    return lambda redis, key: redis.hset(key, field, value)


def hdel(field: str) -> Change:
    return lambda redis, key: redis.hdel(key, field)


def changed(field: str, index: int) -> Change:
    """Flips one bit of a record."""

    async def change(redis: Any, key: str) -> None:
        record = bytearray(await redis.hget(key, field))
        record[index] ^= 1
        await redis.hset(key, field, bytes(record))

    return change


def moved(field: str, by: int = 1) -> Change:
    return lambda redis, key: redis.hincrby(key, field, by)


def added(member: str, score: float | None = None) -> Change:
    return lambda redis, key: redis.sadd(key, member) if score is None else redis.zadd(key, {member: score})


def later(member: str) -> Change:
    return lambda redis, key: redis.zincrby(key, 1, member)


def taken(member: str) -> Change:
    async def take(redis: Any, key: str) -> None:
        assert await (redis.zrem if await redis.type(key) == b"zset" else redis.srem)(key, member) == 1

    return take


async def gone(redis: Any, key: str) -> None:
    assert await redis.delete(key) == 1


async def counted_more(redis: Any, key: str) -> None:
    [(field, value), *_] = sorted((await redis.hgetall(key)).items())
    await redis.hset(key, field, b"%s0" % value)


#: Records that no decoder of MessagePack accepts: no UTF-8, cut, too deep, empty.
UNREADABLE = (b"\xb6" + b"\x9d" * 22, b"\xdd\xff\xff\xff\xff", b"\x91" * 5_000, b"")

KEYS = [
    KeyDamage("state", "c:stock", "shard, time: is", moved("time")),
    *(
        KeyDamage("offer state", offer, f"offer:{offer}, {field}: is", moved(field))
        for offer in ("c:envelope", "c:stock")
        for field in ("amount_left", "units_left", "places", "offer_seq", "opens_at", "closes_at")
    ),
    KeyDamage("offer state", "c:stock", "offer:c:stock, held: is", moved("held")),
    KeyDamage("offer state", "c:stock", "offer:c:stock, queued: is", moved("queued")),
    KeyDamage(
        "offer state", "c:stock", "offer:c:stock, paused: is 1 in Redis, 0 by the journal", hset("paused", 1)
    ),
    KeyDamage(
        "offer state",
        "closed",
        "offer:closed, state: is open in Redis, closed by the journal",
        hset("state", "open"),
    ),
    KeyDamage("offer state", "c:stock", "offer:c:stock, rules: is", hset("rules", b"\x80")),
    KeyDamage("offer state", "c:coupon", "offer:c:coupon, loads is not in Redis", hdel("loads")),
    KeyDamage("offer state", "invited", "offer:invited is not in Redis", gone),
    KeyDamage(
        "offer state",
        "gone",
        "offer:gone is in Redis, but no event creates it",
        hset("state", "open"),
    ),
    KeyDamage("offer users", "c:envelope", "users, u1: is", changed("u1", 4)),
    KeyDamage("offer users", "c:envelope", "users, u1 is not in Redis", hdel("u1")),
    KeyDamage(
        "offer users",
        "c:envelope",
        "users, thief is in Redis, but no event",
        hset("thief", b"12345678901234"),
    ),
    KeyDamage("offer users", "c:stock", "users, ", counted_more),
    KeyDamage(
        "offer parts", "c:envelope", "differs from byte 8 on", lambda redis, key: redis.setrange(key, 8, b"x")
    ),
    KeyDamage("offer parts", "c:envelope", "parts is not in Redis", gone),
    KeyDamage(
        "offer grabs",
        "c:stock",
        "grabs, s1: held is 0 in Redis, 1 by the journal",
        lambda redis, key: grab_changed(redis, key, "s1", "held", 0),
    ),
    KeyDamage(
        "offer grabs",
        "c:stock",
        "grabs, s0: user is thief in Redis, u0 by the journal",
        lambda redis, key: grab_changed(redis, key, "s0", "user", "thief"),
    ),
    KeyDamage(
        "offer grabs",
        "c:stock",
        "grabs, s1: deadline is",
        lambda redis, key: grab_changed(redis, key, "s1", "deadline", 1),
    ),
    KeyDamage("offer grabs", "c:coupon", "grabs, k2 is not in Redis", hdel("k2")),
    KeyDamage(
        "offer codes", "c:coupon", "codes: differs from index 0 on", lambda redis, key: redis.lpop(key)
    ),
    KeyDamage(
        "offer codes",
        "c:coupon",
        "codes: differs from index 1 on",
        lambda redis, key: redis.lset(key, 1, "x"),
    ),
    KeyDamage("offer audience", "invited", "audience, thief is in Redis", added("thief")),
    KeyDamage("offer audience", "invited", "audience, u2 is not in Redis", taken("u2")),
    KeyDamage("offer seen", "c:coupon", "seen is not in Redis", taken("codes/1")),
    KeyDamage(
        "campaign tickets", "ticketed", "tickets is not in Redis", lambda redis, key: redis.zpopmin(key)
    ),
    KeyDamage("campaign tickets", "ticketed", "tickets, used-never is in Redis", added("used-never", 4e12)),
    KeyDamage("campaign state", "c:stock", "state, zone: is ", hset("zone", '"Asia/Tokyo"')),
    KeyDamage("campaign state", "c:stock", "state, zone is not in Redis", hdel("zone")),
    KeyDamage("offer queue", "c:stock", "queue, s4: is", later("s4")),
    KeyDamage("offer queue", "c:stock", "queue is not in Redis", taken("s4")),
    KeyDamage("campaign answers", "c:stock", "answers, c:stock/s0: is", changed("c:stock/s0", 20)),
    KeyDamage("campaign answers", "c:stock", "answers, c:stock/s0 is not in Redis", hdel("c:stock/s0")),
    KeyDamage("campaign answers", "c:stock", "answers, x is in Redis", hset("x", b"x" * 30)),
    *(
        KeyDamage("campaign answers", "c:stock", "answers, x is in Redis", hset("x", record))
        for record in UNREADABLE
    ),
    KeyDamage("campaign answers", "c:stock", "answers, ff is in Redis", hset(b"\xff", b"x" * 30)),
    *(
        KeyDamage("campaign payments", "c:stock", "payments, x is in Redis", hset("x", record))
        for record in UNREADABLE
    ),
    KeyDamage("campaign state", "gone", "retired/gone: is", hset("retired/gone", b"\xff")),
    KeyDamage("campaign payments", "c:stock", "payments, paid-1 is not in Redis", hdel("paid-1")),
    KeyDamage("campaign payments", "c:stock", "payments, paid-2: is", changed("paid-2", -1)),
    KeyDamage("campaign counters", "c:stock", "counters, ", counted_more),
    KeyDamage("campaign counters", "c:stock", "counters is not in Redis", gone),
    KeyDamage("due", "c:stock", "due, c:stock: is", later("c:stock")),
    KeyDamage("due", "c:stock", "due, c:stock is not in Redis", taken("c:stock")),
    KeyDamage("due", "c:stock", "due, ff is in Redis", added(b"\xff", 5)),
    KeyDamage("due", "closed", "is not in Redis", taken("closed")),
    KeyDamage("offers", "c:stock", "offers, c:stock is not in Redis", taken("c:stock")),
    KeyDamage("offers", "c:stock", "offers, thief is in Redis", added("thief")),
    KeyDamage("holds", "c:stock", "holds, c:stock/s1 is not in Redis", taken("c:stock/s1")),
    KeyDamage("holds", "c:stock", "holds, c:stock/s1: is", later("c:stock/s1")),
    KeyDamage("campaigns", "c:stock", "campaigns, c: is", moved("c")),
    KeyDamage("past", "gone", "past, gone is not in Redis", taken("gone")),
    KeyDamage("past", "gone", "past, gone: is", later("gone")),
    KeyDamage("campaign state", "gone", "retired/gone: is", hset("retired/gone", "1:1")),
    KeyDamage("offer orders", "c:coupon", "orders is not in Redis", gone),
    KeyDamage("offer orders", "c:coupon", "orders, k0/order-2 is in Redis", hset("k0/order-2", b"x")),
    KeyDamage("retired", "gone", "retired, gone is not in Redis", taken("gone")),
    KeyDamage("retired", "gone", "retired, c:stock is in Redis", added("c:stock")),
]


async def grab_changed(redis: Any, key: str, grab: str, field: str, value: Any) -> None:
    record = msgspec.msgpack.decode(await redis.hget(key, grab))
    record[GRAB_FIELDS.index(field)] = value
    await redis.hset(key, grab, msgspec.msgpack.encode(record))


@asynccontextmanager
async def keeping(settings: Settings, key: str) -> AsyncIterator[Any]:
    """A client; the key is afterwards as it was."""
    redis = open_redis(settings)
    before = await redis.dump(key)
    try:
        yield redis
    finally:
        if before is None:
            await redis.delete(key)
        else:
            await redis.restore(key, 0, before, replace=True)
        await redis.aclose()


@pytest.mark.parametrize(
    "damage", some_by_tier(KEYS, 3), ids=lambda one: f"{one.kind} {one.offer}: {one.says}"
)
async def test_a_damaged_key_is_reported_and_nothing_else(
    whole: Settings, damage: KeyDamage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing changes in the meantime, so two looks are enough.
    monkeypatch.setattr(shadow, "LOOKS", (0.0, 0.05))
    key = _key(key_space(whole), damage.kind, damage.offer)
    async with keeping(whole, key) as redis:
        assert await redis.exists(key) or damage.offer == "gone"
        await damage.change(redis, key)
        assert_only_problem(await verify(whole, 0, share=1), FOLD, damage.says)


FOLD = "Redis = fold of the journal"


@pytest.mark.long
@pytest.mark.parametrize("name", [b"c:stock/\xff", b"\xff\n", b""])
async def test_a_key_of_any_name_is_reported(
    whole: Settings, name: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "LOOKS", (0.0, 0.05))
    key = f"{key_space(whole).shard(0).tag}:".encode() + name
    async with keeping(whole, key) as redis:  # type: ignore[arg-type]
        await redis.set(key, "x")
        assert_only_problem(await verify(whole, 0, share=1), FOLD, "is in Redis, but no event creates it")


@pytest.mark.parametrize("field", ["seq", "journaled_seq", "journaled_head", "journaled_term"])
async def test_a_damaged_number_of_a_shard_is_reported(whole: Settings, field: str) -> None:
    key = key_space(whole).shard(0).state
    async with keeping(whole, key) as redis:
        await redis.hset(key, field, b"\xffx")
        assert problems_of(await verify(whole, 0, share=1)) != {}


async def test_every_kind_of_key_is_compared(whole: Settings) -> None:
    """Every kind of key in the system is damaged by a test above."""
    redis = open_redis(whole)
    damaged_kinds = {damage.kind for damage in KEYS}
    kinds = set()
    for offer in ("c:envelope", "c:stock", "c:coupon", "invited", "ticketed", "gone", "closed"):
        for kind in (*SHARD_KINDS, *OFFER_KINDS, *CAMPAIGN_KINDS):
            if await redis.exists(_key(key_space(whole), kind, offer)):
                kinds.add(kind)
    await redis.aclose()
    assert kinds - damaged_kinds - set(shadow.NOT_IN_EVENTS) == set()
    assert damaged_kinds - kinds == set()


async def test_the_verifier_believes_the_journal_more_than_the_audit_trail(
    whole: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that begins with the trail is made faster; what differs from it counts if it also differs from a
    copy of the journal alone.
    """
    monkeypatch.setattr(shadow, "LOOKS", (0.0, 0.05))
    keys = key_space(whole).shard(key_space(whole).shard_of_offer("c:stock"))
    of_user = "UPDATE audit_1 SET body = replace(body, '\"{}\"', '\"{}\"') WHERE type = 'grab.held'"
    async with keeping(whole, keys.offer("c:stock")) as redis, await open_tables(whole) as books:
        compare = redis_keys.compares_keys(whole, redis)
        await books.execute(of_user.format("u0", "u9").encode())
        try:
            assert await compare(keys.shard, 1.0) == []
            await redis.hincrby(keys.offer("c:stock"), "units_left", 1)
            [difference] = await compare(keys.shard, 1.0) or []
            assert f"shard {keys.shard}: offer:c:stock, units_left: is " in difference
        finally:
            await books.execute(of_user.format("u9", "u0").encode())


@pytest.mark.long
async def test_staged_parts_are_not_compared(whole: Settings) -> None:
    key = key_space(whole).shard(0).staged("token")
    async with keeping(whole, key) as redis:
        await redis.set(key, b"parts", px=60_000)
        assert problems_of(await verify(whole, 0, share=1)) == {}


# -- the journal ---------------------------------------------------------------------------------------------

Record = tuple[bytes, list[tuple[str, bytes]]]


def with_flipped_bit(value: bytes, index: int = 40) -> bytes:
    return value[:index] + bytes([value[index] ^ 1]) + value[index + 1 :]


def with_header(record: Record, name: str, text: bytes) -> Record:
    value, headers = record
    return value, [(header, text if header == name else old) for header, old in headers]


def blocks(records: list[Record]) -> list[int]:
    """The indexes of records with events."""
    return [index for index, (value, _) in enumerate(records) if value]


def at_block(number: int, change: Callable[[Record], list[Record]]) -> Callable[[list[Record]], list[Record]]:
    def changed_records(records: list[Record]) -> list[Record]:
        index = blocks(records)[number]
        return [*records[:index], *change(records[index]), *records[index + 1 :]]

    return changed_records


JOURNALS = {
    "changed byte of an event": (
        at_block(5, lambda record: [(with_flipped_bit(record[0]), record[1])]),
        "shard 1: offset {5}: the lines of seq",
    ),
    "changed byte of the last event": (
        at_block(-1, lambda record: [(with_flipped_bit(record[0]), record[1])]),
        "shard 1: offset {-1}: the lines of seq",
    ),
    "other hash": (
        at_block(5, lambda record: [with_header(record, "head", b"0" * 64)]),
        "shard 1: offset {5}: the lines of seq",
    ),
    "count that is not a number": (
        at_block(5, lambda record: [with_header(record, "count", b"x")]),
        "shard 1: offset {5}: headers cannot be read",
    ),
    "other count": (
        at_block(5, lambda record: [with_header(record, "count", b"9")]),
        "shard 1: offset {5}: 1 lines where the header says 9",
    ),
    "other term": (
        at_block(5, lambda record: [with_header(record, "term", b"99")]),
        "shard 1: offset {5}: a block of term 99",
    ),
    "other shard": (
        at_block(5, lambda record: [with_header(record, "shard", b"0")]),
        "shard 1: offset {5}: a block of shard 0 in partition 1",
    ),
    "missing record": (at_block(5, lambda record: []), "shard 1: offset {5}: begins at seq"),
    "missing last record": (
        at_block(-1, lambda record: []),
        "shard 1: the journal has lost its end: it ends at seq",
    ),
    "empty journal": (lambda records: [], "shard 1: the journal has lost its end: it ends at seq 0,"),
}


@pytest.mark.parametrize("name", some_by_tier(JOURNALS, 1))
async def test_a_damaged_journal_is_reported_and_nothing_else(
    whole: Settings, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """After the break the audit trail is read instead, so the read models are still compared."""
    change, says = JOURNALS[name]
    copy = Topics(f"{whole.prefix}-{secrets.token_hex(3)}")
    await create_topics(whole.kafka, copy, whole.shards)
    block_offsets: list[int] = []
    # A reader sees what all copies have: without acks=all it may miss the last records for a moment.
    producer = AIOKafkaProducer(bootstrap_servers=whole.kafka, acks="all")
    async with open_reader(whole.kafka, Topics(whole.prefix).journal) as reader, started(producer):
        for shard in range(whole.shards):
            records = [
                (record.value, list(record.headers))
                async for batch in reader.read(shard, 0, await reader.end(shard))
                for record in batch
            ]  # fmt: skip
            if shard == 1:
                block_offsets = blocks(records)
                records = change(records)
            for value, headers in records:
                await producer.send_and_wait(copy.journal, value, partition=shard, headers=headers)
    monkeypatch.setattr(verifying, "Topics", lambda prefix: copy)
    try:
        checks = await verify(whole, 0, share=1)
    finally:
        admin = AIOKafkaAdminClient(bootstrap_servers=whole.kafka)
        async with started(admin):
            await admin.delete_topics(list(retention_ms(copy)))
    assert_only_problem(
        checks,
        "chain of every shard",
        says.replace("{5}", str(block_offsets[5])).replace("{-1}", str(block_offsets[-1])),
    )
    by_name = {check.name: check for check in checks}
    assert by_name[LEDGER].checked
    assert by_name[BALANCES].checked
    assert not by_name[LEDGER].notes
    assert by_name[FOLD].notes == ["shard 1 is not compared: its journal is broken"]


# -- the rest of the verdict ---------------------------------------------------------------------------------

VIEWS = (
    "balances",
    "offers",
    "grabs",
    "payments",
    "waiting",
    "limits",
    "accounts",
    "transfers",
    "audit",
    "operations",
)


@pytest.mark.parametrize("view", some_by_tier(VIEWS, 3))
@pytest.mark.parametrize("which", ["shown", "version"])
async def test_a_changed_view_is_reported(whole: Settings, view: str, which: str) -> None:
    async with await open_books(whole) as connection:
        [(model, columns)] = await (
            await connection.execute(
                "SELECT n.nspname, array_agg(quote_ident(a.attname) ORDER BY attnum) FROM pg_class AS c JOIN "
                "pg_namespace AS n "
                "ON n.oid = c.relnamespace JOIN pg_attribute AS a ON a.attrelid = c.oid "
                "WHERE c.relname = %s AND n.nspname LIKE %s AND attnum > 0 GROUP BY 1",
                (view, f"{whole.schema_}\\_%"),
            )
        ).fetchall()
        home = whole.schema_ if which == "shown" else model
        name = f"{home}.{view}"
        [before] = await (
            await connection.execute("SELECT pg_get_viewdef(%s::regclass)", (name,))
        ).fetchone() or [""]
        text = f"SELECT {', '.join(columns)} FROM ({before.strip().rstrip(';')}) AS v WHERE true IS NOT NULL"
        await connection.execute(f"CREATE OR REPLACE VIEW {name} AS {text}".encode())
        try:
            assert_only_problem(
                await verify(whole, 0, share=1), "views show the read models", f"view {name}: "
            )
        finally:
            await connection.execute(f"CREATE OR REPLACE VIEW {name} AS {before}".encode())


@pytest.mark.long
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("journaled_head", "00" * 32, "shard 1: the hash at seq"),
        ("journaled_seq", "3", "shard 1: the hash at seq 3 is"),
        ("journaled_seq", "99999", "shard 1: Redis counts seq 99999 as journaled, but the journal ends at"),
    ],
)
async def test_a_checkpoint_that_differs_from_the_journal_is_reported(
    whole: Settings, field: str, value: str, says: str
) -> None:
    state = key_space(whole).shard(1).state
    async with keeping(whole, state) as redis:
        await redis.hset(state, field, value)
        assert_only_problem(
            await verify(whole, 0, share=1), "what Redis counts as journaled is in the journal", says
        )


@pytest.mark.long
async def test_a_shard_at_another_seq_than_its_journal_is_reported(
    whole: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = key_space(whole).shard(1).state
    async with keeping(whole, state) as redis:
        seq = int(await redis.hget(state, "seq"))
        await redis.hset(state, "seq", seq + 2)
        assert_only_problem(
            await verify(whole, 0, share=1),
            "read models have caught up",
            f"shard 1: Redis is at seq {seq + 2}, but its journal ends at seq {seq}",
        )
        await redis.hset(state, "seq", seq - 2)
        assert_only_problem(
            await verify(whole, 0, share=1),
            FOLD,
            f"shard 1: it is at seq {seq - 2}, but its journal is at seq {seq}",
        )
        await redis.hset(state, "seq", seq)
        await redis.hset(state, "fault", "somebody said so")
        await redis.hdel(state, "server_epoch")
        assert_only_problem(
            await verify(whole, 0, share=1),
            FOLD,
            "shard 1: its relay has not reconciled it with the journal yet (somebody said so)",
        )
        await redis.delete(state)
        assert_only_problem(
            await verify(whole, 0, share=1),
            FOLD,
            f"shard 1: Redis has no data of it, but its journal ends at seq {seq}",
        )


async def test_a_stopped_read_model_is_reported(whole: Settings) -> None:
    async with await open_tables(whole) as connection:
        table = f"{(await live_schemas(connection))['balances']}.stopped_shards"
        await connection.execute(f"INSERT INTO {table} VALUES ('balances', 1, 5, 9, 'because')".encode())
        try:
            assert_only_problem(
                await verify(whole, 0, share=1),
                "read models have caught up",
                "balances has stopped at shard 1, seq ",
            )
        finally:
            await connection.execute(f"DELETE FROM {table}".encode())


@pytest.mark.long
async def test_a_lagging_read_model_is_reported(
    system: Settings, journal: JournalWriter, redis_client: Any
) -> None:
    """The test writes the journal itself, and sets Redis to a later seq than that of balances."""
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 20)
    async with catching_up(system, "ledger", "audit"):
        await until_at_seq(system, 20, "ledger", "audit")
    await redis_client.hset(key_space(system).shard(SHARD).state, "seq", 20)
    problems = problems_of(await verify(system, 0))
    assert problems["read models have caught up"] == [
        f"balances is at seq 0 of shard {SHARD}, Redis is at seq 20"
    ]


@pytest.mark.long
async def test_an_account_below_0_is_reported(system: Settings, journal: JournalWriter) -> None:
    """An event gives away more than the offer has, and the ledger has lost the constraint against it."""
    lines = [opened("e", 1, total=100), granted("e", 2, amount=101)]
    async with await open_tables(system) as connection:
        await connection.execute(b"ALTER TABLE accounts_1 DROP CONSTRAINT never_below_zero")
    await journal.marker(1, "a")
    await journal.block(lines, 1, 1)
    async with running(system, "ledger", "audit") as projectors:
        for seq in (1, 2):
            for projector in projectors:
                await projector.put(CatchUp(SHARD))
            await until_at_seq(system, seq, "ledger", "audit")
            if seq == 1:
                await journal.block(lines, 2, 2)
    problems = problems_of(await verify(system, 0))
    assert problems.pop("no account below 0") == ["offer:e CNY is below 0: -1"]
    assert list(problems) == [FOLD]  # Redis does not have the offer


@pytest.mark.long
async def test_different_sums_in_ledger_and_balances_are_reported(
    system: Settings, journal: JournalWriter
) -> None:
    """Ledger and balances apply an event in different ways: it returns units to another offer."""
    returned = (
        b'{"type":"grab.returned","v":1,"shard":%d,"seq":3,"offer_seq":3,"offer":"e","at":3,"command":"r",'
        b'"grab":"g2","user":"u2","quantity":1,"amount":10,"asset":"CNY","place":2,"left":3,"to":"offer:x",'
        b'"issuer":"alice","restored":true,"digest":"d"}'
    ) % SHARD
    lines = [opened("e", 1, total=100), granted("e", 2), returned]
    await journal.marker(1, "a")
    await journal.block(lines, 1, 3)
    async with catching_up(system):
        await until_at_seq(system, 3)
    problems = problems_of(await verify(system, 0))
    differences = problems.pop("ledger and balances agree")
    assert any(line.startswith("offer:e CNY: ") for line in differences), differences
    assert list(problems) == [FOLD]


async def test_a_shard_that_another_process_compares_is_not_compared(whole: Settings) -> None:
    made = KeySpace(whole.prefix + shadow.SHADOW, whole.shards).shard(1)
    redis = open_redis(whole)
    await redis.set(made.lease, "another", px=60_000)
    assert_only_problem(await verify(whole, 0, share=1), FOLD, "shard 1 is being compared by another process")
    assert await redis.get(made.lease) == b"another"
    await redis.delete(made.lease)
    await redis.aclose()


@pytest.mark.long
async def test_a_shard_is_not_copied_where_there_is_no_room(
    whole: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_keys, "ROOM_SHARE", 0.0)
    monkeypatch.setattr(redis_keys, "ROOM_SHARE_OF_MACHINE", 0.0)
    problems = problems_of(await verify(whole, 0, share=1))
    assert list(problems) == [FOLD]
    assert len(problems[FOLD]) == whole.shards
    assert "the shadow of shard 0 cannot be built: " in problems[FOLD][0]
    assert " bytes in use (--quick skips this check)" in problems[FOLD][0]
    assert problems_of(await verify(whole, 0, quick=True)) == {}


# -- under traffic -------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stopped_verification_deletes_its_copies(whole: Settings, number: signal.Signals) -> None:
    """Otherwise Redis would keep them until the next one."""
    keys = key_space(whole)
    shard = keys.shard_of_offer("c:stock")
    copy = KeySpace(whole.prefix + shadow.SHADOW, keys.shards).shard(shard)
    command = [sys.executable, "-m", "grabstream.ops.cli", "verify", "--wait", "0"]
    # What differs is looked at again for some seconds.
    async with keeping(whole, keys.shard(shard).offer("c:stock")) as redis:
        await redis.hincrby(keys.shard(shard).offer("c:stock"), "units_left", 1)
        environment = child_environment(**env_of(whole), shards=str(whole.shards))
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            await until(lambda: redis.exists(copy.offer("c:stock")), 30, "the copy")
            process.send_signal(number)
            _, said = await asyncio.to_thread(process.communicate, timeout=60)
        finally:
            process.kill()
        assert (process.returncode, "stopped" in said) == (128 + number, True), said
        assert [key async for key in redis.scan_iter(f"{whole.prefix}{shadow.SHADOW}:*", 10_000)] == []


@pytest.mark.long
async def test_a_sound_system_has_no_problems_under_traffic(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """Grabs, ends of holds, confirmations, releases, closings and retirements happen while `verify` reads."""
    worker(system, "decide,relay,sweep,project")
    stop = asyncio.Event()
    async with open_gate(system) as gate:

        async def send(*commands: AnyCommand) -> None:
            await gate.decide(commands, "decided", patience_ms=60_000, timeout_ms=60_000)

        async def shop(number: int) -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                await asyncio.sleep(0.5)  # a pace that the read models keep on a busy machine
                name, user = f"c{number}:{turn}", f"u{turn % 7}"
                sold = terms(
                    StockTerms,
                    20,
                    hold_ms=1_000,
                    waiting_list=True,
                    limits=LIMITS,
                    price=5,
                    currency="CNY",
                    retire_after_ms=1,
                )
                parts = EnvelopeTerms(issuer="a", funding="f", asset="CNY", total=900, parts=9)
                await send(
                    Open(id=f"o{turn}", offer=name, terms=sold),
                    Open(id=f"e{turn}", offer=f"e{number}-{turn}", terms=parts),
                )
                await send(
                    *(
                        Grab(id=f"g{turn}-{one}", offer=name, user=f"{user}{one}", wait=True)
                        for one in range(24)
                    )
                )
                await send(
                    *(
                        Grab(id=f"p{turn}-{one}", offer=f"e{number}-{turn}", user=f"{user}{one}")
                        for one in range(7)
                    )
                )
                await send(*(
                    Confirm(id=f"k{turn}-{one}", offer=name, grab=f"g{turn}-{one}", payment=f"y{turn}-{one}",
                    paid=5, currency="CNY")
                    for one in range(6)
                ))  # fmt: skip
                await send(
                    Release(id=f"r{turn}", offer=name, grab=f"g{turn}-9"), Close(id=f"x{turn}", offer=name)
                )

        shopping = asyncio.gather(*map(shop, range(2)))
        redis = open_redis(system)

        async def decided() -> int:
            return sum(
                [
                    int(await redis.hget(key_space(system).shard(one).state, "seq") or 0)
                    for one in range(system.shards)
                ]
            )

        try:
            await until(lambda: _above(decided, 200), 60, "traffic")
            before = await decided()
            assert problems_of(await verify(system, 60)) == {}
            assert await decided() > before
        finally:
            stop.set()
            await shopping
            await redis.aclose()


async def _above(number: Callable[[], Any], least: int) -> bool:
    return bool(await number() > least)
