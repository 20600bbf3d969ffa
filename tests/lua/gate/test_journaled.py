"""A journaled answer waits until Kafka has its event: its own, in its own history, and no longer than it has
time.
"""

import asyncio
import secrets
from typing import Any

import pytest

from grabstream.lua.gate.calls import GateLimits, run_script
from grabstream.lua.gate.door import Gate
from grabstream.lua.gate.journaled import HistoryChanged, Journaled
from grabstream.lua.gate.queue import OutcomeUnknown
from grabstream.lua.keys import KeySpace
from grabstream.models.commands import Grab
from tests.conftest import until
from tests.lua.conftest import SEALER, grabs, opening


async def journal(client: Any, keys: KeySpace, number: int, seq: int) -> None:
    """What a relay does once Kafka has everything up to `seq`."""
    shard = keys.shard(number)
    term, owner, server_epoch = [
        value.decode() for value in await client.hmget(shard.state, ["term", "owner", "life"])
    ]
    await run_script(
        client, "trim", [shard.state, shard.outbox], [term, owner, server_epoch, seq, "aa", 1, shard.channel]
    )


async def test_a_journaled_answer_waits_for_its_own_event_only(
    gate: Any, client: Any, keys: KeySpace
) -> None:
    one = gate(timeout_ms=20_000)
    one.start()
    number = keys.shard_of_offer("e")
    await one.decide([opening(), *grabs(3)], "decided")
    first, second = (asyncio.create_task(one.decide([grab])) for grab in grabs(2))
    refused = await one.decide([Grab(id="no", offer="none", user="u")])
    assert refused[0].outcome == "no_such_offer"  # no event, nothing to wait for
    # With those two waits the gate itself, for what it answered as decided only.
    await until(lambda: len(one.journaled._waiting.get(number, ())) == 3)
    await journal(client, keys, number, 2)
    assert (await first)[0].seq == 2
    assert not second.done()
    # It carries the second's event.
    told = asyncio.create_task(one.decide([Grab(id="later", offer="e", user="u1")]))
    await until(lambda: len(one.journaled._waiting.get(number, ())) == 3)
    assert not second.done()
    await journal(client, keys, number, 3)
    assert (await second)[0].seq == 3
    assert (await told)[0].outcome == "already_taken"
    # What is journaled already does not wait.
    assert (await one.decide(grabs(2)))[1].repeated
    await one.close()


async def test_of_several_events_the_last_must_be_journaled(gate: Any, client: Any, keys: KeySpace) -> None:
    one = gate(timeout_ms=20_000)
    one.start()
    number = keys.shard_of_offer("e")
    waiting = asyncio.create_task(one.decide([opening(), *grabs(3)]))
    await until(lambda: client.hexists(keys.shard(number).answers("e"), "e-g2"))
    await journal(client, keys, number, 3)
    await one.journaled.look(number)
    await asyncio.sleep(0)
    assert not waiting.done()
    await journal(client, keys, number, 4)
    assert [answer.seq for answer in await waiting] == [1, 2, 3, 4]
    await one.close()


async def test_a_journaled_answer_waits_for_its_own_history(own: Any) -> None:
    """An announcement of another history releases nobody: the command is asked again, and its new answer is
    waited for.
    """
    client, keys = own
    shard = keys.shard(0)
    one = Gate(client, keys, SEALER, GateLimits(timeout_ms=20_000))
    one.start()
    await one.decide([opening("j")], "decided")
    waiting = asyncio.create_task(one.decide(grabs(1, "j")))
    await until(lambda: client.hexists(shard.answers("j"), "j-g0"))
    assert not waiting.done()
    # A recovery: another history, at the same state.
    term, server_epoch, *_ = await run_script(client, "raise_term", [shard.state], [0, "second"])
    seq = await client.hget(shard.state, "seq")
    await run_script(client, "reconcile", [shard.state], [term, "second", server_epoch, seq, 1])
    await run_script(
        client, "trim", [shard.state, shard.outbox], [term, "second", server_epoch, 1, "aa", 1, shard.channel]
    )
    await asyncio.wait({waiting}, timeout=0.5)
    assert not waiting.done()
    await run_script(
        client,
        "trim",
        [shard.state, shard.outbox],
        [term, "second", server_epoch, seq, "aa", 2, shard.channel],
    )
    [answer] = await waiting
    assert (answer.outcome, answer.repeated) == ("granted", True)
    await one.close()


async def test_a_number_of_another_history_releases_nobody_who_comes_after_it(own: Any) -> None:
    """What is known already was journaled in the history that is there now: an answer of the one before is
    not in it.
    """
    client, keys = own
    gate = Gate(client, keys, SEALER)
    await gate.decide([opening("j")], "decided")
    await journal(client, keys, 0, 1)
    history = int(await client.hget(keys.shard(0).state, "history"))
    journaled = Journaled(client, keys)
    journaled.start()
    try:
        await journaled.look(0)
        async with asyncio.timeout(10):
            await journaled.wait(0, history, 1)
            with pytest.raises(HistoryChanged):
                await journaled.wait(0, history - 1, 1)
    finally:
        # Also when the test fails: a listener that is cancelled only once, at the end of the loop, may go on
        # for ever.
        await journaled.close()
        await gate.close()


async def test_not_journaled_in_time_is_unknown(own: Any) -> None:
    client, keys = own
    one = Gate(client, keys, SEALER, GateLimits(timeout_ms=300))
    one.start()
    with pytest.raises(OutcomeUnknown, match="not in the journal in time"):
        await one.decide([opening(secrets.token_hex(4))])
    await one.close()


async def test_decided_in_a_lost_history_and_then_fenced_is_unknown(own: Any) -> None:
    """It was decided once: whether that survived, nobody knows yet, and `fenced` would say that it did
    not.
    """
    client, keys = own
    shard = keys.shard(0)
    one = Gate(client, keys, SEALER, GateLimits(timeout_ms=600))
    one.start()
    await one.decide([opening("j")], "decided")
    waiting = asyncio.create_task(one.decide(grabs(1, "j")))
    await until(lambda: client.hexists(shard.answers("j"), "j-g0"))
    await client.hset(shard.state, "history", 99)
    await client.hdel(shard.state, "life")
    with pytest.raises(OutcomeUnknown, match="under their ids"):
        await waiting
    await one.close()
