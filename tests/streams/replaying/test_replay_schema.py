"""Replays into a schema: they make the rows of the live read models, completely, up to a point, of some
offers or users, and after an interruption; and schemas that are refused.
"""

import asyncio
import json
import random
import signal
import subprocess
import sys
from typing import Any, Final

import pytest
from psycopg import errors

from grabstream.models.events import (
    OfferAmended,
    OfferClosed,
    OfferLoaded,
    OfferOpened,
    OfferPaused,
    OfferResumed,
    OfferRetired,
)
from grabstream.ops.formats.moments import show_time
from grabstream.settings import child_environment
from grabstream.streams.projecting.agents import make_projectors
from grabstream.streams.projecting.projector import CatchUp
from grabstream.workshop.rehearsal.run import open_books
from grabstream.workshop.rehearsal.stage import take_down
from tests.conftest import make_system, until
from tests.streams.replaying.histories import VIEWS, WAITS_FOR_US, RecordedSystem, drop, journal, tables
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import rows


@pytest.mark.every_change("one replay against the live system")
async def test_a_replay_makes_the_rows_of_the_live_system(recorded: RecordedSystem, prefix: str) -> None:
    """All events, from both sources, and from a journal with blocks of other sizes, some repeated."""
    now = await tables(recorded.settings, recorded.settings.schema_)
    for source in ("journal", "audit"):
        done = recorded.replay("--into", f"schema:{recorded.into(source)}", "--source", source)
        assert done.returncode == 0, done.stderr
        assert await tables(recorded.settings, recorded.into(source)) == now
    limits = "SELECT * FROM {}.limits ORDER BY offer, by, per, value"
    assert await rows(recorded.settings, limits.format(recorded.settings.schema_)) == await rows(
        recorded.settings, limits.format(recorded.into("journal"))
    )
    again = recorded.settings.model_copy(update={"prefix": prefix + "x", "schema_": prefix + "x"})
    await make_system(again)
    try:
        for history in recorded.histories.values():
            await journal(again, history, random.Random(99))
        done = grabstream("replay", "--into", f"schema:{prefix}x_all", **env_of(again))
        assert done.returncode == 0, done.stderr
        assert await tables(again, f"{prefix}x_all") == now
        await drop(again, f"{prefix}x_all")
    finally:
        await take_down(again)


@pytest.mark.long
async def test_a_replay_up_to_a_point_makes_the_rows_of_that_point(recorded: RecordedSystem) -> None:
    for name, words in (
        ("seqs", tuple(f"--until={shard}:{seq}" for shard, seq in recorded.seqs.items())),
        ("moment", (f"--until={recorded.at_ms}",)),
        ("trail", (f"--until={show_time(recorded.at_ms)}", "--source=audit")),
    ):
        done = recorded.replay("--into", f"schema:{recorded.into(name)}", *words)
        assert done.returncode == 0, done.stderr
        assert await tables(recorded.settings, recorded.into(name)) == recorded.then, name
        assert "limits_partial" in done.stdout
    # The same schema continues to a later time, then to the end; never to an earlier time.
    later = recorded.histories[5].events[-20].at
    for words, before in (((f"--until={later}",), recorded.at_ms), ((), later)):
        done = recorded.replay("--into", f"schema:{recorded.into('moment')}", *words)
        assert done.returncode == 0, done.stderr
        done = recorded.replay("--into", f"schema:{recorded.into('moment')}", f"--until={before}")
        assert (done.returncode, "ends later" in done.stderr) == (1, True), done.stderr
    assert await tables(recorded.settings, recorded.into("moment")) == await tables(
        recorded.settings, recorded.settings.schema_
    )
    limits = [
        await rows(recorded.settings, f"SELECT * FROM {schema}.limits")
        for schema in (recorded.settings.schema_, recorded.into("moment"))
    ]
    assert sorted(map(str, limits[0])) == sorted(map(str, limits[1]))


async def test_a_replay_of_offers_has_their_rows(recorded: RecordedSystem) -> None:
    """Views with their usual names have the live rows of these offers; other views are named `_partial`."""
    names = (recorded.histories[2].envelope, recorded.histories[2].names[0])
    done = recorded.replay(
        "--into", f"schema:{recorded.into('some')}", *(f"--offer={name}" for name in names), "--json"
    )
    assert done.returncode == 0, done.stderr
    partial = {"accounts", "balances"}
    assert set(json.loads(done.stdout)["partial_views"]) == partial | {"limits"}
    mine = await tables(
        recorded.settings, recorded.into("some"), [view for view in VIEWS if view not in partial]
    )
    for view in ("offers", "grabs", "transfers", "payments", "audit", "operations", "waiting"):
        query = f"SELECT * FROM {view} WHERE offer IN {names} ORDER BY {VIEWS[view]}"
        whole = await rows(recorded.settings, query)
        assert mine[view] == whole, view
        assert whole or view == "waiting"
    # The partial view of accounts has the sums of these offers' transfers.
    sums = await rows(
        recorded.settings,
        "SELECT account, asset, sum(change)::bigint FROM (SELECT debit AS account, asset, -amount AS change, "
        "offer FROM transfers "
        f"UNION ALL SELECT credit, asset, amount, offer FROM transfers) AS legs WHERE offer IN {names} GROUP "
        "BY 1, 2 ORDER BY 1, 2",
    )
    assert (await tables(recorded.settings, recorded.into("some"), ["accounts_partial"]))[
        "accounts_partial"
    ] == sums


OF_USERS: Final = (
    "Of the users alone: offers has the terms and the state of an offer, not what was taken of it; balances "
    "has these users only."
)


@pytest.mark.parametrize("words", [("--shard", "2"), ("--offer", "no-such")])
def test_a_replay_of_users_in_some_shards_says_that_it_has_no_balances(
    recorded: RecordedSystem, words: tuple[str, str]
) -> None:
    """`--dry-run` says it before anything is written, and `--json` in a field."""
    asked = ("--into", f"schema:{recorded.into('part')}", "--user", "u1", *words)
    said = "not what was taken of it; there is no balances, because a balance is of all offers and shards."
    done = recorded.replay(*asked, "--dry-run")
    assert (done.returncode, said in done.stdout) == (0, True), done
    shown = json.loads(recorded.replay(*asked, "--dry-run", "--json").stdout)
    assert shown["of_users"].endswith(said)


@pytest.mark.long
async def test_a_replay_of_users_has_their_rows(recorded: RecordedSystem) -> None:
    """In two steps: the second step knows the refunds due for grabs of the first."""
    for words in ((f"--until={recorded.at_ms}",), ()):
        done = recorded.replay(
            "--into", f"schema:{recorded.into('own')}", "--user", "u1", "--user", "alice", *words
        )
        assert done.returncode == 0, done.stderr
        assert OF_USERS in done.stdout
    mine = await tables(recorded.settings, recorded.into("own"), ["grabs", "balances", "payments"])
    users = "('u1', 'alice')"
    for view in ("grabs", "balances"):
        assert mine[view] == await rows(
            recorded.settings, f"SELECT * FROM {view} WHERE user_id IN {users} ORDER BY {VIEWS[view]}"
        )
        assert mine[view]
    paid = (
        f"SELECT p.* FROM payments AS p JOIN grabs AS g USING (offer, grab) WHERE g.user_id IN {users} "
        "ORDER BY payment"
    )
    assert mine["payments"] == await rows(recorded.settings, paid)
    booked = "'wallet:u1', 'hold:u1', 'wallet:alice', 'hold:alice'"
    # Without `line_seq`: here each grab of a run has a line.
    query = (
        "SELECT shard, seq, leg, offer, asset, debit, credit, amount, at FROM {}.transfers "
        "WHERE debit IN ({}) OR credit IN ({}) ORDER BY shard, seq, leg"
    )
    live, replayed = [
        await rows(recorded.settings, query.format(schema, booked, booked))
        for schema in (recorded.settings.schema_, recorded.into("own"))
    ]
    assert live == replayed
    query = "SELECT offer, state, total, closed_at, terms FROM {}.offers ORDER BY offer"
    live, replayed = [
        await rows(recorded.settings, query.format(schema))
        for schema in (recorded.settings.schema_, recorded.into("own"))
    ]
    assert live == replayed
    columns = await rows(
        recorded.settings,
        f"SELECT attname FROM pg_attribute WHERE attrelid = '{recorded.into('own')}.offers'::regclass",
    )
    assert not {"given", "held", "units_left"} & {name for (name,) in columns}
    offer_level = (
        OfferOpened | OfferLoaded | OfferAmended | OfferPaused | OfferResumed | OfferClosed | OfferRetired
    )
    bodies = {
        body for (body,) in await rows(recorded.settings, f"SELECT body FROM {recorded.into('own')}.audit")
    }
    missing = [
        event
        for history in recorded.histories.values()
        for line, event in zip(history.lines, history.events, strict=True)
        if isinstance(event, offer_level) and line.decode() not in bodies
    ]
    assert not missing


@pytest.mark.long
async def test_a_replay_refuses_schemas_that_are_not_its_own(recorded: RecordedSystem) -> None:
    own, other = recorded.settings.schema_, recorded.into("other")
    for schema in (own, "public"):
        done = recorded.replay("--into", f"schema:{schema}")
        assert (done.returncode, "cannot be used for replays" in done.stderr) == (1, True), done.stderr
    for number in (1, 99):
        done = recorded.replay("--into", f"schema:{own}_ledger_{number}")
        assert (done.returncode, "named like the system's read models" in done.stderr) == (1, True), (
            done.stderr
        )
    async with await open_books(recorded.settings) as books:
        await books.execute(f"CREATE SCHEMA {other}".encode())
    done = recorded.replay("--into", f"schema:{other}")
    assert (done.returncode, f'DROP SCHEMA "{other}" CASCADE' in done.stderr) == (1, True)
    assert recorded.replay("--into", f"schema:{recorded.into('mine')}", "--shard", "2").returncode == 0
    # Two replays at the same time would disturb each other.
    async with await open_books(recorded.settings) as books:
        await books.execute(
            "SELECT pg_advisory_lock(hashtext(%s))", (f"grabstream-replay-{recorded.into('mine')}",)
        )
        done = recorded.replay("--into", f"schema:{recorded.into('mine')}", "--shard", "2")
        assert (done.returncode, "being written by another" in done.stderr) == (1, True), done.stderr
    kept = await tables(
        recorded.settings,
        recorded.into("mine"),
        ["transfers", "accounts_partial", "balances_partial", "offers"],
    )
    assert kept["transfers"] == await rows(
        recorded.settings, "SELECT * FROM transfers WHERE shard = 2 ORDER BY shard, seq, leg"
    )
    done = recorded.replay("--into", f"schema:{recorded.into('mine')}", "--shard", "5")
    assert (done.returncode, "another replay, made with shards [2]" in done.stderr) == (1, True), done.stderr
    # A schema is continued only with the definitions with which it was made.
    change = "jsonb_set(definition, '{definitions,balances}', '9')"
    async with await open_books(recorded.settings) as books:
        await books.execute(f"UPDATE {recorded.into('mine')}.replay SET definition = {change}".encode())
    done = recorded.replay("--into", f"schema:{recorded.into('mine')}", "--shard", "2")
    assert (done.returncode, "'balances': 9" in done.stderr) == (1, True), done.stderr


@pytest.mark.long
async def test_no_worker_writes_the_schema_of_a_replay(recorded: RecordedSystem) -> None:
    schema = recorded.into("mine")
    assert (
        recorded.replay(
            "--into", f"schema:{schema}", "--until", f"2:{recorded.seqs[2]}", "--shard", "2"
        ).returncode
        == 0
    )
    before = await tables(recorded.settings, schema, ["audit"])
    own = {**env_of(recorded.settings), "schema": schema}
    for verb in ("worker", "init"):
        done = grabstream(verb, **own)
        # The prefix belongs to the schema of the system. This is reported first.
        said = (
            "bounded replay" in done.stderr
            or f"belongs to GRAB_SCHEMA={recorded.settings.schema_}," in done.stderr
        )
        assert (done.returncode, said) == (2, True), done.stderr
    # A projector started in another way (by Faust, for example) has no version to write, and no other session
    # can move a cursor.
    of = recorded.settings
    [projector] = make_projectors(of.kafka, of.prefix, of.shards, of.postgres, schema, ["ledger"])
    running = asyncio.create_task(projector.run())
    await projector.put(CatchUp(2))
    await until(lambda: "has no read models" in projector.waits_for, 20, "the refusal")
    running.cancel()
    await asyncio.wait({running})
    async with await open_books(of) as books:
        with pytest.raises(errors.RaiseException, match="bounded replay"):
            await books.execute(f"UPDATE {schema}.projection_cursors SET seq = seq + 1".encode())
    assert await tables(recorded.settings, schema, ["audit"]) == before


@pytest.mark.long
async def test_an_interrupted_replay_continues(recorded: RecordedSystem) -> None:
    """SIGINT and SIGTERM while it writes: the same command continues, and the rows are those of an
    uninterrupted run.
    """
    schema = recorded.into("stopped")
    assert recorded.replay("--into", f"schema:{schema}", f"--until={recorded.at_ms}").returncode == 0
    command = [sys.executable, "-m", "grabstream.ops.cli", "replay", "--into", f"schema:{schema}"]
    for number in (signal.SIGINT, signal.SIGTERM):
        # It begins to write and then waits, since its last table is locked.
        async with await open_books(recorded.settings) as books, books.transaction():
            await books.execute(f"LOCK TABLE {schema}.audit IN ACCESS EXCLUSIVE MODE".encode())
            running = subprocess.Popen(
                command, env=child_environment(**env_of(recorded.settings)), stderr=subprocess.PIPE
            )

            async def waits(books: Any = books) -> bool:
                return await (await books.execute(WAITS_FOR_US)).fetchone() is not None

            await until(waits, 30, "the wait of the replay")
            running.send_signal(number)
            await until(lambda running=running: running.poll() is not None, 20, "the end")
        assert running.returncode == 128 + number
        assert running.stderr is not None
        assert b"repeat the same command to continue" in running.stderr.read()
        assert await tables(recorded.settings, schema) == recorded.then
    done = recorded.replay("--into", f"schema:{schema}")
    assert done.returncode == 0, done.stderr
    assert await tables(recorded.settings, schema) == await tables(
        recorded.settings, recorded.settings.schema_
    )
