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
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from redis.asyncio.cluster import RedisCluster

from lua.batches import zone_from
from lua.gate import Gate, GateLimits
from lua.keys import KeySpace
from models.answers import Answer
from models.commands import AnyCommand, Grab, Open, Settle
from models.events import GrabConfirmed, GrabGranted, OfferLoaded, OfferOpened, decode_event, encode_event
from models.identifiers import campaign_of
from models.rules import Offer, ShardState, decide, decide_basket, sweep
from models.splitting import pack_parts
from ops.settings import Settings
from streams.sweeper import Sweeper
from tests.lua.books import check_books
from tests.lua.conftest import NOW, SEALER, event_lines, take_over
from tests.lua.histories import (
    IDS,
    OFFERS,
    PASSES,
    PIECES,
    TICKETS,
    USERS,
    baskets,
    beginnings,
    envelopes,
    grabs,
    offers,
    opens,
    operations,
    piece_grabs,
    settlings,
    steering,
    whole_lists,
)


class Machine(RuleBasedStateMachine):
    """Two implementations, one history."""

    connect: Callable[[], Any]

    @initialize(
        batch_commands_max=st.sampled_from((2, 3, 512)), commands=st.lists(envelopes(), min_size=2, max_size=6), pieces=beginnings,
        only_pieces=st.sampled_from((True, True, False)), data=st.data(),
    )  # fmt: skip
    def begin(self, batch_commands_max: int, commands: list[AnyCommand], pieces: list[Open], only_pieces: bool, data: Any) -> None:
        self.runner = asyncio.Runner()
        self.keys = KeySpace(f"machine{secrets.token_hex(5)}", 2)
        self.now = [NOW]
        self.states = [ShardState(number) for number in range(2)]
        self.lines: list[list[bytes]] = [[], []]
        self.first_answers: dict[tuple[str, str], tuple[AnyCommand, Answer]] = {}
        self.sent: list[AnyCommand] = []
        self.baskets: list[list[Any]] = []
        self.fresh = 0
        self.only_pieces = only_pieces
        self.runner.run(self._begin(GateLimits(batch_commands_max=batch_commands_max)))
        self._all(commands)
        self._all(pieces)
        for command in pieces:
            if command.terms.audience == "list":
                self._all(data.draw(whole_lists(command.offer, command.terms.total, "audience")))
            if command.terms.__struct_config__.tag == "coupon" and command.terms.opens_at and data.draw(st.booleans()):
                self._all(data.draw(whole_lists(command.offer, command.terms.total, "codes")))
        self.now[0] += 1

    def _named(self, commands: list[Any], data: Any) -> list[Any]:
        """Most of the commands under ids that nobody has used."""
        self.fresh += len(commands)
        return [
            command if data.draw(st.integers(0, 9)) == 0 else msgspec.structs.replace(command, id=f"new{self.fresh + number}")
            for number, command in enumerate(commands)
        ]

    async def _begin(self, limits: GateLimits) -> None:
        self.client = type(self).connect()
        await self.client.initialize()
        await take_over(self.client, self.keys)
        self.gate = Gate(self.client, self.keys, SEALER, limits, clock=lambda: self.now[0], tickets=TICKETS)

    @precondition(lambda self: not self.only_pieces)
    @rule(command=opens)
    def opens_an_offer(self, command: AnyCommand) -> None:
        self._all([command])

    @precondition(lambda self: not self.only_pieces)
    @rule(offer=offers, users=st.lists(st.sampled_from(USERS), min_size=4, max_size=12))
    def a_crowd_comes(self, offer: str, users: list[str]) -> None:
        """Every one under an id that nobody has used."""
        first = len(IDS) + len(self.sent)
        self._all([Grab(id=f"id{number}", offer=offer, user=user) for number, user in enumerate(users, first)])

    @precondition(lambda self: not self.only_pieces)
    @rule(command=envelopes(), again=envelopes())
    def opens_twice_under_one_id(self, command: Open, again: Open) -> None:
        self._all([command, msgspec.structs.replace(again, id=command.id), command])

    @precondition(lambda self: not self.only_pieces)
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

    @precondition(lambda self: not self.only_pieces)
    @rule(commands=st.lists(st.one_of(grabs, grabs, grabs, steering), min_size=1, max_size=8), times=st.sampled_from((1, 1, 2)))
    def mixes(self, commands: list[AnyCommand], times: int) -> None:
        self._all([command for command in commands for _ in range(times)])

    @rule(data=st.data(), count=st.integers(1, 8))
    def grabs_pieces(self, data: Any, count: int) -> None:
        self._all(self._named([data.draw(piece_grabs(self.now[0])) for _ in range(count)], data))

    @rule(data=st.data(), count=st.integers(1, 5))
    def settles(self, data: Any, count: int) -> None:
        """Commands about grabs that are there, of any age, and now and then about one that is not."""
        known = [
            (offer.name, name, grab.price * (grab.held or grab.lapsed))
            for state in self.states
            for offer in state.offers.values()
            for name, grab in offer.grabs.items()
        ]
        if not known or data.draw(st.integers(0, 9)) == 0:
            known = [(data.draw(st.sampled_from((*PIECES, "e"))), "id0", 7)]
        self._all(self._named([data.draw(settlings(*data.draw(st.sampled_from(known)))) for _ in range(count)], data))

    @rule(commands=baskets(), times=st.sampled_from((1, 1, 2)), data=st.data())
    def grabs_a_basket(self, commands: list[AnyCommand], times: int, data: Any) -> None:
        commands = self._named(commands, data)
        for _ in range(times):
            self._all(commands)

    @rule(back=st.integers(0, 20), other=st.sampled_from((None, None, *USERS)))
    def sends_a_basket_again(self, back: int, other: str | None) -> None:
        """The same basket once more, also with another user in one of its grabs."""
        if self.baskets:
            commands = self.baskets[-1 - back % len(self.baskets)]
            self._all([*commands[:-1], msgspec.structs.replace(commands[-1], user=other or commands[-1].user)])

    @rule(data=st.data(), count=st.integers(1, 3))
    def operates(self, data: Any, count: int) -> None:
        self._all(self._named([data.draw(operations(self.now[0])) for _ in range(count)], data))

    @rule(ms=st.sampled_from(PASSES))
    def time_passes(self, ms: int) -> None:
        self.now[0] += ms

    @rule(number=st.integers(0, 50), late_ms=st.sampled_from((-1, 0, 1)), data=st.data())
    def at_a_deadline(self, number: int, late_ms: int, data: Any) -> None:
        """The very millisecond of a hold's end: whoever comes first wins."""
        holds = [
            (offer, name, grab)
            for state in self.states
            for offer in state.offers.values()
            for name, grab in offer.grabs.items()
            if grab.held
        ]
        if holds:
            offer, name, grab = holds[number % len(holds)]
            self.now[0] = max(self.now[0], grab.lapses_at + late_ms)
            self._all(self._named([data.draw(settlings(offer.name, name, grab.price * grab.held)) for _ in range(2)], data))

    @rule()
    def sweeps(self) -> None:
        self.runner.run(self._sweep())

    async def _sweep(self) -> None:
        for number, state in enumerate(self.states):
            await Sweeper(self.client, self.keys.shard(number), 2, 10**12).sweep(self.now[0])
            await self._compare(number, sweep(state, self.now[0]))

    def _all(self, commands: list[AnyCommand]) -> None:
        if commands:
            self.runner.run(self._decide(commands))
            if isinstance(commands[0], Grab) and commands[0].basket is not None:
                self.baskets.append(commands)  # it may be sent again as a whole only
            else:
                self.sent += commands

    async def _decide(self, commands: list[AnyCommand]) -> None:
        answers = await self.gate.decide(commands, "decided")
        made: list[list[Any]] = [[], []]
        by_shard: dict[int, list[tuple[int, AnyCommand]]] = {}
        for place, command in enumerate(commands):
            by_shard.setdefault(self.keys.shard_of_offer(command.offer), []).append((place, command))
        for number, of_shard in by_shard.items():
            for group in _groups(of_shard):
                for (place, command), decided in zip(group, self._by_rules(number, group), strict=True):
                    assert answers[place] == decided.answer, f"{command}: Lua {answers[place]}, rules {decided.answer}"
                    made[number] += decided.events
                    self._check_repeat(command, answers[place])
        for number, events in enumerate(made):
            await self._compare(number, events)

    def _by_rules(self, number: int, group: list[tuple[int, AnyCommand]]) -> list[Any]:
        """What the rules decide of one command, or of the grabs of a basket."""
        state, commands = self.states[number], [command for _, command in group]
        if isinstance(commands[0], Grab) and commands[0].basket is not None:
            return decide_basket(state, commands, self.now[0], [self._drawn(command) for command in commands])  # type: ignore[arg-type]
        return [decide(state, commands[0], self.now[0], self._drawn(commands[0]))]

    def _drawn(self, command: AnyCommand) -> dict[str, Any]:
        if isinstance(command, Open):
            return {"sealed_seed": "sealed", "zone_from": zone_from(self.now[0])}
        if isinstance(command, Grab) and command.ticket and (ticket := TICKETS.read(command.ticket, command.user, command.offer)):
            return {"ticket_expires_at": ticket.expires_at_ms, "ticket_once": ticket.once_id}
        return {}

    def _check_repeat(self, command: AnyCommand, answer: Answer) -> None:
        """The promise about repeats, without the rules: a command that was carried out keeps its answer, and its id."""
        self._forget_retired()
        known, first = self.first_answers.setdefault((campaign_of(command.offer), command.id), (command, answer))
        if first is answer or not first.positive:
            if not first.positive:
                del self.first_answers[campaign_of(command.offer), command.id]
            assert not (answer.positive and answer.repeated and not isinstance(command, Settle))
        elif command == known:
            assert answer == msgspec.structs.replace(first, repeated=True)
        else:
            assert answer.outcome in ("conflict", "invalid")

    def _forget_retired(self) -> None:
        """Answers are kept until their offer is retired."""
        retired = {offer for state in self.states for offer in state.retired}
        for key in [key for key, (command, _) in self.first_answers.items() if command.offer in retired]:
            del self.first_answers[key]

    async def _compare(self, number: int, events: list[Any]) -> None:
        """The events of this step, byte for byte; only the sealed seed is a server's own, and is opened and checked."""
        lines = await event_lines(self.client, self.keys, number)
        new = lines[len(self.lines[number]) :]
        expected = []
        for line, event in zip(new, events, strict=True):
            if isinstance(event, OfferOpened):
                sealed = decode_event(line).sealed_seed  # type: ignore[union-attr]
                if sealed is not None:
                    assert SEALER.open(number, event.offer, "seed", sealed) == self.states[number].offers[event.offer].seed
                event = msgspec.structs.replace(event, sealed_seed=sealed)
            elif isinstance(event, GrabGranted | GrabConfirmed) and event.codes:
                event = msgspec.structs.replace(event, codes=self._sealed(number, event.offer, line, "codes", event.codes))
            elif isinstance(event, OfferLoaded) and event.what == "codes":
                event = msgspec.structs.replace(event, items=self._sealed(number, event.offer, line, "items", event.items))
            expected.append(encode_event(event))
        assert new == expected
        self.lines[number] = lines

    def _sealed(self, number: int, offer: str, line: bytes, field: str, codes: tuple[str, ...]) -> tuple[str, ...]:
        """The codes as sealed in the line, when they are those: in clear they stand in no topic."""
        sealed = getattr(decode_event(line), field)
        assert tuple(SEALER.open(number, offer, "code", one) for one in sealed) == codes
        return sealed  # type: ignore[no-any-return]

    @invariant()
    def nothing_is_created_or_lost(self) -> None:
        if not hasattr(self, "states"):
            return
        for state in self.states:
            for offer in state.offers.values():
                if not offer.is_envelope:
                    held, taken = (sum(getattr(grab, what) for grab in offer.grabs.values()) for what in ("held", "taken"))
                    assert offer.held == held
                    assert offer.closed_reason or offer.units_left + held + taken == offer.terms.total
                    assert min(offer.units_left, *(min(grab.held, grab.taken - grab.redeemed) for grab in offer.grabs.values()), 0) == 0
                    continue
                given = sum(part.amount for part in offer.users.values())
                closed = offer.closed_reason in ("command", "deadline")
                assert closed or given + offer.amount_left == offer.terms.total
                assert given <= offer.terms.total
                assert all(part.amount >= offer.terms.min for part in offer.users.values())  # type: ignore[union-attr]

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
        assert {name.decode() for name in await self.client.smembers(of_shard.retired)} == state.retired
        assert await self._scores(of_shard.due) == {name: offer.due for name, offer in state.offers.items()}
        assert await self._scores(of_shard.holds) == {
            f"{offer.name}/{name}": grab.lapses_at for offer in state.offers.values() for name, grab in offer.grabs.items() if grab.held
        }
        counted = await self.client.hgetall(of_shard.campaigns)
        names = [offer.campaign for offer in state.offers.values()]
        assert {name.decode(): int(number) for name, number in counted.items()} == {name: names.count(name) for name in names}
        for offer in state.offers.values():
            await self._compare_offer(of_shard, offer)
        for campaign in {campaign_of(name) for name in (*OFFERS, *PIECES)}:
            kept = {field.decode() for field in await self.client.hkeys(of_shard.answers(campaign))}
            assert kept == {id for kept_in, id in state.answers if kept_in == campaign}
            _, payments_key, counters_key = of_shard.of_campaign(campaign)
            payments = {name.decode(): tuple(unpack(record)) for name, record in (await self.client.hgetall(payments_key)).items()}
            assert payments == {name: tuple(payment) for (of, name), payment in state.payments.items() if of == campaign}
            assert await self._counters(counters_key) == {name: value for (of, name), value in state.counters.items() if of == campaign}
        refused = {field.decode() for field in await self.client.hkeys(of_shard.refusals)}
        assert refused == {f"{campaign}/{id}" for campaign, id in state.refusals}
        counts = {field.decode(): int(count) for field, count in (await self.client.hgetall(of_shard.demand)).items()}
        assert counts == {f"{second}:{code}:{offer}": count for (second, code, offer), count in state.demand.items()}

    async def _compare_offer(self, of_shard: Any, offer: Offer) -> None:
        found = await self.client.hgetall(of_shard.offer(offer.name))
        fields = {name.decode(): value.decode() for name, value in found.items() if name not in (b"rules", b"loads")}
        assert fields["state"] == ("closed" if offer.closed_reason else "open")
        assert fields.get("reason") == offer.closed_reason
        assert fields["paused"] == ("1" if offer.paused else "0")
        numbers = {name: int(fields[name]) for name in ("amount_left", "units_left", "places", "offer_seq", "opens_at", "closes_at")}
        assert numbers == {name: getattr(offer, name) for name in numbers}
        _, users_key, parts_key, grabs_key, codes_key, audience_key, seen_key, queue_key = of_shard.of_offer(offer.name)
        assert (await self.client.get(parts_key) or b"") == pack_parts(offer.parts)
        assert {user.decode() for user in await self.client.smembers(audience_key)} == offer.audience
        assert {name.decode() for name in await self.client.smembers(seen_key)} == offer.seen
        if not offer.is_envelope:
            assert int(fields["total"]) == offer.terms.total
            assert (int(fields["held"]), int(fields["queued"])) == (offer.held, offer.queued)
            assert await self._counters(users_key) == offer.counters
            codes = [SEALER.open(of_shard.shard, offer.name, "code", code.decode()) for code in await self.client.lrange(codes_key, 0, -1)]
            assert codes == offer.codes
            assert [name.decode() for name in await self.client.zrange(queue_key, 0, -1)] == offer.queue
            records = {name.decode(): unpack(record) for name, record in (await self.client.hgetall(grabs_key)).items()}
            assert records == {name: self._record(of_shard.shard, offer, grab, records) for name, grab in offer.grabs.items()}
            return
        users = await self.client.hgetall(users_key)
        assert {
            user.decode(): tuple(int.from_bytes(number, "big") for number in (place, amount, seq))
            for user, (place, amount, seq) in ((user, struct.unpack(">3s6s5s", record)) for user, record in users.items())
        } == {user: tuple(part) for user, part in offer.users.items()}

    async def _scores(self, key: str) -> dict[str, int]:
        return {name.decode(): int(at) for name, at in await self.client.zrange(key, 0, -1, withscores=True)}

    async def _counters(self, key: str) -> dict[str, tuple[int, ...]]:
        return {name.decode(): tuple(map(int, value.split(b":"))) for name, value in (await self.client.hgetall(key)).items()}

    def _record(self, shard: int, offer: Offer, grab: Any, records: dict[str, list[Any]]) -> list[Any]:
        """A grab as Lua keeps it; the codes in it are sealed there, and are opened here."""
        for record in records.values():
            record[-1] = [SEALER.open(shard, offer.name, "code", code) if ":" in code else code for code in record[-1]]
        return [
            grab.user, grab.place, grab.quantity, grab.held, grab.taken, grab.redeemed, grab.lapsed, grab.deadline, grab.grace,
            grab.extensions,
            grab.price, int(grab.status), *grab.ended, *grab.confirmed, [[*one[:2], int(one[2])] for one in grab.counted],
            [list(payment) for payment in grab.payments], [list(order) for order in grab.orders], grab.codes,
        ]  # fmt: skip


unpack = msgspec.msgpack.Decoder().decode


def _groups(commands: list[tuple[int, AnyCommand]]) -> list[list[tuple[int, AnyCommand]]]:
    """Commands one by one; the grabs of a basket, which stand side by side, together."""
    groups: list[list[tuple[int, AnyCommand]]] = []
    for place, command in commands:
        basket = command.basket if isinstance(command, Grab) else None
        before = groups[-1][-1][1] if groups else None
        if basket is not None and isinstance(before, Grab) and before.basket == basket:
            groups[-1].append((place, command))
        else:
            groups.append([(place, command)])
    return groups


def _run(connect: Callable[[], Any], examples: int, derandomize: bool) -> None:
    machine = type("OneMachine", (Machine,), {"connect": staticmethod(connect)})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=hypothesis_settings(max_examples=examples, stateful_step_count=40, derandomize=derandomize, deadline=None),
    )


# A failure is shrunk before it is printed, which takes minutes.
@pytest.mark.timeout(900)
def test_same_histories_every_time(servers: Settings) -> None:
    """The same random histories on every run: more than 20 thousand steps."""
    _run(lambda: redis.asyncio.Redis.from_url(servers.redis_url), 520, derandomize=True)


@pytest.mark.timeout(900)
def test_fresh_histories(servers: Settings) -> None:
    """Others on every run."""
    _run(lambda: redis.asyncio.Redis.from_url(servers.redis_url), 100, derandomize=False)


@pytest.mark.timeout(900)
def test_histories_on_a_cluster(cluster_port: int) -> None:
    """The same scripts, with the shards on different nodes."""
    _run(lambda: RedisCluster(host="127.0.0.1", port=cluster_port), 15, derandomize=True)
