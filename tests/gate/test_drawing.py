"""Large envelopes are drawn in slices, one at a time, while the other offers of their shards are decided."""

import asyncio
from collections.abc import Generator
from typing import Any

import pytest

from grabstream.gate import drawing, encoding
from grabstream.gate.queue import CallOrder
from grabstream.lua.keys import KeySpace
from grabstream.models.commands import Grab, Open, Pause
from grabstream.models.offers import EnvelopeTerms
from grabstream.models.splitting import SLICE_PARTS, splitting_ahead
from tests.conftest import until
from tests.support.shards import opening

GRABS = 20


def large(number: int) -> Open:
    # More parts than are drawn within a call; as few as that, so that the test is quick.
    return opening(f"large{number}", parts=drawing.DRAWN_IN_CALL_MAX + 1, seed=f"{number:032x}")


class Draws:
    """What was drawn: each envelope's drawing continues until `grabs_wanted` grabs more were decided."""

    def __init__(self, grabs_wanted: int) -> None:
        self.grabs_wanted = grabs_wanted
        self.decided = 0
        self.order: list[str] = []
        self.at_a_time = self.most_at_a_time = 0
        self._real = encoding.drawing_parts

    def drawing_parts(self, terms: EnvelopeTerms, seed: str) -> Generator[None, None, bytes]:
        if terms.parts <= drawing.DRAWN_IN_CALL_MAX:
            return (yield from self._real(terms, seed))
        self.order.append(seed)
        self.at_a_time += 1
        self.most_at_a_time = max(self.most_at_a_time, self.at_a_time)
        until = self.decided + self.grabs_wanted
        try:
            while self.decided < until:
                yield
            return (yield from self._real(terms, seed))
        finally:
            self.at_a_time -= 1


def watched(monkeypatch: pytest.MonkeyPatch, grabs_wanted: int) -> Draws:
    draws = Draws(grabs_wanted)
    monkeypatch.setattr(encoding, "drawing_parts", draws.drawing_parts)
    return draws


@pytest.mark.parametrize("readers", [False, True])
async def test_grabs_of_other_offers_are_decided_while_large_envelopes_are_drawn(
    make_gate: Any, keys: KeySpace, monkeypatch: pytest.MonkeyPatch, readers: bool
) -> None:
    """Each drawing waits until a number of grabs is decided, some of its own shard: so it would never end if
    it held them up. The same holds for those that read commands from topics.
    """
    gate, draws = make_gate(timeout_ms=20_000), watched(monkeypatch, GRABS)
    await gate.decide([opening("small", parts=drawing.DRAWN_IN_CALL_MAX)], "decided")
    shards = {keys.shard_of_offer(f"large{number}") for number in range(8)}
    assert keys.shard_of_offer("small") in shards

    async def open_(number: int) -> str:
        reader = CallOrder() if readers else None
        [answer] = await gate.decide([large(number)], "decided", topic_order=reader)
        return str(answer.outcome)

    opens = asyncio.gather(*map(open_, range(8)))
    reader = CallOrder() if readers else None
    while not opens.done():
        grab = Grab(id=f"g{draws.decided}", offer="small", user=f"u{draws.decided}")
        [answer] = await gate.decide([grab], "decided", topic_order=reader)
        assert answer.outcome == "granted", answer
        draws.decided += 1
    assert await opens == ["opened"] * 8
    assert draws.most_at_a_time == 1
    assert len(draws.order) == 8


async def test_later_commands_of_a_caller_wait_for_a_large_envelope(
    make_gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, draws, reader = make_gate(timeout_ms=60_000), watched(monkeypatch, 1), CallOrder()
    opened = asyncio.create_task(gate.decide([large(0)], "decided", topic_order=reader))
    paused = asyncio.create_task(gate.decide([Pause(id="p", offer="large0")], "decided", topic_order=reader))
    await until(lambda: draws.order, what="the drawing")
    [answer] = await gate.decide([Pause(id="of-another", offer="large0")], "decided")
    assert answer.outcome == "no_such_offer", "another caller's do not wait"
    assert not paused.done()
    draws.decided += 1
    assert [answer.outcome for answer in [*await opened, *await paused]] == ["opened", "paused"]


async def test_an_envelope_that_is_not_drawn_in_time_is_busy_and_is_drawn_no_further(
    make_gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not opened later: so it may be sent again, under the same id."""
    gate, draws = make_gate(timeout_ms=60_000), watched(monkeypatch, 1)
    [answer] = await gate.decide([large(0)], "decided", timeout_ms=200)
    assert (answer.outcome, answer.seq) == ("busy", None)
    assert "the parts were not drawn within the timeout" in answer.message
    await until(lambda: not draws.at_a_time, what="the end of the drawing")
    draws.grabs_wanted = 0
    [answer] = await gate.decide([large(0)], "decided")
    assert (answer.outcome, answer.repeated) == ("opened", False)


def test_a_step_has_a_bounded_number_of_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = 0
    real = splitting_ahead.__globals__["draw"]

    def counted(seed: str, k: int, range_size: int) -> int:
        nonlocal draws
        draws += 1
        return int(real(seed, k, range_size))

    monkeypatch.setitem(splitting_ahead.__globals__, "draw", counted)
    for _ in splitting_ahead("double_mean", 10_000, 2_000, 1, 10_000, "ab"):
        assert draws <= SLICE_PARTS
        draws = 0
    assert draws <= SLICE_PARTS
