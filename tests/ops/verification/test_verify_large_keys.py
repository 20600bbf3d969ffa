"""Keys with more fields than a page: they are compared without waiting when they are right, and damage of
them is found. Waits are counted in virtual time.
"""

import secrets
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from grabstream.connections.opening import open_gate
from grabstream.lua.keys import LAYOUT, KeySpace
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import CouponTerms, Limit
from grabstream.ops.verification.verifying import verify
from grabstream.settings import Settings
from grabstream.streams.relaying import shadow
from grabstream.streams.relaying.recovery import literal
from grabstream.streams.relaying.shadow import LOOKS, PAGE, ShadowShard, TimeShare

FIELDS = PAGE + 100
ANSWERS, PAYMENTS, PAST, USERS = "campaign:c/answers", "campaign:c/payments", "past", "offer:c:a/users"


class Waits:
    """Stands for the clock and the sleeps of the comparison: a sleep takes no time, and nothing else does."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    counted = Waits()
    monkeypatch.setattr(shadow, "asyncio", SimpleNamespace(sleep=counted.sleep))
    monkeypatch.setattr(shadow, "time", SimpleNamespace(monotonic=counted.monotonic))
    return counted


@pytest.fixture
async def pair(redis: Any, waits: Waits) -> AsyncIterator[tuple[str, ShadowShard]]:
    """A shard with large keys, and a shadow that is equal to it: the start of its keys, and the shadow."""
    name = f"large-{secrets.token_hex(4)}"
    live, made = KeySpace(name, 1).shard(0), KeySpace(f"{name}/made", 1).shard(0)
    await redis.hset(live.state, mapping={"seq": 0, "server_epoch": "x", "time": 1, "layout": LAYOUT})
    await redis.hset(made.state, "time", 1)
    for keys in (live, made):
        for key in (ANSWERS, PAYMENTS, USERS):
            await redis.hset(f"{keys.tag}:{key}", mapping={f"field{n}": n for n in range(FIELDS)})
        await redis.zadd(f"{keys.tag}:{PAST}", {f"offer{n}": 1e15 for n in range(FIELDS)})
        await redis.rpush(f"{keys.tag}:list", *range(FIELDS))
    yield f"{live.tag}:", ShadowShard(redis, live, made, None, None, None, TimeShare(0.5))  # type: ignore[arg-type]
    names = [key async for key in redis.scan_iter(match=f"{literal(name)}*", count=1_000)]
    await redis.unlink(*names)


async def test_equal_keys_are_compared_without_waiting(pair: tuple[str, ShadowShard], waits: Waits) -> None:
    _, compared = pair
    assert (await compared.compare()).differences == []
    assert waits.seconds == 0


Damage = Callable[[Any, str], Any]


def added(name: str, field: str) -> Damage:
    return lambda redis, start: redis.hset(f"{start}{name}", field, b"x")


def gone(name: str, field: str) -> Damage:
    return lambda redis, start: redis.hdel(f"{start}{name}", field)


async def _exchanged(redis: Any, start: str) -> None:
    """The number of fields stays the same."""
    await gone(ANSWERS, "field7")(redis, start)
    await added(ANSWERS, "thief")(redis, start)


async def _another_kind(redis: Any, start: str) -> None:
    await redis.set(f"{start}campaign:new/answers", b"x" * FIELDS)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (added(ANSWERS, "thief"), [f"{ANSWERS}, thief is in Redis, but no event creates it"]),
        (gone(ANSWERS, "field7"), [f"{ANSWERS}, field7 is not in Redis"]),
        (
            _exchanged,
            [f"{ANSWERS}, field7 is not in Redis", f"{ANSWERS}, thief is in Redis, but no event creates it"],
        ),
        (added(PAYMENTS, "thief"), [f"{PAYMENTS}, thief is in Redis, but no event creates it"]),
        (
            lambda redis, start: redis.zadd(f"{start}{PAST}", {"thief": 1e15}),
            [f"{PAST}, thief is in Redis, but no event creates it"],
        ),
        (added(USERS, "thief"), [f"{USERS}, thief is in Redis, but no event creates it"]),
        (_another_kind, ["campaign:new/answers: Redis has 600 elements, the journal makes it 0"]),
        (
            lambda redis, start: redis.lpush(f"{start}list", "thief"),
            ["list: Redis has 601 elements, the journal makes it 600"],
        ),
    ],
    ids=["answer", "lost answer", "exchanged", "payment", "retired", "user", "another kind", "list"],
)
async def test_damage_of_a_large_key_is_found(
    redis: Any, pair: tuple[str, ShadowShard], waits: Waits, damage: Damage, says: list[str]
) -> None:
    start, compared = pair
    await damage(redis, start)
    differences = (await compared.compare()).differences
    assert sorted(differences) == [f"shard 0: {line}" for line in says]


async def test_no_answer_that_is_too_many_is_left_out(
    redis: Any, pair: tuple[str, ShadowShard], waits: Waits
) -> None:
    """Answers of a retired offer count as forgotten; they may stand before all others, in any number."""
    start, compared = pair
    many = {f"z{n}": b"x" for n in range(shadow.DOUBTS_AT_ONCE + 50)}
    await redis.hset(f"{start}{ANSWERS}", mapping=many)
    assert len((await compared.compare()).differences) == len(many)


async def test_waits_are_not_followed_by_a_pause(
    redis: Any, pair: tuple[str, ShadowShard], waits: Waits
) -> None:
    """The share of the time is about work: the looks at a difference are spread over seconds of waiting."""
    start, compared = pair
    await redis.hset(f"{start}{USERS}", "thief", b"x")
    assert len((await compared.compare()).differences) == 1
    # The number of users, then the one user that is too many.
    assert waits.seconds == pytest.approx(2 * sum(LOOKS))


async def test_a_step_is_followed_by_a_pause_and_a_wait_is_not(waits: Waits) -> None:
    pace = TimeShare(0.25)
    waits.seconds += 1  # work
    await pace.wait(10)
    assert waits.seconds == 11
    await pace()
    assert waits.seconds == 14
    await pace()
    assert waits.seconds == 14


@pytest.mark.long
async def test_a_campaign_with_many_grabs_is_compared_without_waiting(
    system: Settings, worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = []
    sleep = shadow.asyncio.sleep

    async def counted(wait: float) -> None:
        seconds.append(wait)
        await sleep(wait)

    worker(system, "decide,relay,project")
    terms = CouponTerms(issuer="shop", total=FIELDS, limits=(Limit("user", "week", 9, scope="campaign"),))
    async with open_gate(system) as gate:
        asked: dict[str, Any] = {"patience_ms": 60_000, "timeout_ms": 60_000}
        await gate.decide([Open(id="open", offer="c:a", terms=terms)], **asked)
        grabs = [Grab(id=f"g{n}", offer="c:a", user=f"u{n}") for n in range(FIELDS)]
        answers = await gate.decide(grabs, **asked)
        assert {answer.outcome for answer in answers} == {"granted"}
    monkeypatch.setattr(shadow, "asyncio", SimpleNamespace(sleep=counted))
    checks = await verify(system, 60, share=1)
    assert {check.name: check.problems for check in checks if not check.passed} == {}
    assert sum(seconds) < 1
