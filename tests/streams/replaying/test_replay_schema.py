"""Replays into a schema: the rows of the live read models, whole, up to a point, in part, stopped and begun
again; and what is refused.
"""

import asyncio
import json
import random
import signal
import subprocess
import sys
from typing import Any

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
from grabstream.ops.rehearsal.run import open_books
from grabstream.ops.rehearsal.stage import take_down
from grabstream.ops.settings import child_environment
from grabstream.streams.projecting.agents import make_projectors
from grabstream.streams.projecting.projector import CatchUp
from tests.conftest import make_system, until
from tests.streams.replaying.histories import VIEWS, WAITS_FOR_US, System, drop, journal, tables
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import rows


async def test_read_models_anew_are_those_of_the_live_system(told: System, prefix: str) -> None:
    """All of it, from both sources, and from a journal whose blocks are cut elsewhere and repeated."""
    now = await tables(told.settings, told.settings.schema_)
    for source in ("journal", "audit"):
        done = told.replay("--into", f"schema:{told.into(source)}", "--source", source)
        assert done.returncode == 0, done.stderr
        assert await tables(told.settings, told.into(source)) == now
    limits = "SELECT * FROM {}.limits ORDER BY offer, by, per, value"
    assert await rows(told.settings, limits.format(told.settings.schema_)) == await rows(
        told.settings, limits.format(told.into("journal"))
    )
    again = told.settings.model_copy(update={"prefix": prefix + "x", "schema_": prefix + "x"})
    await make_system(again)
    try:
        for history in told.histories.values():
            await journal(again, history, random.Random(99))
        done = grabstream("replay", "--into", f"schema:{prefix}x_all", **env_of(again))
        assert done.returncode == 0, done.stderr
        assert await tables(again, f"{prefix}x_all") == now
        await drop(again, f"{prefix}x_all")
    finally:
        await take_down(again)


async def test_up_to_a_point_it_is_what_the_live_system_was_there(told: System) -> None:
    for name, words in (
        ("places", tuple(f"--until={shard}:{seq}" for shard, seq in told.places.items())),
        ("moment", (f"--until={told.at_ms}",)),
        ("trail", (f"--until={show_time(told.at_ms)}", "--source=audit")),
    ):
        done = told.replay("--into", f"schema:{told.into(name)}", *words)
        assert done.returncode == 0, done.stderr
        assert await tables(told.settings, told.into(name)) == told.then, name
        assert "limits_partial" in done.stdout
    # Further on, in the same schema: to a later time, then to the end; never back.
    later = told.histories[5].events[-20].at
    for words, before in (((f"--until={later}",), told.at_ms), ((), later)):
        done = told.replay("--into", f"schema:{told.into('moment')}", *words)
        assert done.returncode == 0, done.stderr
        done = told.replay("--into", f"schema:{told.into('moment')}", f"--until={before}")
        assert (done.returncode, "goes beyond" in done.stderr) == (1, True), done.stderr
    assert await tables(told.settings, told.into("moment")) == await tables(
        told.settings, told.settings.schema_
    )
    limits = [
        await rows(told.settings, f"SELECT * FROM {schema}.limits")
        for schema in (told.settings.schema_, told.into("moment"))
    ]
    assert sorted(map(str, limits[0])) == sorted(map(str, limits[1]))


async def test_offers_alone(told: System) -> None:
    """What is under its usual name is what the live system has of these offers."""
    names = (told.histories[2].envelope, told.histories[2].names[0])
    done = told.replay(
        "--into", f"schema:{told.into('some')}", *(f"--offer={name}" for name in names), "--json"
    )
    assert done.returncode == 0, done.stderr
    partial = {"accounts", "balances"}
    assert set(json.loads(done.stdout)["partial_views"]) == partial | {"limits"}
    mine = await tables(told.settings, told.into("some"), [view for view in VIEWS if view not in partial])
    for view in ("offers", "grabs", "transfers", "payments", "audit", "operations", "waiting"):
        query = f"SELECT * FROM {view} WHERE offer IN {names} ORDER BY {VIEWS[view]}"
        whole = await rows(told.settings, query)
        assert mine[view] == whole, view
        assert whole or view == "waiting"
    # The part on accounts is the sum of these offers' transfers.
    sums = await rows(
        told.settings,
        "SELECT account, asset, sum(change)::bigint FROM (SELECT debit AS account, asset, -amount AS change, "
        "offer FROM transfers "
        f"UNION ALL SELECT credit, asset, amount, offer FROM transfers) AS legs WHERE offer IN {names} GROUP "
        "BY 1, 2 ORDER BY 1, 2",
    )
    assert (await tables(told.settings, told.into("some"), ["accounts_partial"]))["accounts_partial"] == sums


async def test_users_alone(told: System) -> None:
    """In two steps: what is due back for a grab of the first is known in the second."""
    for words in ((f"--until={told.at_ms}",), ()):
        done = told.replay("--into", f"schema:{told.into('own')}", "--user", "u1", "--user", "alice", *words)
        assert done.returncode == 0, done.stderr
    mine = await tables(told.settings, told.into("own"), ["grabs", "balances", "payments"])
    users = "('u1', 'alice')"
    for view in ("grabs", "balances"):
        assert mine[view] == await rows(
            told.settings, f"SELECT * FROM {view} WHERE user_id IN {users} ORDER BY {VIEWS[view]}"
        )
        assert mine[view]
    paid = (
        f"SELECT p.* FROM payments AS p JOIN grabs AS g USING (offer, grab) WHERE g.user_id IN {users} "
        "ORDER BY payment"
    )
    assert mine["payments"] == await rows(told.settings, paid)
    booked = "'wallet:u1', 'hold:u1', 'wallet:alice', 'hold:alice'"
    query = "SELECT * FROM {}.transfers WHERE debit IN ({}) OR credit IN ({}) ORDER BY shard, seq, leg"
    found = [
        await rows(told.settings, query.format(schema, booked, booked))
        for schema in (told.settings.schema_, told.into("own"))
    ]
    assert found[0] == found[1]
    said = "SELECT offer, state, total, closed_at, terms FROM {}.offers ORDER BY offer"
    found = [
        await rows(told.settings, said.format(schema)) for schema in (told.settings.schema_, told.into("own"))
    ]
    assert found[0] == found[1]
    columns = await rows(
        told.settings,
        f"SELECT attname FROM pg_attribute WHERE attrelid = '{told.into('own')}.offers'::regclass",
    )
    assert not {"given", "held", "units_left"} & {name for (name,) in columns}
    offer_level = (
        OfferOpened | OfferLoaded | OfferAmended | OfferPaused | OfferResumed | OfferClosed | OfferRetired
    )
    bodies = {body for (body,) in await rows(told.settings, f"SELECT body FROM {told.into('own')}.audit")}
    missing = [
        event
        for history in told.histories.values()
        for line, event in zip(history.lines, history.events, strict=True)
        if isinstance(event, offer_level) and line.decode() not in bodies
    ]
    assert not missing


async def test_schemas_that_are_refused(told: System) -> None:
    own, other = told.settings.schema_, told.into("other")
    for schema in (own, "public"):
        done = told.replay("--into", f"schema:{schema}")
        assert (done.returncode, "not for replays" in done.stderr) == (1, True), done.stderr
    for number in (1, 99):
        done = told.replay("--into", f"schema:{own}_ledger_{number}")
        assert (done.returncode, "named as the system's own read models" in done.stderr) == (1, True), (
            done.stderr
        )
    async with await open_books(told.settings) as books:
        await books.execute(f"CREATE SCHEMA {other}".encode())
    done = told.replay("--into", f"schema:{other}")
    assert (done.returncode, f"DROP SCHEMA {other} CASCADE" in done.stderr) == (1, True)
    assert told.replay("--into", f"schema:{told.into('mine')}", "--shard", "2").returncode == 0
    # Two at once would be in each other's way.
    async with await open_books(told.settings) as books:
        await books.execute(
            "SELECT pg_advisory_lock(hashtext(%s))", (f"grabstream-replay-{told.into('mine')}",)
        )
        done = told.replay("--into", f"schema:{told.into('mine')}", "--shard", "2")
        assert (done.returncode, "being written by another" in done.stderr) == (1, True), done.stderr
    kept = await tables(
        told.settings, told.into("mine"), ["transfers", "accounts_partial", "balances_partial", "offers"]
    )
    assert kept["transfers"] == await rows(
        told.settings, "SELECT * FROM transfers WHERE shard = 2 ORDER BY shard, seq, leg"
    )
    done = told.replay("--into", f"schema:{told.into('mine')}", "--shard", "5")
    assert (done.returncode, "another replay, made with shards [2]" in done.stderr) == (1, True), done.stderr
    # Its tables are those of its release.
    for change, word in (
        ("jsonb_set(definition, '{definitions,balances}', '1')", "'balances': 1"),
        ("definition - 'definitions'", "older"),
    ):
        async with await open_books(told.settings) as books:
            await books.execute(f"UPDATE {told.into('mine')}.replay SET definition = {change}".encode())
        done = told.replay("--into", f"schema:{told.into('mine')}", "--shard", "2")
        assert (done.returncode, word in done.stderr, "Traceback" in done.stderr) == (1, True, False), (
            done.stderr
        )


async def test_no_worker_goes_on_with_a_replay(told: System) -> None:
    schema = told.into("mine")
    assert (
        told.replay("--into", f"schema:{schema}", "--until", f"2:{told.places[2]}", "--shard", "2").returncode
        == 0
    )
    before = await tables(told.settings, schema, ["audit"])
    own = {**env_of(told.settings), "schema": schema}
    for verb in ("worker", "init"):
        done = grabstream(verb, **own)
        # The prefix belongs to the system's own schema, which is said first.
        said = (
            "bounded replay" in done.stderr
            or f"belongs to GRAB_SCHEMA={told.settings.schema_}," in done.stderr
        )
        assert (done.returncode, said) == (2, True), done.stderr
    # A projector that was started all the same (by Faust, say) finds no version to write; nor can another
    # session move a cursor.
    one = told.settings
    [projector] = make_projectors(one.kafka, one.prefix, one.shards, one.postgres, schema, ["ledger"])
    running = asyncio.create_task(projector.run())
    await projector.put(CatchUp(2))
    await until(lambda: "has no read models" in projector.waits_for, 20, "the refusal")
    running.cancel()
    await asyncio.wait({running})
    async with await open_books(one) as books:
        with pytest.raises(errors.RaiseException, match="bounded replay"):
            await books.execute(f"UPDATE {schema}.projection_cursors SET seq = seq + 1".encode())
    assert await tables(told.settings, schema, ["audit"]) == before


async def test_stopped_and_begun_again(told: System) -> None:
    """SIGINT and SIGTERM in the middle; the same command goes on, and the rows are those of a run that was
    never stopped.
    """
    schema = told.into("stopped")
    assert told.replay("--into", f"schema:{schema}", f"--until={told.at_ms}").returncode == 0
    command = [sys.executable, "-m", "grabstream.ops.cli", "replay", "--into", f"schema:{schema}"]
    for number in (signal.SIGINT, signal.SIGTERM):
        # It gets as far as to write, and no further: the last of the tables is locked.
        async with await open_books(told.settings) as books, books.transaction():
            await books.execute(f"LOCK TABLE {schema}.audit IN ACCESS EXCLUSIVE MODE".encode())
            running = subprocess.Popen(
                command, env=child_environment(**env_of(told.settings)), stderr=subprocess.PIPE
            )

            async def waits(books: Any = books) -> bool:
                return await (await books.execute(WAITS_FOR_US)).fetchone() is not None

            await until(waits, 30, "the replay's writing")
            running.send_signal(number)
            await until(lambda running=running: running.poll() is not None, 20, "the end")
        assert running.returncode == 128 + number
        assert running.stderr is not None
        assert b"the same command goes on" in running.stderr.read()
        assert await tables(told.settings, schema) == told.then
    done = told.replay("--into", f"schema:{schema}")
    assert done.returncode == 0, done.stderr
    assert await tables(told.settings, schema) == await tables(told.settings, told.settings.schema_)
