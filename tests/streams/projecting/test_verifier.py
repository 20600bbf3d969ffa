"""The verifier: it has no findings in a sound history, and reports every row that was changed by hand until
it is repaired.
"""

import asyncio
import logging
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from grabstream.connections.opening import key_space, open_gate, open_redis
from grabstream.lua.keys import CAMPAIGN_KEYS, OFFER_KEYS, KeySpace
from grabstream.lua.server import server_epoch_of
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import EnvelopeTerms, StockTerms
from grabstream.projections.checking import verified
from grabstream.settings import Settings
from grabstream.streams.clients import Trouble
from grabstream.streams.projecting import verifier as verifier_module
from grabstream.streams.projecting.verifier import Verifier
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import until
from tests.support.projecting import (
    SHARD,
    JournalWriter,
    catching_up,
    granted,
    journal,  # noqa: F401 - a fixture
    live_schemas,
    open_tables,
    opened,
    rows,
    until_at_seq,
)
from tests.support.random_history import History, project, random_history
from tests.support.stopped_shards import (
    WHY,
    as_if_set_aside,
    call_json,
    until_stopped,
)
from tests.support.verifier_passes import (
    execute,
    history,  # noqa: F401 - a fixture
    verifying,
)


async def progress_of(settings: Settings, shard: int = SHARD) -> verified.VerifiedTo:
    async with await open_books(settings) as connection:
        return (await verified.progress(connection))[shard]


@pytest.mark.long
async def test_the_verifier_agrees_with_a_sound_history(system: Settings, history: History) -> None:
    await project(system, history, Random(1))
    async with verifying(system) as passes:
        assert await passes() == []
        at = await progress_of(system)
        assert at.seq == len(history.lines)
        assert at.rounds >= 1
        async with await open_books(system) as connection:
            states = await verified.offer_states(connection, history.names)
    for name, offer in history.state.offers.items():
        assert states[name].numbers == (offer.amount_left, offer.units_left, offer.held, offer.places), name
    assert set(states) >= set(history.state.offers)


DAMAGES = [
    # The damage, the finding's kind and subject, and the statement that repairs it: "same" repeats the
    # damage, None restores a copy of the table.
    ("UPDATE audit_1 SET body = replace(body, '\"place\":1,', '\"place\":7,') WHERE seq = {grab}", "chain",
    "seq {grab}", None),
    ("UPDATE audit_1 SET hash = set_byte(hash, 3, get_byte(hash, 3) # 1) WHERE seq = 300", "chain", "seq 300",
    "same"),
    ("UPDATE audit_1 SET offer = 'x' WHERE seq = {grab}", "chain", "seq {grab}",
    "UPDATE audit_1 SET offer = "
    "'{offer}' WHERE seq = "
    "{grab}"),
    ("DELETE FROM audit_1 WHERE seq = 200", "chain", "seq 200", None),
    ("UPDATE transfer_runs_1 SET amounts[1] = amounts[1] + 1 WHERE seq = {grab}", "ledger", "seq {grab}",
     "UPDATE transfer_runs_1 SET amounts[1] = amounts[1] - 1 WHERE seq = {grab}"),
    ("DELETE FROM transfer_runs_1 WHERE seq = {grab}", "ledger", "seq {grab}", None),
    ("UPDATE transfers_1 SET amount = amount + 1 WHERE (seq, leg) = ({payment}, 0)", "ledger",
     "seq {payment}", "UPDATE transfers_1 SET amount = amount - 1 WHERE (seq, leg) = ({payment}, 0)"),
    ("DELETE FROM transfers_1 WHERE (seq, leg) = ({payment}, 1)", "ledger", "seq {payment}", None),
    ("INSERT INTO transfers_1 VALUES (3, {grab}, 7, '{offer}', 'CNY', 'external:x', 'wallet:thief', 5, 1)",
    "ledger", "seq {grab}",
     "DELETE FROM transfers_1 WHERE credit = 'wallet:thief'"),
    ("UPDATE accounts_1 SET posted = posted + 1 WHERE account = 'issuer:shop' AND asset = 'CNY'", "accounts",
    "issuer:shop CNY",
     "UPDATE accounts_1 SET posted = posted - 1 WHERE account = 'issuer:shop' AND asset = 'CNY'"),
    ("INSERT INTO accounts_1 VALUES ('wallet:thief', 'CNY', 7)", "accounts", "wallet:thief CNY",
     "DELETE FROM accounts_1 WHERE account = 'wallet:thief'"),
    ("INSERT INTO accounts_1 VALUES ('external:a b', 'CNY', 7)", "accounts", "external:a b CNY",
     "DELETE FROM accounts_1 WHERE account = 'external:a b'"),
    ("UPDATE balances_1 SET available = available + 1 WHERE (user_id, asset) = ('{user}', '{asset}')",
    "balances", "wallet:{user} {asset}",
     "UPDATE balances_1 SET available = available - 1 WHERE (user_id, asset) = ('{user}', '{asset}')"),
    ("UPDATE offers_1 SET held = held + 1, total = total + 1 WHERE offer = '{there}'", "balances", "{there}",
     "UPDATE offers_1 SET held = held - 1, total = total - 1 WHERE offer = '{there}'"),
    ("UPDATE grabs_1 SET amount = amount + 1 WHERE (offer, place) = ('{offer}', 1)", "rows", "{offer}",
     "UPDATE grabs_1 SET amount = amount - 1 WHERE (offer, place) = ('{offer}', 1)"),
    ("DELETE FROM grabs_1 WHERE (offer, place) = ('{offer}', 1)", "rows", "{offer}", None),
    ("INSERT INTO payments_1 SELECT campaign, 'thief', offer, grab, amount, currency, state, outcome, "
     "refunded, shard, seq + 1000000, at "
     "FROM payments_1 WHERE seq = {payment}", "rows", "{paid}",
     "DELETE FROM payments_1 WHERE payment = "
     "'thief'"),
    ("UPDATE payments_1 SET refunded = refunded + 1 WHERE seq = {payment}", "rows", "{paid}",
     "UPDATE payments_1 SET refunded = refunded - 1 WHERE seq = {payment}"),
    ("UPDATE {balances}.projection_cursors SET head = set_byte(head, 0, get_byte(head, 0) # 1) WHERE shard = "
     "3", "heads",
     "balances", "same"),
]  # fmt: skip


@pytest.mark.long
async def test_every_damage_is_a_finding_until_it_is_mended(system: Settings, history: History) -> None:
    """The damage occurs after all events were verified once: verified rows may be changed later."""
    await project(system, history, Random(2))
    [(grab, offer)] = await rows(
        system, "SELECT seq, offer FROM audit WHERE type = 'grab.held' AND body LIKE '%\"place\":1,%' LIMIT 1"
    )
    [(user, asset)] = await rows(
        system, "SELECT user_id, asset FROM balances WHERE available > 0 ORDER BY 1, 2 LIMIT 1"
    )
    [(there,)] = await rows(system, "SELECT offer FROM offers WHERE state <> 'retired' ORDER BY 1 LIMIT 1")
    [(payment, paid)] = await rows(system, "SELECT seq, offer FROM payments ORDER BY seq LIMIT 1")
    async with await open_books(system) as books:
        [balances] = [schema for name, schema in (await live_schemas(books)).items() if name == "balances"]
    named = {
        "balances": balances,
        "payment": payment,
        "paid": paid,
        "grab": grab,
        "offer": offer,
        "user": user,
        "asset": asset,
        "there": there,
    }
    async with verifying(system) as passes:
        assert await passes() == []
        for damage, kind, subject, mending in DAMAGES:
            statement = damage.format(**named)
            table = next(word for word in statement.split() if "_" in word)
            await execute_all(system, f"CREATE TABLE sound AS TABLE {table}")
            await execute(system, statement)
            findings = await passes()
            assert [(finding.kind, finding.subject) for finding in findings] == [
                (kind, subject.format(**named))
            ], damage
            if mending is None:
                await execute_all(system, f"DELETE FROM {table}", f"INSERT INTO {table} SELECT * FROM sound")
            else:
                await execute(system, statement if mending == "same" else mending.format(**named))
            assert await passes() == [], damage
            await execute_all(system, "DROP TABLE sound")
    assert await rows(system, "SELECT count(*) FROM findings WHERE cleared_at IS NULL") == [(0,)]


async def execute_all(settings: Settings, *statements: str) -> None:
    async with await open_tables(settings) as connection:
        for statement in statements:
            await connection.execute(statement.encode())


@pytest.mark.long
async def test_verification_stops_before_a_damaged_event(system: Settings, history: History) -> None:
    """An event is damaged before its first verification: `verified to` stays before it, and advances when it
    is repaired.
    """
    await project(system, history, Random(3))
    await execute(
        system, "UPDATE audit_1 SET hash = set_byte(hash, 3, get_byte(hash, 3) # 1) WHERE seq = 300"
    )
    async with verifying(system) as passes:
        [finding] = await passes()
        assert (finding.kind, finding.subject) == ("chain", "seq 300")
        assert (await progress_of(system)).seq == 299
        await execute(
            system, "UPDATE audit_1 SET hash = set_byte(hash, 3, get_byte(hash, 3) # 1) WHERE seq = 300"
        )
        assert await passes() == []
        assert (await progress_of(system)).seq == len(history.lines)


@pytest.mark.long
async def test_a_dismissed_finding_returns_when_it_changes(system: Settings, history: History) -> None:
    await project(system, history, Random(4))
    change = "UPDATE accounts_1 SET posted = posted + 1 WHERE account = 'issuer:shop' AND asset = 'CNY'"
    await execute(system, change)
    async with verifying(system) as passes:
        [finding] = await passes()
        code, _ = await call_json(system, "dismiss", str(finding.id), *WHY)
        assert code == 0
        assert await passes() == []
        assert (await call_json(system, "dismiss", str(finding.id), *WHY))[0] == 1
        await execute(system, change)
        [again] = await passes()
        assert again.what != finding.what


@pytest.mark.long
async def test_records_set_aside_are_not_findings(system: Settings, journal: JournalWriter) -> None:
    """One record is missing from the ledger, another from the audit trail: all other events are verified."""
    lines = [opened("e", 1, total=100), granted("e", 2), granted("e", 3, amount=999), granted("e", 4)]
    await journal.marker(1, "a")
    for seq in range(1, 5):
        await journal.block(lines, seq, seq)
    async with catching_up(system):
        for name in ("ledger", "balances"):
            await until_stopped(system, name)
            assert (await call_json(system, "set-aside", name, str(SHARD), *WHY, "--yes"))[0] == 0
        await until_at_seq(system, 4)
    # The audit trail lacks another record, which the ledger has.
    async with await open_tables(system) as connection:
        await as_if_set_aside(connection, lines, 2)
    async with verifying(system) as passes:
        assert await passes() == []
    assert (await progress_of(system)).seq == 4
    code, checks = await call_json(system, "verify", "--wait", "0")
    wrong = {check["name"]: check["problems"] for check in checks if check["problems"]}
    # The test wrote this journal: Redis has no state of the offer.
    problem = f"shard {SHARD}: Redis has no data of it, but its journal ends at seq 4"
    assert (code, wrong) == (1, {"Redis = fold of the journal": [problem]})
    [notes] = [check["notes"] for check in checks if check["name"] == "set aside by operators"]
    assert len(notes) == 3
    assert "1 event (3) set aside in ledger, shard 3 by olga" in "\n".join(notes)
    assert "offer:e -999 CNY; wallet:u3 +999 CNY" in "\n".join(notes)


async def test_a_damaged_key_of_an_offer_is_a_finding_and_others_are_compared(
    system: Settings, history: History
) -> None:
    """A key of another type, and a field that is no number, end no verifier and hide no other offer."""
    await project(system, history, Random(1))
    redis, keys = open_redis(system), key_space(system).shard(SHARD)
    live = await rows(system, "SELECT offer FROM offers WHERE state <> 'retired' ORDER BY offer")
    names = [offer for (offer,) in live][:3]
    epoch = await server_epoch_of(redis, keys.state)
    await redis.hset(keys.state, mapping={"server_epoch": epoch, "history": "1", "seq": 1})
    numbers = dict.fromkeys(verifier_module.NUMBERS, 0)
    for offer in names:
        await redis.hset(keys.offer(offer), mapping=numbers)
    typed, counted, whole = names
    await redis.set(keys.offer(typed), "x")
    await redis.hset(keys.offer(counted), "units_left", b"\xff9")
    async with verifying(system) as passes:
        said = {finding.subject: finding.what for finding in await passes() if finding.kind == "redis"}
        assert f"{typed} in Redis: its key cannot be read" in said[typed]
        assert "WRONGTYPE" in said[typed]
        assert f"{counted} in Redis: units_left is b'\\xff9', not a number" in said[counted]
        assert "Redis is at its event 0" in said[whole]
        # The relay reports damaged fields of the shard itself.
        for field, value in (("history", ""), ("seq", "x"), ("server_epoch", b"\xff")):
            before = await redis.hget(keys.state, field)
            await redis.hset(keys.state, field, value)
            await passes()
            await redis.hset(keys.state, field, before)
    await redis.delete(keys.state, *map(keys.offer, names))
    await redis.aclose()


@pytest.mark.nightly
@pytest.mark.timeout(500)
async def test_the_verifier_compares_redis_at_the_same_event(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """On a running system: the role stores its verified position, and reports an offer whose numbers were
    changed in Redis by hand.
    """
    worker(system, "decide,relay,sweep,project,publish,verify", verify_percent="100")
    redis = open_redis(system)
    envelope = EnvelopeTerms(issuer="i", funding="f", asset="CNY", total=1_000, parts=50)
    stock = StockTerms(issuer="i", total=50, hold_ms=600_000)
    async with open_gate(system) as gate:
        opens = [Open(id="o-e", offer="c:e", terms=envelope), Open(id="o-s", offer="c:s", terms=stock)]
        for answer in await gate.decide(opens, patience_ms=20_000, timeout_ms=20_000):
            assert answer.outcome == "opened"
        keys = key_space(system).shard(key_space(system).shard_of_offer("c:e"))
        for number in range(10):
            await gate.decide(
                [Grab(id=f"{offer}-{number}", offer=f"c:{offer}", user=f"u{number}") for offer in "es"]
            )

        async def verified_to(seq: int) -> bool:
            async with await open_books(system) as connection:
                at = (await verified.progress(connection)).get(keys.shard)
            return at is not None and at.seq == seq and at.compared_at is not None

        await until(lambda: verified_to(22), 30, "verification")
        assert await rows(system, "SELECT count(*) FROM findings") == [(0,)]
        for offer, field, named in (("c:s", "units_left", "units"), ("c:e", "amount_left", "left")):
            before = await redis.hget(keys.offer(offer), field)
            await redis.hincrby(keys.offer(offer), field, 1)

            async def found(offer: str = offer) -> list[Any]:
                return await rows(
                    system,
                    f"SELECT what FROM findings WHERE kind = 'redis' AND subject = '{offer}' AND cleared_at "
                    "IS NULL",
                )

            [(what,)] = await until(found, 30, "the finding")  # type: ignore[misc]
            assert f"{named} {int(before) + 1}" in what
            await redis.hset(keys.offer(offer), field, before)

            async def cleared(found: Any = found) -> bool:
                return not await found()

            await until(cleared, 30, "the clearing")
        # Fields that the numbers do not cover: a grab, an answer, a part.
        offer, campaign = keys.offer_keys("c:s"), keys.campaign_keys("c")
        for key, field in ((offer[OFFER_KEYS.index("grabs")], "s-3"),
            (campaign[CAMPAIGN_KEYS.index("answers")], "c:s/s-3"),
                           (keys.offer_keys("c:e")[OFFER_KEYS.index("users")], "u3")):  # fmt: skip
            record = await redis.hget(key, field)
            await redis.hset(key, field, record[:-1] + bytes([record[-1] ^ 1]))

            async def keys_found() -> list[Any]:
                return await rows(
                    system, "SELECT subject FROM findings WHERE kind = 'keys' AND cleared_at IS NULL"
                )

            assert await until(keys_found, 60, "the finding") == [
                (f"{key.removeprefix(keys.tag)[1:]}, {field}",)
            ]
            await redis.hset(key, field, record)

            async def keys_cleared() -> bool:
                return not await keys_found()

            await until(keys_cleared, 60, "the clearing")
        # An offer that changes is compared at the event at which it was read, once verification reaches it.
        await gate.decide([Grab(id=f"b-{number}", offer="c:e", user=f"b{number}") for number in range(20)])
        await until(lambda: verified_to(42), 30, "verification")
        await redis.delete(keys.offer("c:s"))

        async def lost() -> list[Any]:
            return await rows(system, "SELECT what FROM findings WHERE kind = 'redis' AND cleared_at IS NULL")

        assert "not in Redis" in str(await until(lost, 30, "the finding"))
    await redis.aclose()


@pytest.mark.parametrize(("took", "rests"), [(2.0, 38.0), (900.0, 1_800.0)])
async def test_a_pass_is_followed_by_a_rest_that_is_bounded(
    monkeypatch: pytest.MonkeyPatch, took: float, rests: float
) -> None:
    """As doctor expects: a verifier that works has compared something in the last hour."""
    now, rested, stop = 100.0, [], asyncio.Event()

    async def verify_once(connection: Any) -> bool:
        nonlocal now
        now += took
        return True

    async def pause(stop: asyncio.Event, seconds: float) -> bool:
        rested.append(seconds)
        stop.set()
        return True

    verifier = Verifier(None, KeySpace("x", 1), "", "x", 0.05)
    monkeypatch.setattr(verifier, "verify_once", verify_once)
    monkeypatch.setattr(verifier_module, "_pause", pause)
    monkeypatch.setattr(verifier_module, "time", SimpleNamespace(monotonic=lambda: now))
    await verifier._walk_on(None, stop, Trouble(logging.getLogger(), "verifier"))  # type: ignore[arg-type]
    assert rested == pytest.approx([rests])


@pytest.mark.long
async def test_a_second_verifier_takes_over_when_the_first_stops(system: Settings, history: History) -> None:
    redis = open_redis(system)
    stops = [asyncio.Event(), asyncio.Event()]
    verifiers = [Verifier(redis, key_space(system), system.postgres, system.schema_, 1.0) for _ in stops]
    tasks = [asyncio.create_task(verifier.run(stop)) for verifier, stop in zip(verifiers, stops, strict=True)]

    async def lock_holders() -> list[Any]:
        return await rows(system,
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND "
        "objid = "
                          f"(hashtext('grabstream-verifier-{system.schema_}')::bigint & "
                          "4294967295)")  # fmt: skip

    [first] = await until(lock_holders, 20, "a verifier")  # type: ignore[misc]
    assert [first] == await lock_holders()
    stops[0].set()
    await tasks[0]
    await project(system, history, Random(5))

    async def done() -> bool:
        return (await progress_of(system)).seq == len(history.lines)

    await until(done, 30, "the other verifier")
    stops[1].set()
    await tasks[1]
    await redis.aclose()


@pytest.mark.long
@pytest.mark.parametrize(
    ("damage", "word", "mend"),
    [
        # As after a restore that set a sequence back: the next number exists already.
        ("SELECT setval('findings_id_seq', 1, false)", "UniqueViolation", "SELECT"),
        ("DELETE FROM verified WHERE shard = 3", "KeyError", "SELECT"),
        (
            "UPDATE verified_accounts SET posted = repeat('9', 38)::numeric; UPDATE verified SET seq = "
            "DEFAULT, head = DEFAULT",
            "NumericValueOutOfRange", "DELETE FROM verified_accounts; DELETE FROM verified_offers",
        ),
    ],
)  # fmt: skip
async def test_the_verifier_retries_after_an_error_in_its_tables(
    system: Settings, damage: str, word: str, mend: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    """The error is logged and the step retried; when the row is repaired, the verifier continues and reports
    differences.
    """
    monkeypatch.setattr(verifier_module, "RETRY_SECONDS", 0.1)
    history = random_history(7, 60)
    await project(system, history, Random(7))
    redis, stop = open_redis(system), asyncio.Event()
    task = asyncio.create_task(
        Verifier(redis, key_space(system), system.postgres, system.schema_, 1.0).run(stop)
    )

    async def walked() -> bool:
        if task.done():
            task.result()
        return await rows(system, f"SELECT seq FROM verified WHERE shard = {SHARD}") == [
            (len(history.lines),)
        ]

    await until(walked, 60, "the walk")
    async with await open_books(system) as books:
        await books.execute("INSERT INTO findings (kind, shard, subject, what) VALUES ('x', 0, 'first', 'w')")
        await books.execute(damage.encode())
        if "setval" in damage:
            await books.execute("UPDATE verified_offers SET held = held + 1")
        await until(lambda: task.done() or word in caplog.text, 60, word)
        await books.execute(mend.encode())
    await until(walked, 60, "the walk after the mending")
    if "setval" in damage:

        async def found() -> list[Any]:
            return await rows(system, "SELECT FROM findings WHERE kind = 'balances'")

        await until(found, 60, "the difference")
    stop.set()
    await task
    await redis.aclose()


async def test_the_verifier_logs_a_missing_init_once(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(verifier_module, "RETRY_SECONDS", 0.01)
    redis, stop, tries = open_redis(settings), asyncio.Event(), 0
    verifier = Verifier(redis, key_space(settings), settings.postgres, settings.schema_, 0.5)
    run = verifier._run

    async def counted(*arguments: Any) -> None:
        nonlocal tries
        tries += 1
        if tries == 3:
            stop.set()
        await run(*arguments)

    monkeypatch.setattr(verifier, "_run", counted)
    async with asyncio.timeout(90):
        await verifier.run(stop)
    await redis.aclose()
    [message] = [
        record.getMessage()
        for record in caplog.records
        if record.name == "grabstream.streams.projecting.verifier"
    ]
    assert "run `grabstream init`" in message
