"""Replays of a journal that a worker wrote: `replay`, `at`, `read_events` and the views agree."""

import json
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from grabstream import read_events, read_lines
from grabstream.connections.opening import open_gate
from grabstream.models.commands import Close, Confirm, Grab, Open, Release
from grabstream.models.events import GrabGranted, GrabHeld, encode_event
from grabstream.models.offers import CouponTerms, EnvelopeTerms, StockTerms
from grabstream.settings import Settings
from tests.conftest import Worker, until
from tests.streams.replaying.histories import drop, tables
from tests.streams.replaying.test_at import in_json
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import rows
from tests.support.runs import as_singles

pytestmark = pytest.mark.long

OFFERS = {
    "coupons": CouponTerms(issuer="shop", total=500),
    "stock": StockTerms(issuer="shop", total=500, price=7, currency="CNY", hold_ms=600_000, max_per_grab=3),
    "envelope": EnvelopeTerms(issuer="alice", funding="pay", asset="CNY", total=99_999, parts=200),
}


async def decide(settings: Settings, part: int) -> None:
    """A crowd grabs of each offer, in lists; some of what is held is paid, some is released."""
    async with open_gate(settings) as gate:
        if not part:
            opens = [Open(id=f"open-{offer}", offer=offer, terms=terms) for offer, terms in OFFERS.items()]

            async def all_open() -> bool:
                return {answer.outcome for answer in await gate.decide(opens)} == {"opened"}

            await until(all_open, what="shards that decide")
        for offer in OFFERS:
            grabs = [
                Grab(
                    id=f"{offer}-{part}-{number}", offer=offer, user=f"u{part}-{number}",
                    quantity=number % 3 + 1 if offer == "stock" else 1,
                )
                for number in range(80)
            ]  # fmt: skip
            outcomes = {answer.outcome for answer in await gate.decide(grabs)}
            assert outcomes == {"held" if offer == "stock" else "granted"}
        settling: list[Any] = [Release(id=f"r{part}", offer="stock", grab=f"stock-{part}-1")]
        settling.append(
            Confirm(
                id=f"c{part}",
                offer="stock",
                grab=f"stock-{part}-0",
                payment=f"p{part}",
                paid=7,
                currency="CNY",
            )
        )
        assert [answer.outcome for answer in await gate.decide(settling)] == ["released", "confirmed"]
        if part:
            await gate.decide([Close(id="close", offer="envelope")])


async def until_booked(settings: Settings) -> dict[int, int]:
    """Waits until all read models have every event that is journaled; returns the last seq of each shard."""
    ends = dict[int, int]()
    async with aclosing(read_lines(settings)) as lines:
        async for line in lines:
            ends[line.shard] = line.last_seq

    async def all_booked() -> bool:
        found = await rows(settings, "SELECT shard, seq FROM cursors")
        return all(seq == ends.get(shard, 0) for shard, seq in found)

    await until(all_booked, 60, f"{ends}")
    return ends


async def test_replays_and_views_of_a_journal_that_a_worker_wrote_agree(
    system: Settings, worker: Callable[..., Worker], tmp_path: Path
) -> None:
    running = worker(system, "decide,relay,sweep,project")
    await decide(system, 0)
    seqs = await until_booked(system)
    then = await tables(system, system.schema_)
    [(at_ms,)] = await rows(system, "SELECT max(at) FROM audit")
    # What is decided from now on has a later time: all servers have the clock of this machine.
    await until(lambda: _clock_is_after(system, at_ms), what="a later millisecond")
    await decide(system, 1)
    ends = await until_booked(system)
    assert running.stop() == 0

    # `replay` writes lines with runs. `read_events` has their grabs one by one, from each source.
    done = grabstream("replay", "--into", "-", **env_of(system))
    assert done.returncode == 0, done.stderr
    lines = [line.encode() for line in done.stdout.splitlines()]
    singles = as_singles(lines)
    assert len(singles) == sum(ends.values()) > 2 * len(lines)
    events = [event async for event in read_events(system)]
    assert [encode_event(event) for event in events] == singles
    assert [event async for event in read_events(system, source="audit")] == events
    # The view has the same grabs.
    grabs = [event for event in events if isinstance(event, GrabGranted | GrabHeld)]
    assert await rows(system, "SELECT offer, grab, user_id, quantity FROM grabs ORDER BY 1, 2") == sorted(
        (event.offer, event.grab, event.user, event.quantity) for event in grabs
    )
    # A schema that a replay fills has the rows of the live system: those of now, or those of before.
    now = await tables(system, system.schema_)
    try:
        for name, words, expected in (
            ("all", (), now), ("trail", ("--source", "audit"), now), ("then", ("--until", str(at_ms)), then)
        ):  # fmt: skip
            schema = f"{system.schema_}_{name}"
            done = grabstream("replay", "--into", f"schema:{schema}", *words, **env_of(system))
            assert done.returncode == 0, done.stderr
            assert await tables(system, schema) == expected, name
        done = grabstream("at", str(at_ms), "--json", **env_of(system))
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)
        assert {shard["shard"]: shard["seq"] for shard in shown["shards"] if shard["seq"]} == seqs
        offers = sorted(shown["offers"], key=lambda offer: str(offer["offer"]))
        assert [tuple(offer.values()) for offer in offers] == list(map(in_json, then["offers"]))
    finally:
        await drop(system, *(f"{system.schema_}_{name}" for name in ("all", "trail", "then")))


async def _clock_is_after(settings: Settings, at_ms: int) -> bool:
    [(now,)] = await rows(settings, "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint")
    return bool(now > at_ms + 1)
