"""The gate's promises: order, bounds, patience, and what it says when it does not know."""

import asyncio
import os
import secrets
import signal
from typing import Any

import pytest
import redis.asyncio

from lua.gate import Gate, GateLimits, OutcomeUnknown, run_script
from models.commands import Close, Grab
from tests.conftest import until
from tests.lua.conftest import SEALER, grabs, opening


async def test_an_array_is_carried_out_in_order(gate: Any) -> None:
    one = gate(batch_commands_max=4)
    commands = [*grabs(1, "z"), opening("z", 30), *grabs(20, "z", 1), Close(id="c", offer="z"), *grabs(2, "z", 30)]
    outcomes = [answer.outcome for answer in await one.decide(commands, "decided")]
    assert outcomes == ["no_such_offer", "opened", *["granted"] * 20, "closed", "over", "over"]


async def test_a_refusal_counts_within_its_own_call(gate: Any) -> None:
    one = gate()
    twice = [Close(id="c", offer="s:a"), Close(id="c", offer="s:b"), Close(id="c", offer="s:a"), *grabs(1, "s:a"), *grabs(1, "s:a")]
    answers = await one.decide(twice, "decided")
    assert [(answer.outcome, answer.repeated) for answer in answers] == [
        ("no_such_offer", False),
        ("conflict", False),
        ("no_such_offer", True),
        ("no_such_offer", False),
        ("no_such_offer", True),
    ]


async def test_bad_commands_do_not_stop_the_others(gate: Any) -> None:
    one = gate()
    bad = [
        Grab(id="b1", offer="e", user="a b"),
        Grab(id="b2", offer="e", user="u", quantity=0),
        Grab(id="b\n", offer="e", user="u"),
    ]
    answers = await one.decide([opening(), *bad, *grabs(1)], "decided")
    assert [answer.outcome for answer in answers] == ["opened", "invalid", "invalid", "invalid", "granted"]
    assert "user" in (answers[1].message or "")


async def test_a_server_that_does_not_answer(own: Any, own_server: Any) -> None:
    """Sent and not answered is unknown, not `busy`; the same ids find out later. What was never sent is `busy`."""
    client, keys = own
    bounded = redis.asyncio.Redis(port=own_server[1], socket_timeout=0.2, retry=None)
    one = Gate(bounded, keys, SEALER, GateLimits(timeout_ms=400, queue_commands_max=20))
    await one.decide([opening("t", 100)], "decided")
    os.kill(own_server[0].pid, signal.SIGSTOP)
    sent = [
        asyncio.create_task(one.decide(grabs(8, "t", 0), "decided")),
        asyncio.create_task(one.decide(grabs(8, "t", 8), "decided")),
    ]
    await asyncio.sleep(0)
    too_many = await one.decide(grabs(40, "t", 20), "decided")
    assert {answer.outcome for answer in too_many} == {"busy"}
    assert too_many[0].retry_at is not None
    for task in sent:
        with pytest.raises(OutcomeUnknown, match="send the commands again"):
            await task
    os.kill(own_server[0].pid, signal.SIGCONT)

    async def again() -> Any:
        try:
            return await one.decide(grabs(16, "t"), "decided")
        except OutcomeUnknown:
            return None

    answers = await until(again, what="an answer")
    assert {answer.outcome for answer in answers} == {"granted"}  # type: ignore[attr-defined]
    assert int(await client.hget(keys.shard(0).offer("t"), "places")) == 16
    await one.close()
    await bounded.aclose()


async def test_patience_waits_out_a_fence(own: Any) -> None:
    client, keys = own
    state = keys.shard(0).state
    life = await client.hget(state, "life")
    one = Gate(client, keys, SEALER)
    await one.decide([opening("p")], "decided")
    await client.hdel(state, "life")
    waiting = asyncio.create_task(one.decide([*grabs(3, "p"), Close(id="c", offer="p")], "decided", patience_ms=20_000))
    assert (await one.decide(grabs(1, "p", 5), "decided"))[0].outcome == "fenced"
    await client.hset(state, "life", life)
    assert [answer.outcome for answer in await waiting] == ["granted"] * 3 + ["closed"]
    await one.close()


async def test_a_journaled_answer_waits_for_its_own_history(own: Any) -> None:
    """An announcement of another history releases nobody: the command is asked again, and its new answer is waited for."""
    client, keys = own
    shard = keys.shard(0)
    one = Gate(client, keys, SEALER, GateLimits(timeout_ms=20_000))
    one.start()
    await one.decide([opening("j")], "decided")
    waiting = asyncio.create_task(one.decide(grabs(1, "j")))
    await until(lambda: client.hexists(shard.answers("j"), "j-g0"))
    assert not waiting.done()
    # A recovery: another history, at the same state.
    term, life, *_ = await run_script(client, "raise_term", [shard.state], [0, "second"])
    seq = await client.hget(shard.state, "seq")
    await run_script(client, "reconcile", [shard.state], [term, "second", life, seq, 1])
    await run_script(client, "trim", [shard.state, shard.outbox], [term, "second", life, 1, "aa", 1, shard.channel])
    await asyncio.wait({waiting}, timeout=0.5)
    assert not waiting.done()
    await run_script(client, "trim", [shard.state, shard.outbox], [term, "second", life, seq, "aa", 2, shard.channel])
    [answer] = await waiting
    assert (answer.outcome, answer.repeated) == ("granted", True)
    await one.close()


async def test_not_journaled_in_time_is_unknown(own: Any) -> None:
    client, keys = own
    one = Gate(client, keys, SEALER, GateLimits(timeout_ms=300))
    one.start()
    with pytest.raises(OutcomeUnknown, match="not in the journal in time"):
        await one.decide([opening(secrets.token_hex(4))])
    await one.close()
