"""A state machine of Hypothesis: the pure rules and the real Lua get the same random commands at the same
random times, and must not differ.

After every step the answers, the events (byte for byte) and repeats are compared; at the end everything in
Redis. The books are checked from the event lines alone. A failure prints the line that repeats it.
"""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import redis.asyncio
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio.cluster import RedisCluster

from grabstream.gate.calls import GateLimits
from grabstream.lua.keys import KeySpace
from grabstream.models.commands import AnyCommand, Confirm, Grab, Open
from grabstream.settings import Settings
from tests.conftest import examples
from tests.lua.histories.strategies import (
    HOUR,
    IDS,
    PASSES_MS,
    PIECES,
    USERS,
    baskets,
    confirms,
    envelopes,
    grab_commands,
    grabs,
    lively_opens,
    offer_commands,
    offers,
    opens,
    operations,
    piece_grabs,
    whole_lists,
)
from tests.lua.histories.twins import SHARDS, Twins


class Machine(Twins, RuleBasedStateMachine):
    """Twins whose commands and times Hypothesis draws."""

    connect: Callable[[], Any]

    @initialize(
        batch_commands_max=st.sampled_from((2, 3, 512)),
        commands=st.lists(envelopes(), min_size=2, max_size=6), pieces=lively_opens,
        only_pieces=st.sampled_from((True, True, False)), data=st.data(),
    )  # fmt: skip
    def begin(
        self,
        batch_commands_max: int,
        commands: list[AnyCommand],
        pieces: list[Open],
        only_pieces: bool,
        data: Any,
    ) -> None:
        self.runner = asyncio.Runner()
        self.sent: list[AnyCommand] = []
        self.baskets: list[list[Any]] = []
        self.fresh = 0
        self.only_pieces = only_pieces
        limits = GateLimits(timeout_ms=30_000, batch_commands_max=batch_commands_max)
        self.runner.run(
            self.begin_twins(type(self).connect(), KeySpace(f"machine{secrets.token_hex(5)}", SHARDS), limits)
        )
        self._decide(commands)
        self._decide(pieces)
        for command in pieces:
            if command.terms.audience == "list":
                self._decide(data.draw(whole_lists(command.offer, command.terms.total, "audience")))
            if (
                command.terms.__struct_config__.tag == "coupon"
                and command.terms.opens_at
                and data.draw(st.booleans())
            ):
                self._decide(data.draw(whole_lists(command.offer, command.terms.total, "codes")))
        self.now += 1

    def _holds(self) -> list[Any]:
        """Offer, name and state of each grab that has units on hold."""
        return [
            (offer, name, grab)
            for state in self.states
            for offer in state.offers.values()
            for name, grab in offer.grabs.items()
            if grab.held
        ]

    def _named(self, commands: list[Any], data: Any) -> list[Any]:
        """The commands, most of them under new ids."""
        self.fresh += len(commands)
        return [
            command
            if data.draw(st.integers(0, 9)) == 0
            else msgspec.structs.replace(command, id=f"new{self.fresh + number}")
            for number, command in enumerate(commands)
        ]

    @precondition(lambda self: not self.only_pieces)
    @rule(command=opens)
    def opens_an_offer(self, command: AnyCommand) -> None:
        self._decide([command])

    @precondition(lambda self: not self.only_pieces)
    @rule(offer=offers, users=st.lists(st.sampled_from(USERS), min_size=4, max_size=12))
    def a_crowd_comes(self, offer: str, users: list[str]) -> None:
        """Grabs of many users, all under new ids."""
        first = len(IDS) + len(self.sent)
        self._decide(
            [Grab(id=f"id{number}", offer=offer, user=user) for number, user in enumerate(users, first)]
        )

    @precondition(lambda self: not self.only_pieces)
    @rule(command=envelopes(), again=envelopes())
    def opens_twice_under_one_id(self, command: Open, again: Open) -> None:
        self._decide([command, msgspec.structs.replace(again, id=command.id), command])

    @precondition(lambda self: not self.only_pieces)
    @rule(commands=st.lists(grabs, min_size=1, max_size=12))
    def grabs_many(self, commands: list[AnyCommand]) -> None:
        self._decide(commands)

    @rule(
        picks=st.lists(
            st.tuples(st.integers(0, 300), st.sampled_from((*USERS, None, None))), min_size=1, max_size=6
        ),
        more=st.lists(grabs, max_size=3),
    )
    def sends_again(self, picks: list[tuple[int, str | None]], more: list[AnyCommand]) -> None:
        """Earlier commands, mostly recent ones; some grabs with another user; new grabs in the list."""
        earlier = [
            (self.sent[-1 - commands_ago % len(self.sent)], user) for commands_ago, user in picks if self.sent
        ]
        changed = [
            msgspec.structs.replace(command, user=user) if user and isinstance(command, Grab) else command
            for command, user in earlier
        ]
        self._decide([*changed, *more, *changed[:1]])

    @precondition(lambda self: not self.only_pieces)
    @rule(
        commands=st.lists(st.one_of(grabs, grabs, grabs, offer_commands), min_size=1, max_size=8),
        times=st.sampled_from((1, 1, 2)),
    )
    def mixes(self, commands: list[AnyCommand], times: int) -> None:
        self._decide([command for command in commands for _ in range(times)])

    @rule(data=st.data(), count=st.integers(1, 8))
    def grabs_pieces(self, data: Any, count: int) -> None:
        self._decide(self._named([data.draw(piece_grabs(self.now)) for _ in range(count)], data))

    @rule(data=st.data(), count=st.integers(1, 5))
    def settles(self, data: Any, count: int) -> None:
        """Commands about existing grabs of any age, sometimes about an unknown grab."""
        known = [
            (offer.name, name, grab.price * (grab.held or grab.lapsed))
            for state in self.states
            for offer in state.offers.values()
            for name, grab in offer.grabs.items()
        ]
        if not known or data.draw(st.integers(0, 9)) == 0:
            known = [(data.draw(st.sampled_from((*PIECES, "e"))), "id0", 7)]
        self._decide(
            self._named(
                [data.draw(grab_commands(*data.draw(st.sampled_from(known)))) for _ in range(count)], data
            )
        )

    @rule(data=st.data(), spoiled=st.sampled_from((0, 0, 1, 3)), late_ms=st.sampled_from((None, None, -1, 0)))
    def a_crowd_pays(self, data: Any, spoiled: int, late_ms: int | None) -> None:
        """Confirmations of all holds of some offers in one list, most of them right; between them others
        about the same grabs, and some of the list a second time, some with another id or payment.
        """
        holds = self._holds()
        if not holds:
            return
        if late_ms is not None:
            self.now = max(self.now, min(grab.lapses_at for *_, grab in holds) + late_ms)
        first = self.fresh
        listed: list[Any] = []
        self.fresh += len(holds)
        for number, (offer, name, grab) in enumerate(holds, first):
            paid = grab.price * grab.held
            listed.append(
                Confirm(
                    id=f"new{number}", offer=offer.name, grab=name, paid=paid,
                    payment=f"paid{number}" if paid or number % 3 else None,
                    currency="CNY" if paid else None, user=grab.user if number % 4 == 0 else None,
                )
            )  # fmt: skip
        for _ in range(spoiled):
            offer, name, grab = data.draw(st.sampled_from(holds))
            [other] = self._named([data.draw(confirms(offer.name, name, grab.price * grab.held))], data)
            again = data.draw(st.sampled_from(listed))
            spoil = data.draw(st.sampled_from(("", "id", "payment", "user", "grab")))
            if spoil == "id":
                [again] = self._named([again], data)
            elif spoil:
                again = msgspec.structs.replace(again, **{spoil: "p1" if spoil == "payment" else "u1"})
            for command in (other, again):
                listed.insert(data.draw(st.integers(0, len(listed))), command)
        self._decide(listed)

    @rule(commands=baskets(), times=st.sampled_from((1, 1, 2)), data=st.data())
    def grabs_a_basket(self, commands: list[AnyCommand], times: int, data: Any) -> None:
        commands = self._named(commands, data)
        for _ in range(times):
            self._decide(commands)

    @rule(baskets_ago=st.integers(0, 20), other=st.sampled_from((None, None, *USERS)))
    def sends_a_basket_again(self, baskets_ago: int, other: str | None) -> None:
        """An earlier basket, sometimes with another user in one of its grabs."""
        if self.baskets:
            commands = self.baskets[-1 - baskets_ago % len(self.baskets)]
            self._decide(
                [*commands[:-1], msgspec.structs.replace(commands[-1], user=other or commands[-1].user)]
            )

    @rule(data=st.data(), count=st.integers(1, 3))
    def operates(self, data: Any, count: int) -> None:
        self._decide(self._named([data.draw(operations(self.now)) for _ in range(count)], data))

    @rule(ms=st.sampled_from(PASSES_MS))
    def time_passes(self, ms: int) -> None:
        self.now += ms

    @rule(number=st.integers(0, 50), late_ms=st.sampled_from((-1, 0, 1)), data=st.data())
    def at_a_deadline(self, number: int, late_ms: int, data: Any) -> None:
        """Two commands about a hold, in the millisecond of its end or the one before or after."""
        holds = self._holds()
        if holds:
            offer, name, grab = holds[number % len(holds)]
            self.now = max(self.now, grab.lapses_at + late_ms)
            self._decide(
                self._named(
                    [data.draw(grab_commands(offer.name, name, grab.price * grab.held)) for _ in range(2)],
                    data,
                )
            )

    @rule(number=st.integers(0, 50), late_ms=st.sampled_from((-1, 0, 1)), swept=st.booleans())
    def at_a_due_time(self, number: int, late_ms: int, swept: bool) -> None:
        """In the millisecond in which an offer with a waiting list is due, or the one before or after."""
        dues = [
            offer.due
            for state in self.states
            for offer in state.offers.values()
            if offer.queue and offer.due < self.now + 30 * 24 * HOUR
        ]
        if dues:
            self.now = max(self.now, dues[number % len(dues)] + late_ms)
            if swept:
                self.runner.run(self.sweep_both())

    @rule()
    def sweeps(self) -> None:
        self.runner.run(self.sweep_both())

    def _decide(self, commands: list[AnyCommand]) -> None:
        if commands:
            self.runner.run(self.decide_both(commands))
            if isinstance(commands[0], Grab) and commands[0].basket is not None:
                self.baskets.append(commands)  # a basket is sent again as a whole only
            else:
                self.sent += commands

    @invariant()
    def nothing_is_created_or_lost(self) -> None:
        if hasattr(self, "states"):
            self.check_conservation()

    @invariant()
    def nobody_is_served_while_new_grabs_are_refused(self) -> None:
        """And no grab waits for units that are left, once the sweeper has come."""
        if hasattr(self, "states"):
            self.check_waiting()

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.end_twins())
            self.runner.run(self.client.aclose())
            self.runner.close()


def _run(connect: Callable[[], Any], count: int, derandomize: bool, part: int = 0) -> None:
    """Plays histories, `count` of them in the long tier. With `derandomize` they are the same ones on every
    run, others for each `part`.
    """
    # With `derandomize`, Hypothesis derives the histories from the name of the class.
    machine = type(
        f"Machine{part}", (Machine,), {"connect": staticmethod(connect), "__qualname__": f"Machine{part}"}
    )
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=hypothesis_settings(
            max_examples=examples(count), stateful_step_count=40, derandomize=derandomize, deadline=None
        ),
    )


# A failure is shrunk before it is printed, which takes minutes.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in (1, 2, 3))])
@pytest.mark.every_change("every script against the rules")
def test_fixed_histories_match_the_rules(servers: Settings, part: int) -> None:
    """The same random histories on every run, more than 6,000 steps; `make nightly` plays more."""
    _run(lambda: redis.asyncio.Redis.from_url(servers.redis_url), 40, derandomize=True, part=part)


@pytest.mark.draws_cases
@pytest.mark.long
@pytest.mark.timeout(900)
def test_fresh_histories_match_the_rules(servers: Settings) -> None:
    """Other histories on every run."""
    _run(lambda: redis.asyncio.Redis.from_url(servers.redis_url), 100, derandomize=False)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_histories_on_a_cluster_match_the_rules(cluster_port: int) -> None:
    """The same scripts, with the shards on different nodes."""
    _run(lambda: RedisCluster(host="127.0.0.1", port=cluster_port), 15, derandomize=True)
