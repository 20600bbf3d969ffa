"""Undecidable commands: a command that raises gets `invalid`, and changes no answer of the other commands in
its call, list and shard.
"""

import asyncio
from itertools import groupby
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grabstream.crypto.tickets import TicketKeys
from grabstream.gate.batches import batch_of
from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import Gate
from grabstream.gate.queue import CallOrder, QueueEntry
from grabstream.models.commands import AnyCommand, Grab, Open
from grabstream.models.offers import Limit, StockTerms
from grabstream.models.outcomes import OutcomeUnknown
from grabstream.streams.deciding.sweeper import Sweeper
from tests.conftest import until
from tests.lua.changed_scripts import bound_lines, forget_weeks, inject, sell_at_any_price
from tests.support.fake_relay import (
    CARRIED_OUT,
    FakeRelay,
    gate_over,
    relay,  # noqa: F401 - a fixture
    steps_of,
)
from tests.support.shards import SEALER, event_lines, grabs


def undecidable(number: int = 0, offer: str = "e") -> Grab:
    return Grab(id=f"undecidable-{number}", offer=offer, user=f"undecided{number}")


async def test_a_command_that_raises_is_refused_alone(
    relay: FakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of several callers share calls. The gate finds the command that raises, and refuses it alone."""
    inject(monkeypatch, "before")
    gate = gate_over(relay)
    lists: list[list[AnyCommand]] = [
        [Grab(id=f"g{n}-{m}", offer="s", user=f"u{n}") for m in range(9)] for n in range(20)
    ]
    lists[7].insert(4, undecidable(7, "s"))
    lists[13].insert(0, undecidable(13, "s"))
    answered = await asyncio.gather(*(gate.decide(commands, "decided") for commands in lists))
    for commands, answers in zip(lists, answered, strict=True):
        assert [answer.id for answer in answers] == [command.id for command in commands]
        assert [answer.outcome for answer in answers] == [
            "invalid" if "undecidable" in command.id else "held" for command in commands
        ]
        assert all("injected" in (answer.message or "") for answer in answers if answer.outcome == "invalid")
    places = [answer.place for answers in answered for answer in answers if answer.outcome == "held"]
    assert sorted(place for place in places if place is not None) == list(range(1, 181))
    await gate.close()


async def test_a_line_above_its_bound_is_refused_before_any_write(
    relay: FakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bounds of commands rule out such a line; an event with one would stop its shard permanently."""
    gate = gate_over(relay)
    bound_lines(monkeypatch, 300)
    commands = [*grabs(2), Grab(id="x" * 64, offer="s", user="y" * 64), *grabs(2, start=2)]
    answers = await gate.decide(commands, "decided")
    assert [answer.outcome for answer in answers] == ["granted", "granted", "invalid", "granted", "granted"]
    assert "more than the 300 allowed" in (answers[2].message or "")
    assert len(await event_lines(relay.client, relay.keys, 0, len(relay.lines))) == 4
    await gate.close()


async def test_a_number_that_would_be_rounded_is_refused_before_its_event(
    relay: FakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grab script refuses such a product. If it does not, the code that writes events refuses it."""
    gate = gate_over(relay)
    terms = StockTerms(issuer="i", total=200, max_per_grab=200, price=1, hold_ms=1_000, currency="CNY")
    assert [
        answer.outcome for answer in await gate.decide([Open(id="open-d", offer="d", terms=terms)], "decided")
    ] == ["opened"]
    state = relay.keys.shard(relay.keys.shard_of_offer("d")).offer("d")
    rules = msgspec.msgpack.decode(await relay.client.hget(state, "rules"), type=dict[str, Any])
    await relay.client.hset(state, "rules", msgspec.msgpack.encode(rules | {"price": 10**12}))
    sell_at_any_price(monkeypatch)
    commands = [Grab(id=f"d{units}", offer="d", user=f"u{units}", quantity=units) for units in (1, 150, 2)]
    answers = await gate.decide(commands, "decided")
    assert [answer.outcome for answer in answers] == ["held", "invalid", "held"]
    assert [answer.left for answer in answers] == [199, None, 197]
    assert "not an integer from 0 to" in (answers[1].message or "")
    await gate.close()


@pytest.mark.parametrize("attributes", [{}, {"card": "7"}])
async def test_a_limit_whose_period_has_no_counters_is_refused(
    relay: FakeRelay, monkeypatch: pytest.MonkeyPatch, attributes: dict[str, str]
) -> None:
    """Otherwise the units would be given without being counted. Grabs with attributes are decided singly."""
    gate = gate_over(relay)
    terms = StockTerms(issuer="i", total=20, hold_ms=1_000, limits=(Limit("user", "week", 1),))
    opened = [Open(id="open-w", offer="w", terms=terms)]
    assert [answer.outcome for answer in await gate.decide(opened, "decided")] == ["opened"]
    forget_weeks(monkeypatch)
    commands = [Grab(id=f"w{n}", offer="w", user=f"u{n}", attributes=attributes) for n in range(3)]
    answers = await gate.decide(commands, "decided")
    assert [answer.outcome for answer in answers] == ["invalid"] * 3
    assert all("no letter for counters of the period week" in (answer.message or "") for answer in answers)
    await gate.close()


async def test_undecidable_commands_are_reported_with_their_index(
    relay: FakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, "before")
    gate = gate_over(relay)
    reported: list[tuple[int, str]] = []
    commands = [*grabs(3), undecidable(1), *grabs(2, start=3), undecidable(2), *steps_of("ann")[:3]]
    relaying = asyncio.create_task(relay.run())
    answers = await gate.decide(
        commands,
        topic_order=CallOrder(),
        report_undecidable=lambda index, reason: reported.append((index, reason)),
    )
    relaying.cancel()
    assert [answer.outcome for answer in answers] == ["granted"] * 3 + ["invalid"] + ["granted"] * 2 + [
        "invalid"
    ] + CARRIED_OUT
    assert [index for index, _ in reported] == [3, 6]
    assert all("injected" in reason for _, reason in reported)
    await gate.close()


async def test_a_sweep_ends_the_other_holds_when_one_raises(
    relay: FakeRelay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = gate_over(relay)
    held = await gate.decide(
        [Grab(id=f"g{n}", offer="s", user=f"u{n}") for n in range(20)] + [undecidable(1, "s")], "decided"
    )
    assert {answer.outcome for answer in held} == {"held"}
    over_at = max(answer.deadline_at or 0 for answer in held)
    inject(monkeypatch, "before")
    shard = relay.keys.shard(relay.keys.shard_of_offer("s"))
    sweeper = Sweeper(relay.client, shard, relay.keys.shards, 10**12)
    assert await sweeper.sweep(over_at) == 21
    assert await relay.client.zrange(shard.holds, 0, -1) == [b"s/undecidable-1"]
    assert "fails for s/undecidable-1" in caplog.text
    assert await sweeper.sweep(over_at) == 0  # later sweeps leave it out
    monkeypatch.undo()
    assert await Sweeper(relay.client, shard, relay.keys.shards, 10**12).sweep(over_at) == 1
    assert not await relay.client.exists(shard.holds)
    await gate.close()


async def test_a_basket_with_an_undecidable_grab_is_refused_whole(
    relay: FakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, "before")
    gate = gate_over(relay)

    def basket(name: str, *ids: str) -> list[AnyCommand]:
        return [Grab(id=id, offer="s", user="ann", basket=name) for id in ids]

    commands = [
        *basket("b1", "a1", "a2"),
        *basket("b2", "a3", "undecidable", "a4"),
        *basket("b3", "a5", "a6", "a7"),
    ]
    outcomes = [answer.outcome for answer in await gate.decide(commands, "decided")]
    assert outcomes == ["held"] * 2 + ["invalid"] * 3 + ["held"] * 3
    await gate.close()


async def test_a_command_whose_arguments_cannot_be_built_is_refused_alone(relay: FakeRelay) -> None:
    """An error in Python, while a command becomes arguments of a script, is handled like one in Lua."""

    class Broken(TicketKeys):
        def read(self, ticket: str, user: str, offer: str) -> Any:
            raise ZeroDivisionError("no such key")

    gate = Gate(relay.client, relay.keys, SEALER, tickets=Broken({}))
    ticketed = Grab(id="t", offer="e", user="eve", ticket="x.y.z")
    answers = await gate.decide([*grabs(3), ticketed, *grabs(2, start=3)], "decided")
    assert [answer.outcome for answer in answers] == ["granted"] * 3 + ["invalid"] + ["granted"] * 2
    assert "ZeroDivisionError" in (answers[3].message or "")
    await gate.close()


async def test_a_command_whose_check_raises_is_refused_alone(
    relay: FakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grabstream.gate import gate as gate_module

    check = gate_module.check

    def raising(command: AnyCommand, from_system: bool) -> None:
        if command.id == "unchecked":
            raise RecursionError
        check(command, from_system)

    monkeypatch.setattr(gate_module, "check", raising)
    gate = gate_over(relay)
    unchecked = Grab(id="unchecked", offer="e", user="eve", attributes={"card": "7"})
    answers = await gate.decide([*grabs(2), unchecked, *grabs(2, start=2)], "decided")
    assert [answer.outcome for answer in answers] == ["granted", "granted", "invalid", "granted", "granted"]
    await gate.close()


async def test_an_answer_that_cannot_be_read_whole_keeps_its_outcome(
    relay: FakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grabstream.gate import encoding

    answer_of = encoding.answer_of

    def raising(shard: int, command: AnyCommand, row: Any, sealer: Any) -> Any:
        if command.id == "e-g1":
            raise KeyError("codes")
        return answer_of(shard, command, row, sealer)

    monkeypatch.setattr(encoding, "answer_of", raising)
    gate = gate_over(relay)
    # The answers to a run of plain grabs are made together, with nothing to read that could fail.
    first, second, third = grabs(3)
    second = msgspec.structs.replace(second, attributes={"card": "7"})
    answers = await gate.decide([first, second, third], "decided")
    assert [answer.outcome for answer in answers] == ["granted"] * 3
    assert answers[1].seq == (answers[0].seq or 0) + 1
    assert "cannot be read" in (answers[1].message or "")
    await gate.close()


@pytest.mark.parametrize("where", ["between", "after"])
async def test_an_error_after_the_first_write_fences_the_shard_at_once(
    relay: FakeRelay, monkeypatch: pytest.MonkeyPatch, where: Any
) -> None:
    """Nothing is decided on a half-written shard: the same call fences it and sets its seq to that of its
    outbox. The commands are answered after a recovery has rebuilt the shard from its events.
    """
    inject(monkeypatch, where)
    gate = gate_over(relay)
    deciding = asyncio.create_task(gate.decide([*grabs(2), undecidable(), *grabs(2, start=2)], "decided"))
    await until(lambda: relay.client.hget(relay.shard.state, "partial"))
    assert await relay.client.hget(relay.shard.state, "server_epoch") is None
    assert b"injected" in await relay.client.hget(relay.shard.state, "fault")
    assert (await gate.decide(grabs(1, start=8), "decided"))[0].outcome == "fenced"
    assert int(await relay.client.hget(relay.shard.state, "seq")) == 2 + len(
        await event_lines(relay.client, relay.keys, 0, 2)
    )
    while not deciding.done():
        if await relay.client.hget(relay.shard.state, "partial"):
            await relay.lose_tail(lambda decided: decided)  # journaled, and rebuilt from the journal
        await asyncio.wait({deciding}, timeout=0.05)
    answers = await deciding
    assert [answer.outcome for answer in answers] == ["granted"] * 5
    assert [answer.place for answer in answers] == [1, 2, 3, 4, 5]
    assert len({answer.seq for answer in answers}) == 5
    await gate.close()


async def test_a_command_that_breaks_its_shard_each_time_ends_as_unknown(
    relay: FakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never reaches the outbox, so it would break the shard permanently. The other commands are
    decided.
    """
    inject(monkeypatch, "after")
    gate = Gate(relay.client, relay.keys, SEALER, GateLimits(timeout_ms=30_000))
    gate.start()
    deciding = asyncio.create_task(gate.decide([undecidable()], "decided"))
    others = asyncio.create_task(gate.decide(grabs(3), "decided"))
    while not (deciding.done() and others.done()):
        if await relay.client.hget(relay.shard.state, "partial"):
            await relay.lose_tail()  # the whole tail is lost
        await asyncio.wait({deciding, others}, timeout=0.05)
    with pytest.raises(OutcomeUnknown, match="fails after its first write"):
        await deciding
    assert [answer.outcome for answer in await others] == ["granted"] * 3
    await gate.close()


async def test_a_missing_permission_is_busy_and_not_undecidable(relay: FakeRelay) -> None:
    """A missing permission affects every command: the answer is `busy`, no command is undecidable."""
    client = relay.client
    await client.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval", "-fcall")
    gate = gate_over(relay)
    [answer] = await gate.decide(grabs(1), "decided")
    assert answer.outcome == "busy"
    assert "NoPermission" in (answer.message or "")
    await client.execute_command("ACL", "SETUSER", "default", "+@all")
    assert (await gate.decide(grabs(1), "decided"))[0].outcome == "granted"
    await gate.close()


@given(st.lists(st.sampled_from((None, None, "a", "b")), min_size=1, max_size=9))
async def test_a_list_is_halved_until_each_command_or_basket_is_alone(baskets: list[str | None]) -> None:
    commands = [Grab(id=f"g{i}", offer="m", user=f"u{i}", basket=basket) for i, basket in enumerate(baskets)]
    whole = QueueEntry(CallOrder().lane(0), batch_of(commands), 0.0, 0.0)
    waiting, alone = [whole], list[list[AnyCommand]]()
    while waiting:
        entry = waiting.pop(0)
        parts = entry.halves()
        waiting = [*parts, *waiting]
        if not parts:
            alone.append(list(entry.batch.commands))
    expected: list[list[AnyCommand]] = []
    for basket, group in groupby(commands, key=lambda one: one.basket):
        of_basket = list(group)
        expected += [of_basket] if basket is not None else [[command] for command in of_basket]
    assert alone == expected
