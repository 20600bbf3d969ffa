"""A read model whose tables somebody has dropped: who is asked about it says so and names the way out, which
leads out; and nobody else waits for it.
"""

from collections.abc import Callable
from typing import Any

import pytest

from grabstream.models.commands import Grab, Open
from grabstream.models.offers import EnvelopeTerms
from grabstream.ops.connections.opening import open_gate
from grabstream.ops.rehearsal.run import open_books
from grabstream.ops.settings import Settings
from grabstream.ops.verification.verifying import verify
from grabstream.projections.definitions import PROJECTIONS
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


async def dropped(settings: Settings, statement: str) -> None:
    async with await open_books(settings) as books:
        await books.execute(statement.encode())


@pytest.mark.parametrize(
    "projection",
    ["audit", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("ledger", "balances"))],
)
async def test_a_dropped_version_is_made_anew(booked: Settings, projection: str) -> None:
    live = await version_in(booked, projection)
    before = await digests(booked, live)
    what = f"the tables of {projection}, in schema {live.schema}, are gone"
    for statement in (f"DROP SCHEMA {live.schema} CASCADE", f"DROP TABLE {{}}.{next(iter(before))} CASCADE"):
        lost = await version_in(booked, projection)
        await dropped(booked, statement.format(lost.schema))
        what = f"in schema {lost.schema}, are gone"
        found = grabstream("doctor", "--json", **env_of(booked))
        assert what in found.stdout
        assert f"grabstream rebuild {projection}" in found.stdout
        done = grabstream("init", **env_of(booked))
        assert (done.returncode, f"run `grabstream rebuild {projection}`" in done.stderr) == (0, True), (
            done.stderr
        )
        assert await rows(
            booked, f"SELECT count(DISTINCT projection) FROM cursors WHERE projection <> '{projection}'"
        ) == [(2,)]
        assert grabstream("status", "--json", **env_of(booked)).returncode in (0, 1)
        refused = grabstream("rebuild", projection, "--undo", **env_of(booked))
        assert refused.returncode == 1
        done = grabstream("rebuild", projection, **env_of(booked))
        assert done.returncode == 0, done.stderr
        made = await version_in(booked, projection)
        assert made.schema != lost.schema
        assert await digests(booked, made) == before
        assert what not in grabstream("doctor", "--json", **env_of(booked)).stdout
        done = grabstream("rebuild", projection, "--no-keep", **env_of(booked))
        assert done.returncode == 0, done.stderr


async def test_the_ledger_from_the_audit_trail_and_a_build_that_is_gone(booked: Settings) -> None:
    live = await version_in(booked, "ledger")
    before = await digests(booked, live)
    assert grabstream("rebuild", "ledger", "--no-switch", **env_of(booked)).returncode == 0
    building = await version_in(booked, "ledger", "building")
    await dropped(booked, f"DROP SCHEMA {building.schema} CASCADE; DROP SCHEMA {live.schema} CASCADE")
    done = grabstream("rebuild", "ledger", "--from", "audit", **env_of(booked))
    assert done.returncode == 0, done.stderr
    assert await digests(booked, await version_in(booked, "ledger")) == before


async def _are_at(settings: Settings, seq: int) -> bool:
    found = await rows(settings, "SELECT projection, max(seq) FROM cursors GROUP BY 1 ORDER BY 1")
    return found == [(name, seq) for name in sorted(PROJECTIONS)]


async def test_deciding_goes_on_beside_it(system: Settings, worker: Callable[..., Any]) -> None:
    """In a worker with all roles: tables dropped, cursors deleted; the other read models go on, and so do
    these when they are back.
    """
    one = worker(system, "decide,relay,sweep,project,publish,verify")
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
    await dropped(system, f"DELETE FROM {balances.schema}.projection_cursors")
    await dropped(system, f"DROP SCHEMA {ledger.schema} CASCADE")
    await grab("b")
    audit = await version_in(system, "audit")

    async def audited() -> bool:
        return await rows(system, f"SELECT max(seq) FROM {audit.schema}.projection_cursors") == [(3,)]

    await until(audited, 60, "the audit trail")
    await until(
        lambda: "are gone: run `grabstream rebuild ledger`" in one.log.read_text(), 60, "the ledger's wait"
    )
    await until(lambda: "has no cursor of shard" in one.log.read_text(), 60, "the wait of balances")
    await grab("c")
    assert one.process.poll() is None
    for projection in ("ledger", "balances"):
        if projection == "balances":
            await dropped(system, f"DROP SCHEMA {balances.schema} CASCADE")
        done = grabstream("rebuild", projection, **env_of(system))
        assert done.returncode == 0, done.stderr
    await grab("d")
    wrong = {
        check.name: check.problems for check in await verify(system, wait_seconds=60) if not check.passed
    }
    assert not wrong, wrong
    assert one.stop() == 0
