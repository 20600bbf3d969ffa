"""The journal read by the rules: `models/rules` must decide each command, at the time of its event, as the
scripts did. So what one command does is checked in the histories that only faults make.

What made no event (refusals, repeats) is not read: no event may depend on it. `answers_reading.py` compares
it with the rules.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Grab, Open, basket_of, identity_of
from grabstream.models.events import (
    AnyEvent,
    GrabConfirmed,
    GrabGranted,
    GrabReleased,
    GrabReturned,
    OfferLoaded,
    OfferOpened,
    decode_event,
    encode_event,
)
from grabstream.models.identifiers import campaign_of
from grabstream.models.rules import Decided, ShardState, decide, decide_basket
from grabstream.models.rules.grabbing import leave_queue
from grabstream.models.rules.operating import fall_due
from grabstream.models.rules.settling import lapse
from tests.lua.histories.strategies import TICKETS
from tests.support.shards import SEALER

#: The command in events that no command caused.
SWEEP = "sweep"


class Sent(NamedTuple):
    """A command that a caller has sent, and the list that it was sent in."""

    command: AnyCommand
    in_list: Sequence[AnyCommand]


class Difference(Exception):
    """The journal has an event that the rules do not make."""


def is_of(event: Any, command: AnyCommand) -> bool:
    """Whether an event is that of a command."""
    is_named = event["command"] == command.id
    return bool(is_named and (not isinstance(command, Grab) or event.get("user") == command.user))


def all_sent(lists: Iterator[Sequence[AnyCommand]]) -> dict[tuple[str, str], list[Sent]]:
    """All commands that callers send, by campaign and id: several bodies may have one id."""
    sent: dict[tuple[str, str], list[Sent]] = defaultdict(list)
    for commands in lists:
        for command in commands:
            sent[campaign_of(command.offer), command.id].append(Sent(command, commands))
    return sent


class RulesReading:
    """A shard's journal, decided once more. `answers` are those of the rules, by campaign, id and seq."""

    def __init__(self, shard: int, sent: dict[tuple[str, str], list[Sent]]) -> None:
        self.state = ShardState(shard, SEALER.digests)
        self.answers: dict[tuple[str, str, int], Answer] = {}
        self._sent = sent

    def read(self, lines: Sequence[bytes], before: Callable[[int], None] = lambda seq: None) -> None:
        """Raises Difference at the first event that the rules do not make. Between two decisions, and at both
        ends, it calls `before` with the number of events read.
        """
        seq = 0
        while seq < len(lines):
            before(seq)
            event: Any = decode_event(lines[seq])
            made = self._swept(event) if event.command == SWEEP else self._decided(event)
            if not made:
                raise Difference(f"the rules make no such event: {lines[seq].decode()}")
            for expected in made:
                if seq == len(lines):
                    raise Difference(f"missing at the end: {encode_event(expected).decode()}")
                line = self._as_sealed(expected, lines[seq])
                # Attributes come in the order in which their sender wrote them.
                if json.loads(line) != json.loads(lines[seq]):
                    raise Difference(f"the rules make {line.decode()}, the journal has {lines[seq].decode()}")
                seq += 1
        before(seq)

    def baskets_of(self, command: Grab) -> Iterator[list[Grab]]:
        """The baskets that callers have sent with a grab."""
        for sent in self._sent.get((campaign_of(command.offer), command.id), ()):
            if sent.command == command:
                yield _basket_in(sent)

    def has_other_bodies(self, command: AnyCommand) -> bool:
        """Whether callers have sent another command under the id of one."""
        return any(
            sent.command != command and self._is_same(sent.command, command)
            for sent in self._sent.get((campaign_of(command.offer), command.id), ())
        )

    def _is_same(self, one: AnyCommand, other: AnyCommand) -> bool:
        """Whether two commands with one id are the same command, or claim to be: the id of a grab of pieces
        is known to all users.
        """
        are_grabs = isinstance(one, Grab) and isinstance(other, Grab)
        return identity_of(one) == identity_of(other) or (are_grabs and one.offer == other.offer)

    def _swept(self, event: Any) -> list[AnyEvent]:
        """What a sweep makes at this time of the hold or offer in an event."""
        offer = self.state.offers.get(event.offer)
        if offer is None:
            return []
        if isinstance(event, GrabReleased) and event.reason == "expired":
            return lapse(self.state, offer, event.grab, event.at) if event.grab in offer.grabs else []
        if event.at < offer.due:
            return []
        if offer.closed_reason and offer.queue:
            # Each waiter that leaves is a separate decision.
            return [leave_queue(self.state, offer, offer.queue[0], SWEEP, None, event.at)]
        return fall_due(self.state, offer, event.at)

    def _decided(self, event: Any) -> list[AnyEvent]:
        """What the command in an event makes at this time."""
        found = self._command_of(event)
        if found is None:
            return []
        command = found.command
        if isinstance(command, Grab) and basket_of(command) is not None:
            grabs = _basket_in(found)
            decided = decide_basket(self.state, grabs, event.at, [claims_of(one) for one in grabs])
            pairs = zip(grabs, decided, strict=True)
            return [made for one, of_grab in pairs for made in self._kept(one, of_grab)]
        given = self._drawn(event) if isinstance(command, Open) else claims_of(command)
        return self._kept(command, decide(self.state, command, event.at, given))

    def _kept(self, command: AnyCommand, decided: Decided) -> list[AnyEvent]:
        if decided.answer.seq is not None:
            self.answers[campaign_of(command.offer), command.id, decided.answer.seq] = decided.answer
        return decided.events

    def _command_of(self, event: Any) -> Sent | None:
        """The command with the id and the body of an event."""
        for sent in self._sent.get((campaign_of(event.offer), event.command), ()):
            command: Any = sent.command
            if (
                command.offer == event.offer
                and SEALER.digests.digest(command) == getattr(event, "digest", None)
                and (not isinstance(command, Grab) or command.user == event.user)
                and (not hasattr(event, "operator") or command.operator == event.operator)
            ):
                return sent
        return None

    def _drawn(self, event: Any) -> dict[str, Any]:
        """What the gate has drawn for an opening: it stands in the event."""
        if not isinstance(event, OfferOpened):
            return {}
        clock_ms = event.offsets[0][0] if event.offsets else event.at
        sealed = event.sealed_seed
        seed = sealed and SEALER.open(self.state.shard, event.offer, "seed", sealed)
        return {"clock_ms": clock_ms, "sealed_seed": sealed, "seed": seed}

    def _as_sealed(self, event: AnyEvent, line: bytes) -> bytes:
        """The text of an event of the rules, with its codes sealed as a line has them."""
        if isinstance(event, GrabGranted | GrabConfirmed):
            field = "codes"
        elif isinstance(event, GrabReturned):
            field = "voided_codes"
        elif isinstance(event, OfferLoaded) and event.what == "codes":
            field = "items"
        else:
            return encode_event(event)
        sealed = getattr(decode_event(line), field, ())
        opened = tuple(SEALER.open(self.state.shard, event.offer, "code", code) for code in sealed)
        if opened == tuple(getattr(event, field)):
            event = msgspec.structs.replace(event, **{field: sealed})
        return encode_event(event)


def _basket_in(sent: Sent) -> list[Grab]:
    """The grabs of a list that are in the basket of one of them."""
    basket = basket_of(sent.command)
    return [one for one in sent.in_list if isinstance(one, Grab) and basket_of(one) == basket]


def claims_of(command: AnyCommand) -> dict[str, Any]:
    """What the gate reads in the ticket of a grab."""
    if not isinstance(command, Grab) or not command.ticket:
        return {}
    ticket = TICKETS.read(command.ticket, command.user, command.offer)
    if ticket is None:
        return {}
    of_campaign = {"ticket_ends_at": ticket.expires_at_ms} if ticket.is_campaign_wide else {}
    return {"ticket_expires_at": ticket.expires_at_ms, "ticket_once": ticket.once_id, **of_campaign}
