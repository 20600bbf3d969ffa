"""The audit trail, checked row by row: the chain, the columns beside the text, and the ledger's lines; and
folded into what must be.

Nothing here reads a database: rows come in, what is proved and what is wrong goes out. The first thing wrong
ends the walk: what stands behind it is proved only when it is mended.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec

from grabstream.models.events import (
    AnyEvent,
    GrabConfirmed,
    GrabGranted,
    GrabHeld,
    GrabReleased,
    GrabReturned,
    OfferAmended,
    OfferClosed,
    OfferOpened,
    OfferRetired,
    decode_event,
)
from grabstream.models.transfers import Transfer, transfers_of
from grabstream.models.upcasting import NewerEvent
from grabstream.projections.records.set_aside import SetAside

AUDIT: Final = "audit"
LEDGER: Final = "ledger"
EVENTS: Final = "events"


class AuditRow(NamedTuple):
    """A row of the audit trail."""

    seq: int
    offer: str
    type: str
    at: int
    body: str
    hash: bytes


class LedgerRow(NamedTuple):
    """A row of the transfers."""

    seq: int
    leg: int
    offer: str
    asset: str
    debit: str
    credit: str
    amount: int
    at: int


class Wrong(NamedTuple):
    """What is wrong at a seq: `kind` is `chain` or `ledger`."""

    kind: str
    seq: int
    what: str


class AuditedEvent(NamedTuple):
    """An event of the trail, with the transfers that the ledger has for it. None: it was set aside and cannot
    be read.
    """

    seq: int
    event: AnyEvent | None
    transfers: Sequence[Transfer]


class Walked(NamedTuple):
    """How far a walk came: the last seq that is proved, the hash there, the events up to it, and what ended
    it, if anything did.
    """

    seq: int
    head: bytes
    facts: list[AuditedEvent]
    wrong: Wrong | None


class Gaps:
    """What was set aside in a shard, by projection and seq."""

    def __init__(self, aside: Iterable[SetAside], shard: int) -> None:
        mine = [one for one in aside if one.shard == shard and one.event_count and one.projection != EVENTS]
        #: The first seq of each, by its id, as far as the walk has to do with it.
        self.ids = {one.id: one.first_seq for one in mine if one.projection in (AUDIT, LEDGER)}
        self.audit = {one.first_seq: one for one in mine if one.projection == AUDIT}
        self._ledger, self._audit = (
            [(one.first_seq, one.last_seq) for one in mine if one.projection == name] for name in (LEDGER,
            AUDIT)
        )  # fmt: skip
        #: Offers whose state at a seq is not told by the trail and the read models alone.
        self.offers = {offer for one in mine for offer in one.offers}
        self.unreadable = any(not one.readable for one in mine)

    def not_in_ledger(self, seq: int) -> bool:
        """Whether the ledger lacks an event, as an operator decided."""
        return any(first <= seq <= last for first, last in self._ledger)

    def not_in_audit(self, seq: int) -> bool:
        """Whether the audit trail lacks an event, as an operator decided."""
        return any(first <= seq <= last for first, last in self._audit)


def walk(
    shard: int, seq: int, head: bytes, rows: Sequence[AuditRow], ledger: Iterable[LedgerRow], gaps: Gaps,
    reach: int | None = None
) -> Walked:  # fmt: skip
    """Walks from behind `seq`, where the chain's hash is `head`, over consecutive rows and the ledger's rows
    of the same seqs.

    `reach` is the seq that these rows must lead to, where they are all that is there.
    """
    lines: defaultdict[int, list[LedgerRow]] = defaultdict(list)
    for line in ledger:
        lines[line.seq].append(line)
    facts: list[AuditedEvent] = []

    def past_gap() -> None:
        nonlocal seq, head
        while gap := gaps.audit.get(seq + 1):
            facts.extend(_facts_of(gap, lines))
            seq, head = gap.last_seq, gap.after.head

    for row in rows:
        past_gap()
        try:
            if row.seq != seq + 1:
                raise _Differs("chain", f"the audit trail has no row for seq {seq + 1}")
            event, head_behind = _proved(shard, head, row)
            transfers = () if gaps.not_in_ledger(row.seq) else transfers_of(event)
            _compare_ledger(event, transfers, lines[row.seq])
        except NewerEvent:
            # A newer program wrote it: what this one does not know it cannot judge, and a worker of that one
            # goes on.
            return Walked(seq, head, facts, None)
        except _Differs as wrong:
            return Walked(seq, head, facts, Wrong(wrong.kind, seq + 1, str(wrong)))
        seq, head = row.seq, head_behind
        facts.append(AuditedEvent(seq, event, transfers))
    if reach is not None:
        past_gap()
        if seq < reach:
            return Walked(
                seq, head, facts, Wrong("chain", seq + 1, f"the audit trail has no row for seq {seq + 1}")
            )
    return Walked(seq, head, facts, None)


class _Differs(Exception):
    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


def _proved(shard: int, head: bytes, row: AuditRow) -> tuple[AnyEvent, bytes]:
    text = row.body.encode()
    if sha256(head + text).digest() != row.hash:
        raise _Differs(
            "chain",
            f"audit, seq {row.seq}: text and hash do not follow from what stands before: one of them was "
            "changed",
        )
    try:
        event: AnyEvent = decode_event(text)
    except NewerEvent:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _Differs("chain", f"audit, seq {row.seq}: the text is no event: {error}") from None
    said = (event.shard, event.seq, event.offer, str(event.__struct_config__.tag), event.at)
    if said != (shard, row.seq, row.offer, row.type, row.at):
        raise _Differs(
            "chain",
            f"audit, seq {row.seq}: the columns beside the text differ from it: {said[2:]} by the text",
        )
    return event, row.hash


def _compare_ledger(event: AnyEvent, transfers: Sequence[Transfer], lines: Sequence[LedgerRow]) -> None:
    expected = [
        LedgerRow(event.seq, leg, event.offer, *transfer, event.at) for leg, transfer in enumerate(transfers)
    ]
    found = sorted(lines)
    if found == expected:
        return
    missing = [f"{one.amount} {one.asset} {one.debit} → {one.credit}" for one in expected if one not in found]
    surplus = [f"{one.amount} {one.asset} {one.debit} → {one.credit}" for one in found if one not in expected]
    words = [f"{word} {', '.join(ones)}" for word, ones in (("lacks", missing), ("has", surplus)) if ones]
    raise _Differs(
        "ledger",
        f"transfers, seq {event.seq} ({event.offer}): the ledger {'; it '.join(words)}, which the event does "
        "not say",
    )


def _facts_of(gap: SetAside, lines: Mapping[int, list[LedgerRow]]) -> list[AuditedEvent]:
    """Events that the audit trail lacks: as they stand in the record that was set aside, with what the ledger
    has of them.
    """
    texts: Sequence[bytes] = gap.value.split(b"\n") if gap.readable else ()
    events: dict[int, AnyEvent] = {}
    for text in texts:
        event = decode_event(text)
        events[event.seq] = event
    return [
        AuditedEvent(
            seq,
            events.get(seq),
            [Transfer(one.asset, one.debit, one.credit, one.amount) for one in lines.get(seq, ())],
        )
        for seq in range(gap.first_seq, gap.last_seq + 1)
    ]


def numbers_in_words(numbers: tuple[int, int, int, int]) -> str:
    """(amount left, units left, held, grabs) for a finding."""
    return "left {}, units {}, held {}, grabs {}".format(*numbers)


# -- what must be --------------------------------------------------------------------------------------------


class OfferState(NamedTuple):
    """An offer behind its event `offer_seq`: what is left (in its asset, and in units), held, and how many
    grabs it has had.
    """

    offer: str
    shard: int
    offer_seq: int
    seq: int
    amount_left: int
    units_left: int
    held: int
    grabs: int
    retired: bool

    def in_words(self) -> str:
        """The numbers, for a finding."""
        return numbers_in_words(self.numbers)

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """What is compared."""
        return (self.amount_left, self.units_left, self.held, self.grabs)


class _Terms(msgspec.Struct):
    parts: int = 0


_terms = msgspec.json.Decoder(_Terms).decode


def after(state: OfferState | None, event: AnyEvent) -> OfferState:
    """The state of an offer behind its next event."""
    state = state or OfferState(event.offer, event.shard, 0, 0, 0, 0, 0, 0, False)
    left, held = state.amount_left, state.held
    own = "offer:" + event.offer
    for _, debit, credit, amount in transfers_of(event):
        left += amount * ((credit == own) - (debit == own))
        held += amount * (credit.startswith("hold:") - debit.startswith("hold:"))
    return OfferState(
        event.offer, event.shard, event.offer_seq, event.seq, left, _units_left(state, event), held,
        # Of one that has retired only late payments are told.
        state.grabs + isinstance(event, GrabGranted | GrabHeld),
        state.retired or isinstance(event, OfferRetired),
    )  # fmt: skip


def _units_left(state: OfferState, event: AnyEvent) -> int:
    if isinstance(event, OfferOpened):
        return _terms(event.terms).parts or event.total
    if isinstance(event, OfferClosed):
        return 0
    if isinstance(event, GrabGranted | GrabHeld | GrabConfirmed | GrabReleased | GrabReturned | OfferAmended):
        return event.left
    return state.units_left


def account_changes(facts: Iterable[AuditedEvent]) -> dict[tuple[str, str], int]:
    """What the ledger's lines change, by account and asset."""
    changes: defaultdict[tuple[str, str], int] = defaultdict(int)
    for fact in facts:
        for asset, debit, credit, amount in fact.transfers:
            changes[debit, asset] -= amount
            changes[credit, asset] += amount
    return dict(changes)


def row_of(values: Sequence[Any]) -> AuditRow:
    """A row as the database gives it."""
    seq, offer, type_, at, body, hash_ = values
    return AuditRow(seq, offer, type_, at, body, bytes(hash_))
