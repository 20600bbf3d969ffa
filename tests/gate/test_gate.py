"""What the gate promises: order, bounds, patience, and `OutcomeUnknown` when it cannot know the outcome."""

import asyncio
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import Gate
from grabstream.gate.queue import CallOrder
from grabstream.lua.keys import KeySpace
from grabstream.models.commands import Close, Grab, Pause, Resume
from grabstream.models.outcomes import OutcomeUnknown
from tests.conftest import until
from tests.support.shards import SEALER, event_lines, grabs, opening


async def test_commands_of_a_list_are_decided_in_order(make_gate: Any) -> None:
    gate = make_gate(batch_commands_max=4)
    commands = [
        *grabs(1, "z"),
        opening("z", 30),
        *grabs(20, "z", 1),
        Close(id="c", offer="z"),
        *grabs(2, "z", 30),
    ]
    outcomes = [answer.outcome for answer in await gate.decide(commands, "decided")]
    assert outcomes == ["no_such_offer", "opened", *["granted"] * 20, "closed", "over", "over"]


async def test_a_refusal_is_repeated_within_one_call(make_gate: Any) -> None:
    gate = make_gate()
    commands = [
        Close(id="c", offer="s:a"),
        Close(id="c", offer="s:b"),
        Close(id="c", offer="s:a"),
        *grabs(1, "s:a"),
        *grabs(1, "s:a"),
    ]
    answers = await gate.decide(commands, "decided")
    assert [(answer.outcome, answer.repeated) for answer in answers] == [
        ("no_such_offer", False),
        ("conflict", False),
        ("no_such_offer", True),
        ("no_such_offer", False),
        ("no_such_offer", True),
    ]


async def test_a_grant_is_repeated_within_one_call(make_gate: Any) -> None:
    [first], other = grabs(1), Grab(id="e-g0", offer="e", user="other")
    again = Grab(id="again", offer="e", user=first.user)
    answers = await make_gate().decide([opening(), first, first, other, again, again], "decided")
    assert [(answer.outcome, answer.repeated, answer.place) for answer in answers[1:]] == [
        ("granted", False, 1),
        ("granted", True, 1),
        ("granted", False, 2),
        ("already_taken", False, 1),
        ("already_taken", True, 1),
    ]


@pytest.mark.parametrize(("kind", "done"), [(Pause, "paused"), (Resume, "resumed"), (Close, "closed")])
async def test_an_offer_command_is_repeated_within_one_call(
    make_gate: Any, client: Any, keys: KeySpace, kind: Any, done: str
) -> None:
    first, second, other = kind(id="s1", offer="e"), kind(id="s2", offer="e"), kind(id="s1", offer="e:2")
    answers = await make_gate().decide([opening(), first, first, second, other], "decided")
    assert [(answer.outcome, answer.repeated) for answer in answers[1:3]] == [(done, False), (done, True)]
    assert answers[3].outcome == ("over" if kind is Close else done)
    assert answers[4].outcome == "conflict"
    assert len(await event_lines(client, keys, keys.shard_of_offer("e"))) == (2 if kind is Close else 3)


async def test_invalid_commands_do_not_stop_the_others(make_gate: Any) -> None:
    gate = make_gate()
    bad = [
        Grab(id="b1", offer="e", user="a b"),
        Grab(id="b2", offer="e", user="u", quantity=0),
        Grab(id="b\n", offer="e", user="u"),
    ]
    answers = await gate.decide([opening(), *bad, *grabs(1)], "decided")
    assert [answer.outcome for answer in answers] == ["opened", "invalid", "invalid", "invalid", "granted"]
    assert "user" in (answers[1].message or "")


async def test_commands_sent_to_a_server_that_hangs_are_unknown(
    private_redis: Any, private_server: Any
) -> None:
    """Commands sent without a reply are unknown, not `busy`; the same ids sent again get the answer. Commands
    that were never sent are `busy`.
    """
    client, keys = private_redis
    bounded = redis.asyncio.Redis(port=private_server[1], socket_timeout=1.0, retry=None)
    gate = Gate(bounded, keys, SEALER, GateLimits(timeout_ms=2_000, queue_commands_max=20))
    await gate.decide([opening("t", 100)], "decided")
    os.kill(private_server[0].pid, signal.SIGSTOP)
    sent = [
        asyncio.create_task(gate.decide(grabs(8, "t", 0), "decided")),
        asyncio.create_task(gate.decide(grabs(8, "t", 8), "decided")),
    ]
    await asyncio.sleep(0)
    too_many = await gate.decide(grabs(40, "t", 20), "decided")
    assert {answer.outcome for answer in too_many} == {"busy"}
    assert too_many[0].retry_at is not None
    for task in sent:
        with pytest.raises(OutcomeUnknown, match="send the commands again"):
            await task
    os.kill(private_server[0].pid, signal.SIGCONT)

    async def again() -> Any:
        try:
            return await gate.decide(grabs(16, "t"), "decided")
        except OutcomeUnknown:
            return None

    answers = await until(again, what="an answer")
    assert {answer.outcome for answer in answers} == {"granted"}  # type: ignore[attr-defined]
    assert int(await client.hget(keys.shard(0).offer("t"), "places")) == 16
    await gate.close()
    await bounded.aclose()


async def test_a_patient_caller_waits_until_the_shard_is_no_longer_fenced(private_redis: Any) -> None:
    client, keys = private_redis
    state = keys.shard(0).state
    server_epoch = await client.hget(state, "server_epoch")
    gate = Gate(client, keys, SEALER)
    await gate.decide([opening("p")], "decided")
    await client.hdel(state, "server_epoch")
    waiting = asyncio.create_task(
        gate.decide([*grabs(3, "p"), Close(id="c", offer="p")], "decided", patience_ms=20_000)
    )
    assert (await gate.decide(grabs(1, "p", 5), "decided"))[0].outcome == "fenced"
    await client.hset(state, "server_epoch", server_epoch)
    assert [answer.outcome for answer in await waiting] == ["granted"] * 3 + ["closed"]
    await gate.close()


# -- replies that are lost -----------------------------------------------------------------------------------


class LosesReplies:
    """A client that executes its next `lost` script calls, then runs `then`, and then raises a timeout
    instead of returning the reply.
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
    await client.hdel(keys.shard(0).state, "server_epoch")


async def test_commands_sent_without_a_reply_are_unknown_if_then_fenced(private_redis: Any) -> None:
    """`fenced` says that nothing was decided, so a command that was sent without a reply must not get it."""
    client, keys = private_redis
    await Gate(client, keys, SEALER).decide([opening("e")], "decided")
    gate = Gate(
        LosesReplies(client, 1, lambda: fence(client, keys)), keys, SEALER, GateLimits(timeout_ms=1_500)
    )
    with pytest.raises(OutcomeUnknown, match="under their ids"):
        await gate.decide(grabs(1), "decided")
    assert await client.hget(keys.shard(0).offer("e"), "places") == b"1"
    # A command that was never sent gets `fenced`.
    assert (await gate.decide(grabs(1, start=5), "decided"))[0].outcome == "fenced"
    await gate.close()


async def test_commands_sent_without_a_reply_are_unknown_if_the_outbox_is_full(private_redis: Any) -> None:
    """The outbox may be full of these very commands."""
    client, keys = private_redis
    await Gate(client, keys, SEALER).decide([opening("e")], "decided")
    gate = Gate(
        LosesReplies(client, 1, client.ping), keys, SEALER, GateLimits(timeout_ms=1_500, outbox_events_max=4)
    )
    with pytest.raises(OutcomeUnknown, match="under their ids"):
        await gate.decide(grabs(3), "decided")
    assert await client.hget(keys.shard(0).offer("e"), "places") == b"3"
    await gate.close()


async def test_commands_sent_without_a_reply_wait_while_the_shard_is_fenced(private_redis: Any) -> None:
    client, keys = private_redis
    state = keys.shard(0).state
    server_epoch = await client.hget(state, "server_epoch")
    await Gate(client, keys, SEALER).decide([opening("e")], "decided")
    gate = Gate(
        LosesReplies(client, 1, lambda: fence(client, keys)), keys, SEALER, GateLimits(timeout_ms=20_000)
    )
    waiting = asyncio.create_task(gate.decide(grabs(2), "decided"))

    async def is_fenced() -> bool:
        return bool(await client.hget(state, "server_epoch") != server_epoch)

    # The shard is fenced after the call was decided, and before its reply is lost.
    await until(is_fenced)
    assert await client.hexists(keys.shard(0).users("e"), grabs(2)[1].user)
    await client.hset(state, "server_epoch", server_epoch)
    assert [(answer.outcome, answer.repeated) for answer in await waiting] == [("granted", True)] * 2
    await gate.close()


async def test_the_gate_times_out_before_a_more_patient_client(
    private_redis: Any, private_server: Any
) -> None:
    """The gate's timeout holds, whatever the client's. Commands that are still queued then were not sent, and
    get `busy`.
    """
    _, keys = private_redis
    patient = redis.asyncio.Redis(port=private_server[1], socket_timeout=60)
    gate = Gate(patient, keys, SEALER, GateLimits(timeout_ms=1_500))
    await gate.decide([opening("e")], "decided")
    os.kill(private_server[0].pid, signal.SIGSTOP)
    sent = asyncio.create_task(gate.decide(grabs(1), "decided"))
    # The next command is queued only once this call is in flight.
    await until(lambda: len(gate._shards[0].in_flight) == 1)
    queued = asyncio.create_task(gate.decide(grabs(1, start=1), "decided"))
    with pytest.raises(OutcomeUnknown, match="within the timeout"):
        await asyncio.wait_for(sent, 30)
    assert [answer.outcome for answer in await asyncio.wait_for(queued, 30)] == ["busy"]
    os.kill(private_server[0].pid, signal.SIGCONT)
    answers = await until(lambda: _granted(gate), what="an answer")
    assert [answer.repeated for answer in answers] == [True, False]  # type: ignore[attr-defined]
    await gate.close()
    await patient.aclose()


class HeldBack:
    """A client whose calls are sent only when `sent` is set."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.sent = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def execute_command(self, *words: Any) -> Any:
        await self.sent.wait()
        return await self._client.execute_command(*words)


@pytest.mark.parametrize(
    ("is_fast", "callers", "of_one_reader", "calls"),
    [
        (True, 15, False, [15]),
        (True, 16, False, [8, 8]),
        (True, 35, False, [18, 17]),
        (True, 1_400, False, [512, 512]),
        (True, 35, True, [35]),
        (False, 127, False, [127]),
        (False, 128, False, [64, 64]),
    ],
)
async def test_calls_go_side_by_side_if_they_are_large_or_the_server_is_fast(
    private_redis: Any,
    monkeypatch: pytest.MonkeyPatch,
    is_fast: bool,
    callers: int,
    of_one_reader: bool,
    calls: list[int],
) -> None:
    monkeypatch.setattr("grabstream.gate.gate.FAST_SECONDS", 60.0 if is_fast else 0.0)
    client, keys = private_redis
    held_back, reader = HeldBack(client), CallOrder() if of_one_reader else None
    gate = Gate(held_back, keys, SEALER, GateLimits(timeout_ms=60_000))
    held_back.sent.set()
    assert (await gate.decide([opening("e", callers)], "decided"))[0].positive
    held_back.sent.clear()
    crowd = [
        asyncio.create_task(gate.decide([grab], "decided", topic_order=reader)) for grab in grabs(callers)
    ]
    await until(lambda: gate._shards[0].in_flight)
    in_flight = [sum(len(entry.batch.commands) for entry in call) for call in gate._shards[0].in_flight]
    held_back.sent.set()
    answers = [answer for [answer] in await asyncio.gather(*crowd)]
    assert in_flight == calls
    assert [answer.outcome for answer in answers] == ["granted"] * callers
    assert sorted(answer.place or 0 for answer in answers) == list(range(1, callers + 1))
    await gate.close()


async def _granted(gate: Gate) -> Any:
    try:
        return await gate.decide(grabs(2), "decided")
    except OutcomeUnknown:
        return None


# -- a server that refuses to write --------------------------------------------------------------------------


@pytest.mark.parametrize("command", [grabs(1)[0], Close(id="c", offer="e")], ids=["grab", "close"])
async def test_too_few_replicas_is_busy(private_redis: Any, command: Any) -> None:
    """Redis refuses the script before it starts: nothing was decided, and a repeat may succeed soon."""
    client, keys = private_redis
    gate = Gate(client, keys, SEALER)
    await gate.decide([opening("e")], "decided")
    await client.config_set("min-replicas-to-write", 1)
    [answer] = await gate.decide([command], "decided")
    assert (answer.outcome, answer.seq) == ("busy", None)
    assert "NOREPLICAS" in (answer.message or "")
    assert answer.retry_at is not None
    waiting = asyncio.create_task(gate.decide([command], "decided", patience_ms=20_000))
    await until(lambda: gate._shards[0].is_paused)
    await client.config_set("min-replicas-to-write", 0)
    [answer] = await waiting
    assert answer.positive
    assert not answer.repeated
    await gate.close()


async def test_a_disk_that_cannot_be_written_is_busy(private_redis: Any, tmp_path: Path) -> None:
    client, keys = private_redis
    gate = Gate(client, keys, SEALER)
    await gate.decide([opening("e")], "decided")
    (tmp_path / "dump.rdb").mkdir()  # where the server would save
    await client.config_set("save", "3600 1")
    await client.bgsave()
    await until(lambda: _saving_failed(client), what="a failed save")
    [answer] = await gate.decide(grabs(1), "decided")
    assert (answer.outcome, answer.seq) == ("busy", None)
    assert "MISCONF" in (answer.message or "")
    await client.config_set("save", "")
    assert (await gate.decide(grabs(1), "decided"))[0].outcome == "granted"
    await gate.close()


async def _saving_failed(client: Any) -> bool:
    return bool((await client.info("persistence"))["rdb_last_bgsave_status"] == "err")


async def test_a_caller_may_change_its_list_while_it_waits(make_gate: Callable[..., Gate]) -> None:
    """The gate has a copy of it, whatever kind of sequence it is."""
    gate = make_gate()
    assert (await gate.decide([opening()], "decided"))[0].positive
    for sent in (grabs(3), deque(grabs(3, start=3))):
        waiting = asyncio.create_task(gate.decide(sent, "decided"))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        sent.clear()
        assert [answer.outcome for answer in await waiting] == ["granted"] * 3
