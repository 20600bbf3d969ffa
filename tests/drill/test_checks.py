"""The checks of the drill on a small system: each passes, and fails when its data are damaged."""

from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from grabstream.connections.opening import key_space, open_gate
from grabstream.models.commands import AnyCommand, Confirm, Grab, Open
from grabstream.models.offers import CouponTerms, EnvelopeTerms, StockTerms
from grabstream.settings import Settings
from tests.conftest import until
from tests.drill.checks import at_rest, journal_of, level, missing, problems_of, repeated
from tests.drill.observer import Fenced
from tests.support.projecting import open_tables

pytestmark = pytest.mark.long


@pytest.fixture
async def scene(system: Settings, redis_client: Any, worker: Callable[..., Any]) -> AsyncIterator[Any]:
    """The scene after a cell: a system, and the answers of its traffic."""
    settings = system
    worker(settings, "decide,relay,sweep,project")
    envelope = EnvelopeTerms(issuer="i", funding="f", asset="CNY", total=1_000, parts=50)
    stock = StockTerms(issuer="i", total=50, hold_ms=600_000, price=5, currency="CNY")
    commands: list[AnyCommand] = [
        Open(id="o-e", offer="e", terms=envelope),
        Open(id="o-s", offer="s", terms=stock),
        Open(id="o-k", offer="k:1", terms=CouponTerms(issuer="i", total=9)),
        *(
            Grab(id=f"{offer}{number}", offer=offer, user=f"u{number}")
            for offer in ("e", "s")
            for number in range(5)
        ),
        Confirm(id="c0", offer="s", grab="s0", payment="p0", paid=5, currency="CNY"),
        *(Grab(id=f"b{number}", offer="k:1", user="u", basket="b") for number in range(2)),
    ]
    async with open_gate(settings) as gate:
        answered = [
            (command, answer)
            for command in commands[:-2]
            for answer in await gate.decide([command], patience_ms=60_000, timeout_ms=60_000)
        ]
        basket = await gate.decide(commands[-2:], patience_ms=60_000, timeout_ms=60_000)
        answered += zip(commands[-2:], basket, strict=True)
        assert all(answer.positive for _, answer in answered), answered
        await until(lambda: level(settings, redis_client), 60, "all events in the read models")
        traffic, observer = SimpleNamespace(answered=answered), SimpleNamespace(spans=[])
        keys = key_space(settings)
        yield SimpleNamespace(
            settings=settings, redis=redis_client, gate=gate, traffic=traffic, observer=observer, keys=keys,
            mended_at_ms=None,
            deciding=[], projecting=[], gaps=SimpleNamespace(answered=[]), http=None,
        )  # fmt: skip


async def failed(scene: Any) -> dict[str, list[str]]:
    """The problems of the checks that fail, by name."""
    return {name: problems for name, problems in (await problems_of(scene, False)).items() if problems}


async def check_level(settings: Settings, redis: Any) -> None:
    """Copies the state of the shards to another prefix and damages it there: `level` must compare every
    shard, and must not accept an empty Redis.
    """
    live = key_space(settings)
    settings = settings.model_copy(update={"prefix": f"{settings.prefix}copy"})
    keys = key_space(settings)
    assert not await level(settings, redis), "Redis is empty, as after a loss, and the read models are ahead"
    states = [await redis.hgetall(live.shard(shard).state) for shard in range(live.shards)]
    for shard, state in enumerate(states):
        await redis.hset(keys.shard(shard).state, mapping=state)
    assert await level(settings, redis)
    full = [shard for shard, state in enumerate(states) if int(state.get(b"seq", 0))]
    for shard, by in ((full[0], -1), (full[1], 1)):
        for field in ("seq", "journaled_seq"):
            await redis.hincrby(keys.shard(shard).state, field, by)
    assert not await level(settings, redis), "the read models of one shard are ahead, of another lagging"
    await redis.delete(keys.shard(full[1]).state)
    await redis.hset(keys.shard(full[0]).state, mapping=states[full[0]])
    await redis.hset(keys.shard(full[1]).state, mapping=states[full[1]])
    assert await level(settings, redis)
    await redis.hdel(keys.shard(full[0]).state, "server_epoch")
    assert not await level(settings, redis), "a shard is being recovered"


@pytest.mark.nightly
async def test_each_check_fails_when_its_data_are_damaged(scene: Any) -> None:
    assert await failed(scene) == {}
    settings, redis, answered = scene.settings, scene.redis, scene.traffic.answered
    await check_level(settings, redis)

    # An answer whose event is not in the journal, and an answer with another amount.
    grab, answer = next(pair for pair in answered if pair[0].id == "e1")
    for wrong in (
        msgspec.structs.replace(answer, seq=999),
        msgspec.structs.replace(answer, amount=answer.amount + 1),
    ):
        scene.traffic.answered = [(grab, wrong)]
        assert set(await failed(scene)) == {
            "no acknowledged answer is missing",
            "an answer is given again as it was",
        }
    basket = [pair for pair in answered if pair[0].id in ("b0", "b1")]
    scene.traffic.answered = [
        basket[0],
        (basket[1][0], msgspec.structs.replace(basket[1][1], seq=basket[0][1].seq)),
    ]
    [line] = await repeated(scene)
    assert line.startswith("b1: first granted")
    confirm, answer = next(pair for pair in answered if isinstance(pair[0], Confirm))
    of_another_offer = msgspec.structs.replace(confirm, offer="e")
    assert "but the journal has" in missing([(of_another_offer, answer)], await journal_of(settings))[0]
    scene.traffic.answered = answered

    # An event was decided while its shard was fenced.
    events = await journal_of(settings)
    (shard, _), journaled = next(iter(events.items()))
    at = journaled.event["at"]
    scene.observer.spans = [Fenced(shard, journaled.term, at - 1, at + 1)]
    assert set(await failed(scene)) == {"nothing was decided while fenced"}
    scene.observer.spans = []

    # Redis differs from a fold of the journal: both checks that compare them fail.
    key = scene.keys.shard(scene.keys.shard_of_offer("s")).offer("s")
    await redis.hincrby(key, "held", 1)
    assert set(await failed(scene)) == {"state = fold of the journal", "verify: Redis = fold of the journal"}
    await redis.hincrby(key, "held", -1)

    # `verify` has a problem.
    async with await open_tables(settings) as connection:
        await connection.execute(
            b"UPDATE balances_1 SET available = available + 1 WHERE (user_id, asset) = ('u1', 'CNY')"
        )
        assert set(await failed(scene)) == {"verify: balances = fold of the journal"}
        await connection.execute(
            b"UPDATE balances_1 SET available = available - 1 WHERE (user_id, asset) = ('u1', 'CNY')"
        )
    assert await failed(scene) == {}


async def test_a_cell_waits_for_holds_and_read_models(scene: Any) -> None:
    """`at_rest` is false while there are holds, `level` while read models lag."""
    assert not await at_rest(scene)
    for shard in range(scene.settings.shards):
        await scene.redis.delete(scene.keys.shard(shard).holds)
    assert await at_rest(scene)
    assert await level(scene.settings, scene.redis)
    await scene.redis.hincrby(scene.keys.shard(0).state, "seq", 1)
    assert not await level(scene.settings, scene.redis)
