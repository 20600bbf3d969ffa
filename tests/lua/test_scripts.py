"""The scripts around the rules: loader, fences, bounds, memory, clock, and the gate's promises."""

import asyncio
import os
import secrets
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from lua import loader
from lua.gate import Gate, GateLimits, OutcomeUnknown, now_ms, run_script
from lua.keys import KeySpace
from lua.loader import BadScript, assemble
from models.commands import Close, Grab, Open
from models.offers import EnvelopeTerms
from ops.services import free_ports
from tests.conftest import until, wait_until
from tests.lua.conftest import SEALER, event_lines, take_over

HEADER = "#!lua\n-- Purpose. Command: x\n-- KEYS[1] a\n-- Returns 1\n"


def opening(offer: str = "e", parts: int = 10, **rest: Any) -> Open:
    terms = EnvelopeTerms(issuer="alice", funding="pay", asset="CNY", total=parts * 100, parts=parts, **rest)
    return Open(id=f"open-{offer}", offer=offer, terms=terms)


def grabs(count: int, offer: str = "e", start: int = 0) -> list[Grab]:
    return [Grab(id=f"{offer}-g{number}", offer=offer, user=f"u{number}") for number in range(start, start + count)]


# -- loader -----------------------------------------------------------------------------------------------------------


def write(folder: Path, name: str, text: str) -> None:
    path = folder / f"{name}.lua"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)


def test_an_include_is_pasted_once(tmp_path: Path) -> None:
    write(tmp_path, "a", HEADER + '--- @include "x"\n--- @include "y"\n')
    write(tmp_path / "includes", "x", '--- @include "y"\nX\n')
    write(tmp_path / "includes", "y", "Y\n")
    assert assemble("a", tmp_path).count("Y\n") == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("-- KEYS[1] Returns\n", "first line must be #!lua"),
        ("#!lua\n-- Returns\n", r"does not say KEYS\[1\]"),
        (HEADER + 'redis.call("GET", KEYS[2])\n', r"KEYS\[2\] is used but not in the header"),
        (HEADER + "return ARGV[3]\n", r"ARGV\[3\] is used"),
        (HEADER + '--- @include "none"\n', "there is no none.lua"),
        (HEADER + '--- @include "round"\n', "circle"),
        (HEADER + '--- @include "decide"\n', "does not say Outcomes:"),
    ],
)
def test_a_wrong_script_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    write(tmp_path, "a", text)
    write(tmp_path / "includes", "round", '--- @include "round"\n')
    with pytest.raises(BadScript, match=reason):
        assemble("a", tmp_path)


def test_all_scripts_load() -> None:
    assert {"grab", "open", "pause", "resume", "close"} <= {loader.load(name).name for name in loader.script_names()}


# -- deciding or not --------------------------------------------------------------------------------------------------


async def test_scripts_are_sent_again_when_the_server_forgot_them(gate: Any, client: Any) -> None:
    one = gate()
    await one.decide([opening()], "decided")
    await client.script_flush()
    [answer] = await one.decide(grabs(1), "decided")
    assert answer.outcome == "granted"


async def test_nothing_is_decided_before_a_take_over(client: Any, keys: KeySpace) -> None:
    one = Gate(client, keys, SEALER)
    [answer] = await one.decide([opening()], "decided")
    assert (answer.outcome, answer.seq) == ("fenced", None)
    assert answer.retry_at is not None
    assert "not been reconciled" in (answer.message or "")
    await one.close()


async def test_nothing_is_decided_in_another_life(gate: Any, client: Any, keys: KeySpace) -> None:
    one = gate()
    shard = keys.shard(keys.shard_of_offer("e"))
    await one.decide([opening(), *grabs(2)], "decided")
    before = await event_lines(client, keys, shard.shard)
    await client.hset(shard.state, "life", "another server's")
    answers = await one.decide([*grabs(1, start=2), Close(id="c", offer="e")], "decided")
    assert [answer.outcome for answer in answers] == ["fenced", "fenced"]
    assert await event_lines(client, keys, shard.shard) == before


async def test_who_believes_another_number_of_shards_is_fenced(gate: Any, client: Any, keys: KeySpace) -> None:
    """Or an offer could be open in two shards at once."""
    gate()
    other = Gate(client, KeySpace(keys.prefix, keys.shards - 1), SEALER)
    [answer] = await other.decide([opening()], "decided")
    assert answer.outcome == "fenced"
    assert "GRAB_SHARDS" in (answer.message or "")
    await other.close()


async def test_the_owner_s_scripts_refuse_a_stranger(gate: Any, client: Any, keys: KeySpace) -> None:
    gate()
    shard = keys.shard(0)
    fields = [value.decode() for value in await client.hmget(shard.state, ["term", "owner", "life"])]
    for wrong in (["99", fields[1], fields[2]], [fields[0], "stranger", fields[2]], [fields[0], fields[1], "life"]):
        for name, script_keys, rest in (
            ("read_outbox", [shard.state, shard.outbox], [1, 1]),
            ("trim", [shard.state, shard.outbox], [1, "aa", 1, shard.channel]),
            ("fence", [shard.state], ["why"]),
            ("reconcile", [shard.state], ["0", 3]),
        ):
            with pytest.raises(redis.ResponseError, match="LOST"):
                await run_script(client, name, script_keys, [*wrong, *rest])


async def test_a_full_outbox_is_busy_until_it_is_trimmed(gate: Any, client: Any, keys: KeySpace) -> None:
    one = gate(outbox_events_max=5)
    assert all(answer.positive for answer in await one.decide([opening(), *grabs(4)], "decided"))
    [busy] = await one.decide(grabs(1, start=4), "decided")
    assert (busy.outcome, busy.seq) == ("busy", None)
    assert busy.retry_at is not None
    # What ends an offer must work all the same.
    shard = keys.shard(keys.shard_of_offer("e"))
    term, owner, life = [value.decode() for value in await client.hmget(shard.state, ["term", "owner", "life"])]
    await run_script(client, "trim", [shard.state, shard.outbox], [term, owner, life, 3, "aa", 1, shard.channel])
    # Trimmed in mid-entry: the entry that holds the first unacknowledged event stays whole.
    assert len(await event_lines(client, keys, shard.shard)) == 4
    assert [answer.outcome for answer in await one.decide([*grabs(1, start=4), Close(id="c", offer="e")], "decided")] == [
        "granted",
        "closed",
    ]


async def test_a_clock_that_jumped_opens_and_closes_nothing(client: Any, keys: KeySpace, monkeypatch: pytest.MonkeyPatch) -> None:
    await take_over(client, keys)
    one = Gate(client, keys, SEALER, GateLimits(clock_skew_ms_max=1_000))
    assert (await one.decide([opening(opens_at=now_ms() + 3_600_000, closes_at=now_ms() + 7_200_000)], "decided"))[0].positive
    # Seen from a caller, a server whose clock jumped an hour ahead is the same as a caller an hour behind.
    monkeypatch.setattr("lua.gate.now_ms", lambda: time.time_ns() // 1_000_000 - 3_600_000)
    [answer] = await one.decide(grabs(1), "decided")
    assert answer.outcome == "fenced"
    assert "clock" in (answer.message or "")
    await one.close()


async def test_time_never_goes_back_in_a_shard(gate: Any, client: Any, keys: KeySpace) -> None:
    one = gate()
    shard = keys.shard(keys.shard_of_offer("e"))
    await one.decide([opening()], "decided")
    ahead = now_ms() + 2_000
    await client.hset(shard.state, "time", ahead)
    [answer] = await one.decide(grabs(1), "decided")
    assert answer.at == ahead


async def test_refusals_are_remembered_a_bounded_number_of_times(gate: Any, client: Any, keys: KeySpace) -> None:
    one = gate()
    shard = keys.shard(keys.shard_of_offer("none"))
    for start in range(0, 100_000, 10_000):
        fields = {f"none/old{number}": b"x" * 14 for number in range(start, start + 10_000)}
        await client.hset(shard.refusals, mapping=fields)
        await client.rpush(shard.refusal_order, *fields)
    answers = await one.decide(grabs(3, "none"), "decided")
    assert {answer.outcome for answer in answers} == {"no_such_offer"}
    assert await client.hlen(shard.refusals) == await client.llen(shard.refusal_order) == 100_000
    assert not await client.hexists(shard.refusals, "none/old2")
    assert (await one.decide(grabs(3, "none"), "decided"))[0].repeated


# -- the gate ---------------------------------------------------------------------------------------------------------


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


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """A small Redis of this test's own, to be filled and to be stopped."""
    [port] = free_ports(1)
    server = subprocess.Popen(
        [
            "redis-server",
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            str(tmp_path),
            "--repl-backlog-ttl",
            "0",
        ],
        stdout=subprocess.DEVNULL,
    )
    client = redis.Redis(port=port)

    def answers() -> bool:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False

    wait_until(answers, what="a Redis of one's own")
    yield server, port
    os.kill(server.pid, signal.SIGCONT)
    server.kill()
    server.wait()


@pytest.fixture
async def own(own_server: Any) -> AsyncIterator[tuple[Any, KeySpace]]:
    client = redis.asyncio.Redis(port=own_server[1])
    keys = KeySpace("own", 1)
    await take_over(client, keys)
    yield client, keys
    await client.aclose()


async def test_full_memory_refuses_and_goes_on_when_there_is_room(own: Any) -> None:
    client, keys = own
    shard = keys.shard(0)
    one = Gate(client, keys, SEALER)
    assert (await one.decide([opening("m", 50_000)], "decided"))[0].positive
    await client.config_set("maxmemory", str((await client.info("memory"))["used_memory"] + 3_000_000))
    granted, outcome, start = 0, "granted", 0
    while outcome == "granted":
        answers = await one.decide(grabs(200, "m", start), "decided")
        granted += sum(answer.outcome == "granted" for answer in answers)
        outcome, start = answers[-1].outcome, start + 200
    assert outcome == "busy"
    assert "memory" in (answers[-1].message or "")
    assert (await one.decide([opening("n")], "decided"))[0].outcome == "busy"
    # Nothing half-done stays: every grant has its event, every event its state.
    assert int(await client.hget(shard.offer("m"), "places")) == granted == len(await event_lines(client, keys, 0)) - 1
    # The owner's scripts go on, or the outbox could never shrink.
    term, owner, life = [value.decode() for value in await client.hmget(shard.state, ["term", "owner", "life"])]
    await run_script(client, "trim", [shard.state, shard.outbox], [term, owner, life, granted, "aa", 1, shard.channel])
    assert (await one.decide(grabs(200, "m", start), "decided"))[0].outcome == "granted"
    await client.config_set("maxmemory", "1")
    assert (await one.decide([Close(id="c", offer="m")], "decided"))[0].outcome == "closed"
    await one.close()


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
