"""A read model whose tables were dropped by hand: every command reports it and names the rebuild, the rebuild
works, and the other read models continue.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from grabstream.connections.opening import open_gate
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import EnvelopeTerms
from grabstream.ops.verification.verifying import verify
from grabstream.projections.definitions import PROJECTIONS
from grabstream.settings import Settings
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import until
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import (
    journal,  # noqa: F401 - a fixture
    rows,
)
from tests.support.rebuilding import (
    booked,  # noqa: F401 - a fixture
    digests,
    version_in,
)


async def execute(settings: Settings, statement: str) -> None:
    async with await open_books(settings) as books:
        await books.execute(statement.encode())


@pytest.mark.long
@pytest.mark.parametrize(
    "projection",
    ["audit", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("ledger", "balances"))],
)
async def test_a_dropped_version_is_reported_and_rebuilt(booked: Settings, projection: str) -> None:
    live = await version_in(booked, projection)
    before = await digests(booked, live)
    what = f"the tables of {projection}, in schema {live.schema}, are gone"
    for statement in (f"DROP SCHEMA {live.schema} CASCADE", f"DROP TABLE {{}}.{next(iter(before))} CASCADE"):
        lost = await version_in(booked, projection)
        await execute(booked, statement.format(lost.schema))
        what = f"in schema {lost.schema}, are gone"
        diagnosis = grabstream("doctor", "--json", **env_of(booked))
        assert what in diagnosis.stdout
        assert f"grabstream rebuild {projection}" in diagnosis.stdout
        done = grabstream("init", **env_of(booked))
        assert (done.returncode, f"run `grabstream rebuild {projection}`" in done.stderr) == (0, True), (
            done.stderr
        )
        assert await rows(
            booked, f"SELECT count(DISTINCT projection) FROM cursors WHERE projection <> '{projection}'"
        ) == [(2,)]
        assert grabstream("status", "--json", **env_of(booked)).returncode in (0, 1)
        refused = grabstream("rebuild", "undo", projection, **env_of(booked))
        assert refused.returncode == 1
        done = grabstream("rebuild", projection, **env_of(booked))
        assert done.returncode == 0, done.stderr
        new = await version_in(booked, projection)
        assert new.schema != lost.schema
        assert await digests(booked, new) == before
        assert what not in grabstream("doctor", "--json", **env_of(booked)).stdout
        done = grabstream("rebuild", projection, "--no-keep", **env_of(booked))
        assert done.returncode == 0, done.stderr


@pytest.mark.long
async def test_a_rebuild_succeeds_after_live_and_building_schemas_were_dropped(booked: Settings) -> None:
    live = await version_in(booked, "ledger")
    before = await digests(booked, live)
    assert grabstream("rebuild", "build", "ledger", **env_of(booked)).returncode == 0
    building = await version_in(booked, "ledger", "building")
    await execute(booked, f"DROP SCHEMA {building.schema} CASCADE; DROP SCHEMA {live.schema} CASCADE")
    done = grabstream("rebuild", "ledger", "--from", "audit", **env_of(booked))
    assert done.returncode == 0, done.stderr
    assert await digests(booked, await version_in(booked, "ledger")) == before


async def _are_at(settings: Settings, seq: int) -> bool:
    seqs = await rows(settings, "SELECT projection, max(seq) FROM cursors GROUP BY 1 ORDER BY 1")
    return seqs == [(name, seq) for name in sorted(PROJECTIONS)]


@pytest.mark.long
async def test_a_worker_continues_while_tables_and_cursors_are_missing(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """The tables of one read model are dropped, the cursors of another deleted. A worker with all roles
    continues to decide and to apply the others, and continues these two after a rebuild.
    """
    running = worker(system, "decide,relay,sweep,project,publish,verify")
    terms = EnvelopeTerms(issuer="alice", funding="pay", asset="CNY", total=900, parts=9)

    async def grab(user: str) -> None:
        async with open_gate(system) as gate:
            if user == "a":
                await gate.decide([Open(id="o", offer="e", terms=terms)], patience_ms=30_000)
            [answer] = await gate.decide([Grab(id=user, offer="e", user=user)], patience_ms=30_000)
            assert answer.outcome == "granted"

    await grab("a")
    await until(lambda: _are_at(system, 2), 60, "the books")
    ledger, balances = await version_in(system, "ledger"), await version_in(system, "balances")
    await execute(system, f"DELETE FROM {balances.schema}.projection_cursors")
    await execute(system, f"DROP SCHEMA {ledger.schema} CASCADE")
    await grab("b")
    audit = await version_in(system, "audit")

    async def audited() -> bool:
        return await rows(system, f"SELECT max(seq) FROM {audit.schema}.projection_cursors") == [(3,)]

    await until(audited, 60, "the audit trail")
    await until(
        lambda: "are gone: run `grabstream rebuild ledger`" in running.log.read_text(),
        60,
        "the wait of the ledger",
    )
    await until(lambda: "has no cursor of shard" in running.log.read_text(), 60, "the wait of balances")
    await grab("c")
    assert running.process.poll() is None
    for projection in ("ledger", "balances"):
        if projection == "balances":
            await execute(system, f"DROP SCHEMA {balances.schema} CASCADE")
        done = grabstream("rebuild", projection, **env_of(system))
        assert done.returncode == 0, done.stderr
    await grab("d")
    wrong = {
        check.name: check.problems for check in await verify(system, wait_seconds=60) if not check.passed
    }
    assert not wrong, wrong
    assert running.stop() == 0


@pytest.mark.long
async def test_dropped_tables_of_events_are_reported_and_made_by_init(booked: Settings) -> None:
    """What was published is in the topic: its tables have only the shards at which publishing stopped."""
    for statement in ("DROP SCHEMA {} CASCADE", "DROP TABLE {}.stopped_shards CASCADE"):
        lost = await version_in(booked, "events")
        await execute(booked, statement.format(lost.schema))
        what = f"the tables of events, in schema {lost.schema}, are gone"
        diagnosis = json.loads(grabstream("doctor", "--json", **env_of(booked)).stdout)
        [finding] = [finding for finding in diagnosis["findings"] if finding["what"] == what]
        assert finding["command"] == "grabstream init"
        done = grabstream("init", **env_of(booked))
        assert done.returncode == 0, done.stderr
        assert what not in grabstream("doctor", "--json", **env_of(booked)).stdout
        assert await rows(booked, "SELECT count(*) FROM stopped_shards") == [(0,)]
