"""The pure rules and the real Lua, driven by the same random commands at the same random times, must not differ in anything.

After every step: the answers, the events byte for byte, and that a repeat got its first answer. At the end: everything Redis has of
every offer, and the books, from the event lines alone.
A failure prints the line that repeats it.
"""

import asyncio
import secrets
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import redis.asyncio
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from redis.asyncio.cluster import RedisCluster

from lua.gate import Gate, GateLimits
from lua.keys import KeySpace
from models.answers import Answer
from models.commands import AnyCommand, Close, Grab, Open, Pause, Resume
from models.events import OfferOpened, decode_event, encode_event
from models.identifiers import campaign_of
from models.offers import EnvelopeTerms
from models.rules import Offer, ShardState, decide, sweep
from models.splitting import pack_parts
from ops.settings import Settings
from streams.sweeper import Sweeper
from tests.lua.books import check_books
from tests.lua.conftest import NOW, SEALER, event_lines, take_over

OFFERS = ("c:a", "c:b", "d", "e", "f")
USERS = tuple(f"u{number}" for number in range(9))
# Rarely the same by chance: what repeats does so because it is sent again.
IDS = tuple(f"id{number}" for number in range(500))

offers = st.sampled_from(OFFERS)
ids = st.sampled_from(IDS)
grabs = st.builds(
    Grab,
    id=ids,
    offer=offers,
    user=st.sampled_from(USERS),
    quantity=st.sampled_from((1, 1, 1, 1, 1, 2)),
    attributes=st.sampled_from(({}, {}, {}, {"card": "c:1"})),
)
steering = st.one_of(*(st.builds(kind, id=ids, offer=offers) for kind in (Pause, Resume, Close)))


@st.composite
def opens(draw: Any) -> Open:
    parts = draw(st.integers(1, 8))
    least = draw(st.integers(1, 3))
    law = draw(st.sampled_from(("double_mean", "bounded", "equal")))
    most = draw(st.integers(least, 40)) if law == "bounded" and draw(st.booleans()) else None
    total = draw(st.integers(parts * least, parts * (most or 10**6)))
    opens_at = draw(st.none() | st.none() | st.integers(NOW, NOW + 3_000))
    closes_at = draw(st.none() | st.integers(NOW + 500, NOW + 9_000))
    if opens_at is not None and closes_at is not None and closes_at <= opens_at:
        closes_at = opens_at + 1
    terms = EnvelopeTerms(
        issuer="alice", funding="pay", asset="CNY", total=total, parts=parts, min=least, max=most, law=law,
        draw=draw(st.sampled_from(("ahead", "at_grab"))), seed=f"{draw(st.integers(0, 2**32)):032x}",
        opens_at=opens_at, closes_at=closes_at, title=draw(st.sampled_from(("", 'a "b" \\ 你好'))),
    )  # fmt: skip
    return Open(id=draw(ids), offer=draw(offers), terms=terms)


class Machine(RuleBasedStateMachine):
    """Two implementations, one history."""

    connect: Callable[[], Any]

    @initialize(batch_commands_max=st.sampled_from((2, 3, 512)), commands=st.lists(opens(), min_size=3, max_size=8))
    def begin(self, batch_commands_max: int, commands: list[AnyCommand]) -> None:
        self.runner = asyncio.Runner()
        self.keys = KeySpace(f"machine{secrets.token_hex(5)}", 2)
        self.now = [NOW]
        self.states = [ShardState(number) for number in range(2)]
        self.lines: list[list[bytes]] = [[], []]
        self.first_answers: dict[tuple[str, str], tuple[AnyCommand, Answer]] = {}
        self.sent: list[AnyCommand] = []
        self.runner.run(self._begin(GateLimits(batch_commands_max=batch_commands_max)))
        self._all(commands)

    async def _begin(self, limits: GateLimits) -> None:
        self.client = type(self).connect()
        await self.client.initialize()
        await take_over(self.client, self.keys)
        self.gate = Gate(self.client, self.keys, SEALER, limits, clock=lambda: self.now[0])

    @rule(command=opens())
    def opens_an_offer(self, command: AnyCommand) -> None:
        self._all([command])

    @rule(offer=offers, users=st.lists(st.sampled_from(USERS), min_size=4, max_size=12))
    def a_crowd_comes(self, offer: str, users: list[str]) -> None:
        """Every one under an id that nobody has used."""
        first = len(IDS) + len(self.sent)
        self._all([Grab(id=f"id{number}", offer=offer, user=user) for number, user in enumerate(users, first)])

    @rule(command=opens(), again=opens())
    def opens_twice_under_one_id(self, command: Open, again: Open) -> None:
        self._all([command, msgspec.structs.replace(again, id=command.id), command])

    @rule(commands=st.lists(grabs, min_size=1, max_size=12))
    def grabs_many(self, commands: list[AnyCommand]) -> None:
        self._all(commands)

    @rule(
        picks=st.lists(st.tuples(st.integers(0, 300), st.sampled_from((*USERS, None, None))), min_size=1, max_size=6),
        more=st.lists(grabs, max_size=3),
    )
    def sends_again(self, picks: list[tuple[int, str | None]], more: list[AnyCommand]) -> None:
        """Earlier commands once more, the latest most often; grabs also with another user, and with company."""
        commands = [(self.sent[-1 - back % len(self.sent)], user) for back, user in picks if self.sent]
        changed = [msgspec.structs.replace(one, user=user) if user and isinstance(one, Grab) else one for one, user in commands]
        self._all([*changed, *more, *changed[:1]])

    @rule(commands=st.lists(st.one_of(grabs, grabs, grabs, steering), min_size=1, max_size=8), times=st.sampled_from((1, 1, 2)))
    def mixes(self, commands: list[AnyCommand], times: int) -> None:
        self._all([command for command in commands for _ in range(times)])

    @rule(ms=st.sampled_from((0, 1, 7, 500, 999, 3_000, 6_000, -2_000)))
    def time_passes(self, ms: int) -> None:
        self.now[0] += ms

    @rule()
    def sweeps(self) -> None:
        self.runner.run(self._sweep())

    async def _sweep(self) -> None:
        for number, state in enumerate(self.states):
            await Sweeper(self.client, self.keys.shard(number), 2, 10**12).close_due(self.now[0])
            await self._compare(number, sweep(state, self.now[0]))

    def _all(self, commands: list[AnyCommand]) -> None:
        if commands:
            self.runner.run(self._decide(commands))
            self.sent += commands

    async def _decide(self, commands: list[AnyCommand]) -> None:
        answers = await self.gate.decide(commands, "decided")
        made: list[list[Any]] = [[], []]
        by_shard: dict[int, list[tuple[int, AnyCommand]]] = {}
        for place, command in enumerate(commands):
            by_shard.setdefault(self.keys.shard_of_offer(command.offer), []).append((place, command))
        for number, of_shard in by_shard.items():
            for place, command in of_shard:
                decided = decide(self.states[number], command, self.now[0], {"sealed_seed": "sealed"})
                assert answers[place] == decided.answer, f"{command}: Lua {answers[place]}, rules {decided.answer}"
                made[number] += decided.events
                self._check_repeat(command, answers[place])
        for number, events in enumerate(made):
            await self._compare(number, events)

    def _check_repeat(self, command: AnyCommand, answer: Answer) -> None:
        """The promise about repeats, without the rules: a command that was carried out keeps its answer, and its id."""
        known, first = self.first_answers.setdefault((campaign_of(command.offer), command.id), (command, answer))
        if first is answer or not first.positive:
            if not first.positive:
                del self.first_answers[campaign_of(command.offer), command.id]
            assert not (answer.positive and answer.repeated)
        elif command == known:
            assert answer == msgspec.structs.replace(first, repeated=True)
        else:
            assert answer.outcome in ("conflict", "invalid")

    async def _compare(self, number: int, events: list[Any]) -> None:
        """The events of this step, byte for byte; only the sealed seed is a server's own, and is opened and checked."""
        lines = await event_lines(self.client, self.keys, number)
        new = lines[len(self.lines[number]) :]
        expected = []
        for line, event in zip(new, events, strict=True):
            if isinstance(event, OfferOpened):
                sealed = decode_event(line).sealed_seed  # type: ignore[union-attr]
                assert SEALER.open(number, event.offer, "seed", sealed) == self.states[number].offers[event.offer].seed
                event = msgspec.structs.replace(event, sealed_seed=sealed)
            expected.append(encode_event(event))
        assert new == expected
        self.lines[number] = lines

    @invariant()
    def nothing_is_created_or_lost(self) -> None:
        if not hasattr(self, "states"):
            return
        for state in self.states:
            for offer in state.offers.values():
                given = sum(part.amount for part in offer.users.values())
                closed = offer.closed_reason in ("command", "deadline")
                assert closed or given + offer.amount_left == offer.terms.total
                assert given <= offer.terms.total
                assert all(part.amount >= offer.terms.min for part in offer.users.values())

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self._end())
            self.runner.close()

    async def _end(self) -> None:
        for number, state in enumerate(self.states):
            await self._compare_state(number, state)
            check_books(self.lines[number])
        names = [key async for key in self.client.scan_iter(match=f"{self.keys.prefix}:*", count=1_000)]
        if names:
            await self.client.unlink(*names)
        await self.gate.close()
        await self.client.aclose()

    async def _compare_state(self, number: int, state: ShardState) -> None:
        of_shard = self.keys.shard(number)
        assert int(await self.client.hget(of_shard.state, "seq") or 0) == state.seq
        assert [decode_event(line).seq for line in self.lines[number]] == list(range(1, state.seq + 1))
        assert {name.decode() for name in await self.client.smembers(of_shard.offers)} == set(state.offers)
        due = {name.decode(): int(at) for name, at in await self.client.zrange(of_shard.due, 0, -1, withscores=True)}
        assert due == {name: offer.closes_at for name, offer in state.offers.items() if offer.closed_reason is None}
        for offer in state.offers.values():
            await self._compare_offer(of_shard, offer)
        for campaign in {campaign_of(name) for name in OFFERS}:
            kept = {field.decode() for field in await self.client.hkeys(of_shard.answers(campaign))}
            assert kept == {id for kept_in, id in state.answers if kept_in == campaign}
        refused = {field.decode() for field in await self.client.hkeys(of_shard.refusals)}
        assert refused == {f"{campaign}/{id}" for campaign, id in state.refusals}
        counts = {field.decode(): int(count) for field, count in (await self.client.hgetall(of_shard.demand)).items()}
        assert counts == {f"{second}:{code}:{offer}": count for (second, code, offer), count in state.demand.items()}

    async def _compare_offer(self, of_shard: Any, offer: Offer) -> None:
        fields = {name.decode(): value.decode() for name, value in (await self.client.hgetall(of_shard.offer(offer.name))).items()}
        assert fields["state"] == ("closed" if offer.closed_reason else "open")
        assert fields.get("reason") == offer.closed_reason
        assert fields["paused"] == ("1" if offer.paused else "0")
        numbers = {name: int(fields[name]) for name in ("amount_left", "units_left", "places", "offer_seq", "opens_at", "closes_at")}
        assert numbers == {name: getattr(offer, name) for name in numbers}
        drawn = b"" if offer.closed_reason else pack_parts(offer.parts)
        assert (await self.client.get(of_shard.of_offer(offer.name)[2]) or b"") == drawn
        users = await self.client.hgetall(of_shard.of_offer(offer.name)[1])
        assert {
            user.decode(): tuple(int.from_bytes(number, "big") for number in (place, amount, seq))
            for user, (place, amount, seq) in ((user, struct.unpack(">3s6s5s", record)) for user, record in users.items())
        } == {user: tuple(part) for user, part in offer.users.items()}


def _run(connect: Callable[[], Any], examples: int, derandomize: bool) -> None:
    machine = type("OneMachine", (Machine,), {"connect": staticmethod(connect)})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=hypothesis_settings(max_examples=examples, stateful_step_count=40, derandomize=derandomize, deadline=None),
    )


# A failure is shrunk before it is printed, which takes minutes.
@pytest.mark.timeout(900)
def test_same_histories_every_time(servers: Settings) -> None:
    """The same random histories on every run."""
    _run(lambda: redis.asyncio.Redis.from_url(servers.redis_url), 120, derandomize=True)


@pytest.mark.timeout(900)
def test_fresh_histories(servers: Settings) -> None:
    """Others on every run."""
    _run(lambda: redis.asyncio.Redis.from_url(servers.redis_url), 60, derandomize=False)


@pytest.mark.timeout(900)
def test_histories_on_a_cluster(cluster_port: int) -> None:
    """The same scripts, with the shards on different nodes."""
    _run(lambda: RedisCluster(host="127.0.0.1", port=cluster_port), 15, derandomize=True)
