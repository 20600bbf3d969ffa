"""Names of PostgreSQL sessions, and that a switch waits for all sessions except those of other systems."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from psycopg import AsyncConnection, IsolationLevel

from grabstream.connections.opening import key_space, open_gate, open_redis
from grabstream.lua.keys import KeySpace
from grabstream.models.commands import Open
from grabstream.models.offers import EnvelopeTerms
from grabstream.ops.initialization import make_system
from grabstream.ops.verification.redis_keys import compares_keys
from grabstream.projections.database.locks import LockTaken, lock_or_raise
from grabstream.projections.database.sessions import connect, session_name, system_name
from grabstream.settings import Settings
from grabstream.streams.rebuilding.switching import Busy, older_snapshots_gone, with_snapshot
from grabstream.streams.relaying.shadow import VERIFIER_SHADOW
from grabstream.workshop.rehearsal.run import open_books
from grabstream.workshop.rehearsal.stage import take_down
from tests.conftest import until
from tests.support.projecting import rows

#: Schema names of the maximal length that differ in the last letter.
LONG = ("s" * 47 + "a", "s" * 47 + "b")


@pytest.fixture
async def other(servers: Settings, system: Settings) -> AsyncIterator[Settings]:
    """Another system in the same database, whose names begin with those of `system`."""
    settings = servers.model_copy(
        update={"prefix": f"{system.prefix}_b", "schema_": f"{system.schema_}_b", "shards": 1}
    )
    await make_system(settings)
    yield settings
    await take_down(settings)


async def test_sessions_speak_utf8_whatever_the_environment_says(
    system: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    async with await connect(system.postgres, system.schema_) as connection:
        assert connection.info.encoding == "utf-8"


async def test_a_switch_waits_for_every_session_except_those_of_other_systems(
    system: Settings, other: Settings
) -> None:
    """The switch also waits for sessions whose names only resemble those of another system."""
    mine, theirs = system_name(system.schema_), system_name(other.schema_)
    waited_for = [
        "",
        "psql",
        mine,
        f"{mine}: ledger",
        f"{mine}_c",
        f"{theirs}_b: ledger",
        theirs.upper(),
        f"{theirs} ",
        f" {theirs}",
        "grabstream",
    ]
    not_waited_for = [theirs, f"{theirs}: ledger"]
    for us, names in (
        (system, (waited_for, not_waited_for)),
        (other, ([theirs, f"{theirs}: verify"], [mine, f"{mine}: ledger"])),
    ):
        async with await open_books(us) as asking, AsyncExitStack() as stack:
            pids = {name: await begin(stack, us.postgres, name) for name in (*names[0], *names[1])}
            awaited = {pid for pid, _ in await with_snapshot(asking, us.schema_)}
            assert [name for name, pid in pids.items() if pid in awaited] == names[0]
            with pytest.raises(Busy, match="older snapshot"):
                await older_snapshots_gone(asking, us.schema_, 0)


async def begin(stack: AsyncExitStack, postgres: str, name: str) -> int:
    """Opens a session with this name, which has a snapshot until the stack ends; returns its pid."""
    connection = await stack.enter_async_context(
        await AsyncConnection.connect(postgres, application_name=name)
    )
    await connection.set_isolation_level(IsolationLevel.REPEATABLE_READ)
    await connection.execute("SELECT 1")
    return connection.info.backend_pid


@pytest.mark.long
async def test_a_switch_waits_for_sessions_named_after_a_removed_system(
    system: Settings, other: Settings
) -> None:
    async with await open_books(system) as asking, AsyncExitStack() as stack:
        pid = await begin(stack, system.postgres, system_name(other.schema_))
        assert pid not in {awaited for awaited, _ in await with_snapshot(asking, system.schema_)}
        await take_down(other)
        assert pid in {awaited for awaited, _ in await with_snapshot(asking, system.schema_)}


@pytest.mark.long
async def test_a_switch_does_not_wait_for_the_verifier_of_keys(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """The comparison of keys pauses most of the time, and has no open transaction then."""
    worker(system, "decide,relay,sweep,project")
    terms = EnvelopeTerms(issuer="alice", funding="pay", asset="CNY", total=900, parts=9)
    async with open_gate(system) as gate:
        opened = await gate.decide(
            [Open(id="o", offer="e", terms=terms)], patience_ms=60_000, timeout_ms=60_000
        )
        assert [answer.outcome for answer in opened] == ["opened"]
    shard = key_space(system).shard_of_offer("e")
    redis, beside = (
        open_redis(system),
        KeySpace(f"{system.prefix}{VERIFIER_SHADOW}", system.shards).shard(shard),
    )

    async def begun() -> bool:
        return bool(await redis.exists(beside.state))

    async with await open_books(system) as asking:
        await until(lambda: _booked(system), 60, "the opening in the books")
        # With this small share of CPU time, it pauses for minutes after its first step.
        comparing = asyncio.create_task(compares_keys(system, redis)(shard, 0.001))
        try:
            await until(begun, 60, "the copy of the shard")
            for _ in range(3):
                await asyncio.sleep(0.3)
                busy = ""
                try:
                    await older_snapshots_gone(asking, system.schema_, 1)
                except Busy as error:
                    busy = str(error)
                # A user projection of a test that runs at the same time may have a snapshot, too.
                assert system_name(system.schema_) not in busy
            assert not comparing.done()
        finally:
            comparing.cancel()
            await asyncio.gather(comparing, return_exceptions=True)
            await redis.aclose()


async def _booked(settings: Settings) -> bool:
    return await rows(settings, "SELECT count(*) FROM audit") == [(1,)]


async def test_a_session_is_named_after_its_system_whatever_the_dsn_says(system: Settings) -> None:
    """The name fits completely, for schemas and purposes of every length, and still contains the system while
    a lock is held.
    """
    named = f"{system.postgres}?application_name=mine"
    name_of = "SELECT application_name FROM pg_stat_activity WHERE pid = {}"
    for schema in (system.schema_, *LONG):
        for work in ("", "ledger", "grabs_per_minute.1" * 4, "grüße"):
            async with await connect(named, schema, work) as connection:
                query = name_of.format(connection.info.backend_pid)
                assert await rows(system, query) == [(session_name(schema, work),)]
        async with (
            await connect(named, schema) as connection,
            await connect(named, schema, "second") as second,
        ):
            await lock_or_raise(
                connection, f"test-{system.schema_}", "work that is told in many words, since it is long"
            )
            [(now,)] = await rows(system, name_of.format(connection.info.backend_pid))
            assert now.startswith(f"{system_name(schema)}: process {os.getpid()}")
            with pytest.raises(LockTaken, match=f"process {os.getpid()}"):
                await lock_or_raise(second, f"test-{system.schema_}", "the same")


def test_names_of_different_systems_and_works_differ() -> None:
    names = [
        session_name(schema, work)
        for schema in ("s", "s_b", *LONG)
        for work in ("", "ledger", "ledger_b", "w" * 80, "w" * 81)
    ]
    assert len(set(names)) == len(names)
    assert len({system_name(schema) for schema in ("s", "s_b", *LONG)}) == 4
    assert all(len(name.encode()) <= 63 for name in names)
