"""The gate's promises: order, bounds, patience, and what it says when it does not know."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from grabstream.lua.gate.calls import GateLimits
from grabstream.lua.gate.door import Gate
from grabstream.lua.gate.queue import OutcomeUnknown
from grabstream.lua.keys import KeySpace
from grabstream.models.commands import Close, Grab, Pause, Resume
from tests.conftest import until
from tests.lua.conftest import SEALER, event_lines, grabs, opening


async def test_an_array_is_carried_out_in_order(gate: Any) -> None:
    one = gate(batch_commands_max=4)
    commands = [
        *grabs(1, "z"),
        opening("z", 30),
        *grabs(20, "z", 1),
        Close(id="c", offer="z"),
        *grabs(2, "z", 30),
    ]
    outcomes = [answer.outcome for answer in await one.decide(commands, "decided")]
    assert outcomes == ["no_such_offer", "opened", *["granted"] * 20, "closed", "over", "over"]


async def test_a_refusal_counts_within_its_own_call(gate: Any) -> None:
    one = gate()
    twice = [
        Close(id="c", offer="s:a"),
        Close(id="c", offer="s:b"),
        Close(id="c", offer="s:a"),
        *grabs(1, "s:a"),
        *grabs(1, "s:a"),
    ]
    answers = await one.decide(twice, "decided")
    assert [(answer.outcome, answer.repeated) for answer in answers] == [
        ("no_such_offer", False),
        ("conflict", False),
        ("no_such_offer", True),
        ("no_such_offer", False),
        ("no_such_offer", True),
    ]


async def test_a_grant_counts_within_its_own_call(gate: Any) -> None:
    [first], other = grabs(1), Grab(id="e-g0", offer="e", user="other")
    again = Grab(id="again", offer="e", user=first.user)
    answers = await gate().decide([opening(), first, first, other, again, again], "decided")
    assert [(answer.outcome, answer.repeated, answer.place) for answer in answers[1:]] == [
        ("granted", False, 1),
        ("granted", True, 1),
        ("conflict", False, None),
        ("already_taken", False, 1),
        ("already_taken", True, 1),
    ]


@pytest.mark.parametrize(("kind", "done"), [(Pause, "paused"), (Resume, "resumed"), (Close, "closed")])
async def test_steering_counts_within_its_own_call(
    gate: Any, client: Any, keys: KeySpace, kind: Any, done: str
) -> None:
    first, second, other = kind(id="s1", offer="e"), kind(id="s2", offer="e"), kind(id="s1", offer="e:2")
    answers = await gate().decide([opening(), first, first, second, other], "decided")
    assert [(answer.outcome, answer.repeated) for answer in answers[1:3]] == [(done, False), (done, True)]
    assert answers[3].outcome == ("over" if kind is Close else done)
    assert answers[4].outcome == "conflict"
    assert len(await event_lines(client, keys, keys.shard_of_offer("e"))) == (2 if kind is Close else 3)


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
    """Sent and not answered is unknown, not `busy`; the same ids find out later. What was never sent is
    `busy`.
    """
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
    server_epoch = await client.hget(state, "life")
    one = Gate(client, keys, SEALER)
    await one.decide([opening("p")], "decided")
    await client.hdel(state, "life")
    waiting = asyncio.create_task(
        one.decide([*grabs(3, "p"), Close(id="c", offer="p")], "decided", patience_ms=20_000)
    )
    assert (await one.decide(grabs(1, "p", 5), "decided"))[0].outcome == "fenced"
    await client.hset(state, "life", server_epoch)
    assert [answer.outcome for answer in await waiting] == ["granted"] * 3 + ["closed"]
    await one.close()


# -- what it says when it does not know ----------------------------------------------------------------------


class LosesReplies:
    """A client whose next `lost` script calls are carried out but not answered, and then something happens on
    the server.
    """

    def __init__(self, client: Any, lost: int, then: Callable[[], Awaitable[Any]]) -> None:
        self._client = client
        self._lost = lost
        self._then = then

    async def execute_command(self, *words: Any) -> Any:
        reply = await self._client.execute_command(*words)
        if self._lost:
            self._lost -= 1
            await self._then()
            raise redis.TimeoutError("Timeout reading from socket")
        return reply


async def fence(client: Any, keys: KeySpace) -> None:
    await client.hdel(keys.shard(0).state, "life")


async def test_sent_without_a_reply_and_then_fenced_is_unknown(own: Any) -> None:
    """`fenced` says that nothing was decided; who was sent once and heard nothing must not be told so."""
    client, keys = own
    await Gate(client, keys, SEALER).decide([opening("e")], "decided")
    one = Gate(LosesReplies(client, 1, lambda: fence(client, keys)), keys, SEALER, GateLimits(timeout_ms=300))
    with pytest.raises(OutcomeUnknown, match="under their ids"):
        await one.decide(grabs(1), "decided")
    assert await client.hget(keys.shard(0).offer("e"), "places") == b"1"
    # Who was never sent before is told that nothing was decided.
    assert (await one.decide(grabs(1, start=5), "decided"))[0].outcome == "fenced"
    await one.close()


async def test_sent_without_a_reply_and_then_a_full_outbox_is_unknown(own: Any) -> None:
    """The outbox may be full of these very commands."""
    client, keys = own
    await Gate(client, keys, SEALER).decide([opening("e")], "decided")
    one = Gate(
        LosesReplies(client, 1, client.ping), keys, SEALER, GateLimits(timeout_ms=300, outbox_events_max=4)
    )
    with pytest.raises(OutcomeUnknown, match="under their ids"):
        await one.decide(grabs(3), "decided")
    assert await client.hget(keys.shard(0).offer("e"), "places") == b"3"
    await one.close()


async def test_sent_without_a_reply_waits_out_a_short_fence(own: Any) -> None:
    client, keys = own
    state = keys.shard(0).state
    server_epoch = await client.hget(state, "life")
    await Gate(client, keys, SEALER).decide([opening("e")], "decided")
    one = Gate(
        LosesReplies(client, 1, lambda: fence(client, keys)), keys, SEALER, GateLimits(timeout_ms=20_000)
    )
    waiting = asyncio.create_task(one.decide(grabs(2), "decided"))
    await until(lambda: client.hexists(keys.shard(0).answers("e"), "e-g1"))
    await client.hset(state, "life", server_epoch)
    assert [(answer.outcome, answer.repeated) for answer in await waiting] == [("granted", True)] * 2
    await one.close()


async def test_time_runs_out_also_when_the_client_is_more_patient(own: Any, own_server: Any) -> None:
    """The gate's own time-out holds, whatever the client's; who still waits in the queue then was not sent,
    and hears `busy`.
    """
    _, keys = own
    patient = redis.asyncio.Redis(port=own_server[1], socket_timeout=60)
    one = Gate(patient, keys, SEALER, GateLimits(timeout_ms=300))
    await one.decide([opening("e")], "decided")
    os.kill(own_server[0].pid, signal.SIGSTOP)
    began = asyncio.get_running_loop().time()
    sent = asyncio.create_task(one.decide(grabs(1), "decided"))
    # The call is in flight once the next one finds no room beside it.
    await until(lambda: len(one._shards[0].in_flight) == 1)
    queued = asyncio.create_task(one.decide(grabs(1, start=1), "decided"))
    with pytest.raises(OutcomeUnknown, match="in time"):
        await asyncio.wait_for(sent, 10)
    assert [answer.outcome for answer in await asyncio.wait_for(queued, 10)] == ["busy"]
    assert asyncio.get_running_loop().time() - began < 5
    os.kill(own_server[0].pid, signal.SIGCONT)
    answers = await until(lambda: _granted(one), what="an answer")
    assert [answer.repeated for answer in answers] == [True, False]  # type: ignore[attr-defined]
    await one.close()
    await patient.aclose()


async def _granted(one: Gate) -> Any:
    try:
        return await one.decide(grabs(2), "decided")
    except OutcomeUnknown:
        return None


# -- a server that refuses to write --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [grabs(1)[0], Close(id="c", offer="e"), opening("new")], ids=["grab", "close", "open"]
)
async def test_too_few_replicas_is_busy(own: Any, command: Any) -> None:
    """Redis refuses such a script before it begins: nothing was decided, and it may go better soon."""
    client, keys = own
    one = Gate(client, keys, SEALER)
    await one.decide([opening("e")], "decided")
    await client.config_set("min-replicas-to-write", 1)
    [answer] = await one.decide([command], "decided")
    assert (answer.outcome, answer.seq) == ("busy", None)
    assert "NOREPLICAS" in (answer.message or "")
    assert answer.retry_at is not None
    waiting = asyncio.create_task(one.decide([command], "decided", patience_ms=20_000))
    await until(lambda: one._shards[0].held)
    await client.config_set("min-replicas-to-write", 0)
    [answer] = await waiting
    assert answer.positive
    assert not answer.repeated
    await one.close()


async def test_a_disk_that_cannot_be_written_is_busy(own: Any, tmp_path: Path) -> None:
    client, keys = own
    one = Gate(client, keys, SEALER)
    await one.decide([opening("e")], "decided")
    (tmp_path / "dump.rdb").mkdir()  # where the server would save
    await client.config_set("save", "3600 1")
    await client.bgsave()
    await until(lambda: _saving_failed(client), what="a failed save")
    [answer] = await one.decide(grabs(1), "decided")
    assert (answer.outcome, answer.seq) == ("busy", None)
    assert "MISCONF" in (answer.message or "")
    await client.config_set("save", "")
    assert (await one.decide(grabs(1), "decided"))[0].outcome == "granted"
    await one.close()


async def _saving_failed(client: Any) -> bool:
    return bool((await client.info("persistence"))["rdb_last_bgsave_status"] == "err")
