"""Commands of one caller are executed in the order given, even if Redis loses its latest decisions (its tail)
between two calls: the lost commands are decided again first.
"""

import asyncio
import math
import operator
import random
from typing import Any

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

from grabstream.gate.batches import Batch, batch_of
from grabstream.gate.calls import CallRefused, GateLimits
from grabstream.gate.gate import Gate
from grabstream.gate.queue import CallOrder, Lane, QueueEntry
from grabstream.lua.keys import KeySpace
from grabstream.models.commands import Confirm, Grab
from grabstream.models.events import decode_event
from grabstream.models.outcomes import Outcome, OutcomeUnknown
from grabstream.runtime.measures import FUNCTION_SECONDS
from tests.conftest import until
from tests.lua.costs.measured_shard import scripts
from tests.support.fake_relay import (
    CARRIED_OUT,
    FakeRelay,
    InterruptedClient,
    gate_over,
    relay,  # noqa: F401 - a fixture
    steps_of,
)
from tests.support.shards import SEALER


async def types(relay: FakeRelay) -> list[str]:
    """The types of all events after the openings."""
    await relay.journal()
    return [str(decode_event(line).__struct_config__.tag) for line in relay.lines[2:]]


@pytest.mark.parametrize("promise", ["decided", "journaled"])
@pytest.mark.parametrize("loses_reply", [False, True], ids=["replied", "reply-lost"])
async def test_a_confirmation_never_overtakes_its_grab(
    relay: FakeRelay, promise: Any, loses_reply: bool
) -> None:
    """The tail with the grab is lost between the two calls of one list."""
    gate = gate_over(relay, InterruptedClient(relay.client, "grab", relay.lose_tail, loses_reply))
    relaying = asyncio.create_task(until_decided(relay, "c-ann"))
    answers = await gate.decide(steps_of("ann")[:2], promise)
    assert [answer.outcome for answer in answers] == ["held", "confirmed"]
    await relaying
    assert await types(relay) == ["grab.held", "grab.confirmed"]
    await gate.close()


async def test_a_server_that_lags_behind_a_journaled_command_decides_nothing(relay: FakeRelay) -> None:
    """In a divided network, a former master may decide on; it has not seen what the other has journaled."""
    gate, [grab, *_] = gate_over(relay), steps_of("ann")
    seq = int(await relay.client.hget(relay.shard.state, "seq"))
    with pytest.raises(CallRefused, match="this server lags behind the journal") as refused:
        await gate._calls.call(relay.shard, batch_of([grab]), 0, seq + 1)
    assert refused.value.outcome == Outcome.fenced
    reply = await gate._calls.call(relay.shard, batch_of([grab]), 0, seq)
    assert reply.rows_or_message[0].code == Outcome.held
    await gate.close()


async def test_a_reader_s_commands_name_no_journaled_event(relay: FakeRelay) -> None:
    """A reader may outlive a journal that is put back, shorter than it was."""
    gate, reader = gate_over(relay), CallOrder()
    relaying = asyncio.create_task(relay.run())
    assert (await gate.decide(steps_of("ann")[:1], topic_order=reader))[0].outcome == "held"
    relaying.cancel()
    assert reader.lane(relay.shard.shard).journaled_seq == 0
    await gate.close()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("is_reader", [False, True])
async def test_a_command_of_a_wrong_type_is_invalid_and_affects_no_other(
    relay: FakeRelay, count: int, is_reader: bool
) -> None:
    gate = gate_over(relay)
    good, *_ = steps_of("ann")
    commands = [Grab(id=5, offer="s", user="u"), good][:count]  # type: ignore[arg-type]
    reader = CallOrder() if is_reader else None
    answers = await gate.decide(commands, "decided", topic_order=reader)
    assert [answer.outcome for answer in answers] == ["invalid", "held"][:count]
    await gate.close()


async def until_decided(relay: FakeRelay, command: str) -> None:
    """Journals nothing until a command is decided, so that all earlier decisions can be lost."""
    await until(lambda: relay.client.hexists(relay.shard.answers("s"), command))
    await relay.journal()


async def test_a_reader_s_calls_are_decided_again_in_order(relay: FakeRelay) -> None:
    """Calls of one order are in flight or queued when the tail is lost. The first call learns of it from the
    announcement of journaled events, not from a script.
    """
    gate, reader = gate_over(relay), CallOrder()
    steps = steps_of("ann")[:3]
    first = asyncio.create_task(gate.decide([steps[0]], topic_order=reader))
    await until(lambda: relay.client.hexists(relay.shard.answers("s"), "s/g-ann"))
    await relay.lose_tail()
    others = [asyncio.create_task(gate.decide([step], topic_order=reader)) for step in steps[1:]]
    relaying = asyncio.create_task(relay.run())
    answers = [(await task)[0] for task in (first, *others)]
    relaying.cancel()
    assert [answer.outcome for answer in answers] == CARRIED_OUT
    assert await types(relay) == ["grab.held", "grab.confirmed", "grab.redeemed"]
    await gate.close()


async def test_a_list_that_is_cut_when_it_is_decided_again_is_answered(relay: FakeRelay) -> None:
    """Answers of the lost history no longer count, even if the call that decides the list again has no room
    for all of it.
    """
    gate = gate_over(relay)
    grabs = [Grab(id=f"g{n}", offer="s", user=f"u{n}") for n in range(12)]
    deciding = asyncio.create_task(gate.decide(grabs, topic_order=CallOrder()))
    await until(lambda: relay.client.hexists(relay.shard.answers("s"), "s/g11"))
    with scripts(call_max=1):
        await relay.lose_tail()
        await until(lambda: relay.client.hexists(relay.shard.answers("s"), "s/g11"))
        relaying = asyncio.create_task(relay.run())
        async with asyncio.timeout(90):
            answers = await deciding
    relaying.cancel()
    assert [answer.outcome for answer in answers] == ["held"] * 12
    assert [answer.id for answer in answers] == [f"g{n}" for n in range(12)]
    assert await types(relay) == ["grab.held"] * 12
    await gate.close()


async def test_a_call_in_flight_is_decided_after_the_calls_decided_again(relay: FakeRelay) -> None:
    """The history changes while the second call is in flight: it was decided in the old history, and its
    reply arrives after the change.
    """
    lane_is_stale = asyncio.Event()

    async def lose() -> None:
        await relay.lose_tail()
        lane_is_stale.set()
        # Waits until the gate has received the announcement of the new history.
        await until(lambda: _stale(gate))

    async def _stale(gate: Gate) -> bool:
        return reader.lane(0).stale

    reader = CallOrder()
    gate = gate_over(relay, InterruptedClient(relay.client, "confirm", lose))
    steps = steps_of("ann")[:3]
    first = asyncio.create_task(gate.decide([steps[0]], topic_order=reader))
    await until(lambda: relay.client.hexists(relay.shard.answers("s"), "s/g-ann"))
    others = [asyncio.create_task(gate.decide([step], topic_order=reader)) for step in steps[1:]]
    await lane_is_stale.wait()
    relaying = asyncio.create_task(relay.run())
    assert [(await task)[0].outcome for task in (first, *others)] == CARRIED_OUT
    relaying.cancel()
    assert await types(relay) == ["grab.held", "grab.confirmed", "grab.redeemed"]
    await gate.close()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
async def test_order_holds_however_often_the_tail_is_lost(relay: FakeRelay, seed: int) -> None:
    """Lists and a reader's calls, with replies lost and tails cut at random: every step finds the effect of
    the previous step, and no step has its effect twice.
    """
    draw = random.Random(seed)

    class Troubled(InterruptedClient):
        async def execute_command(self, *words: Any) -> Any:
            reply = await self._client.execute_command(*words)
            if draw.random() < 0.15:
                await relay.lose_tail(lambda decided: draw.randint(0, decided))
            if draw.random() < 0.1:
                raise redis.TimeoutError("Timeout reading from socket")
            return reply

    gate = gate_over(relay, Troubled(relay.client, "grab", relay.lose_tail), timeout_ms=100_000)
    reader = CallOrder()

    async def by_list(user: str) -> list[str]:
        # Two calls may be in flight: one may find the shard fenced while the tail that the other lost is cut.
        promise: Any = draw.choice(("decided", "journaled"))
        return [answer.outcome for answer in await gate.decide(steps_of(user), promise, patience_ms=60_000)]

    async def by_reader(user: str) -> list[str]:
        calls = [asyncio.create_task(gate.decide([step], topic_order=reader)) for step in steps_of(user)]
        return [(await call)[0].outcome for call in calls]

    relaying = asyncio.create_task(relay.run())
    crowd = [
        asyncio.create_task((by_list if draw.random() < 0.5 else by_reader)(f"u{number}"))
        for number in range(60)
    ]
    for outcomes in await asyncio.gather(*crowd):
        assert outcomes[:3] == CARRIED_OUT
    relaying.cancel()
    # Commands answered as decided may be lost at the end. Other event types, such as refunds, would show
    # steps executed in another order.
    assert set(await types(relay)) <= {"grab.held", "grab.confirmed", "grab.redeemed", "grab.returned"}
    await gate.close()


async def test_commands_after_a_fenced_grab_in_its_list_are_fenced(relay: FakeRelay) -> None:
    """The shard decides again between two calls of a list; a confirmation whose grab was answered `fenced`
    gets `fenced` too.
    """
    server_epoch = await relay.client.hget(relay.shard.state, "server_epoch")
    await relay.client.hdel(relay.shard.state, "server_epoch")

    async def lift_fence() -> None:
        await relay.client.hset(relay.shard.state, "server_epoch", server_epoch)

    gate = gate_over(relay, InterruptedClient(relay.client, "grab", lift_fence))
    assert [answer.outcome for answer in await gate.decide(steps_of("ann"), "decided")] == ["fenced"] * 4
    assert [answer.outcome for answer in await gate.decide(steps_of("ann")[:3], "decided")] == CARRIED_OUT
    await gate.close()


async def test_commands_after_a_grab_that_found_no_room_are_busy(relay: FakeRelay) -> None:
    gate = Gate(relay.client, relay.keys, SEALER, GateLimits(timeout_ms=20_000, queue_commands_max=3))
    many = [Grab(id=f"g{number}", offer="s", user="ann") for number in range(4)]
    confirm = Confirm(id="c", offer="s", grab="g0", payment="p", paid=7, currency="CNY")
    assert {answer.outcome for answer in await gate.decide([*many, confirm], "decided")} == {"busy"}
    await gate.close()


async def test_unsent_commands_of_a_cancelled_caller_are_dropped(relay: FakeRelay) -> None:
    """A list whose first call was never sent must not be executed from its second call on."""
    entered, leave = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        entered.set()
        await leave.wait()

    gate = gate_over(relay, InterruptedClient(relay.client, "grab", wait))
    sent = asyncio.create_task(gate.decide(steps_of("bob")[:1], "decided"))
    await entered.wait()
    cancelled = asyncio.create_task(gate.decide(steps_of("ann"), "decided"))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    leave.set()
    assert (await sent)[0].outcome == "held"
    assert (await gate.decide(steps_of("eve")[:1], "decided"))[0].outcome == "held"
    assert await types(relay) == ["grab.held", "grab.held"]
    await gate.close()


async def test_a_reader_is_never_refused_for_a_full_queue(relay: FakeRelay) -> None:
    """A reader bounds its commands in flight itself, so a full queue never refuses them."""
    gate = Gate(relay.client, relay.keys, SEALER, GateLimits(timeout_ms=20_000, queue_commands_max=10))
    gate.start()
    reader = CallOrder()
    relaying = asyncio.create_task(relay.run())
    calls = [
        asyncio.create_task(
            gate.decide([Grab(id=f"g{n}-{m}", offer="s", user="ann") for m in range(20)], topic_order=reader)
        )
        for n in range(100)
    ]
    answered = await asyncio.gather(*calls)
    relaying.cancel()
    assert {answer.outcome for answers in answered for answer in answers} == {"held"}
    await gate.close()


async def test_only_a_reader_waits_while_its_shard_is_fenced(relay: FakeRelay) -> None:
    """`busy` and `fenced` are not stored as answers, so a reader's commands wait instead. Another caller
    without patience, queued after the reader, gets `fenced`.
    """
    server_epoch = await relay.client.hget(relay.shard.state, "server_epoch")
    gate, reader = gate_over(relay), CallOrder()
    await relay.client.hdel(relay.shard.state, "server_epoch")
    waiting = asyncio.create_task(gate.decide(steps_of("ann")[:3], "decided", topic_order=reader))
    assert (await gate.decide(steps_of("bob")[:1], "decided"))[0].outcome == "fenced"
    await asyncio.wait({waiting}, timeout=0.3)
    assert not waiting.done()
    await relay.client.hset(relay.shard.state, "server_epoch", server_epoch)
    assert [answer.outcome for answer in await waiting] == CARRIED_OUT
    await gate.close()


async def test_a_list_whose_history_is_lost_repeatedly_times_out(relay: FakeRelay) -> None:
    class Forgetful(InterruptedClient):
        async def execute_command(self, *words: Any) -> Any:
            reply = await self._client.execute_command(*words)
            await relay.lose_tail()
            return reply

    gate = gate_over(relay, Forgetful(relay.client, "grab", relay.lose_tail), timeout_ms=500)
    with pytest.raises(OutcomeUnknown):
        await gate.decide(steps_of("ann"), "decided")
    await gate.close()


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["grab", "confirm", "release"])), max_size=60),
    st.booleans(),
)
def test_calls_take_a_type_together_and_keep_the_order_of_each_lane(
    queued: list[tuple[int, str]], are_all_alone: bool
) -> None:
    async def take() -> None:
        gate = Gate(None, KeySpace("test", 1), SEALER)
        shard = gate._shards[0]
        lanes = [Lane() for _ in range(6)]
        commands = steps_of("ann")[:1]
        of_queue = [
            QueueEntry(
                Lane() if are_all_alone else lanes[lane],
                Batch(commands, {"o"}, 64, script),
                math.inf,
                0.0,
            )
            for lane, script in queued
        ]
        shard.queue.extend(of_queue)
        shard.queued = len(queued)
        calls = []
        while shard.queue:
            call, *_ = gate._next_call(shard)
            assert len({entry.batch.script for entry in call}) == 1
            for entry in call:
                entry.lane.in_flight = False
            calls.append(call)
        assert shard.queued == 0
        taken = [entry for call in calls for entry in call]
        assert len(taken) == len(of_queue)
        for lane in {entry.lane for entry in of_queue}:
            in_order = [entry for entry in of_queue if entry.lane is lane]
            assert all(map(operator.is_, (entry for entry in taken if entry.lane is lane), in_order))
        if are_all_alone:
            assert len(calls) == len({script for _, script in queued})

    asyncio.run(take())


def calls_of(*scripts: str) -> int:
    return sum(sum(FUNCTION_SECONDS[script].counts) for script in scripts)


async def test_grabs_and_payments_of_many_callers_share_few_calls(relay: FakeRelay) -> None:
    """Each caller holds and pays, so both are in the queue at the same time, in any order."""
    gate, crowd = gate_over(relay), [steps_of(f"u{number}")[:2] for number in range(40)]
    relaying = asyncio.create_task(relay.run())
    before = calls_of("grab", "confirm")
    held = crowd[: len(crowd) // 2]
    await asyncio.gather(*(gate.decide([grab]) for grab, _ in held))
    mixed = [
        step for (grab, _), (_, paid) in zip(crowd[len(held) :], held, strict=True) for step in (grab, paid)
    ]
    answers = await asyncio.gather(*(gate.decide([step]) for step in mixed))
    relaying.cancel()
    assert [answer.outcome for [answer] in answers] == ["held", "confirmed"] * len(held)
    assert calls_of("grab", "confirm") - before <= 20
    await gate.close()
