"""Scripts apart from the rules they decide by: loading, fencing, bounds, memory, clock, and atomic calls."""

import time
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest
import redis

from grabstream.gate.calls import GateLimits, now_ms
from grabstream.gate.gate import Gate
from grabstream.lua.keys import LAYOUT, KeySpace
from grabstream.lua.loader import BadScript, assemble
from grabstream.lua.running import run_script
from grabstream.lua.server import let_callers_set_time
from grabstream.models.commands import Close, Grab, Open, Pause, Resume
from grabstream.models.events import decode_event
from grabstream.models.journal import Cursor
from grabstream.models.offers import EnvelopeTerms
from grabstream.models.splitting import at_once
from grabstream.streams.deciding.sweeper import Sweeper
from grabstream.streams.relaying import apply_arguments
from grabstream.streams.relaying.leases import request_lease
from grabstream.streams.relaying.ownership import Outbox, OwnedShard, Ownership
from grabstream.streams.relaying.shares import Worker
from tests.support.shards import SEALER, announce, event_lines, grabs, opening, take_over

HEADER = "#!lua\n-- Purpose. Command: x\n-- KEYS[1] a\n-- Returns 1\n"


# -- loader --------------------------------------------------------------------------------------------------


def write(folder: Path, name: str, text: str) -> None:
    path = folder / f"{name}.lua"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)


def test_an_include_named_twice_is_inserted_once(tmp_path: Path) -> None:
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
        (HEADER + '--- @include "round"\n', "includes form a cycle"),
        (HEADER + '--- @include "decide"\n', "does not say Outcomes:"),
    ],
    ids=[
        "no shebang", "KEYS[1] not in the header", "KEYS[2] not in the header", "ARGV[3] not in the header",
        "missing include", "cycle of includes", "no outcomes",
    ],
)  # fmt: skip
def test_a_malformed_script_is_refused_with_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    write(tmp_path, "a", text)
    write(tmp_path / "includes", "round", '--- @include "round"\n')
    with pytest.raises(BadScript, match=reason):
        assemble("a", tmp_path)


# -- when a shard decides ------------------------------------------------------------------------------------


async def test_a_shard_decides_nothing_before_its_takeover(client: Any, keys: KeySpace) -> None:
    gate = Gate(client, keys, SEALER)
    [answer] = await gate.decide([opening()], "decided")
    assert (answer.outcome, answer.seq) == ("fenced", None)
    assert answer.retry_at is not None
    assert "not been reconciled" in (answer.message or "")
    await gate.close()


async def test_a_shard_decides_nothing_in_another_server_epoch(
    make_gate: Any, client: Any, keys: KeySpace
) -> None:
    gate = make_gate()
    shard = keys.shard(keys.shard_of_offer("e"))
    await gate.decide([opening(), *grabs(2)], "decided")
    before = await event_lines(client, keys, shard.shard)
    await client.hset(shard.state, "server_epoch", "another server's")
    answers = await gate.decide([*grabs(1, start=2), Close(id="c", offer="e")], "decided")
    assert [answer.outcome for answer in answers] == ["fenced", "fenced"]
    assert await event_lines(client, keys, shard.shard) == before


async def test_a_gate_with_another_number_of_shards_is_fenced(
    make_gate: Any, client: Any, keys: KeySpace
) -> None:
    """Otherwise an offer could be open in two shards at once."""
    make_gate()
    other = Gate(client, KeySpace(keys.prefix, keys.shards - 1), SEALER)
    [answer] = await other.decide([opening()], "decided")
    assert answer.outcome == "fenced"
    assert "GRAB_SHARDS" in (answer.message or "")
    await other.close()


async def test_owner_scripts_refuse_another_term_owner_or_server_epoch(
    make_gate: Any, client: Any, keys: KeySpace
) -> None:
    make_gate()
    shard = keys.shard(0)
    fields = [value.decode() for value in await client.hmget(shard.state, ["term", "owner", "server_epoch"])]
    for wrong in (
        ["99", fields[1], fields[2]],
        [fields[0], "stranger", fields[2]],
        [fields[0], fields[1], "server_epoch"],
    ):
        for name, script_keys, rest in (
            ("read_outbox", [shard.state, shard.outbox], [1, 1]),
            ("trim", [shard.state, shard.outbox], [1, "aa", 1, shard.channel, 1, "x", 1]),
            ("read", [shard.state, shard.state], ["HMGET", 1, "seq"]),
            ("fence", [shard.state], ["why"]),
            ("reconcile", [shard.state], ["0", 3]),
            ("wipe", [shard.state], ["why", 4, 2]),
            ("apply", shard.deciding(), ["0", "0", "0", NO_EVENTS]),
            ("apply_past", [shard.state, shard.past], [msgspec.msgpack.encode([[], []])]),
        ):
            with pytest.raises(redis.ResponseError, match="LOST"):
                await run_script(client, name, script_keys, [*wrong, *rest])


NO_EVENTS = msgspec.msgpack.encode([[], [], [], [], [], []])


async def test_events_are_applied_only_to_a_fenced_shard_directly_after_its_last_event(
    make_gate: Any, client: Any, keys: KeySpace
) -> None:
    make_gate()
    shard = keys.shard(0)
    ownership = [
        value.decode() for value in await client.hmget(shard.state, ["term", "owner", "server_epoch"])
    ]
    with pytest.raises(redis.ResponseError, match="LOST the shard is not fenced"):
        await run_script(client, "apply", shard.deciding(), [*ownership, "0", "0", "0", NO_EVENTS])
    await run_script(client, "fence", [shard.state], [*ownership, "why", 4, 2])
    with pytest.raises(redis.ResponseError, match="LOST the shard has changed"):
        await run_script(client, "apply", shard.deciding(), [*ownership, "7", "7", "0", NO_EVENTS])
    # While a rebuild is unfinished, the shard decides nothing, and only the rebuild applies events.
    await run_script(client, "wipe", [shard.state], [*ownership, "why", 4, 2])
    with pytest.raises(redis.ResponseError, match="LOST the shard has changed"):
        await run_script(client, "apply", shard.deciding(), [*ownership, "0", "0", "0", NO_EVENTS])
    with pytest.raises(redis.ResponseError, match="LOST the shard is incomplete"):
        await run_script(client, "reconcile", [shard.state], [*ownership, "0", 3])
    await run_script(client, "apply", shard.deciding(), [*ownership, "", "0", "0", NO_EVENTS])
    with pytest.raises(redis.ResponseError, match="LOST the shard has changed"):
        await run_script(client, "reconcile", [shard.state], [*ownership, "1", 3])
    assert await run_script(client, "reconcile", [shard.state], [*ownership, "0", 3]) == 1


async def test_events_with_a_gap_are_refused(make_gate: Any, client: Any, keys: KeySpace) -> None:
    gate = make_gate()
    await gate.decide([opening(), *grabs(3)], "decided")
    shard = keys.shard(keys.shard_of_offer("e"))
    events = [decode_event(line) for line in await event_lines(client, keys, shard.shard)]
    ownership = [
        value.decode() for value in await client.hmget(shard.state, ["term", "owner", "server_epoch"])
    ]
    await run_script(client, "wipe", [shard.state, *shard.offer_keys("e")], [*ownership, "why", 4, 2])
    arguments_of_apply = at_once(apply_arguments.building(shard, [events[0], events[2]], SEALER))
    with pytest.raises(redis.ResponseError, match="HOLE before event 3 of offer e"):
        await run_script(
            client,
            "apply",
            [*shard.deciding(), *arguments_of_apply.keys],
            [*ownership, "", "", "", *arguments_of_apply.arguments],
        )
    assert await client.hget(shard.state, "partial") == b"1"


async def test_a_shard_of_another_layout_decides_nothing(make_gate: Any, client: Any, keys: KeySpace) -> None:
    """A shard without a layout that has decided events has an older one; one without any state is new. A
    takeover and a lease leave a newer one alone.
    """
    gate = make_gate()
    await gate.decide([opening()], "decided")
    shard = keys.shard(keys.shard_of_offer("e"))

    async def form() -> bytes:
        return (await run_script(client, "raise_term", [shard.state], [0, "x"]))[4]  # type: ignore[no-any-return]

    for layout in (None, "0", str(LAYOUT + 1)):
        if layout is None:
            await client.hdel(shard.state, "layout")
        else:
            await client.hset(shard.state, "layout", layout)
        before = await client.hgetall(shard.state)
        [answer] = await gate.decide(grabs(1), "decided")
        assert answer.outcome == "fenced"
        assert f"has key layout {layout or 0}, this program writes layout {LAYOUT}" in (answer.message or "")
        assert await Sweeper(client, shard, keys.shards, 10**15).sweep(10**12) == 0
        assert await client.hgetall(shard.state) == before
        if layout == str(LAYOUT + 1):
            assert "upgrade it" in (answer.message or "")
            with pytest.raises(redis.ResponseError, match="NEWER the shard has key layout 2"):
                await form()
            assert (await request_lease(client, shard, "me", 1_000)).holder == "a newer program"
            assert await client.hgetall(shard.state) == before
        else:
            assert await form() == b"outdated"
            assert (await request_lease(client, shard, "me", 1_000)).holder == "me"
    await client.hset(shard.state, "layout", LAYOUT)
    assert [answer.outcome for answer in await gate.decide(grabs(1), "decided")] == ["granted"]
    # A rebuild would lose what the outbox has, and apart from the layout, everything is sound.
    await client.hset(shard.state, "layout", "rubbish")
    [answer] = await gate.decide(grabs(1), "decided")
    assert (answer.outcome, "set it to that of another shard" in (answer.message or "")) == ("fenced", True)
    await client.hset(shard.state, "layout", LAYOUT)
    assert await form() == b"complete"
    assert await form() == b"complete"
    await client.delete(shard.state)
    assert await form() == b"complete"


async def test_a_full_outbox_is_busy_until_it_is_trimmed(make_gate: Any, client: Any, keys: KeySpace) -> None:
    gate = make_gate(outbox_events_max=5)
    assert all(answer.positive for answer in await gate.decide([opening(), *grabs(4)], "decided"))
    before = await everything(client, keys)
    for busy in await gate.decide([*grabs(3, start=2), opening("e:2")], "decided"):
        assert (busy.outcome, busy.seq) == ("busy", None)
        assert busy.retry_at is not None
    assert await everything(client, keys) == before
    # After trimming, grabs and the close of the offer work again.
    shard = keys.shard(keys.shard_of_offer("e"))
    await announce(client, shard, 3)
    # Trimmed within an entry: the entry with the first unacknowledged event stays whole.
    assert len(await event_lines(client, keys, shard.shard)) == 4
    assert [
        answer.outcome
        for answer in await gate.decide([*grabs(1, start=4), Close(id="c", offer="e")], "decided")
    ] == [
        "granted",
        "closed",
    ]


async def test_a_trim_reads_what_an_owner_would_read_after_it(
    make_gate: Any, client: Any, keys: KeySpace
) -> None:
    """After a trim into an entry, to its end, and to the last event; and before a hole."""
    gate = make_gate()
    for commands in ([opening(), *grabs(3)], grabs(2, start=3), [Pause(id="p", offer="e")]):
        assert all(answer.positive for answer in await gate.decide(commands, "decided"))
    shard = keys.shard(keys.shard_of_offer("e"))
    term, owner, server_epoch = [
        value.decode() for value in await client.hmget(shard.state, ["term", "owner", "server_epoch"])
    ]
    owned, ownership = OwnedShard(client, shard), Ownership(int(term), owner, server_epoch)
    expected = {seq: await owned.read_outbox(ownership, seq) for seq in (0, 1, 4, 6, 7)}
    assert [len(outbox.lines) for outbox in expected.values()] == [4, 3, 2, 1, 0]
    for seq, outbox in expected.items():
        cursor = Cursor(seq, bytes(32), 1, int(term), owner)
        assert await owned.trim_and_read(ownership, cursor) == outbox
    await client.delete(shard.outbox)
    await gate.decide([Resume(id="r", offer="e")], "decided")
    assert await owned.trim_and_read(ownership, cursor) == Outbox(8, [[(ANY, 1)]], "")
    await gate.decide([Pause(id="q", offer="e")], "decided")
    await client.xdel(shard.outbox, "8-0")
    assert await owned.trim_and_read(ownership, cursor) == Outbox(9, [], "", has_hole=True)


async def test_an_outbox_that_no_script_writes_has_a_hole(
    make_gate: Any, client: Any, keys: KeySpace
) -> None:
    gate, shard = make_gate(), keys.shard(keys.shard_of_offer("e"))
    await gate.decide([opening()], "decided")
    owned = OwnedShard(client, shard)
    ownership = (await owned.raise_term(0)).ownership
    for entry, field in (
        (b"2-0", b"x"),
        (b"2-0", b"0"),
        (b"2-0", b" 1"),
        (b"2-0", b"9" * 40),
        (b"3-0", b"e"),
    ):
        await client.xadd(shard.outbox, {field: b"y"}, id=entry)
        assert (await owned.read_outbox(ownership, 0)).has_hole
        assert await owned.read_outbox(ownership, 1) == Outbox(1, [], "", has_hole=True)
        await client.xdel(shard.outbox, entry)
        await client.execute_command("XSETID", shard.outbox, "1-0")
    assert not (await owned.read_outbox(ownership, 0)).has_hole
    await client.delete(shard.outbox)
    await client.set(shard.outbox, "of another program")
    assert await owned.read_outbox(ownership, 0) == Outbox(1, [], "")


async def test_a_lease_that_no_program_writes_is_free(client: Any, keys: KeySpace) -> None:
    """Else no worker would relay the shard: a lease without an end is never free."""
    shard = keys.shard(0)
    await client.set(shard.lease, "another", px=60_000)
    assert (await request_lease(client, shard, "me", 1_000)).holder == "another"
    await client.persist(shard.lease)
    assert (await request_lease(client, shard, "me", 1_000)).holder == "me"
    for key in (shard.lease, shard.present):
        await client.delete(key)
        await client.rpush(key, "of another program")
        assert (await request_lease(client, shard, "me", 1_000, about=Worker(0))).holder == "me"
    assert 0 < await client.pttl(shard.lease) <= 1_000
    await client.delete(shard.lease, shard.present)


async def test_a_call_with_too_large_a_clock_difference_is_fenced(
    client: Any, keys: KeySpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await take_over(client, keys)
    gate = Gate(client, keys, SEALER, GateLimits(timeout_ms=20_000, clock_skew_ms_max=1_000))
    assert (
        await gate.decide([opening(opens_at=now_ms() + 3_600_000, closes_at=now_ms() + 7_200_000)], "decided")
    )[0].positive
    # A server clock one hour ahead looks to the caller like a caller's clock one hour late; the test changes
    # that.
    monkeypatch.setattr("grabstream.gate.calls.now_ms", lambda: time.time_ns() // 1_000_000 - 3_600_000)
    [answer] = await gate.decide(grabs(1), "decided")
    assert answer.outcome == "fenced"
    assert "clock" in (answer.message or "")
    await gate.close()


async def test_time_of_a_shard_never_decreases(make_gate: Any, client: Any, keys: KeySpace) -> None:
    gate = make_gate()
    shard = keys.shard(keys.shard_of_offer("e"))
    await gate.decide([opening()], "decided")
    ahead = now_ms() + 2_000
    await client.hset(shard.state, "time", ahead)
    [answer] = await gate.decide(grabs(1), "decided")
    assert answer.at == ahead


async def test_stored_refusals_are_bounded_and_the_oldest_are_dropped(
    make_gate: Any, client: Any, keys: KeySpace
) -> None:
    gate = make_gate()
    shard = keys.shard(keys.shard_of_offer("none"))
    for start in range(0, 100_000, 10_000):
        fields = {f"none/old{number}": b"x" * 14 for number in range(start, start + 10_000)}
        await client.hset(shard.refusals, mapping=fields)
        await client.rpush(shard.refusal_order, *fields)
    answers = await gate.decide(grabs(3, "none"), "decided")
    assert {answer.outcome for answer in answers} == {"no_such_offer"}
    assert await client.hlen(shard.refusals) == await client.llen(shard.refusal_order) == 100_000
    assert not await client.hexists(shard.refusals, "none/old2")
    assert (await gate.decide(grabs(3, "none"), "decided"))[0].repeated


# -- memory --------------------------------------------------------------------------------------------------


async def test_full_memory_is_busy_until_there_is_room(private_redis: Any) -> None:
    client, keys = private_redis
    shard = keys.shard(0)
    gate = Gate(client, keys, SEALER)
    assert (await gate.decide([opening("m", 50_000)], "decided", timeout_ms=60_000))[0].positive
    await client.config_set("maxmemory", str((await client.info("memory"))["used_memory"] + 3_000_000))
    granted, outcome, start = 0, "granted", 0
    while outcome == "granted":
        answers = await gate.decide(grabs(200, "m", start), "decided")
        granted += sum(answer.outcome == "granted" for answer in answers)
        outcome, start = answers[-1].outcome, start + 200
    assert outcome == "busy"
    assert "memory" in (answers[-1].message or "")
    # Clearly full: near the limit, freed buffers decide which calls are refused.
    await client.config_set("maxmemory", str((await client.info("memory"))["used_memory"] - 100_000))
    assert (await gate.decide([opening("n")], "decided"))[0].outcome == "busy"
    # No call is half done: every grant has its event, and every event its state.
    assert (
        int(await client.hget(shard.offer("m"), "places"))
        == granted
        == len(await event_lines(client, keys, 0)) - 1
    )
    # The owner's scripts still run; otherwise the outbox could never shrink.
    await announce(client, shard, granted)
    assert (await gate.decide(grabs(200, "m", start), "decided"))[0].outcome == "granted"
    await client.config_set("maxmemory", "1")
    assert (await gate.decide([Close(id="c", offer="m")], "decided"))[0].outcome == "closed"
    await gate.close()


# -- all or nothing ------------------------------------------------------------------------------------------


async def everything(client: Any, keys: KeySpace) -> dict[bytes, bytes]:
    """The values of all keys of this test, as DUMP returns them."""
    return {
        key: await client.dump(key) async for key in client.scan_iter(match=f"{keys.prefix}:*", count=1_000)
    }


@pytest.mark.parametrize("draw", ["ahead", "at_grab"])
async def test_a_refused_write_of_the_outbox_changes_nothing(
    make_gate: Any, client: Any, keys: KeySpace, draw: str
) -> None:
    """The outbox is written first. If that write is refused, nothing else has been written."""
    gate = make_gate()
    shard = keys.shard(keys.shard_of_offer("e"))
    await gate.decide([opening(draw=draw), *grabs(2)], "decided")
    aside = f"{shard.outbox}:aside"
    await client.rename(shard.outbox, aside)
    await client.set(shard.outbox, "not a stream")
    before = await everything(client, keys)
    drained = grabs(9, start=2)
    same_shard = next(f"x{n}" for n in range(100) if keys.shard_of_offer(f"x{n}") == shard.shard)
    for commands in (
        grabs(1, start=2),
        [*drained, *grabs(1, "e", 90)],  # the last part, the close that follows from it, and a refusal
        [Pause(id="p", offer="e")],
        [Close(id="c", offer="e")],
        [opening(same_shard)],
    ):
        answers = await gate.decide(commands, "decided")
        assert {answer.outcome for answer in answers} == {"busy"}
        assert "WRONGTYPE" in (answers[0].message or "")
        assert await everything(client, keys) == before
    sweeper = Sweeper(client, shard, keys.shards, 10**12)
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        await sweeper.close_due(now_ms() + 10**9)
    assert await everything(client, keys) == before
    # With a writable outbox the same commands are decided.
    await client.rename(aside, shard.outbox)
    assert [answer.outcome for answer in await gate.decide(drained, "decided")] == ["granted"] * 8 + [
        "sold_out"
    ]


@pytest.mark.parametrize("draw", ["ahead", "at_grab"])
async def test_the_greatest_amounts_and_the_longest_names_are_exact(
    make_gate: Any, client: Any, keys: KeySpace, draw: str
) -> None:
    """The greatest amounts are exact in answers, in events and in repeated answers: Lua computes and prints
    them as doubles.
    """
    gate = make_gate()
    name, user = "o" * 64, "u" * 63
    terms = EnvelopeTerms(
        issuer="i" * 64, funding="f" * 64, asset="CNY", total=10**13, parts=3, law="bounded", min=10**12,
        max=9 * 10**12 - 1,
        draw=draw, seed="5eed" * 32, opens_at=0, closes_at=4_102_444_800_000,
    )  # fmt: skip
    three_grabs = [
        Grab(id=f"{n}" * 64, offer=name, user=f"{user}{n}", attributes={"a" * 64: "v" * 64}) for n in range(3)
    ]
    answers = await gate.decide([Open(id="q" * 64, offer=name, terms=terms), *three_grabs], "decided")
    assert answers[0].amount == 10**13
    assert sum(answer.amount for answer in answers[1:]) == 10**13
    repeats = await gate.decide(three_grabs, "decided")
    assert [(answer.amount, answer.seq, answer.at) for answer in repeats] == [
        (answer.amount, answer.seq, answer.at) for answer in answers[1:]
    ]
    events = [decode_event(line) for line in await event_lines(client, keys, keys.shard_of_offer(name))]
    assert [event.amount for event in events[1:4]] == [answer.amount for answer in answers[1:]]  # type: ignore[union-attr]
    assert (events[0].total, events[0].closes_at) == (10**13, 4_102_444_800_000)  # type: ignore[union-attr]


async def test_seqs_of_twelve_digits_are_exact_up_to_the_last_one(
    make_gate: Any, client: Any, keys: KeySpace
) -> None:
    """Event texts never have numbers such as 1e+12, and a shard is fenced before its seqs exceed the field in
    which records store them.
    """
    gate = make_gate()
    shard = keys.shard(keys.shard_of_offer("e"))
    last = 2**40 - 1 - 10_000
    await client.hset(shard.state, mapping={"seq": last - 3, "journaled_seq": last - 3})
    answers = await gate.decide([opening(), *grabs(2)], "decided")
    assert [answer.seq for answer in answers] == [last - 2, last - 1, last]
    assert [decode_event(line).seq for line in await event_lines(client, keys, shard.shard)] == [
        last - 2,
        last - 1,
        last,
    ]
    [repeated, already_taken] = await gate.decide(
        [grabs(2)[1], Grab(id="again", offer="e", user="u1")], "decided"
    )
    assert (repeated.seq, repeated.repeated, already_taken.seq, already_taken.outcome) == (
        last,
        True,
        last,
        "already_taken",
    )
    await client.hset(shard.state, "seq", last + 1)
    [fenced] = await gate.decide(grabs(1, start=5), "decided")
    assert fenced.outcome == "fenced"
    assert "number" in (fenced.message or "")


async def test_a_caller_cannot_set_the_clock_of_a_shard(make_gate: Any, client: Any, keys: KeySpace) -> None:
    """A call that set the time moved a shard to the year 2096: no hold ended, and nothing opened, until then.
    Only shards of tests and rehearsals accept one, and they keep the mark when they are rebuilt.
    """
    year_2096 = 3_976_214_400_000
    shard = keys.shard(keys.shard_of_offer("e"))
    gate, ahead = make_gate(), make_gate(now=[year_2096], timeout_ms=200)
    await gate.decide([opening()], "decided")
    await client.hdel(shard.state, "clock")
    before = await client.hgetall(shard.state)
    [answer] = await ahead.decide(grabs(1), "decided")
    assert (answer.outcome, "names a time" in (answer.message or "")) == ("fenced", True)
    assert await Sweeper(client, shard, keys.shards, 10**15).sweep(year_2096) == 0
    assert await client.hgetall(shard.state) == before
    with pytest.raises(ValueError, match="has events already"):
        await let_callers_set_time(client, shard.state)
    await client.hset(shard.state, "clock", "caller")
    ownership = [
        value.decode() for value in await client.hmget(shard.state, ["term", "owner", "server_epoch"])
    ]
    await run_script(client, "wipe", [shard.state], [*ownership, "a test"])
    assert await client.hget(shard.state, "clock") == b"caller"
