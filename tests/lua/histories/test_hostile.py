"""Hostile histories, played by Lua and by the rules, recovered, projected into tables, and checked from the
event lines alone.

In earlier releases such histories found: offers whose ids looked like keys of other offers; answers kept
after their offer had retired; due sums beyond the exact range; campaign limits counted in two time zones;
tickets valid for several offers; and units that stayed unused because one grab waited for too many.

A failure prints its seed, and `GRAB_TEST_SEED=<seed>` repeats it. `TIER=nightly` plays more and longer
histories.
"""

import asyncio
import os
import random
import secrets
from typing import Any

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from grabstream.gate.calls import GateLimits
from grabstream.lua.keys import KeySpace
from grabstream.models.commands import Amend, Changes, Grab, Open, Release
from grabstream.models.offers import CouponTerms
from grabstream.settings import Settings
from tests.conftest import NIGHTLY, examples
from tests.lua.histories.hostile_history import Sweep
from tests.lua.histories.hostile_twins import HostileTwins, play
from tests.lua.histories.tables import check_tables
from tests.lua.histories.twins import SHARDS
from tests.support.shards import NOW

STEPS, HISTORIES, EXAMPLES = (2_000, 40, 300) if NIGHTLY else (300, 4, examples(12))
#: Steps of the short histories, which Hypothesis can shrink if one fails.
SHORT_STEPS = 80


@pytest.mark.long
@pytest.mark.timeout(3_600 if NIGHTLY else 900)
@pytest.mark.parametrize(
    "history", [*range(1, HISTORIES), pytest.param("fresh", marks=pytest.mark.draws_cases)]
)
async def test_hostile_histories_keep_all_promises(servers: Settings, history: Any) -> None:
    """The same histories on every run, and one with a new seed."""
    seed = int(
        os.environ.get("GRAB_TEST_SEED") or (secrets.randbelow(10**9) if history == "fresh" else history)
    )
    try:
        await _play(servers, random.Random(seed), STEPS)
    except BaseException as error:
        error.add_note(f"GRAB_TEST_SEED={seed} repeats it")
        raise


@pytest.mark.timeout(3_600 if NIGHTLY else 900)
@hypothesis_settings(max_examples=EXAMPLES)
@given(draw=st.randoms(use_true_random=False), steps=st.integers(1, SHORT_STEPS))
def test_short_hostile_histories_keep_all_promises(
    servers: Settings, draw: random.Random, steps: int
) -> None:
    """Histories drawn by Hypothesis, which searches for the shortest failing one."""
    asyncio.run(_play(servers, draw, steps))


async def _play(servers: Settings, draw: random.Random, steps: int) -> None:
    client = redis.asyncio.Redis.from_url(servers.redis_url)
    try:
        twins = await play(client, draw, steps)
    finally:
        await client.aclose()
    await check_tables(servers.postgres, twins.lines, twins.states, twins.now)


async def waiting_twins(client: Any, waiters: int) -> HostileTwins:
    """Twins with an offer `o` of one unit, which `g0` holds for a minute while `g1` … wait; the offer closes
    10 s later.
    """
    twins = HostileTwins()
    await twins.begin_twins(
        client, KeySpace(f"closing{secrets.token_hex(5)}", SHARDS), GateLimits(timeout_ms=30_000)
    )
    terms = CouponTerms(
        issuer="shop", total=1, hold_ms=60_000, closes_at=NOW + 70_000, price=1, currency="CNY",
        waiting_list=True,
    )  # fmt: skip
    grabs = [Grab(id=f"g{n}", offer="o", user=f"u{n}", wait=True) for n in range(waiters + 1)]
    await twins.decide_both([Open(id="open", offer="o", terms=terms), *grabs])
    twins.now += 20_000
    return twins


async def compare_and_end(twins: HostileTwins) -> None:
    """Compares recoveries in different steps with the shard as it is."""
    for seed in range(8):
        await twins.compare_recovered(twins.keys.shard_of_offer("o"), seed)
    await twins.end_twins()


@pytest.mark.long
@pytest.mark.parametrize("waiters", [2, 26], ids=["one is served", "a call serves 25 and leaves one"])
@pytest.mark.parametrize("leaves", [False, True], ids=["who waits stays", "who waits leaves"])
async def test_units_that_return_after_the_closing_time_change_no_due_time(
    client: Any, waiters: int, leaves: bool
) -> None:
    """The sweeper ends a hold after the offer's closing time, and has not closed the offer yet: no grab is
    served, and when the offer is due was decided before. A recovery must not take these units for units that
    a call had left to the sweeper. A hostile history found it.
    """
    twins = await waiting_twins(client, waiters)
    if waiters > 25:
        await twins.decide_both([Amend(id="more", offer="o", changes=Changes(total=waiters + 1))])
    else:
        await twins.decide_both([Release(id="first", offer="o", grab="g0")])
    twins.now += 60_005
    await twins.sweep_some(Sweep(holds=1, broken_off=True))
    if leaves:
        await twins.decide_both([Release(id="away", offer="o", grab=f"g{waiters}")])
    await compare_and_end(twins)


async def test_units_that_nobody_waits_for_any_more_are_not_left_to_the_sweeper(client: Any) -> None:
    """A call serves 25 of 26 and leaves one to the sweeper, who leaves the queue before it is served."""
    twins = await waiting_twins(client, 26)
    await twins.decide_both([Amend(id="more", offer="o", changes=Changes(total=27))])
    twins.now += 1
    await twins.decide_both([Release(id="away", offer="o", grab="g26")])
    await compare_and_end(twins)
