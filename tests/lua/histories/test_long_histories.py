"""Long random histories of a busy shop, by Lua and by the rules: offers with waiting lists that close and
retire.

A failure prints its seed, and `GRAB_TEST_SEED=<seed>` repeats it.
"""

import os
import secrets
from typing import Any, get_args

import pytest
import redis.asyncio

from grabstream.gate.calls import GateLimits
from grabstream.lua.keys import KeySpace
from grabstream.models.calendar import DAY_MS
from grabstream.models.commands import AnyCommand
from grabstream.models.events import CURRENT_VERSIONS
from grabstream.models.schema_documents import tag_of
from grabstream.settings import Settings
from tests.contract import check_answered, check_events
from tests.lua.histories.shop import Shop
from tests.lua.histories.twins import SHARDS, Twins
from tests.support.shards import NOW

pytestmark = pytest.mark.long

STEPS = 3_000
#: Steps between two replacements of an offer by its successor.
GENERATION_STEPS = 150
#: Steps between two comparisons of Redis with a recovery from the events up to then.
RECOVERY_STEPS = 190


async def _run(settings: Settings, seed: int, total: int = 40) -> Twins:
    """Plays the history of this seed, with `total` units per offer; returns its twins."""
    twins, shop = Twins(), Shop(seed, NOW, total=total)
    client = redis.asyncio.Redis.from_url(settings.redis_url)
    limits = GateLimits(timeout_ms=30_000, batch_commands_max=shop.random.choice((1, 3, 512)))
    await twins.begin_twins(client, KeySpace(f"long{secrets.token_hex(5)}", SHARDS), limits)
    try:
        for index in range(len(shop.names)):
            await twins.decide_both(shop.opening(index))
        await _let_time_pass(twins, shop, 10)
        for step in range(STEPS):
            commands_or_ms = shop.next(
                {name: offer for state in twins.states for name, offer in state.offers.items()}
            )
            if isinstance(commands_or_ms, int):
                await _let_time_pass(twins, shop, commands_or_ms)
            else:
                await twins.decide_both(commands_or_ms)
            if step % GENERATION_STEPS == GENERATION_STEPS - 1:
                await twins.decide_both(shop.replace(shop.random.randrange(len(shop.names))))
                await _let_time_pass(twins, shop, 10)
            if step % RECOVERY_STEPS == RECOVERY_STEPS - 1:
                for number in range(SHARDS):
                    await twins.compare_recovered(number)
            twins.check_conservation()
    except BaseException as error:
        error.add_note(f"GRAB_TEST_SEED={seed} repeats it")
        raise
    finally:
        await twins.end_twins()
        await client.aclose()
    return twins


async def _let_time_pass(twins: Twins, shop: Shop, ms: int) -> None:
    twins.now += ms
    shop.now = twins.now
    if shop.random.random() < 0.7:
        await twins.sweep_both()


def _count(twins: Twins, *words: str) -> int:
    """The number of event lines that contain all words."""
    lines: list[Any] = [line for of_shard in twins.lines for line in of_shard]
    return sum(all(word.encode() in line for word in words) for line in lines)


@pytest.mark.draws_cases
async def test_a_fresh_long_history_matches_the_rules(servers: Settings) -> None:
    await _run(servers, int(os.environ.get("GRAB_TEST_SEED") or secrets.randbelow(10**9)))


async def test_a_history_with_long_queues_matches_the_rules(servers: Settings) -> None:
    """Offers with so few units that a command that frees units also grants them to waiting grabs."""
    twins = await _run(servers, 3, total=8)
    assert (
        _count(twins, "grab.held", '"waited":true')
        - _count(twins, "grab.held", '"waited":true', '"command":"sweep"')
        > 5
    )
    assert _count(twins, "payment.refund_due", "not_enough_left") > 5


async def test_a_history_with_every_rare_event_matches_the_rules(servers: Settings) -> None:
    """The same history on every run; every type of event, command and rare case occurs in it."""
    twins = await _run(servers, 2)
    assert twins.now - NOW > 10 * DAY_MS
    rare = [
        ("grab.held", '"waited":true'), ("grab.released", "left_queue"),
        ("grab.released", "left_queue", '"command":"sweep"'),
        ("grab.confirmed", '"retaken":true'), ("grab.confirmed", '"codes"'), ("grab.returned", '"refunds"'),
        ("grab.redeemed",),
        ("grab.unredeemed",), ("grab.extended",), ("offer.retired",), ("payment.refund_due",),
        ("offer.amended", '"removed"'),
        ("grab.granted", '"metadata"'), ("grab.queued", '"metadata"'),
        ("grab.held", '"metadata"', '"waited":true'),
    ]  # fmt: skip
    assert not [words for words in rare if not _count(twins, *words)]
    # Every event and every command matches its schema.
    assert (
        check_events(line for of_shard in twins.lines for line in of_shard).keys() == CURRENT_VERSIONS.keys()
    )
    commands, outcomes = check_answered(twins.answered)
    assert commands.keys() == {tag_of(command) for command in get_args(AnyCommand)}
    assert len(outcomes) >= 20
