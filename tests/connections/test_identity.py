"""Systems side by side: every process refuses settings that mix two systems, and changes nothing of the other
system.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiokafka.errors import KafkaError
from click.testing import CliRunner
from psycopg import AsyncConnection

from grabstream.connections.identity import (
    ClaimDamaged,
    IdentityNotRecorded,
    OtherJournal,
    OtherSystem,
    find_audience,
)
from grabstream.connections.opening import check_system, key_space, open_gate, open_redis
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import StockTerms
from grabstream.ops.cli import VERBS, grabstream
from grabstream.ops.commands.operate import worker
from grabstream.ops.diagnosis.examination import SYSTEM_CHECK, examine
from grabstream.ops.initialization import make_system, take_new_journal
from grabstream.projections.database.locks import LockTaken
from grabstream.projections.versions import drop_all
from grabstream.settings import BadSettings, Settings, child_environment
from grabstream.streams.journal import open_reader
from grabstream.streams.topic_ids import find_topic
from grabstream.streams.topics import Topics, create_topics
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import until
from tests.support.command_line import env_of
from tests.support.losses import delete_topics
from tests.support.projecting import (
    JournalWriter,
    catching_up,
    granted,
    journal,  # noqa: F401 - a fixture
    opened,
    rows,
    until_at_seq,
)

#: The arguments of every verb that touches a system. FILE and MODULE:PROJECTION are replaced.
CALLS = {
    "status": (), "worker": (), "gateway": ("--port", "0"), "open": ("FILE",), "pause": ("x",),
    "resume": ("x",), "close": ("x",),
    "amend": ("x", "--set", "total=9"),
    "load": ("x", "--audience", "FILE"), "grab": ("x", "u"), "confirm": ("x", "g"), "release": ("x", "g"),
    "extend": ("x", "g"),
    "adjust": ("x", "--transfer", "1 CNY issuer:a wallet:u", "--reason", "r", "--approved-by", "b"),
    "return": ("x", "g"),
    "redeem": ("x", "g", "--order", "o"), "unredeem": ("x", "g", "--order", "o"), "show": ("x",),
    "why": ("u", "x"), "result": (), "offers": (), "whatif": ("FILE",), "doctor": (),
    "dismiss": ("1", "--reason", "r", "--operator", "o"), "set-aside": ("list",), "retry": ("ledger", "0"),
    "verify": (),
    "rebuild": ("ledger",), "replay": ("--into", "-"), "export": ("archive", "--dry-run"),
    "dump": (),
    "at": ("2020-01-01",),
    "follow": ("MODULE:PROJECTION",), "init": (),
    "schemas": (), "keys": ("list",), "webhooks": ("list",), "reseal": (), "grants": (),
    "forget": ("u", "--by", "x"),
    "verify-fair": ("x",), "checkpoint": (), "prove": ("x", "u", "g", "--against", "FILE"),
}  # fmt: skip
#: More calls, of verbs that are in CALLS with other arguments.
MORE_CALLS = (
    ("rebuild", "redis"), ("rebuild", "journal", "--from", "audit"),
    ("rebuild", "journal", "--from", "audit", "--new-journal"),
    *(("rebuild", verb, "all") for verb in ("build", "compare", "switch", "undo")),
    ("rebuild", "drop", "all", "unfinished"), ("replay", "--source", "audit", "--into", "-"),
    ("export", "archive", "--dry-run", "--source", "audit"),
    ("init", "--new-journal"), ("keys", "create", "k", "--scope", "read"), ("keys", "revoke", "k"),
)  # fmt: skip
#: Verbs about the servers of this machine, about this process, or about a system that they make themselves.
OF_NO_SYSTEM = {
    "up",
    "down",
    "config",
    "ticket",
    "approve",
    "rehearse",
    "fake-payments",
    "completion",
    "verify-proof",
    "verify-archive",
}
#: Verbs that read the schema only. They report a missing schema.
OF_BOOKS_ONLY = {
    "show",
    "offers",
    "dismiss",
    "set-aside",
    "retry",
    "schemas",
    "why",
    "result",
    "keys",
    "webhooks",
}
#: Verbs that report the mixed settings and continue, because their purpose is to find such faults.
DIAGNOSIS = {"status", "doctor"}


@pytest.fixture
def call(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a verb with the given settings in this process."""
    (tmp_path / "offers.yaml").write_text("- {id: x, offer: x, terms: {kind: stock, issuer: i, total: 1}}\n")
    (tmp_path / "users").write_text("u\n")
    (tmp_path / "whatif").write_text("offer: x\n")
    (tmp_path / "counted.py").write_text(
        "from grabstream.streams.following.user_projection import Projection\n"
        "async def apply(connection, facts): ...\n"
        f"PROJECTION = Projection('counted', schema='{settings.schema_}_counted', tables='', apply=apply)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(of_settings: Settings, verb: str, *words: str) -> Any:
        named = {
            "FILE": tmp_path / {"load": "users", "whatif": "whatif"}.get(verb, "offers.yaml"),
            "MODULE:PROJECTION": "counted:PROJECTION",
        }
        environment = child_environment(
            **env_of(of_settings), shards=str(of_settings.shards), patience_ms="100"
        )
        return CliRunner().invoke(
            grabstream, [verb, *(str(named.get(word, word)) for word in words)], env=environment
        )

    return run


def test_calls_cover_every_verb() -> None:
    assert set(CALLS) | OF_NO_SYSTEM == set(VERBS)


async def everything_of(settings: Settings) -> list[Any]:
    """The rows and journal ends that a refused verb must not change."""
    tables = [
        await rows(settings, "TABLE projection_cursors"),
        await rows(settings, "TABLE system"),
        await rows(settings, "TABLE demand"),
    ]
    tables += [
        await rows(settings, query)
        for query in ("TABLE migrations", "TABLE read_models", "TABLE refusals", "TABLE recoveries")
    ]
    async with open_reader(settings.kafka, Topics(settings.prefix).journal) as reader:
        return [*map(sorted, tables), [await reader.end(shard) for shard in range(settings.shards)]]


@pytest.fixture(params=["prefix", "schema", "shards"])
async def mixed_up(request: pytest.FixtureRequest, system: Settings) -> Any:
    """Settings that mix a running system with another one, of which nothing may exist yet."""
    wrong = {"prefix": f"{system.prefix}_b", "schema": f"{system.schema_}_b", "shards": system.shards // 2}[
        request.param
    ]
    other = system.model_copy(update={{"schema": "schema_"}.get(request.param, request.param): wrong})
    yield other
    topics = Topics(other.prefix)
    assert request.param != "prefix" or await find_topic(other.kafka, topics.journal) is None, (
        "topics were created"
    )
    if request.param == "schema":
        assert await rows(system, f"SELECT FROM pg_namespace WHERE nspname = '{other.schema_}'") == [], (
            "a schema was created"
        )


@pytest.mark.long
def test_every_verb_refuses_settings_that_mix_two_systems(
    mixed_up: Settings, system: Settings, call: Callable[..., Any]
) -> None:  # fmt: skip
    """A refused verb creates, moves and writes nothing. Its error names both systems and the fix."""
    before, accepted = asyncio.run(everything_of(system)), []
    given, existing = ({of.prefix, of.schema_, str(of.shards)} for of in (mixed_up, system))
    wrong, right = given - existing, existing - given
    for verb, *words in (*((verb, *words) for verb, words in CALLS.items()), *MORE_CALLS):
        done = call(mixed_up, verb, *words)
        if verb in DIAGNOSIS:
            refused, said = done.exit_code == 1, done.output
        else:
            refused, said = isinstance(done.exception, OtherSystem), str(done.exception)
        if mixed_up.schema_ != system.schema_ and verb in OF_BOOKS_ONLY:
            continue
        if (
            not refused
            or not all(value in said for value in (*wrong, *right))
            or not ("et GRAB_" in said or "et them to the same values" in said)
        ):
            accepted.append((verb, words, done.output, repr(done.exception)))
    assert accepted == []
    assert asyncio.run(everything_of(system)) == before


# -- the journal ---------------------------------------------------------------------------------------------


async def claim(settings: Settings) -> Any:
    """The identity that Redis records for the prefix."""
    redis = open_redis(settings)
    try:
        return await redis.get(key_space(settings).system)
    finally:
        await redis.aclose()


async def forget(settings: Settings) -> None:
    """Deletes the identity that Redis records for the prefix."""
    redis = open_redis(settings)
    assert await redis.delete(key_space(settings).system) == 1
    await redis.aclose()


@pytest.mark.long
async def test_init_names_the_session_that_holds_a_lock(
    system: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits only briefly, because readers queue behind it meanwhile. Once the lock is free, it has nothing
    to do.
    """
    monkeypatch.setattr("grabstream.ops.initialization.LOCK_SECONDS", 0.5)
    monkeypatch.setattr("grabstream.projections.database.migrate.FIRST_SECONDS_MAX", 1)
    for lock in (
        "LOCK TABLE {0}.migrations", "SELECT pg_advisory_xact_lock(hashtext('grabstream-{0}'))",
    ):  # fmt: skip
        name = "somebody's report"
        async with await AsyncConnection.connect(system.postgres, application_name=name) as stuck:
            await stuck.execute(lock.format(system.schema_).encode())
            said = rf"{name} \(role \w+, pid {stuck.info.backend_pid} of PostgreSQL\)"
            with pytest.raises(LockTaken, match=said):
                await make_system(system)
        assert (await make_system(system))[:2] == ([], [])


async def test_another_journal_of_the_same_name_is_refused_until_it_is_declared_new(system: Settings) -> None:
    """The topic may be on other brokers, or may have been created again. It is refused until an operator
    declares that the old one is lost for good.
    """
    name = Topics(system.prefix).journal
    await delete_topics(system, name)
    for reason in ("no such topic exists", "the topic of that name has the id"):
        with pytest.raises(OtherJournal, match=reason) as refused:
            await check_system(system)
        assert "set GRAB_KAFKA to the brokers that have it" in refused.value.fix
        assert "rebuild journal --from audit --new-journal" in refused.value.fix
        with pytest.raises(OtherJournal, match=reason):
            await make_system(system)
        if reason == "no such topic exists":
            assert await find_topic(system.kafka, name) is None
            await create_topics(system.kafka, Topics(system.prefix), system.shards)
    redis = open_redis(system)
    await take_new_journal(system, redis)
    await redis.aclose()
    identity = await check_system(system)
    topic = await find_topic(system.kafka, name)
    assert identity is not None
    assert topic is not None
    assert identity.journal == topic.id
    assert (await make_system(system))[:2] == ([], [])


@pytest.mark.long
async def test_worker_claims_the_prefix_again_after_redis_was_emptied(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """Another schema cannot take the prefix."""
    before = await claim(system)
    worker(system, "relay,sweep")

    async def relayed() -> bool:
        return not any("no relay" in finding.what for _, finding in (await examine(system)).findings)

    await until(relayed, 30, "a relay")
    await forget(system)
    assert await until(lambda: claim(system), 30, "the claim") == before
    other = system.model_copy(update={"schema_": f"{system.schema_}b"})
    with pytest.raises(OtherSystem, match=f"Set GRAB_SCHEMA={system.schema_}"):
        await make_system(other)
    with pytest.raises(OtherSystem, match=f"belongs to GRAB_SCHEMA={system.schema_}"):
        async with open_gate(other):
            pass


# -- not recorded yet ----------------------------------------------------------------------------------------


async def forget_the_system(settings: Settings) -> None:
    """Makes the schema that of an `init` that was killed before its end: neither it nor Redis records an
    identity.
    """
    await forget(settings)
    async with await open_books(settings) as books:
        await books.execute("DELETE FROM system")


@pytest.mark.long
async def test_init_accepts_a_schema_without_identity_only_if_its_cursors_are_in_the_journal(
    system: Settings, journal: JournalWriter
) -> None:
    lines = [opened("e", 1), *(granted("e", seq) for seq in range(2, 40))]
    await journal.marker(1, "an-owner")
    await journal.block(lines, 1, 20, owner="an-owner")
    async with catching_up(system):
        await until_at_seq(system, 20)
    await forget_the_system(system)
    with pytest.raises(IdentityNotRecorded, match="grabstream init"):
        await check_system(system)
    # It accepts neither a missing journal, nor that of another system, nor one that was created again.
    another = system.model_copy(update={"prefix": f"{system.prefix}.b"})
    with pytest.raises(OtherJournal, match=r"shard 3: seq 20 at offset 2 is not in it"):
        await make_system(another)
    assert await find_topic(system.kafka, Topics(another.prefix).journal) is None
    await create_topics(system.kafka, Topics(another.prefix), system.shards)
    try:
        stranger = JournalWriter(another, journal._producer)
        await stranger.marker(1, "a-stranger")
        await stranger.block(lines, 1, 20, owner="a-stranger")
        with pytest.raises(OtherJournal, match=r"shard 3: seq 20 at offset 2 is not in it"):
            await make_system(another)
        assert await claim(another) is None
    finally:
        await delete_topics(
            system,
            *(
                getattr(Topics(another.prefix), name)
                for name in ("journal", "events", "commands", "results", "rejected")
            ),
        )
    # Blocks that other owners wrote after the cursor's record do not matter.
    for _ in range(3):
        await journal.block(lines, 1, 20, owner="late")
    assert (await make_system(system)).migrations == []
    assert await check_system(system) is not None
    assert await claim(system) is not None


@pytest.mark.long
async def test_worker_decides_but_writes_no_books_until_init_has_recorded_the_identity(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """It decides at once, and the read models start after `init`."""
    await forget_the_system(system)
    running_worker = worker(system)
    with pytest.raises(IdentityNotRecorded):
        await check_system(system)

    async def asks_for_init() -> bool:
        return "Run `grabstream init`" in running_worker.log.read_text()

    await until(asks_for_init, 30, "a log line that names `grabstream init`")
    await make_system(system)
    async with open_gate(system) as gate:
        terms = StockTerms(issuer="i", total=9)
        answers = await gate.decide(
            [Open(id="o", offer="x", terms=terms), Grab(id="g", offer="x", user="u")], patience_ms=30_000
        )
    assert [answer.outcome for answer in answers] == ["opened", "granted"]

    async def booked() -> bool:
        return await rows(system, "SELECT count(*) FROM grabs") == [(1,)]

    await until(booked, 60, "the books")


# -- from before the first release ---------------------------------------------------------------------------


async def test_init_refuses_a_schema_from_before_the_first_release_with_a_way_out(system: Settings) -> None:
    """The way out is walked: the journal gets a new schema, and the old one is left as it is."""
    async with await open_books(system) as books:
        await books.execute("UPDATE migrations SET name = '0001_books.sql'")
    before = await everything_of(system)
    key = key_space(system).system
    with pytest.raises(BadSettings, match=r"state before the first release \(0001_books.sql\)") as refused:
        await make_system(system)
    assert await everything_of(system) == before
    steps = [f'COMMENT ON TABLE "{system.schema_}"."system" IS NULL', f"redis-cli DEL {key}"]
    assert all(f"`{step}`" in str(refused.value) for step in steps)
    new = system.model_copy(update={"schema_": f"{system.schema_}_new"})
    with pytest.raises(OtherSystem, match=f"belong to schema {system.schema_}"):
        await make_system(new)
    async with await open_books(system) as books:
        await books.execute(steps[0].encode())
    await forget(system)
    try:
        assert (await make_system(new)).migrations == ["0001_system.sql"]
        assert await check_system(new) is not None
    finally:
        async with await open_books(system) as books:
            await drop_all(books, new.schema_)
    assert await everything_of(system) == before


# -- names ---------------------------------------------------------------------------------------------------

#: Tables of other programs, by the end of the name of their schema.
FOREIGN = {"reports": "mine ()", "migrated": "migrations (id int, migration text, batch int)"}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("public", "other programs use it"), ("pg_catalog", "other programs use it"),
        ("pg_mine", "other programs use it"),
        ("information_schema", "other programs use it"),
        ("{}_ledger_2", "a system in schema {} would use this name"),
        ("{}_events_10", "would use this name"),
        ("{}__at_0123abcd", "a system in schema {} would use this name"),
        ("{}_reports", r"it has other tables \(mine\)"),
        ("{}_migrated", r"it has other tables \(migrations\)"),
    ],
)  # fmt: skip
async def test_init_refuses_a_schema_that_is_not_for_a_system(
    settings: Settings, name: str, why: str
) -> None:
    """It creates nothing, not even a topic."""
    name = name.format(settings.schema_)
    async with await AsyncConnection.connect(settings.postgres, autocommit=True) as connection:
        foreign = next((table for end, table in FOREIGN.items() if name.endswith(end)), None)
        if foreign is not None:
            await connection.execute(f"CREATE SCHEMA {name} CREATE TABLE {foreign}".encode())
        try:
            with pytest.raises(BadSettings, match=why.format(settings.schema_)):
                await make_system(settings.model_copy(update={"schema_": name}))
            assert await find_topic(settings.kafka, Topics(settings.prefix).journal) is None
            there = await (
                await connection.execute("SELECT FROM pg_namespace WHERE nspname = %s", (name,))
            ).fetchall()
            assert bool(there) == name.endswith((*FOREIGN, "public", "catalog", "information_schema"))
        finally:
            if foreign is not None:
                await connection.execute(f"DROP SCHEMA {name} CASCADE".encode())


async def test_receipts_name_prefix_and_cluster_also_after_redis_or_the_journal_was_lost(
    system: Settings,
) -> None:
    """The record in Redis is enough: a gateway need not reach Kafka. Without it, Kafka is asked."""
    key, topics = key_space(system).system, Topics(system.prefix)
    topic = await find_topic(system.kafka, topics.journal)
    assert topic is not None
    expected = f"{system.prefix}@{topic.cluster}"
    redis = open_redis(system)
    try:
        without_kafka = system.model_copy(update={"kafka": "127.0.0.1:1"})
        assert await find_audience(redis, key, without_kafka) == expected
        await redis.delete(key)
        assert await find_audience(redis, key, system) == expected
        with pytest.raises((KafkaError, OSError)):
            await find_audience(redis, key, without_kafka)
        # Another journal on the same brokers: receipts that are on their way still count.
        await delete_topics(system, topics.journal)
        await create_topics(system.kafka, topics, system.shards)
        await take_new_journal(system, redis)
        other = await find_topic(system.kafka, topics.journal)
        assert other is not None
        assert other.id != topic.id
        assert await find_audience(redis, key, without_kafka) == expected
    finally:
        await redis.aclose()


@pytest.mark.parametrize("value", ["a list", "no JSON"])
async def test_a_damaged_record_in_redis_is_named_with_a_way_out(
    system: Settings, value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By every process that starts, and by `doctor`. It names no other system, so no running worker ends: the
    worker writes it again when it is deleted.
    """
    monkeypatch.setattr(worker, "CHECK_AGAIN_SECONDS", 0.05)
    redis, key, stop = open_redis(system), key_space(system).system, asyncio.Event()
    known = worker.Known(system, lambda name: None, False)
    await known.check()
    await redis.delete(key)
    await (redis.rpush(key, value) if value == "a list" else redis.set(key, value))
    keeping = asyncio.create_task(known.keep(redis, stop))
    way_out = f"redis-cli DEL {key}"
    try:
        for refuses in (check_system(system), find_audience(redis, key, system)):
            with pytest.raises(ClaimDamaged, match=way_out):
                await refuses
        [(check, finding)] = (await examine(system)).findings
        assert (check, finding.severity) == (SYSTEM_CHECK, "stuck")
        assert way_out in finding.command
        await until(lambda: way_out in caplog.text, 10, "the worker's log")
        assert not keeping.done()
        await redis.delete(key)
        await until(lambda: redis.exists(key), 10, "the record")
        await check_system(system)
    finally:
        stop.set()
        await keeping
        await redis.aclose()
