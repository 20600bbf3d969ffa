"""A state machine of Hypothesis about waiting lists alone: offers with hours that are paused and resumed,
while units come back in all ways. The rules and the real Lua must not differ, and the promises about who is
served when are checked from the event lines.
"""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import pytest
import redis.asyncio
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from grabstream.gate.calls import GateLimits
from grabstream.lua.keys import KeySpace
from grabstream.models.calendar import opens_next
from grabstream.models.commands import (
    Amend,
    Close,
    Confirm,
    Extend,
    Grab,
    Open,
    Pause,
    Release,
    Resume,
    Return,
)
from grabstream.models.offers import Changes, Hours, StockTerms
from grabstream.models.rules import Offer
from grabstream.settings import Settings
from tests.conftest import examples
from tests.lua.histories.hostile_history import Sweep
from tests.lua.histories.hostile_twins import HostileTwins
from tests.lua.histories.strategies import ALWAYS_BUT_NOON, HOUR, MORNINGS, ZONES
from tests.lua.histories.twins import SHARDS
from tests.support.shards import NOW

NAMES = ("w:a", "w:b", "x")
#: Of one minute, three hours apart, so that the sweeper may miss some.
MINUTES = tuple(Hours(from_=f"{hour:02}:00", until=f"{hour:02}:01") for hour in range(0, 24, 3))
HOLD_MS = 7_000
names = st.sampled_from(NAMES)
picks = st.integers(0, 1_000)


@st.composite
def terms(draw: Any) -> StockTerms:
    return StockTerms(
        issuer="shop", total=draw(st.sampled_from((1, 3, 30))),
        hold_ms=draw(st.sampled_from((HOLD_MS, HOUR))),
        max_per_grab=3, take=draw(st.sampled_from(("all", "all", "up_to"))), waiting_list=True,
        late=draw(st.sampled_from(("refuse", "retake"))), extensions=2, timezone=draw(st.sampled_from(ZONES)),
        hours=draw(st.sampled_from(((), ALWAYS_BUT_NOON, MORNINGS, MINUTES))),
        closes_at=draw(st.sampled_from((None, None, NOW + 30 * HOUR))),
    )  # fmt: skip


class WaitingMachine(HostileTwins, RuleBasedStateMachine):
    """Twins whose offers are sold out most of the time."""

    connect: Callable[[], Any]

    @initialize(of_offers=st.tuples(*(terms() for _ in NAMES)), batch_commands_max=st.sampled_from((3, 512)))
    def begin(self, of_offers: tuple[StockTerms, ...], batch_commands_max: int) -> None:
        self.runner, self.ids = asyncio.Runner(), 0
        keys = KeySpace(f"waiting{secrets.token_hex(5)}", SHARDS)
        limits = GateLimits(timeout_ms=30_000, batch_commands_max=batch_commands_max)
        self.runner.run(self.begin_twins(type(self).connect(), keys, limits))
        for name, of_offer in zip(NAMES, of_offers, strict=True):
            self._send((Open, name, {"terms": of_offer}))
            opens = opens_next(self.offers[name].hours, self.offers[name].offsets, self.now)
            self.now = max(self.now, opens or self.now)
            self._crowd(name, of_offer.total + 3, 1)

    def _send(self, *commands: tuple[Any, str, dict[str, Any]]) -> None:
        """Sends commands of these kinds, offers and fields under new ids, in one list."""
        first, self.ids = self.ids, self.ids + len(commands)
        self.runner.run(
            self.decide_both(
                [
                    kind(id=f"id{number}", offer=offer, **fields)
                    for number, (kind, offer, fields) in enumerate(commands, first)
                ]
            )
        )

    def _crowd(self, name: str, people: int, quantity: int) -> None:
        fields = [{"user": f"u{n}", "quantity": quantity, "wait": True} for n in range(people)]
        self._send(*((Grab, name, of_grab) for of_grab in fields))

    def _grabs(self, name: str, has: Callable[[Any], Any]) -> list[str]:
        offer: Offer | None = self.offers.get(name)
        return [grab for grab, of_grab in offer.grabs.items() if has(of_grab)] if offer else []

    @rule(name=names, people=st.sampled_from((1, 2, 4, 30)), quantity=st.sampled_from((1, 1, 2, 3)))
    def a_crowd_comes(self, name: str, people: int, quantity: int) -> None:
        self._crowd(name, people, quantity)

    @rule(name=names, pick=picks, count=st.sampled_from((1, 1, 2, 30)))
    def holds_are_given_back(self, name: str, pick: int, count: int) -> None:
        held = self._grabs(name, lambda grab: grab.held)
        if held:
            begin = pick % len(held)
            self._send(*((Release, name, {"grab": grab}) for grab in held[begin : begin + count]))

    @rule(name=names, pick=picks)
    def a_waiting_grab_leaves(self, name: str, pick: int) -> None:
        offer = self.offers.get(name)
        if offer and offer.queue:
            self._send((Release, name, {"grab": offer.queue[pick % len(offer.queue)]}))

    @rule(name=names, pick=picks, also_returns=st.booleans())
    def a_hold_is_confirmed(self, name: str, pick: int, also_returns: bool) -> None:
        grabs = self._grabs(name, lambda grab: grab.held or grab.lapsed)
        if grabs:
            about = {"grab": grabs[pick % len(grabs)]}
            self._send((Confirm, name, about), *([(Return, name, about)] if also_returns else []))

    @rule(name=names, pick=picks)
    def a_hold_is_extended(self, name: str, pick: int) -> None:
        held = self._grabs(name, lambda grab: grab.held)
        if held:
            self._send((Extend, name, {"grab": held[pick % len(held)]}))

    @rule(name=names, more=st.sampled_from((-1, 1, 2, 40)))
    def the_total_changes(self, name: str, more: int) -> None:
        offer = self.offers.get(name)
        if offer:
            self._send((Amend, name, {"changes": Changes(total=max(offer.terms.total + more, 1))}))

    @rule(name=names, after_ms=st.sampled_from((1, HOUR, 26 * HOUR)))
    def the_closing_time_changes(self, name: str, after_ms: int) -> None:
        self._send((Amend, name, {"changes": Changes(closes_at=self.now + after_ms)}))

    @rule(
        name=names, kinds=st.sampled_from(((Pause,), (Pause,), (Resume,), (Pause, Resume), (Resume, Pause)))
    )
    def it_is_paused_or_resumed(self, name: str, kinds: tuple[Any, ...]) -> None:
        self._send(*((kind, name, {}) for kind in kinds))

    @rule(name=names, pick=st.integers(0, 15))
    def it_is_closed(self, name: str, pick: int) -> None:
        if pick == 0:
            self._send((Close, name, {}))

    @rule(ms=st.sampled_from((1, 1_000, HOLD_MS, 60_000, HOUR, 5 * HOUR, 24 * HOUR)))
    def time_passes(self, ms: int) -> None:
        self.now += ms

    @rule(name=names, late_ms=st.sampled_from((-1, 0, 1)))
    def it_is_due(self, name: str, late_ms: int) -> None:
        offer = self.offers.get(name)
        if offer and offer.due < self.now + 30 * 24 * HOUR:
            self.now = max(self.now, offer.due + late_ms)

    @rule(name=names, late_ms=st.sampled_from((-1, 0, 0, 1, 90_000)))
    def its_hours_begin_or_end(self, name: str, late_ms: int) -> None:
        offer = self.offers.get(name)
        if offer is None or not offer.hours:
            return
        now = self.now
        if opens := opens_next(offer.hours, offer.offsets, now):
            now = opens
        while late_ms >= 0 and not opens and opens_next(offer.hours, offer.offsets, now) is None:
            now += 60_000 - now % 60_000
        self.now = max(self.now, now + late_ms)

    @rule()
    def sweeps(self) -> None:
        self.runner.run(self.sweep_some(Sweep()))

    @rule(holds=st.sampled_from((0, 1, None)), offers=st.sampled_from((0, 1)))
    def sweeps_a_little(self, holds: int | None, offers: int) -> None:
        self.runner.run(self.sweep_some(Sweep(holds, offers)))

    @invariant()
    def who_waits_is_served_when_a_new_grab_would_be(self) -> None:
        if hasattr(self, "runner"):
            self.check_conservation()
            self.check_waiting()

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.end_twins())
            self.runner.run(self.client.aclose())
            self.runner.close()


def _machine_of(settings: Settings) -> type[WaitingMachine]:
    connect = staticmethod(lambda: redis.asyncio.Redis.from_url(settings.redis_url))
    return type("OfServers", (WaitingMachine,), {"connect": connect, "__qualname__": "WaitingMachine"})


def _run(settings: Settings, count: int, steps: int, derandomize: bool) -> None:
    machine = _machine_of(settings)
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=hypothesis_settings(
            max_examples=count, stateful_step_count=steps, derandomize=derandomize, deadline=None
        ),
    )


@pytest.mark.timeout(900)
def test_fixed_histories_of_waiting_lists(servers: Settings) -> None:
    """The same histories on every run."""
    _run(servers, 16, 40, derandomize=True)


def test_a_sweeper_that_comes_a_week_late_postpones_a_retirement(servers: Settings) -> None:
    """The holds of a closed offer have not been expired when it should retire: what is due then is postponed,
    without an event, and a recovery does not know it.
    """
    state = _machine_of(servers)()
    sale = StockTerms(issuer="shop", total=3, hold_ms=HOUR, waiting_list=True)
    state.begin((sale,) * len(NAMES), 3)
    state.the_closing_time_changes("w:b", 1)
    state.time_passes(HOLD_MS)
    state.sweeps()
    state.it_is_due("w:b", 1)
    state.sweeps_a_little(0, 1)
    state.sweeps()
    state.teardown()


@pytest.mark.draws_cases
@pytest.mark.long
@pytest.mark.timeout(900)
def test_fresh_histories_of_waiting_lists(servers: Settings) -> None:
    """Others on every run."""
    _run(servers, examples(60), 50, derandomize=False)
