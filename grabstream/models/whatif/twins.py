"""Decides past commands in two states at once: as recorded, and under changed terms.

Every command is derived from its event. The recorded state must produce each event of the journal again: if
not, the rules cannot say what would have happened otherwise, and `Differs` is raised. So the difference
between the two states comes from the terms alone.

Time is that of the journal. What the sweeper did is repeated in both states at the time at which it happened,
as long as both agree on what is due; what is due at another time in the changed state is done exactly then.
"""

import copy
import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from zoneinfo import ZoneInfoNotFoundError

import msgspec

from grabstream.models.commands import (
    Amend,
    AnyCommand,
    Confirm,
    Grab,
    GrabCommand,
    Load,
    OfferCommand,
    Open,
    Redeem,
    Return,
    Unredeem,
)
from grabstream.models.events import AnyEvent, CampaignZone, GrabGranted, GrabHeld, OfferOpened, encode_event
from grabstream.models.money import Invalid
from grabstream.models.offers import Changes, EnvelopeTerms, Terms, check_terms, units_of
from grabstream.models.outcomes import Outcome
from grabstream.models.rules import Decided, ShardState, decide, grabbing, limits
from grabstream.models.rules.operating import fall_due
from grabstream.models.rules.settling import lapse
from grabstream.models.rules.state import Drawn, Offer, PieceGrab, refused
from grabstream.models.whatif.causes import Cause, Due, Lapse, cause_of, drawn_for
from grabstream.models.whatif.numbers import Numbers, UserChanges

#: The outcome of a command that would not have been sent, such as the payment of a grab that was refused.
NOT_SENT: Final = "not_sent"
#: Fields that are not decided by the rules: numbers of the shard, the sender of a command, values computed
#: from keys or a database, and values that the event repeats from the command.
_NOT_DECIDED: Final = (
    "shard", "seq", "operator", "signers", "digest", "offsets", "campaign_zone", "seed_sha256", "sealed_seed",
    "terms", "changes", "basket",
)  # fmt: skip
#: Terms that cannot be changed, since the journal would say nothing about such an offer.
FIXED_TERMS: Final = frozenset({"kind", "issuer", "funding", "asset", "codes", "seed"})


class Differs(Exception):
    """The rules do not produce the recorded events; the text says where."""


class CannotChange(Exception):
    """An offer cannot have these terms; the text names the field and the fix."""


class TermChange(NamedTuple):
    """Changed terms, by name, of `offers` (empty: all of the campaign), from a time (ms since 1970 UTC; None:
    from the opening).
    """

    terms: Mapping[str, Any]
    offers: frozenset[str] = frozenset()
    since: int | None = None

    def is_about(self, offer: str) -> bool:
        """Whether the terms of this offer change."""
        return not self.offers or offer in self.offers


class CommandDifference(NamedTuple):
    """A command with another outcome, or other numbers, under the changed terms. `at` is the time (ms since
    1970 UTC) of its event.
    """

    at: int
    seq: int
    command: AnyCommand
    recorded: dict[str, Any]
    changed: dict[str, Any]

    def document(self) -> dict[str, Any]:
        """The difference as a JSON object."""
        command = self.command
        return {
            "at": self.at, "seq": self.seq, "type": type_of(command), "offer": command.offer,
            "command": command.id, "grab": getattr(command, "grab", None),
            "user": getattr(command, "user", None), "recorded": self.recorded, "changed": self.changed,
        }  # fmt: skip


def type_of(command: AnyCommand) -> str:
    """The type of a command, as in its JSON."""
    return str(command.__struct_config__.tag)


_Key = tuple[str, str]


class Twins:
    """A campaign in two states. `seeds` are those of its envelopes, by offer. `differences` are those since
    the caller last emptied it.
    """

    def __init__(self, shard: int, change: TermChange, seeds: Mapping[str, str]) -> None:
        self._change = change
        self._seeds = seeds
        self._recorded, self._changed = ShardState(shard), ShardState(shard)
        self._expected: deque[AnyEvent] = deque()
        self._basket: list[Any] = []
        # What is due in the changed state at its own time, and what is due in both at the same time.
        self._due: list[tuple[int, _Key]] = []
        self._together: set[_Key] = set()
        self._is_amended = change.since is None
        self.commands = self.not_sent = 0
        self.differences: list[CommandDifference] = []
        self.recorded: dict[str, Numbers] = {}
        self.changed: dict[str, Numbers] = {}
        self.users = UserChanges()

    @property
    def kept(self) -> int:
        """The number of grabs and payments that are kept in memory."""
        states = self._recorded, self._changed
        return sum(len(state.payments) for state in states) + sum(
            len(offer.grabs) + len(offer.users) for state in states for offer in state.offers.values()
        )

    def feed(self, event: AnyEvent) -> None:
        """The next event of the campaign. Raises Differs and CannotChange."""
        if self._basket and not _is_same_basket(self._basket[-1], event):
            self._decide_basket()
        self._amend_at(event.at)
        if isinstance(event, GrabGranted | GrabHeld) and event.basket is not None:
            self._basket.append(event)
            return
        self._decide_cause_of(event)

    def end(self, at: int) -> None:
        """The stretch of history ends at this time (ms since 1970 UTC). Raises Differs and CannotChange."""
        if self._basket:
            self._decide_basket()
        self._amend_at(at)
        self._pass_time(at)
        if self._expected:
            raise Differs(
                f"the rules make an event that the journal does not have: {_text(self._expected[0])}"
            )

    # -- the recorded state ----------------------------------------------------------------------------------

    def _decide_cause_of(self, event: AnyEvent) -> None:
        if self._expected:
            self._compare(event, self._expected.popleft())
            return
        cause = self._cause_of(event)
        self._pass_time(event.at)
        command = self._adapted(cause, event)  # before the recorded state changes
        if isinstance(cause, Lapse | Due):
            made = _sweep_in(self._recorded, cause, event.at, only_due=False)
            self._expect(event, made, "nothing is due")
            self._note_changed(_sweep_in(self._changed, cause, event.at, only_due=True))
        else:
            decided = self._decide_as_recorded(cause, event)
            made, answer = decided.events, decided.answer
            self._expect(event, made, ": ".join(filter(None, (answer.outcome, answer.message))))
            self.commands += 1
            self._decide_changed(event, cause, decided, command)
        self._watch_all(cause, made)

    def _expect(self, event: AnyEvent, made: Sequence[AnyEvent], otherwise: str) -> None:
        """Compares the first of the events that the rules made with that of the journal, and keeps the rest
        for the next ones.
        """
        if not made:
            raise Differs(
                f"event {event.shard}:{event.seq}: the rules make no event ({otherwise}), the journal has "
                f"{_text(event)}"
            )
        self._expected.extend(made)
        self._compare(event, self._expected.popleft())

    def _cause_of(self, event: AnyEvent) -> Cause:
        try:
            cause = cause_of(event, self._recorded)
        except ValueError as error:
            raise Differs(f"event {event.shard}:{event.seq}: {error}") from None
        if cause is None:
            raise Differs(f"event {event.shard}:{event.seq}: nothing before it causes it: {_text(event)}")
        return cause

    def _decide_as_recorded(self, cause: AnyCommand, event: AnyEvent) -> Decided:
        drawn: Drawn = drawn_for(event, self._recorded)
        if isinstance(cause, Open):
            drawn = self._drawn_for_open(cause, event.at)
        try:
            decided = _decided(self._recorded, cause, event.at, drawn)
        except ZoneInfoNotFoundError as error:
            raise Differs(f"event {event.shard}:{event.seq}: {error}: install time-zone data") from None
        if isinstance(cause, Open) and isinstance(event, OfferOpened):
            _use_zone(self._recorded, event)
        return decided

    def _drawn_for_open(self, command: Open, at: int) -> Drawn:
        seed = self._seeds.get(command.offer)
        if isinstance(command.terms, EnvelopeTerms) and seed is None:
            raise Differs(
                f"envelope {command.offer} is not closed, so its seed is still secret: ask again when it is "
                "closed"
            )
        return {"clock_ms": at, "seed": seed}

    def _compare(self, event: AnyEvent, made: AnyEvent) -> None:
        """Raises Differs unless the event that the rules made is that of the journal."""
        if type(made) is type(event):
            names = [name for name in _NOT_DECIDED if hasattr(event, name)]
            same = {name: getattr(event, name) for name in names}
            if msgspec.structs.replace(made, **same) == event:
                self._count(self.recorded, event)
                self.users.add(event, -1)
                return
        raise Differs(
            f"event {event.shard}:{event.seq}: the rules make {_text(made)}, the journal has {_text(event)}"
        )

    def _count(self, numbers: dict[str, Numbers], event: AnyEvent) -> None:
        offer_numbers = numbers.setdefault(event.offer, Numbers())
        if isinstance(event, OfferOpened):
            state = self._recorded if numbers is self.recorded else self._changed
            offer_numbers.open(event, units_of(state.offers[event.offer].terms))
        offer_numbers.add(event)

    # -- the changed state -----------------------------------------------------------------------------------

    def _decide_changed(
        self, event: AnyEvent, cause: AnyCommand, decided: Decided, command: AnyCommand | None
    ) -> None:
        before = _facts(cause, decided)
        if command is None:
            self.not_sent += 1
            self._differs(event, cause, before, {"outcome": NOT_SENT})
            return
        drawn: Drawn = drawn_for(event, self._recorded)
        if isinstance(command, Open):
            drawn = self._drawn_for_open(command, event.at)
        after = _decided(self._changed, command, event.at, drawn)
        if isinstance(command, Open):
            self._require_opened(command, after)
            assert isinstance(event, OfferOpened)
            assert isinstance(cause, Open)
            if command.terms.timezone == cause.terms.timezone:
                _use_zone(self._changed, event)
        elif isinstance(command, Load) and command.what == "codes" and not after.answer.positive:
            raise CannotChange(
                f"total: offer {command.offer} has a code for each of its units, so its total cannot change"
            )
        self._note_changed(after.events)
        self._watch_all(command, after.events)
        self._differs(event, cause, before, _facts(command, after))

    def _differs(
        self, event: AnyEvent, cause: AnyCommand, before: dict[str, Any], after: dict[str, Any]
    ) -> None:
        if before != after:
            self.differences.append(CommandDifference(event.at, event.seq, cause, before, after))

    def _require_opened(self, command: Open, decided: Decided) -> None:
        if not decided.answer.positive:
            raise CannotChange(
                f"offer {command.offer} cannot be opened with these terms: {decided.answer.message}"
            )

    def _note_changed(self, events: Sequence[AnyEvent]) -> None:
        for event in events:
            self._count(self.changed, event)
            self.users.add(event, 1)

    def _adapted(self, cause: Cause, event: AnyEvent) -> AnyCommand | None:
        """The command as it would have been sent under the changed terms; None if it would not have been
        sent.
        """
        if isinstance(cause, Lapse | Due):
            return None
        if isinstance(cause, Open):
            return self._open_with_changes(cause, event.at)
        if isinstance(cause, Amend) and self._change.is_about(cause.offer) and self._is_amended:
            fields = {
                name: value
                for name, value in cause.changes.fields().items()
                if name not in self._change.terms
            }
            return msgspec.structs.replace(cause, changes=Changes(**fields)) if fields else None
        if isinstance(cause, GrabCommand):
            return self._about_grab(cause)
        return cause

    def _open_with_changes(self, command: Open, at: int) -> Open:
        since = self._change.since
        if not self._change.is_about(command.offer) or (since is not None and at < since):
            return command
        return msgspec.structs.replace(
            command, terms=changed_terms(command.offer, command.terms, self._change)
        )

    def _about_grab(self, command: Any) -> AnyCommand | None:
        as_it_is: AnyCommand = command
        offer = self._changed.offers.get(command.offer)
        if offer is None or offer.is_envelope:
            return as_it_is
        was = self._recorded.offers.get(command.offer)
        if was is not None and command.grab not in was.grabs:
            return as_it_is  # about a grab that never was
        grab = offer.grabs.get(command.grab)
        if grab is None:
            return None
        match command:
            case Confirm():
                return as_it_is if was is None else _confirm(command, grab, offer, was.grabs[command.grab])
            case Return():
                free = grab.taken - grab.redeemed
                quantity = min(command.quantity or free, free)
                return msgspec.structs.replace(command, quantity=quantity) if quantity else None
            case Redeem():
                return as_it_is if grab.taken else None
            case Unredeem():
                return as_it_is if (command.grab, command.order) in offer.orders else None
        return as_it_is

    # -- baskets ---------------------------------------------------------------------------------------------

    def _decide_basket(self) -> None:
        """Decides the grabs of a basket. Under the changed terms, they stand or fall together, too."""
        events, self._basket = self._basket, []
        at = events[0].at
        self._pass_time(at)
        commands: list[Grab] = []
        facts = []
        for event in events:
            cause = self._cause_of(event)
            assert isinstance(cause, Grab)
            decided = self._decide_as_recorded(cause, event)
            if len(decided.events) != 1:
                raise Differs(
                    f"event {event.shard}:{event.seq}: the rules refuse the grab ({decided.answer.outcome})"
                )
            self._compare(event, decided.events[0])
            _name_basket(self._recorded, cause, decided, event.basket)
            self.commands += 1
            commands.append(cause)
            facts.append(_facts(cause, decided))
        answers = decided_basket(
            self._changed, commands, [drawn_for(event, self._recorded) for event in events], at,
            events[0].basket,
        )  # fmt: skip
        for event, command, before, after in zip(events, commands, facts, answers, strict=True):
            self._note_changed(after.events)
            self._differs(event, command, before, _facts(command, after))
            self._watch_all(command, [event, *after.events])

    # -- time ------------------------------------------------------------------------------------------------

    def _amend_at(self, at: int) -> None:
        """Changes the terms of offers that are open at the time of the change."""
        since = self._change.since
        if self._is_amended or since is None or at < since:
            return
        if self._basket:
            self._decide_basket()
        self._is_amended = True
        self._pass_time(since)
        for offer in [*self._changed.offers.values()]:
            if self._change.is_about(offer.name) and not offer.closed_reason and self._change.terms:
                self._amend(offer, since)

    def _amend(self, offer: Offer, at: int) -> None:
        fixed = [name for name in self._change.terms if name not in Changes.__struct_fields__]
        if fixed:
            raise CannotChange(
                f"{fixed[0]}: offer {offer.name} was open already, and this can only change from the opening "
                "on: leave out `from`"
            )
        changes = Changes(**self._change.terms)
        decided = _decided(self._changed, Amend(id="whatif", offer=offer.name, changes=changes), at, {})
        if not decided.answer.positive:
            raise CannotChange(
                f"offer {offer.name} cannot have this change at that time: "
                f"{decided.answer.message or decided.answer.outcome}"
            )
        self._note_changed(decided.events)
        self._watch_all(Due(offer.name), decided.events)

    def _pass_time(self, at: int) -> None:
        """Handles what is due in the changed state up to a time, each at its own time."""
        while self._due and self._due[0][0] <= at:
            due, key = heapq.heappop(self._due)
            if key in self._together or _due_of(self._changed, key) != due:
                continue
            cause = Lapse(*key) if key[1] else Due(key[0])
            events = _sweep_in(self._changed, cause, due, only_due=True)
            self._note_changed(events)
            self._watch_all(cause, events)

    def _watch_all(self, cause: Cause, events: Sequence[AnyEvent]) -> None:
        keys = {(cause.offer, "")}
        if not isinstance(cause, Due):
            keys.add((cause.offer, getattr(cause, "grab", cause.id if isinstance(cause, Grab) else "")))
        for event in events:
            keys.add((event.offer, ""))
            keys.add((event.offer, getattr(event, "grab", "")))
        for key in keys:
            self._watch(key)

    def _watch(self, key: _Key) -> None:
        due = _due_of(self._changed, key)
        self._together.discard(key)
        if due is None:
            return
        if due == _due_of(self._recorded, key):
            self._together.add(key)
        else:
            heapq.heappush(self._due, (due, key))


def changed_terms(offer: str, terms: Terms, change: TermChange) -> Terms:
    """The terms of an offer with the changes; raises CannotChange."""
    known = type(terms).__struct_fields__
    for name in change.terms:
        if name not in known:
            raise CannotChange(
                f"{name}: offer {offer} is of kind {terms.__struct_config__.tag}, which has no such term: "
                "name the offers that have it"
            )
    changed: Terms = msgspec.structs.replace(terms, **change.terms)
    try:
        check_terms(changed)
    except Invalid as error:
        raise CannotChange(f"offer {offer}: {str(error).removeprefix('terms.')}") from None
    return changed


def _confirm(command: Confirm, grab: PieceGrab, offer: Offer, was: PieceGrab) -> Confirm | None:
    """A payment as it would have been made: of the units that there are to pay, at their price."""
    base = grab.held or grab.lapsed
    if (was.held or was.lapsed) and not base:
        return None  # granted at once, queued, or given up: there is nothing to pay
    units = command.quantity or was.held or was.lapsed
    if not units or command.paid != was.price * units:
        return command  # a wrong sum stays what it is
    if units <= (was.held or was.lapsed):
        units = min(units, base)
    paid = grab.price * units
    if (units, paid) == (command.quantity or units, command.paid):
        return command
    currency = offer.pieces.currency if paid else command.currency
    return msgspec.structs.replace(command, quantity=units, paid=paid, currency=currency)


def _is_same_basket(last: Any, event: AnyEvent) -> bool:
    return (
        isinstance(event, GrabGranted | GrabHeld)
        and event.basket == last.basket
        and (event.at, event.seq) == (last.at, last.seq + 1)
    )


def _decided(state: ShardState, command: AnyCommand, at: int, drawn: Drawn) -> Decided:
    """Decides a command. Each is decided once, so no answer is remembered."""
    decided = decide(state, command, at, drawn)
    state.answers.clear()
    state.refusals.clear()
    state.demand.clear()
    return decided


def _due_of(state: ShardState, key: _Key) -> int | None:
    """When a hold is over, or something is due for an offer; None if nothing is."""
    offer = state.offers.get(key[0])
    if offer is None or not key[1]:
        return None if offer is None else offer.due
    grab = offer.grabs.get(key[1])
    return grab.lapses_at if grab is not None and grab.held else None


def _sweep_in(state: ShardState, cause: Lapse | Due, at: int, only_due: bool) -> list[AnyEvent]:
    offer = state.offers.get(cause.offer)
    now = max(at, state.time)
    if offer is None:
        return []
    if isinstance(cause, Lapse):
        return lapse(state, offer, cause.grab, now) if cause.grab in offer.grabs else []
    return fall_due(state, offer, now) if not only_due or now >= offer.due else []


def _use_zone(state: ShardState, event: OfferOpened) -> None:
    """Uses the recorded offsets of the time zone."""
    offer = state.offers[event.offer]
    offer.offsets = event.offsets
    zone = event.campaign_zone or CampaignZone(offer.terms.timezone, event.offsets)
    if state.zones[offer.campaign].timezone == zone.timezone:
        state.zones[offer.campaign] = zone
        offer.campaign_offsets = zone.offsets


def _facts(command: AnyCommand, decided: Decided) -> dict[str, Any]:
    """What is compared of a decision: the outcome, and what a grab gives and costs."""
    answer = decided.answer
    facts: dict[str, Any] = {"outcome": answer.outcome}
    if isinstance(command, OfferCommand):
        return facts
    for name in ("quantity", "amount", "due"):
        value = getattr(answer, name)
        if value is not None and answer.positive:
            facts[name] = value
    for event in decided.events:
        if event.command == answer.id and type(event).__struct_config__.tag == "payment.refund_due":
            facts["refund_due"] = event.amount  # type: ignore[union-attr]
        elif event.command == answer.id and (paid := getattr(event, "paid", 0)):
            facts["paid"] = paid
    return facts


def _text(event: AnyEvent) -> str:
    text = encode_event(event).decode()
    return text if len(text) <= 500 else f"{text[:500]}…"


# -- baskets -------------------------------------------------------------------------------------------------


def decided_basket(
    state: ShardState, commands: Sequence[Grab], drawn: Sequence[Drawn], at: int, basket: str
) -> list[Decided]:
    """`rules.decide_basket` for commands without their `basket`. Its time depends on these grabs only:
    `rules.decide_basket` copies the whole state, which may have a million grabs here.
    """
    if (message := grabbing.unfit_basket(state.offers, commands)) is not None:
        return [Decided(refused(state, one, Outcome.invalid, at, message=message), []) for one in commands]
    undo = _Undo(state)
    decided = []
    for command, known in zip(commands, drawn, strict=True):
        undo.save(command, max(at, state.time))
        decided.append(_decided(state, command, at, known))
        answer = decided[-1].answer
        if not answer.positive:
            undo.undo()
            outcome = Outcome(answer.code)
            return [Decided(refused(state, one, outcome, at, message=answer.message), []) for one in commands]
    for command, one in zip(commands, decided, strict=True):
        _name_basket(state, command, one, basket)
    return decided


def _name_basket(state: ShardState, command: Grab, decided: Decided, basket: str) -> None:
    """Gives a grab of pieces that was decided without its basket the name of it: payments are for baskets."""
    offer = state.offers.get(command.offer)
    if decided.answer.positive and offer is not None and not offer.is_envelope:
        offer.grabs[command.id].basket = basket


class _Undo:
    """The parts of a state that the grabs of a basket change, as before them."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._clock = state.seq, state.time
        self._offers: dict[str, Offer] = {}
        self._grabs: list[_Key] = []
        self._saved: list[tuple[dict[Any, Any], Any, Any]] = []
        self._tickets = dict(state.tickets)

    def save(self, command: Grab, now: int) -> None:
        """Called before each grab."""
        offer = self._state.offers.get(command.offer)
        if offer is None or offer.is_envelope or grabbing.unfit(offer, command):
            return
        if offer.name not in self._offers:
            shallow = copy.copy(offer)
            shallow.queue, shallow.seen = list(offer.queue), set(offer.seen)
            self._offers[offer.name] = shallow
        if command.id not in offer.grabs:
            self._grabs.append((offer.name, command.id))
        for counter in limits.counters_of(offer, command, now):
            counters: dict[Any, Any] = self._state.counters if counter.is_campaign_wide else offer.counters
            key = (offer.campaign, counter.name) if counter.is_campaign_wide else counter.name
            self._saved.append((counters, key, counters.get(key)))

    def undo(self) -> None:
        """Restores the state."""
        for counters, key, value in reversed(self._saved):
            if value is None:
                counters.pop(key, None)
            else:
                counters[key] = value
        for name, grab in self._grabs:
            self._state.offers[name].grabs.pop(grab, None)
        for name, saved in self._offers.items():
            vars(self._state.offers[name]).update(vars(saved))
        self._state.seq, self._state.time = self._clock
        self._state.tickets = self._tickets
