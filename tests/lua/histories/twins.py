"""Twins: the pure rules and the real Lua get the same commands at the same times, and are compared.

After every step the answers and, byte for byte, the events are compared; at the end everything in Redis. The
books are checked from the event lines alone.
"""

import random
import re
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.lua.packed_values import GRAB_FIELDS
from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Grab, GrabCommand, Open, carried_texts, identity_of
from grabstream.models.digests import Digests
from grabstream.models.events import (
    CampaignZone,
    GrabConfirmed,
    GrabGranted,
    GrabReturned,
    OfferLoaded,
    OfferOpened,
    decode_event,
    encode_event,
)
from grabstream.models.identifiers import campaign_of, encoded_payment
from grabstream.models.money import AMOUNT_MAX
from grabstream.models.rules import Offer, ShardState, decide, decide_basket, sweep
from grabstream.streams.deciding.sweeper import Sweeper
from tests.contract import check_answered, check_events
from tests.lua.histories.books import check_books
from tests.lua.histories.promises import Servings, check_promises
from tests.lua.histories.recovered import align_postponed_due_times, contents, differences, fold
from tests.lua.histories.strategies import TICKETS
from tests.support.runs import as_runs
from tests.support.shards import NOW, SEALER, event_lines, outbox_lines, take_over

SHARDS = 2
#: Number of events and answers, at the end of every history, that are checked against their schemas.
SCHEMA_CHECKS = 5
#: A counter in a field that has all of a value, and the periods by their letters.
_COUNTER = re.compile("([a-z])([0-9]+:[0-9]+)")
_PERIODS = {"d": "day", "h": "hour", "o": "offer", "w": "week"}


class Twins:
    """A gate and the rules over the same shards; `now` is the time of both, in ms."""

    async def begin_twins(self, client: Any, keys: KeySpace, limits: GateLimits) -> None:
        """Takes over the shards and makes the gate and the states of the rules."""
        self.client = client
        self.keys = keys
        self.now = NOW
        self.recoveries = 0
        self.answered: list[tuple[AnyCommand, Answer]] = []
        self.states = [ShardState(number, SEALER.digests) for number in range(keys.shards)]
        self.lines: list[list[bytes]] = [[] for _ in range(keys.shards)]
        self.servings = [Servings() for _ in range(keys.shards)]
        self.first_answers: dict[tuple[str, ...], tuple[AnyCommand, Answer]] = {}
        await client.initialize()
        await take_over(self.client, self.keys)
        self.gate = Gate(self.client, self.keys, SEALER, limits, clock=lambda: self.now, tickets=TICKETS)

    async def sweep_both(self) -> None:
        """Sweeps by Lua and by the rules, compares the events, and cleans some data of retired offers."""
        await self.sweep_without_cleaning()
        for number, state in enumerate(self.states):
            # Cleaning may be late, or done in part.
            await self.sweeper(number).clean(self.now, steps_max=(0, 1, None)[state.seq % 3])

    async def sweep_without_cleaning(self) -> None:
        """Sweeps by Lua and by the rules, and compares the events."""
        for number, state in enumerate(self.states):
            await self.sweeper(number).sweep(self.now)
            events = sweep(state, self.now)
            # The sweeper continues until nothing is due.
            while any(offer.due <= self.now for offer in state.offers.values()):
                events += sweep(state, self.now)
            await self._compare(number, events)

    def sweeper(self, number: int) -> Sweeper:
        return Sweeper(self.client, self.keys.shard(number), self.keys.shards, 10**12)

    async def decide_both(self, commands: Sequence[AnyCommand]) -> list[Answer]:
        """Decides by Lua and by the rules, compares answers and events, and returns the answers."""
        answers = await self.gate.decide(commands, "decided")
        self.answered += zip(commands, answers, strict=True)
        events_by_shard: list[list[Any]] = [[] for _ in self.states]
        by_shard: dict[int, list[tuple[int, AnyCommand]]] = {}
        for index, command in enumerate(commands):
            by_shard.setdefault(self.keys.shard_of_offer(command.offer), []).append((index, command))
        for number, of_shard in by_shard.items():
            for group in _groups(of_shard):
                for (index, command), decided in zip(group, self._by_rules(number, group), strict=True):
                    assert answers[index] == decided.answer, (
                        f"{command}: Lua {answers[index]}, rules {decided.answer}"
                    )
                    events_by_shard[number] += decided.events
                    self._check_repeat(command, answers[index])
        for number, events in enumerate(events_by_shard):
            await self._compare(number, events)
        return answers

    def _by_rules(self, number: int, group: list[tuple[int, AnyCommand]]) -> list[Any]:
        """What the rules decide about one command, or about the grabs of a basket."""
        state, commands = self.states[number], [command for _, command in group]
        if isinstance(commands[0], Grab) and commands[0].basket is not None:
            return decide_basket(
                state, commands, self.now, [self._given_by_gate(command) for command in commands]
            )  # type: ignore[arg-type]
        return [decide(state, commands[0], self.now, self._given_by_gate(commands[0]))]

    def _given_by_gate(self, command: AnyCommand) -> dict[str, Any]:
        """What a gate adds to the command: the sealed seed of an envelope, the claims of a ticket."""
        if isinstance(command, Open):
            return {"sealed_seed": "sealed", "clock_ms": self.now}
        if (
            isinstance(command, Grab)
            and command.ticket
            and (ticket := TICKETS.read(command.ticket, command.user, command.offer))
        ):
            of_campaign = {"ticket_ends_at": ticket.expires_at_ms} if ticket.is_campaign_wide else {}
            return {"ticket_expires_at": ticket.expires_at_ms, "ticket_once": ticket.once_id, **of_campaign}
        return {}

    def _check_repeat(self, command: AnyCommand, answer: Answer) -> None:
        """Checks repeats without the rules: a command that was executed gets its first answer, and another
        command under its id does not.
        """
        self._forget_retired()
        key = identity_of(command)
        known, first = self.first_answers.setdefault(key, (command, answer))
        if first is answer or not first.positive:
            # A command whose effect held already made no event: a recovery forgets it, as it does refusals.
            if not first.positive or first.repeated:
                del self.first_answers[key]
            assert not (answer.positive and answer.repeated and not isinstance(command, GrabCommand))
        elif Digests().remembered(command) == Digests().remembered(known):
            # A command with another operator is the same command.
            assert answer == msgspec.structs.replace(first, repeated=True)
        else:
            assert answer.outcome in ("conflict", "invalid")

    def _forget_retired(self) -> None:
        """Forgets first answers of retired offers: answers are kept until their offer retires."""
        retired = {offer for state in self.states for offer in state.retired}
        for key in [key for key, (command, _) in self.first_answers.items() if command.offer in retired]:
            del self.first_answers[key]

    async def _compare(self, number: int, events: list[Any]) -> None:
        """Compares the events of this step byte for byte. Sealed seeds and codes, which only the gate makes,
        are opened and compared in clear.
        """
        new = await event_lines(self.client, self.keys, number, len(self.lines[number]))
        expected = []
        for line, event in zip(new, events, strict=True):
            if isinstance(event, OfferOpened):
                sealed = decode_event(line).sealed_seed  # type: ignore[union-attr]
                if sealed is not None:
                    assert (
                        SEALER.open(number, event.offer, "seed", sealed)
                        == self.states[number].offers[event.offer].seed
                    )
                event = msgspec.structs.replace(event, sealed_seed=sealed)
            elif isinstance(event, GrabGranted | GrabConfirmed) and event.codes:
                event = msgspec.structs.replace(
                    event, codes=self._sealed(number, event.offer, line, "codes", event.codes)
                )
            elif isinstance(event, GrabReturned) and event.voided_codes:
                event = msgspec.structs.replace(
                    event,
                    voided_codes=self._sealed(number, event.offer, line, "voided_codes", event.voided_codes),
                )
            elif isinstance(event, OfferLoaded) and event.what == "codes":
                event = msgspec.structs.replace(
                    event, items=self._sealed(number, event.offer, line, "items", event.items)
                )
            expected.append(encode_event(event))
        assert new == expected
        self.lines[number] += new

    def _sealed(
        self, number: int, offer: str, line: bytes, field: str, codes: tuple[str, ...]
    ) -> tuple[str, ...]:
        """The sealed codes in a field of the line, after a check that they open to `codes`."""
        sealed = getattr(decode_event(line), field)
        assert tuple(SEALER.open(number, offer, "code", code) for code in sealed) == codes
        return sealed  # type: ignore[no-any-return]

    def check_conservation(self) -> None:
        """Checks left + held + taken = total for every offer of the rules."""
        for state in self.states:
            for offer in state.offers.values():
                if not offer.is_envelope:
                    held, taken = (
                        sum(getattr(grab, field) for grab in offer.grabs.values())
                        for field in ("held", "taken")
                    )
                    assert offer.held == held
                    assert offer.closed_reason or offer.amount_left + held + taken == offer.terms.total
                    if "codes" not in offer.chunks:
                        assert offer.units_left == offer.amount_left
                    elif not offer.closed_reason and offer.loaded["codes"] == offer.chunks["codes"]:
                        # Codes that were shown are not among those that are left.
                        assert offer.units_left == len(offer.codes) - held
                    assert (
                        min(
                            offer.units_left,
                            *(min(grab.held, grab.taken - grab.redeemed) for grab in offer.grabs.values()),
                            0,
                        )
                        == 0
                    )
                    continue
                given = sum(part.amount for part in offer.users.values())
                closed = offer.closed_reason in ("command", "deadline")
                assert closed or given + offer.amount_left == offer.terms.total
                assert given <= offer.terms.total
                assert all(part.amount >= offer.terms.min for part in offer.users.values())  # type: ignore[union-attr]

    def check_waiting(self) -> None:
        """Checks that no grab is served while new grabs are refused, and that otherwise no units are left
        that suffice for one of the first hundred waiting grabs.
        """
        for servings, lines in zip(self.servings, self.lines, strict=True):
            servings.see(lines)
        for offer in self.offers.values():
            number = self.keys.shard_of_offer(offer.name)
            servings, now = self.servings[number], max(self.now, self.states[number].time)
            if offer.closed_reason or not offer.queue or now >= min(offer.due, offer.closes_at):
                continue
            if servings.is_paused(offer.name) or not servings.is_in_hours(offer.name, now):
                continue
            payable = AMOUNT_MAX // (offer.pieces.price or 1)
            most = min(offer.units_left, payable)
            fits = [
                name
                for name in offer.queue[:100]
                if offer.grabs[name].quantity <= most or (most and offer.pieces.take == "up_to")
            ]
            assert not (offer.units_left and fits), (
                f"{fits[0]} waits for {offer.units_left} units of {offer.name} that are left"
            )

    @property
    def offers(self) -> dict[str, Offer]:
        return {name: offer for state in self.states for name, offer in state.offers.items()}

    async def end_twins(self) -> None:
        """Compares everything in Redis with the rules and a recovery, checks books and promises, then deletes
        it.
        """
        try:
            for number, state in enumerate(self.states):
                await self.sweeper(number).clean(self.now)
                assert await self.client.hgetall(self.keys.shard(number).cleaning) == {}
                await self._compare_state(number, state)
                check_books(self.lines[number])
                check_promises(self.lines[number])
                check_events(self.lines[number][-SCHEMA_CHECKS:])
                check_events((await outbox_lines(self.client, self.keys, number))[-SCHEMA_CHECKS:])
                # One without events is recovered by each worker that starts.
                if self.lines[number]:
                    await self.compare_recovered(number)
            check_answered(self.answered[-SCHEMA_CHECKS:])
        finally:
            names = [name async for name in self.client.scan_iter(match=f"{self.keys.prefix}*", count=1_000)]
            if names:
                await self.client.unlink(*names)
            await self.gate.close()

    async def compare_recovered(self, number: int, seed: int | None = None) -> None:
        """Recovers the shard's events into empty keys, in random steps (of `seed`, or else of the number of
        lines), with runs of at most 1 to 1,000 grabs, and compares the state.
        """
        cut = random.Random(len(self.lines[number]) if seed is None else seed)
        lines = as_runs(self.lines[number], cut.choice((1, 2, 3, 1_000)))
        self.recoveries += 1
        keys = KeySpace(f"{self.keys.prefix}-fold{self.recoveries}", self.keys.shards).shard(number)
        await fold(self.client, keys, lines, SEALER, self.keys.shards, cut)
        live, recovered = (
            await contents(self.client, self.keys.shard(number), self.now),
            await contents(self.client, keys, self.now),
        )
        align_postponed_due_times(live, recovered, self.now)
        different = differences(live, recovered)
        assert not different, different

    async def _compare_state(self, number: int, state: ShardState) -> None:
        of_shard = self.keys.shard(number)
        assert int(await self.client.hget(of_shard.state, "seq") or 0) == state.seq
        assert [decode_event(line).seq for line in self.lines[number]] == list(range(1, state.seq + 1))
        assert {name.decode() for name in await self.client.smembers(of_shard.offers)} == set(state.offers)
        assert {name.decode() for name in await self.client.smembers(of_shard.retired)} == state.retired
        assert await self._scores(of_shard.due) == {name: offer.due for name, offer in state.offers.items()}
        assert await self._scores(of_shard.holds) == {
            f"{offer.name}/{name}": grab.lapses_at
            for offer in state.offers.values()
            for name, grab in offer.grabs.items()
            if grab.held
        }
        counted = await self.client.hgetall(of_shard.campaigns)
        names = [offer.campaign for offer in state.offers.values()]
        assert {name.decode(): int(number) for name, number in counted.items()} == {
            name: names.count(name) for name in names
        }
        for offer in state.offers.values():
            await self._compare_offer(of_shard, offer)
        known = {campaign_of(key[0]) for key in (*state.answers, *state.refusals)}
        for campaign in known | {campaign_of(name) for name in (*state.offers, *state.retired)}:
            answered_ids = {field.decode() for field in await self.client.hkeys(of_shard.answers(campaign))}
            # The answer to a grab of an envelope is the record of its user.
            assert answered_ids == {
                field for of, field in state.answers if of == campaign and field.count("/") < 2
            }
            _, payments_key, counters_key, state_key, tickets_key = of_shard.campaign_keys(campaign)
            assert await self._scores(tickets_key) == {
                once: ends for (of, once), ends in state.tickets.items() if of == campaign
            }
            zone = await self.client.hget(state_key, "zone")
            assert (zone and msgspec.json.decode(zone, type=CampaignZone)) == state.zones.get(campaign)
            payments = {
                name.decode(): tuple(unpack(record))
                for name, record in (await self.client.hgetall(payments_key)).items()
            }
            assert {
                name: payment
                for name, payment in payments.items()
                if state.knows_payments_of(payment[0], self.now)
            } == {
                encoded_payment(name): tuple(payment) if payment.basket else tuple(payment)[:-1]
                for (of, name), payment in state.payments.items()
                if of == campaign and state.knows_payments_of(payment.offer, self.now)
            }
            past = {
                name.decode(): value.decode()
                for name, value in (await self.client.hgetall(state_key)).items()
                if name.startswith(b"retired/")
            }
            assert {
                name: value
                for name, value in past.items()
                if state.knows_payments_of(name.removeprefix("retired/"), self.now)
            } == {
                f"retired/{name}": f"{offer_seq}:{at}"
                for name, (offer_seq, at) in state.past.items()
                if campaign_of(name) == campaign and state.knows_payments_of(name, self.now)
            }
            assert await self._counters(counters_key) == {
                name: value for (of, name), value in state.counters.items() if of == campaign
            }
        refused = {field.decode() for field in await self.client.hkeys(of_shard.refusals)}
        assert refused == {"/".join(identity) for identity in state.refusals}
        counts = {
            field.decode(): int(count)
            for field, count in (await self.client.hgetall(of_shard.demand)).items()
        }
        assert counts == {
            f"{second}:{code}:{offer}": count for (second, code, offer), count in state.demand.items()
        }

    async def _compare_offer(self, of_shard: Any, offer: Offer) -> None:
        stored = await self.client.hgetall(of_shard.offer(offer.name))
        fields = {
            name.decode(): value.decode()
            for name, value in stored.items()
            if name not in (b"rules", b"loads")
        }
        assert fields["state"] == ("closed" if offer.closed_reason else "open")
        assert fields.get("reason") == offer.closed_reason
        assert fields["paused"] == ("1" if offer.paused else "0")
        numbers = {
            name: int(fields[name])
            for name in ("amount_left", "units_left", "places", "offer_seq", "opens_at", "closes_at")
        }
        assert numbers == {name: getattr(offer, name) for name in numbers}
        _, users_key, parts_key, grabs_key, codes_key, audience_key, seen_key, queue_key, orders_key, _ = (
            of_shard.offer_keys(offer.name)
        )
        assert (await self.client.get(parts_key) or b"") == packed(offer.parts)
        assert {user.decode() for user in await self.client.smembers(audience_key)} == offer.audience
        assert {name.decode() for name in await self.client.smembers(seen_key)} == offer.seen
        if not offer.is_envelope:
            assert int(fields["total"]) == offer.terms.total
            assert (int(fields["held"]), int(fields["queued"])) == (offer.held, offer.queued)
            assert await self._counters(users_key) == offer.counters
            codes = [
                SEALER.open(of_shard.shard, offer.name, "code", code.decode())
                for code in await self.client.lrange(codes_key, 0, -1)
            ]
            assert codes == offer.codes
            assert [name.decode() for name in await self.client.zrange(queue_key, 0, -1)] == offer.queue
            records = {
                name.decode(): unpack(record)
                for name, record in (await self.client.hgetall(grabs_key)).items()
            }
            for record in records.values():
                sealed = GRAB_FIELDS.index("codes")
                record[sealed] = [
                    SEALER.open(of_shard.shard, offer.name, "code", code) for code in record[sealed]
                ]
                _name_counters(record)
            assert records == {name: _record(grab) for name, grab in offer.grabs.items()}
            orders = {
                field.decode(): record for field, record in (await self.client.hgetall(orders_key)).items()
            }
            assert orders == {f"{grab}/{name}": _order(order) for (grab, name), order in offer.orders.items()}
            return
        users = await self.client.hgetall(users_key)
        assert {
            user.decode(): tuple(int.from_bytes(number, "big") for number in (place, amount, seq))
            for user, (place, amount, seq) in (
                (user, struct.unpack(">3s6s5s", record[:14])) for user, record in users.items()
            )
        } == {user: tuple(part) for user, part in offer.users.items()}
        state = self.states[of_shard.shard]
        # A part is the answer to its grab, too.
        of_offer = {
            tuple(field.split("/")[1:]): kept
            for (_, field), kept in state.answers.items()
            if field.startswith(f"{offer.name}/")
        }
        assert {
            (user.decode(), record[20 : 20 + record[19]].decode()): (
                int.from_bytes(record[14:19], "big") + 1577836800000,
                record[20 + record[19] :].decode() or "plain",
            )
            for user, record in users.items()
        } == {
            key: (kept.answer.at, "plain" if kept.digest.startswith("plain$") else kept.digest)
            for key, kept in of_offer.items()
        }

    async def _scores(self, key: str) -> dict[str, int]:
        return {name.decode(): int(at) for name, at in await self.client.zrange(key, 0, -1, withscores=True)}

    async def _counters(self, key: str) -> dict[str, tuple[int, ...]]:
        """The counters of a hash by their names; all of a value are one field."""
        found = {}
        for name, value in (await self.client.hgetall(key)).items():
            by, counted = name.decode().split("/")
            texts = _COUNTER.findall(value.decode())
            assert value.decode() == "".join(letter + text for letter, text in sorted(texts))
            for letter, text in texts:
                found[f"{by}/{_PERIODS[letter]}/{counted}"] = tuple(map(int, text.split(":")))
        return found


unpack = msgspec.msgpack.Decoder().decode


def packed(parts: list[int]) -> bytes:
    """The parts of an envelope as Redis has them."""
    return b"".join(part.to_bytes(6, "big") for part in parts)


def _groups(commands: list[tuple[int, AnyCommand]]) -> list[list[tuple[int, AnyCommand]]]:
    """Groups of one command each; neighbouring grabs of the same basket form one group."""
    groups: list[list[tuple[int, AnyCommand]]] = []
    for index, command in commands:
        basket = command.basket if isinstance(command, Grab) else None
        before = groups[-1][-1][1] if groups else None
        if basket is not None and isinstance(before, Grab) and before.basket == basket:
            groups[-1].append((index, command))
        else:
            groups.append([(index, command)])
    return groups


def _counters(under: Any) -> list[list[Any]]:
    return [[counter, window, int(of_campaign)] for counter, window, of_campaign in under]


def _name_counters(record: list[Any]) -> None:
    """Names the counters of a record in full: a name ends before the grab's user, and 0 stands for the
    counters under which the grab was counted first.
    """
    user, under, counted = (record[GRAB_FIELDS.index(name)] for name in ("user", "under", "counted"))
    counted[:] = [[units, under if counters == 0 else counters] for units, counters in counted]
    for counters in (under, *(counters for _, counters in counted)):
        for counter in counters:
            counter[0] += user if counter[0].endswith("/") else ""


def _record(grab: Any) -> list[Any]:
    """A grab as Lua stores it, except for its codes, which Lua stores sealed."""
    return [
        grab.user, grab.place, grab.quantity, grab.held, grab.taken, grab.redeemed, grab.lapsed,
        grab.deadline, grab.grace,
        grab.extensions, grab.price, int(grab.status), *grab.ended, *grab.confirmed, _counters(grab.under),
        [[units, _counters(under)] for units, under in grab.counted],
        [[encoded_payment(payment), units] for payment, units in grab.payments], grab.codes,
        *([list(map(list, carried_texts(grab.carried)))] if grab.carried else []),
        *([False, grab.basket] if grab.basket else []),
    ]  # fmt: skip


def _order(order: Any) -> bytes:
    return b"".join(
        number.to_bytes(size)
        for number, size in zip((order[0], order[1], order[2] - 1577836800000), (6, 5, 5), strict=True)
    )
