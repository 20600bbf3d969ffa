"""`doctor`: each condition is caused, and is reported with the command that repairs it; a healthy system has
no findings.
"""

import json
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis as sync_redis
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr

from grabstream.connections.opening import key_space, open_gate, open_redis
from grabstream.gate.calls import now_ms
from grabstream.lua import loader
from grabstream.lua.keys import LAYOUT, SHARD_FIELDS
from grabstream.lua.library import MISSING
from grabstream.models.bounds import quoted
from grabstream.models.commands import Grab, Open
from grabstream.models.journal import Cursor, parse_block
from grabstream.models.offers import StockTerms
from grabstream.ops.commands.read.status import read as read_status
from grabstream.ops.diagnosis import core, database_checks, machine, topics
from grabstream.ops.diagnosis.core import CoreReadings, ShardReadings
from grabstream.ops.diagnosis.database_checks import BookReadings, LostDecisions
from grabstream.ops.diagnosis.examination import (
    CHECKS,
    CONDITIONS_CHECK,
    JOURNAL_CHECK,
    SYSTEM_CHECK,
    Examination,
    examine,
)
from grabstream.ops.diagnosis.findings import RESTORE, Finding, address, spans
from grabstream.ops.diagnosis.topics import Partition, TopicReadings
from grabstream.ops.grants import postgres_statements
from grabstream.projections.checking import verified
from grabstream.projections.database.sessions import connect
from grabstream.settings import Settings, load_settings
from grabstream.streams.clients import started
from grabstream.streams.topics import Topics, delete_command, retention_ms
from grabstream.workshop.services import free_ports
from grabstream.workshop.services.servers import Redis
from tests.conftest import until
from tests.support.command_line import env_of, grabstream
from tests.support.diagnosis import findings_of
from tests.support.losses import OFFERS, delete_topics, empty_journal, take_parts
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
from tests.support.stopped_shards import (
    WHY,
    call_json,
    until_stopped,
)
from tests.support.verifier_passes import (
    execute,
    history,  # noqa: F401 - a fixture
    verifying,
)


def only(examination: Examination, check: str) -> Finding:
    [finding] = findings_of(examination, check)
    return finding


# -- a healthy system ----------------------------------------------------------------------------------------


@pytest.mark.every_change("no false alarm")
async def test_a_healthy_system_has_no_findings(system: Settings, worker: Callable[..., Any]) -> None:
    before = await examine(system)
    assert before.exit_code == 1
    assert "no relay" in only(before, "shards are relayed").what
    unread = findings_of(before, "commands are read")
    assert [finding.command for finding in unread] == ["grabstream worker --roles decide"] * 2
    printed = grabstream("doctor", "--json", **env_of(system))
    report = json.loads(printed.stdout)
    assert (printed.returncode, report["healthy"]) == (1, False)
    assert {"check", "severity", "what", "means", "command", "since"} == set(report["findings"][0])
    assert report["servers"] == {"redis": None, "kafka": None, "postgres": None}
    worker(system, "decide,relay,sweep,project,publish,verify", verify_percent="100")
    last: list[Examination] = []

    async def healthy() -> bool:
        last[:] = [await examine(system)]
        return last[0].exit_code == 0 and not last[0].findings

    await until(healthy, 40, "health")
    assert len(last[0].passed) == len(CHECKS)
    shown = grabstream("doctor", **env_of(system))
    assert (shown.returncode, shown.stdout) == (0, f"✓ {len(CHECKS)} checks: nothing is stuck.\n")


async def test_before_init_topics_and_tables_are_missing(settings: Settings) -> None:
    examination = await examine(settings.model_copy(update={"seal_keys": SecretStr("")}))
    assert only(examination, "topics exist").command == "grabstream init"
    assert "0001_system.sql" in only(examination, "tables exist").what
    assert "GRAB_SEAL_KEYS" in only(examination, "seal keys are set").what
    assert examination.exit_code == 1


@pytest.mark.long
async def test_a_server_without_answer_does_not_hide_findings_about_the_others(system: Settings) -> None:
    for server, setting, value, still_found in (
        ("redis", "redis_url", "redis://127.0.0.1:1/0", "commands are read"),
        ("kafka", "kafka", "127.0.0.1:1", "shards are relayed"),
        ("postgres", "postgres", "postgresql://127.0.0.1:1/x", "shards are relayed"),
    ):
        examination = await examine(system.model_copy(update={setting: value}))
        assert [name for name, problem in examination.servers.items() if problem] == [server]
        assert examination.exit_code == 3
        assert findings_of(examination, still_found)
        assert examination.not_checked
        shown = grabstream("doctor", **{**env_of(system), setting: value})
        assert shown.returncode == 3, shown.stderr
        assert "does not answer" in shown.stdout
        assert f"correct GRAB_{setting.upper()}" in shown.stdout


async def test_a_login_that_may_not_read_the_tables_is_examined_without_their_checks(
    system: Settings,
) -> None:
    """The role `reader` of `grabstream grants` reads views only."""
    schema, role = system.schema_, f"{system.prefix}_reader"
    async with await connect(load_settings().postgres, schema) as connection:
        statements = await postgres_statements(connection, schema, system.prefix)
        for statement in statements:
            # Sessions of other tests change the rights on the database too.
            if " ON DATABASE " not in statement:
                await connection.execute(statement.encode())
        login = system.model_copy(update={"postgres": make_conninfo(system.postgres, user=role)})
        try:
            examination, status = await examine(login), await read_status(login)
            shown = grabstream("doctor", **env_of(login))
        finally:
            for name in (role, f"{system.prefix}_writer"):
                await connection.execute(f'DROP OWNED BY "{name}"; DROP ROLE "{name}"'.encode())
    assert "this login may not ask: InsufficientPrivilege" in (examination.servers["postgres"] or "")
    assert [server for server, problem in examination.servers.items() if problem] == ["postgres"]
    assert examination.not_checked == [
        check.name for check in CHECKS if "postgres" in check.needs or check.name == SYSTEM_CHECK
    ]
    assert findings_of(examination, "shards are relayed")
    assert (shown.returncode, shown.stderr) == (3, "")
    assert "PostgreSQL cannot be examined" in shown.stdout
    assert "permission denied" in status["servers"].pop("postgres")
    assert status["servers"] == {"redis": None, "kafka": None}


# -- what stops ----------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_doctor_names_what_waits_after_the_worker_has_stopped(
    system: Settings, worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relay, sweeper, decider, projectors and verifier stop; an outbox with room for three events fills, a
    hold passes its deadline, a command waits.
    """
    for module, name in (
        (core, "HOLD_LATE_MS"),
        (core, "SWEEP_LATE_MS"),
        (topics, "LATE_MS"),
        (database_checks, "LATE_MS"),
    ):
        monkeypatch.setattr(module, name, 100)
    working = worker(system, "decide,relay,sweep")
    began = now_ms()
    async with open_gate(system) as gate:
        opening = Open(
            id="o", offer="x", terms=StockTerms(issuer="i", total=9, hold_ms=1_000, closes_at=began + 25_000)
        )
        [answer] = await gate.decide([opening], patience_ms=20_000, timeout_ms=20_000)
        assert answer.outcome == "opened"
        working.stop()
        for number in range(3):
            await gate.decide([Grab(id=f"g{number}", offer="x", user=f"u{number}")], "decided")
    producer = AIOKafkaProducer(bootstrap_servers=system.kafka)
    await producer.start()
    await producer.send_and_wait(Topics(system.prefix).commands, b"{}")
    await producer.stop()
    shard = key_space(system).shard_of_offer("x")
    small = system.model_copy(update={"outbox_events_max": 3})

    async def holds_are_late() -> bool:
        return bool(findings_of(await examine(small), "holds and offers end on time"))

    await until(holds_are_late, 20, "the holds' end")
    examination = await examine(small)
    relay = only(examination, "shards are relayed")
    assert "3 events not in the journal" in relay.what
    assert relay.since is not None
    assert began <= relay.since <= now_ms()
    full = only(examination, "outboxes have room")
    assert f"shard {shard}: the outbox holds 3 of 3 events" in full.what
    assert full.severity == "stuck"
    holds = only(examination, "holds and offers end on time")
    assert "holds have passed their deadline and have not ended" in holds.what
    assert holds.since is not None
    commands, operations = findings_of(examination, "commands are read")
    assert (commands.severity, "1 record waiting" in commands.what) == ("stuck", True)
    assert "record waiting" not in operations.what
    assert commands.since is not None
    assert began <= commands.since <= now_ms()
    lagging = findings_of(examination, "read models keep up")
    assert {finding.what.split(" lags behind")[0] for finding in lagging} == {
        "ledger",
        "balances",
        "audit",
        "events",
    }
    assert all(finding.since is not None and finding.since >= began for finding in lagging)
    assert {finding.command for finding in lagging} == {
        "grabstream worker --roles project",
        "grabstream worker --roles publish",
    }


@pytest.mark.long
async def test_a_stopped_read_model_and_a_record_set_aside_are_reported(
    system: Settings, journal: JournalWriter
) -> None:
    lines = [opened("e", 1, total=25), granted("e", 2, amount=99), granted("e", 3)]
    await journal.marker(1, "a")
    for seq in range(1, 4):
        await journal.block(lines, seq, seq)
    async with catching_up(system, "ledger"):
        await until_stopped(system, "ledger")
        stopped = only(await examine(system), "read models have not stopped")
        assert f"ledger has stopped at shard {SHARD}, after seq 1" in stopped.what
        assert "never_below_zero" in stopped.what
        assert f"grabstream set-aside ledger {SHARD} --dry-run" in stopped.command
        assert f"grabstream retry ledger {SHARD}" in stopped.command
        assert stopped.since is not None
        assert (await call_json(system, "set-aside", "ledger", str(SHARD), *WHY, "--yes"))[0] == 0
    examination = await examine(system)
    assert not findings_of(examination, "read models have not stopped")
    note = only(examination, "nothing is set aside")
    assert (
        note.severity,
        "1 event (2) set aside in ledger" in note.what,
        "lacks what it says of e" in note.what,
    ) == ("note", True, True)


async def test_a_read_model_does_not_lag_behind_blocks_that_do_not_count(
    system: Settings, journal: JournalWriter
) -> None:
    """Such as those of a relay that was paused, or of a stranger."""
    lines = [opened("e", 1), granted("e", 2), granted("e", 3)]
    await journal.marker(1, "a")
    await journal.block(lines, 1, 2)
    after = Cursor()
    for record in journal.records:
        after, _ = after.feed(record.offset, parse_block(record.headers, record.value))
    readings = BookReadings(
        0, None, True, [], {"ledger": {SHARD: after}}, [], [], [], {}, LostDecisions(0, 0, None), []
    )  # fmt: skip

    async def next_offsets() -> list[int]:
        async with started(AIOKafkaConsumer(bootstrap_servers=system.kafka)) as consumer:
            lags = (await database_checks.read_lags(system, readings, consumer))["ledger"]
        return [lag.next_offset for lag in lags]

    await journal.marker(2, "b")
    await journal.block(lines, 3, 3)
    assert await next_offsets() == []
    await journal.block(lines, 3, 3, 2, "b")
    assert await next_offsets() == [journal.records[-1].offset]


@pytest.mark.long
async def test_a_read_model_of_another_release_needs_a_rebuild(system: Settings) -> None:
    await execute(system, "UPDATE read_models SET definition = 999 WHERE projection = 'ledger'")
    finding = only(await examine(system), "read models are of this release")
    assert finding.what.startswith("ledger: ")
    assert finding.command == "grabstream rebuild ledger"


@pytest.mark.long
async def test_a_finding_of_the_verifier_is_reported(system: Settings, journal: JournalWriter) -> None:
    lines = [opened("e", 1), granted("e", 2)]
    await journal.marker(1, "a")
    await journal.block(lines, 1, 2)
    async with catching_up(system):

        async def no_worker_verifies() -> list[Finding]:
            return findings_of(await examine(system), "a verifier is running")

        await until(no_worker_verifies, 20, "the finding that no worker verifies")
    await execute(system, "UPDATE accounts_1 SET posted = posted + 1 WHERE account = 'wallet:u2'")
    async with verifying(system) as passes:
        [difference] = await passes()
    examination = await examine(system)
    finding = only(examination, "the books agree")
    assert "wallet:u2 CNY has 11, its events lead to 10" in finding.what
    assert f"grabstream dismiss {difference.id}" in finding.command
    assert not findings_of(examination, "a verifier is running")
    status = json.loads(grabstream("status", "--json", **env_of(system)).stdout)
    assert [finding["id"] for finding in status["findings"]] == [difference.id]
    assert {shard["shard"]: shard["seq"] for shard in status["verified"]}[SHARD] == 2


async def test_a_verifier_that_rests_is_not_missing(system: Settings) -> None:
    """After a pass of a large system the verifier rests, for longer than a missing one is tolerated. It keeps
    its lock meanwhile; one that does not get on for an hour is reported too.
    """
    async with await open_tables(system) as connection:
        audit = (await live_schemas(connection))["audit"]
        await connection.execute(f"UPDATE {audit}.projection_cursors SET seq = 1".encode())
        await verified.begin(connection, system.shards)

    async def reported(minutes: int) -> list[str]:
        async with await open_tables(system) as connection:
            await connection.execute(
                "UPDATE verified SET compared_at = now() - make_interval(mins => %s)", (minutes,)
            )
        return [finding.what for finding in findings_of(await examine(system), "a verifier is running")]

    assert await reported(20) == ["no worker verifies"]
    lock = f"grabstream-verifier-{system.schema_}"
    async with await open_tables(system) as verifier:
        await verifier.execute("SELECT pg_advisory_lock(hashtext(%s))", (lock,))
        assert await reported(20) == []
        assert await reported(90) == ["the verifier has compared nothing for 90 minutes"]


@pytest.mark.long
async def test_a_lost_decision_is_reported_by_doctor_and_why(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """The server loses a decision before it is journaled. The recovery records the loss."""
    working = worker(system, "relay,sweep")
    redis = open_redis(system)
    async with open_gate(system) as gate:
        [opening] = await gate.decide(
            [Open(id="o", offer="x", terms=StockTerms(issuer="i", total=9))],
            patience_ms=20_000,
            timeout_ms=20_000,
        )
        assert opening.outcome == "opened"
        worker(system, "project")

        async def read() -> list[Any]:
            return await rows(system, "SELECT 1 FROM offers WHERE offer = 'x'")

        await until(read, 30, "the offer")
        working.kill()
        shard = key_space(system).shard(key_space(system).shard_of_offer("x"))
        [granted] = await gate.decide([Grab(id="g", offer="x", user="u")], "decided")
        assert granted.outcome == "granted"
        # Another server epoch, and under the same seq another event than the journal will have.
        await redis.hset(shard.state, "server_epoch", "another")
        [entry, *_] = (await redis.xrevrange(shard.outbox, count=1))[0]
        await redis.xdel(shard.outbox, entry)
        worker(system, "relay,sweep")

        async def lost() -> list[Finding]:
            return findings_of(await examine(system), "no decision was lost")

        [finding] = await until(lost, 40, "the recovery")  # type: ignore[misc]
    assert (finding.severity, "1 decision of 1 user lost" in finding.what) == ("note", True)
    assert (
        "was decided, but lost when Redis was recovered"
        in grabstream("why", "u", "x", **env_of(system)).stdout
    )
    await redis.aclose()


@pytest.mark.long
async def test_a_lost_journal_leads_every_finding_to_the_restore(
    system: Settings, worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is deleted, empty, or has only markers of relays that could not take over: every finding
    names the restore, and shards fenced for this reason share one finding.
    """
    monkeypatch.setattr(database_checks, "LATE_MS", 0)
    everything = worker(system)
    await take_parts(system, "a")
    assert everything.stop() == 0
    await delete_topics(system, Topics(system.prefix).journal)
    gone = await examine(system)
    assert only(gone, "topics exist").command == RESTORE
    events = OFFERS * 10
    lost = only(gone, JOURNAL_CHECK)
    assert f"Kafka has lost {events} events that the read models or Redis have" in lost.what
    assert lost.command == RESTORE
    assert only(gone, "shards are relayed").command == RESTORE
    assert only(gone, SYSTEM_CHECK).command.startswith("set GRAB_KAFKA to the brokers that have it")
    await empty_journal(system)
    empty = await examine(system)
    assert f"{events} events" in only(empty, JOURNAL_CHECK).what
    assert only(empty, "shards are relayed").command == RESTORE
    assert not findings_of(empty, "read models keep up")
    worker(system, "relay,sweep")

    async def fenced_once() -> list[Finding]:
        findings = findings_of(await examine(system), "shards decide")
        return findings if len(findings) == 1 and "it has lost events" in findings[0].what else []

    [fenced] = await until(fenced_once, 40, "one finding for all fenced shards")  # type: ignore[misc]
    assert fenced.command == RESTORE
    markers = await examine(system)
    assert f"{events} events" in only(markers, JOURNAL_CHECK).what
    # A read model that has not read markers does not lag.
    assert not findings_of(markers, "read models keep up")


@pytest.mark.long
async def test_a_cursor_that_is_not_where_its_rows_are_is_reported_and_retried(
    system: Settings, journal: JournalWriter
) -> None:
    """A cursor was moved past unread events, or past the journal's end: its read model would apply nothing
    and report no error. `retry` finds the right offset by the hash.
    """
    lines = [opened("e", 1), *(granted("e", seq) for seq in range(2, 41))]
    await journal.marker(1, "an-owner")
    await journal.block(lines, 1, 20, owner="an-owner")
    async with catching_up(system):
        await until_at_seq(system, 20)
    check = "cursors match their rows"
    assert not findings_of(await examine(system), check)
    await journal.block(lines, 21, 40, owner="an-owner")
    assert not findings_of(await examine(system), check), "a cursor that lags is where its rows are"
    moved = (
        "UPDATE {}_{}_{}.projection_cursors SET next_offset = {}, moved_at = to_timestamp(1000) WHERE "
        "shard = 3"
    )
    versions_of = dict(await rows(system, "SELECT projection, version FROM read_models WHERE state = 'live'"))
    for name, offset in (("ledger", 3), ("balances", 900)):
        await execute(system, moved.format(system.schema_, name, versions_of[name], offset))
    moved_cursors = {
        finding.what.partition(" ")[0]: finding for finding in findings_of(await examine(system), check)
    }
    assert set(moved_cursors) == {"ledger", "balances"}
    assert (
        moved_cursors["ledger"].what == "ledger has the events of shard 3 up to seq 20, but its cursor was "
        "moved to offset 3, after seq 40"
    )
    assert (
        "its cursor was moved to offset 900, which this journal does not have: it ends at 3"
        in moved_cursors["balances"].what
    )
    assert {finding.since for finding in moved_cursors.values()} == {1_000_000}
    assert {name: finding.command for name, finding in moved_cursors.items()} == {
        name: f"grabstream retry {name} 3" for name in moved_cursors
    }
    for name in moved_cursors:
        done = grabstream("retry", name, "3", "--wait", "0", **env_of(system))
        assert done.returncode == 0, (name, done.stdout, done.stderr)
    async with catching_up(system):
        await until_at_seq(system, 40)
    assert not findings_of(await examine(system), check)
    done = grabstream("retry", "ledger", "3", "--wait", "0", **env_of(system))
    assert (done.returncode, "ledger has not stopped at shard 3" in done.stderr) == (1, True), done.stderr


def test_a_journal_that_lost_its_end_is_deleted_before_the_restore(settings: Settings) -> None:
    """The restore deletes the rest of the journal, so the audit trail must have read it."""
    positions = {"ledger": {0: Cursor(9), 1: Cursor(3)}, "audit": {0: Cursor(8), 1: Cursor(3)}}
    readings = BookReadings(0, None, True, [], positions, [], [], [], {}, LostDecisions(0, 0, None), [])
    assert not database_checks.journal_lost({0: 9, 1: 4}, {0: 9, 1: 4}, readings, settings)
    [lost] = database_checks.journal_lost({0: 5, 1: 4}, {0: 10, 1: 4}, readings, settings)
    assert lost.what.startswith("shard 0: Kafka has lost 5 events that the read models or Redis have")
    assert lost.command == f"{delete_command(settings.kafka, Topics(settings.prefix).journal)} && {RESTORE}"
    assert "before the restore, let the audit trail read the rest of shard 1" in lost.means


def test_a_command_names_the_table_of_a_schema_that_is_a_reserved_word(settings: Settings) -> None:
    settings = settings.model_copy(update={"schema_": "order"})
    readings = BookReadings(0, None, True, [], {}, [], [], [], {}, LostDecisions(1, 1, None), [])
    [lost] = database_checks.lost_decisions(readings, settings)
    assert """ -c 'TABLE "order"."lost_decisions"'""" in str(lost.command)


def shard_readings(number: int, relay: str | None = "w-1", **fields: str) -> ShardReadings:
    return ShardReadings(
        number,
        "server_epoch",
        dict.fromkeys(SHARD_FIELDS) | {"layout": str(LAYOUT)} | fields,
        relay,
        None,
        None,
        None,
    )


def test_shards_whose_callers_name_the_time_are_named(settings: Settings) -> None:
    assert not core.check_callers_clock(CoreReadings([], [shard_readings(0)]), settings)
    readings = CoreReadings([], [shard_readings(0), shard_readings(1, clock="caller")])
    [finding] = core.check_callers_clock(readings, settings)
    assert (finding.severity, finding.what.partition(":")[0]) == ("risk", "shard 1")
    assert finding.command == f"redis-cli HDEL {key_space(settings).shard(1).state} clock"


def test_shards_without_functions_are_named_with_the_reason(settings: Settings) -> None:
    """Missing: a risk only where a relay runs; a shard that was never taken over gets the library with its
    first takeover.
    """
    reason = "this user has no permissions to run the 'function|load' command"
    readings = CoreReadings(
        [],
        [
            shard_readings(0),
            shard_readings(1)._replace(library=MISSING),
            shard_readings(2, relay=None)._replace(library=MISSING),
            shard_readings(3, plain=reason)._replace(library=MISSING),
            shard_readings(4, plain=reason),  # the library was loaded since, the relay will notice
        ],
    )
    missing, plain = core.without_functions(readings, settings)
    assert missing.what.startswith("shard 1: Redis does not have the function library grabstream_")
    assert (missing.severity, missing.command.startswith("grabstream init")) == ("stuck", True)
    assert plain.what == f"shard 3: run plain scripts in place of functions: {quoted(reason)}"
    assert plain.severity == "risk"


def test_fenced_shards_name_their_reason_and_command(settings: Settings) -> None:
    """Shards that a relay recovers automatically, shards that it cannot recover, and one finding for shards
    whose reasons differ only in numbers.
    """
    ends = "the journal ends at seq {0}, {1} were acknowledged: it has lost events; put it back"
    wiped = {"seq": "5", "partial": "1", "time": "1000", "fault": "Redis has nothing of the shard"}
    shards = [
        shard_readings(0, fault=ends.format(0, 7), seq="7", time="3000"),
        shard_readings(1, fault=ends.format(0, 9), seq="9", time="2000"),
        shard_readings(2, **wiped),
        shard_readings(3, fault="the shard cannot be rebuilt from the journal: no key k1 to open it with"),
        shard_readings(4, relay=None, server_epoch="before", seq="1", time="4000"),
        shard_readings(5, server_epoch="before", seq="1", time="4000"),
        shard_readings(6, server_epoch="server_epoch", seq="1"),
    ]
    fenced = {
        finding.what.partition(": ")[0]: finding
        for finding in core.fenced(CoreReadings([], shards), settings)
    }
    assert set(fenced) == {"shards 0 to 1", "shard 2", "shard 3", "shard 4", "shard 5"}
    lost = fenced["shards 0 to 1"]
    assert (lost.command, lost.since, "in shard 0, the journal ends at seq 0, 7 were" in lost.what) == (
        RESTORE,
        2000,
        True,
    )
    assert fenced["shard 2"].command.startswith("nothing: its relay is recovering the shard")
    assert fenced["shard 2"].since is None
    assert fenced["shard 3"].command == "grabstream rebuild redis"
    assert fenced["shard 4"].command == "grabstream worker --roles relay,sweep"
    assert fenced["shard 5"].command.startswith("nothing: its relay is recovering the shard")


@pytest.mark.long
async def test_a_shard_changed_by_hand_names_the_field_and_the_command_mends_it(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """The shard's layout or server epoch is changed while its relay runs."""
    relay = worker(system, "relay,sweep")
    redis = open_redis(system)
    shard = key_space(system).shard(key_space(system).shard_of_offer("x"))
    async with open_gate(system) as gate:
        opened = await gate.decide(
            [Open(id="o", offer="x", terms=StockTerms(issuer="i", total=900))],
            patience_ms=60_000,
            timeout_ms=60_000,
        )
        assert opened[0].outcome == "opened"

        numbers = count()

        async def outcome() -> str:
            [answer] = await gate.decide([Grab(id=f"g{next(numbers)}", offer="x", user="u")], "decided")
            return answer.outcome

        async def decides() -> bool:
            return await outcome() == "granted"

        for field, value, words in (
            ("server_epoch", "another", "its server epoch is 'another'"),
            ("layout", "0", "its keys have layout '0'"),
        ):
            await redis.hset(shard.state, field, value)
            assert await outcome() == "fenced"
            finding = only(await examine(system), "shards decide")
            assert words in finding.what
            assert finding.command.startswith("restart the worker ")
            assert relay.stop() == 0
            relay = worker(system, "relay,sweep")

            await until(decides, 60, "the takeover")
        await redis.hset(shard.state, "layout", LAYOUT + 7)
        assert await outcome() == "fenced"
        newer = only(await examine(system), "shards decide")
        assert (
            newer.what
            == f"shard {shard.shard}: fenced: its keys have layout '{LAYOUT + 7}', but this program writes "
            f"layout {LAYOUT}"
        )
        assert f"HSET {shard.state} layout {LAYOUT}" in newer.command
        await redis.hset(shard.state, "layout", LAYOUT)
        # The relay had stepped down from a shard of a newer program; it takes the shard over again.
        await until(decides, 60, "the relay")
        assert not findings_of(await examine(system), "shards decide")
    await redis.aclose()


def test_the_layout_is_the_number_that_the_scripts_write() -> None:
    assert f"\nlocal LAYOUT = {LAYOUT}\n" in loader.load("server_epoch").text


# -- servers -------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_settings_of_topics_clocks_and_disks_are_reported(
    system: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Topics are as an operator or an earlier release may have created them; `init` corrects that of
    commands, once those that lose records are corrected. The doctor's clock is a minute ahead, so the clocks
    of both servers are behind it. The bound of disks is above 100 % free, so every disk counts as nearly
    full.
    """
    kept, bounded = CONDITIONS_CHECK, "batches of commands have a bounded size"
    sound = await examine(system)
    assert not [name for name, _ in sound.findings if name in (kept, bounded, "clocks agree")]
    topics_of = Topics(system.prefix)
    client = AIOKafkaAdminClient(bootstrap_servers=system.kafka)
    await client.start()
    for topic, change in (
        (topics_of.journal, {"retention.ms": "86400000"}), (topics_of.commands, {"compression.type": "gzip"}),
    ):  # fmt: skip
        await client.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, change)])
    await client.close()

    async def are_found(*checks: str) -> bool:
        found = {name for name, _ in (await examine(system)).findings}
        return found & {kept, bounded} == set(checks)

    await until(lambda: are_found(kept, bounded), 20, "the findings")
    monkeypatch.setattr(machine, "FREE_SHARE_MIN", 1.01)
    examination = await examine(system, lambda: now_ms() + 60_000)
    finding = only(examination, kept)
    assert "retention.ms is 86400000" in finding.what
    assert "--add-config retention.ms=-1" in finding.command
    compressed = only(examination, bounded)
    assert compressed.what == f"{topics_of.commands} keeps compressed batches: its compression.type is gzip"
    clocks = [one.what for one in findings_of(examination, "clocks agree")]
    assert [what.split(" is ")[0] for what in clocks] == ["the clock of Redis", "the clock of PostgreSQL"]
    assert all("behind this machine's" in what for what in clocks)
    disks = [one.what for one in findings_of(examination, "disks have room")]
    assert any("the disk of Redis" in what for what in disks)
    refused = grabstream("init", **env_of(system))
    assert refused.returncode == 2
    assert finding.command in refused.stderr
    client = AIOKafkaAdminClient(bootstrap_servers=system.kafka)
    await client.start()
    mended = ConfigResource(ConfigResourceType.TOPIC, topics_of.journal, {"retention.ms": "-1"})
    await client.alter_configs([mended])
    await client.close()
    await until(lambda: are_found(bounded), 20, "the settings of the journal")
    assert grabstream("init", **env_of(system)).returncode == 0
    await until(are_found, 20, "the setting of commands")


@pytest.mark.long
async def test_each_fault_of_a_redis_server_is_reported(
    system: Settings, tmp_path: Path, worker: Callable[..., Any]
) -> None:
    """It may evict, writes nothing to disk, is full, has another number of shards, and restarts without a
    relay.
    """
    server = Redis(tmp_path, free_ports(1)[0])
    server.start()
    try:
        of_server = system.model_copy(update={"redis_url": f"redis://127.0.0.1:{server.port}/0"})
        working = worker(of_server, "relay")

        async def relayed() -> bool:
            return not findings_of(await examine(of_server), "shards are relayed")

        await until(relayed, 30, "a relay")
        fewer = await examine(of_server.model_copy(update={"shards": 4}))
        assert only(fewer, SYSTEM_CHECK).command.startswith("set GRAB_SHARDS=8")
        assert len(fewer.findings) == 1
        [other] = core.other_shards(
            CoreReadings([], [shard_readings(0, shards="8")]), of_server.model_copy(update={"shards": 4})
        )
        assert other.command == "export GRAB_SHARDS=8"
        client = sync_redis.Redis(port=server.port)
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("appendonly", "no")
        examination = await examine(of_server)
        assert "allkeys-lru" in only(examination, "Redis never evicts").what
        assert only(examination, "Redis never evicts").command.endswith(
            "CONFIG SET maxmemory-policy noeviction"
        )
        assert "appendonly is off" in only(examination, "Redis writes an append-only file").what
        # Only now: before, it would have evicted keys.
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1_000_000)
        examination = await examine(of_server)
        assert "MiB" in only(examination, "Redis has memory").what
        assert not findings_of(examination, "Redis never evicts")
        client.config_set("maxmemory", 0)
        client.config_set("appendonly", "yes")
        client.close()
        working.kill()
        before = now_ms()
        server.kill()
        server.start()

        async def fenced() -> list[Finding]:
            # Until the killed worker's lease expires, the reason may be that of a shard with a relay.
            return [
                finding
                for finding in findings_of(await examine(of_server), "shards decide")
                if "shards 0 to 7: fenced: Redis was restarted, or a replica promoted" in finding.what
            ]

        [finding] = await until(fenced, 20, "the fence")  # type: ignore[misc]
        assert finding.since is not None
        assert before - 2_000 <= finding.since <= now_ms()
    finally:
        server.kill()


def test_partitions_without_leader_or_with_replicas_out_of_sync_are_reported(settings: Settings) -> None:
    """The partitions are given as a cluster describes them, since the tests have one broker."""
    partitions = {
        "grab.journal": [
            Partition(0, 1, [1, 2, 3], [1, 2, 3]),
            Partition(1, -1, [1, 2, 3], []),
            Partition(2, 1, [1, 2, 3], [1]),
        ]
    }
    leaderless, degraded = topics.not_led(TopicReadings(partitions, {}, {}), settings)
    assert "no leader for partition 1" in leaderless.what
    assert "partition 2 has replicas out of sync" in degraded.what
    assert "start broker 2 to 3" in degraded.command


async def test_a_transaction_that_hangs_is_named_with_its_end(system: Settings) -> None:
    """What stands behind it is not said to lack a decider."""
    commands, check = Topics(system.prefix).commands, "transactions end"

    async def found() -> Examination:
        return await examine(system, lambda: now_ms() + topics.TRANSACTION_MS_MAX + 1)

    producer = AIOKafkaProducer(bootstrap_servers=system.kafka, transactional_id=f"{system.prefix}-sender")
    async with started(producer):
        async with producer.transaction():
            await producer.send_and_wait(commands, b"{}", partition=3)
        assert check in (await found()).passed
        await producer.begin_transaction()
        await producer.send_and_wait(commands, b"{}", partition=3)
        hanging = await found()
        young = await examine(system)
        await producer.abort_transaction()
    finding = only(hanging, check)
    assert finding.severity == "stuck"
    assert f"{commands}, partition 3: a transaction is open since offset 2; 1 record" in finding.what
    assert f"abort --topic {commands} --partition 3 --start-offset 2" in finding.command
    assert finding.since is not None
    assert check in young.passed
    [unread] = [one for one in findings_of(hanging, "commands are read") if commands in one.what]
    assert "2 records waiting" in unread.what, "what waits for the transaction does not count"
    assert check in (await found()).passed


def test_nobody_is_told_to_delete_a_topic_with_commands(settings: Settings) -> None:
    """More partitions of commands than shards are served; they may hold commands that are not decided yet."""
    names = Topics(settings.prefix)
    every = [Partition(number, 1, [1], [1]) for number in range(settings.shards + 4)]
    shards = every[: settings.shards]
    whole = dict.fromkeys(retention_ms(names, settings.refusals_topic), shards)
    assert topics.missing(TopicReadings(whole, {}, {}), settings) == []
    of_journal = TopicReadings(whole | {names.journal: every[:1]}, {}, {})
    [fewer] = topics.missing(of_journal, settings)
    assert (fewer.severity, f"{names.journal} has 1" in fewer.what) == ("stuck", True)
    [added] = topics.missing(TopicReadings(whole | {names.commands: every}, {}, {}), settings)
    assert (added.severity, f"{names.commands} has 12" in added.what) == ("risk", True)
    assert "delete" not in added.command


@pytest.mark.long
async def test_a_relay_that_copies_nothing_is_reported_with_its_worker(
    system: Settings, monkeypatch: pytest.MonkeyPatch, worker: Callable[..., Any]
) -> None:
    """The worker is suspended: it holds the lease, but does not copy events to the journal."""
    monkeypatch.setattr(core, "RELAY_LATE_MS", 300)
    working = worker(system, "relay,sweep", lease_ms="60000")
    async with open_gate(system) as gate:
        opening = Open(id="o", offer="x", terms=StockTerms(issuer="i", total=9))
        await gate.decide([opening], patience_ms=20_000, timeout_ms=20_000)
        working.signal(signal.SIGSTOP)
        await gate.decide([Grab(id="g", offer="x", user="u")], "decided")

    async def not_relayed() -> list[Finding]:
        return findings_of(await examine(system), "shards are relayed")

    [finding] = await until(not_relayed, 20, "the finding")  # type: ignore[misc]
    assert "has not copied 1 event to the journal" in finding.what
    assert f"-{working.process.pid}-" in finding.what


# -- words ---------------------------------------------------------------------------------------------------


def test_ranges_and_addresses_in_messages() -> None:
    assert spans([5, 0, 1, 2]) == "0 to 2, 5"
    assert address("GRAB_REDIS_URL", "redis://h:1/0") == "redis://h:1/0"
    assert address("GRAB_REDIS_URL", "redis://:secret@h:1/0") == '"$GRAB_REDIS_URL"'
