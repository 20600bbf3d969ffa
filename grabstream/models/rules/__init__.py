"""The rules: the decisions of the Lua scripts as pure functions, so that tests can compare both.

`decide` takes the state of a shard, one command and a time, and returns the answer and the events.
`decide_basket` decides the grabs of a basket, which are all granted or all refused. `sweep` handles what is
due at a time. All of them change the state in place.
"""

import pickle
from collections.abc import Sequence

import msgspec

from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Confirm, Grab, GrabCommand, Open, basket_of, identity_of
from grabstream.models.digests import CannotCompare, whole_of
from grabstream.models.events import AnyEvent
from grabstream.models.identifiers import NO_OFFER
from grabstream.models.outcomes import Outcome
from grabstream.models.rules import grabbing
from grabstream.models.rules.grabbing import draw_part, take_pieces, with_part
from grabstream.models.rules.operating import close_offer, decide_offer_command, fall_due, open_offer
from grabstream.models.rules.settling import decide_grab_command, decide_without_offer, lapse
from grabstream.models.rules.state import (
    REFUSALS_MAX,
    Decided,
    Drawn,
    Offer,
    Remembered,
    ShardState,
    as_remembered,
    refused,
)

__all__ = ["Decided", "Drawn", "Offer", "ShardState", "decide", "decide_basket", "sweep"]

#: Refusals that are not remembered: the command may be corrected under the same id, or its id already has an
#: answer.
_NOT_REMEMBERED = frozenset({Outcome.invalid, Outcome.conflict})


def decide(state: ShardState, command: AnyCommand, clock_ms: int, drawn: Drawn | None = None) -> Decided:
    """Decides one command at `clock_ms` (ms since 1970 UTC); the clock of a shard never goes back. `drawn` is
    what a gate adds to the command.
    """
    if isinstance(command, Grab) and basket_of(command):
        [decided] = decide_basket(state, [command], clock_ms, [drawn or {}])
        return decided
    now = max(clock_ms, state.time)
    offer = state.offers.get(command.offer)
    known = _known(state, command)
    unfit = grabbing.unfit(offer, command) if isinstance(command, Grab) and offer is not None else None
    if known is not None:
        return _decide_known(state, command, known, now, unfit)
    if unfit:
        return Decided(refused(state, command, Outcome.invalid, now, message=unfit), [], False)
    digest = state.digests.digest(command)
    if isinstance(command, Open):
        return open_offer(state, command, digest, now, drawn or {})
    return _remember(state, command, now, _execute(state, command, offer, digest, now, drawn or {}))


def _execute(
    state: ShardState, command: AnyCommand, offer: Offer | None, digest: str, now: int, drawn: Drawn
) -> Decided:
    if offer is None:
        return decide_without_offer(state, command, digest, now)
    if isinstance(command, GrabCommand):
        return decide_grab_command(state, command, offer, digest, now)
    if not isinstance(command, Grab):
        return decide_offer_command(state, command, offer, digest, now)
    for refusal_of in grabbing.REFUSALS:
        if refusal := refusal_of(state, command, offer, now, drawn):
            return Decided(refusal, [], False)
    if not offer.is_envelope:
        return take_pieces(state, command, offer, digest, now, drawn)
    answer, events = draw_part(state, command, offer, digest, now, drawn)
    if offer.units_left == 0:
        events.append(close_offer(state, offer, "drained", command.id, None, now))
    return Decided(answer, events)


def _remember(state: ShardState, command: AnyCommand, now: int, decided: Decided) -> Decided:
    """Remembers an answer under the id of its command: until the offer retires if an event records it, else
    among the latest refusals.
    """
    answer = decided.answer
    if command.offer not in state.offers:
        # An answer with a seq is found again by its event. A payment without an offer gets its message each
        # time.
        if answer.seq is None and answer.code not in _NOT_REMEMBERED:
            _count(state, command, answer, now)
            if command.offer not in state.retired and not (isinstance(command, Confirm) and answer.message):
                _remember_refusal(state, command, as_remembered(answer))
    elif decided.made_event:
        state.answers[state.answer_key(command)] = Remembered(
            answer, state.digests.remembered(command), whole_of(command)
        )
    elif answer.code != Outcome.conflict and (answer.repeated or answer.code not in _NOT_REMEMBERED):
        # A command whose effect already holds is not a refusal, but made no event: it is remembered like a
        # refusal.
        if not answer.repeated:
            _count(state, command, answer, now)
        _remember_refusal(state, command, answer if answer.repeated else as_remembered(answer))
    return decided


def _count(state: ShardState, command: AnyCommand, answer: Answer, now: int) -> None:
    counted_offer = NO_OFFER if answer.code == Outcome.no_such_offer else command.offer
    state.demand[now // 1000, answer.code, counted_offer] += 1


def _remember_refusal(state: ShardState, command: AnyCommand, kept: Answer) -> None:
    state.refusals[identity_of(command)] = Remembered(kept, state.digests.remembered(command))
    if len(state.refusals) > REFUSALS_MAX:
        state.refusals.popitem(last=False)


def decide_basket(
    state: ShardState, commands: Sequence[Grab], clock_ms: int, drawn: Sequence[Drawn]
) -> list[Decided]:
    """Decides the grabs of a basket. When one grab is refused, all get its outcome."""
    now = max(clock_ms, state.time)
    known = [_known(state, command) for command in commands]
    # When only some of its refusals are still remembered, the basket was not granted, and is decided again.
    if all(known) or any(_answered(state, command) for command in commands):
        return [
            _decide_known_basket(state, command, remembered, now)
            for command, remembered in zip(commands, known, strict=True)
        ]
    if (message := grabbing.unfit_basket(state.offers, commands)) is not None:
        return [
            Decided(refused(state, command, Outcome.invalid, now, message=message), [], False)
            for command in commands
        ]
    # A deep copy takes ten times as long, and is needed only for a refusal.
    saved = pickle.dumps(state)
    decided = []
    for command, drawn_for in zip(commands, drawn, strict=True):
        offer = state.offers.get(command.offer)
        digest = state.digests.digest(command)
        if _answered(state, command):
            decision = Decided(refused(state, command, Outcome.conflict, now), [], False)
        elif offer is not None and (message := grabbing.unfit(offer, command)):
            decision = Decided(refused(state, command, Outcome.invalid, now, message=message), [], False)
        else:
            decision = _execute(state, command, offer, digest, now, drawn_for)
        if not decision.answer.positive:
            vars(state).update(vars(pickle.loads(saved)))  # noqa: S301 - what was saved above
            return [_refused_with(state, grab, decision.answer, command, now) for grab in commands]
        decided.append(_remember(state, command, now, decision))
    return decided


def _decide_known_basket(state: ShardState, command: Grab, known: Remembered | None, now: int) -> Decided:
    if known is None:
        outcome = Outcome.conflict if command.offer in state.offers else Outcome.no_such_offer
        return Decided(refused(state, command, outcome, now), [], False)
    return _decide_known(state, command, known, now)


def _decide_known(
    state: ShardState, command: AnyCommand, known: Remembered, now: int, unfit: str | None = None
) -> Decided:
    """The answer to a command whose id is known: its first answer if the body is the same, else a conflict,
    or `invalid` if the offer could never take this body (`unfit` says why).
    """
    try:
        if _is_same(state, command, known):
            return Decided(_repeated(state, command, known), [], False)
    except CannotCompare as error:
        return Decided(refused(state, command, Outcome.conflict, now, message=str(error)), [], False)
    outcome, message = (Outcome.invalid, unfit) if unfit else (Outcome.conflict, None)
    return Decided(refused(state, command, outcome, now, message=message), [], False)


def _is_same(state: ShardState, command: AnyCommand, known: Remembered) -> bool:
    whole = whole_of(command)
    if known.whole is not None or (whole is not None and known.answer.positive):
        return whole == known.whole and command.offer == known.answer.offer
    return state.digests.matches(known.digest, command)


def _refused_with(state: ShardState, command: Grab, refusal: Answer, first: Grab, now: int) -> Decided:
    message = f"basket: refused at offer {first.offer}, with grab {first.id}"
    answer = refused(state, command, Outcome(refusal.code), now, retry_at=refusal.retry_at, message=message)
    return _remember(state, command, now, Decided(answer, [], False))


def _known(state: ShardState, command: AnyCommand) -> Remembered | None:
    refusal = state.refusals.get(identity_of(command))
    return _answered(state, command) or _unless_retired(state, refusal)


def _answered(state: ShardState, command: AnyCommand) -> Remembered | None:
    """The remembered answer under the command's id that made an event."""
    return _unless_retired(state, state.answers.get(state.answer_key(command)))


def _unless_retired(state: ShardState, known: Remembered | None) -> Remembered | None:
    """`known`, or None if its offer has retired: such answers count as forgotten."""
    return None if known is None or known.answer.offer in state.retired else known


def _repeated(state: ShardState, command: AnyCommand, known: Remembered) -> Answer:
    answer = msgspec.structs.replace(known.answer, repeated=True)
    offer = state.offers.get(command.offer)
    if answer.code == Outcome.already_taken and isinstance(command, Grab) and offer is not None:
        return with_part(answer, offer.users[command.user])
    return answer


def sweep(state: ShardState, clock_ms: int) -> list[AnyEvent]:
    """Handles what is due at `clock_ms`: ends holds, the longest due first; then serves queues, closes and
    retires offers.
    """
    now = max(clock_ms, state.time)
    events: list[AnyEvent] = []
    holds = [
        (grab.lapses_at, f"{offer.name}/{name}", offer, name)
        for offer in state.offers.values()
        for name, grab in offer.grabs.items()
        if grab.held and clock_ms >= grab.lapses_at
    ]
    for _, _, offer, name in sorted(holds, key=lambda hold: hold[:2]):
        events += lapse(state, offer, name, now)
    due = [offer for offer in state.offers.values() if clock_ms >= offer.due]
    for offer in sorted(due, key=lambda offer: (offer.due, offer.name)):
        events += fall_due(state, offer, now)
    return events
