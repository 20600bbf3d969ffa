"""Checks of the audit trail, row by row (the chain, the columns next to the text, and the rows of the
ledger), and the expected state of offers and accounts that follows from it.

This module does not read a database: callers pass rows, and get the verified events and the first problem. A
problem ends the walk, because later rows can be verified only after it is repaired.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Final, NamedTuple

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
)
from grabstream.models.runs import AnyLine, decode_line, singles
from grabstream.models.transfers import Transfer, transfers_of
from grabstream.models.upcasting import NewerEvent
from grabstream.projections.checking.trail import TrailRow, row_of
from grabstream.projections.tables.set_aside import SetAsideRecord

AUDIT: Final = "audit"
LEDGER: Final = "ledger"
EVENTS: Final = "events"


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
    """A problem at a seq: `kind` is `chain` or `ledger`."""

    kind: str
    seq: int
    what: str


class AuditedEvent(NamedTuple):
    """An event of the trail, with the transfers that the ledger has for it. The event is None if it was set
    aside and cannot be read.
    """

    seq: int
    event: AnyEvent | None
    transfers: Sequence[Transfer]


class Walked(NamedTuple):
    """The result of a walk: the last verified seq, the hash after it, the events up to it, and the problem
    that ended the walk, if any.
    """

    seq: int
    head: bytes
    facts: list[AuditedEvent]
    wrong: Wrong | None


class Gaps:
    """The records set aside in a shard, by projection and seq."""

    def __init__(self, aside: Iterable[SetAsideRecord], shard: int) -> None:
        records = [
            record
            for record in aside
            if record.shard == shard and record.event_count and record.projection != EVENTS
        ]
        #: id → first seq of the records that a walk must skip or take into account.
        self.ids = {record.id: record.first_seq for record in records if record.projection in (AUDIT, LEDGER)}
        self.audit = {record.first_seq: record for record in records if record.projection == AUDIT}
        self._ledger = [record for record in records if record.projection == LEDGER]
        #: Offers whose state does not follow from the trail and the read models alone.
        self.offers = {offer for record in records for offer in record.offers}
        self.unreadable = any(not record.readable for record in records)

    def not_in_ledger(self, seq: int) -> bool:
        """Whether an operator set an event aside for the ledger."""
        return any(record.first_seq <= seq <= record.last_seq for record in self._ledger)


def walk(
    shard: int, seq: int, head: bytes, rows: Sequence[TrailRow], ledger: Iterable[LedgerRow], gaps: Gaps,
    reach: int | None = None
) -> Walked:  # fmt: skip
    """Verifies the rows after `seq`, where the hash of the chain is `head`, and the rows of the ledger with
    the same seqs.

    `reach`, if given, is the seq that the rows must reach, because there are no further rows.
    """
    lines: defaultdict[int, list[LedgerRow]] = defaultdict(list)
    for ledger_row in ledger:
        lines[ledger_row.seq].append(ledger_row)
    facts: list[AuditedEvent] = []

    def past_gap() -> None:
        nonlocal seq, head
        while gap := gaps.audit.get(seq + 1):
            facts.extend(_facts_of(gap, lines))
            seq, head = gap.last_seq, gap.after.head

    for row in rows:
        past_gap()
        verified: list[AuditedEvent] = []
        try:
            if row.seq != seq + 1:
                raise _Difference("chain", f"the audit trail has no row for seq {seq + 1}")
            line, head_after = _verified(shard, head, row)
            for event in singles(line):
                transfers = () if gaps.not_in_ledger(event.seq) else tuple(transfers_of(event))
                _compare_ledger(event, transfers, lines[event.seq])
                verified.append(AuditedEvent(event.seq, event, transfers))
        except NewerEvent:
            # This release cannot verify an event of a newer one. A worker of the newer release continues
            # here.
            return Walked(seq, head, facts, None)
        except _Difference as problem:
            return Walked(seq, head, facts, Wrong(problem.kind, seq + 1, str(problem)))
        seq, head = line.last_seq, head_after
        facts += verified
    if reach is not None:
        past_gap()
        if seq < reach:
            return Walked(
                seq, head, facts, Wrong("chain", seq + 1, f"the audit trail has no row for seq {seq + 1}")
            )
    return Walked(seq, head, facts, None)


class _Difference(Exception):
    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


def _verified(shard: int, head: bytes, row: TrailRow) -> tuple[AnyLine, bytes]:
    text = row.body.encode()
    if sha256(head + text).digest() != row.hash:
        raise _Difference(
            "chain",
            f"audit, seq {row.seq}: text and hash do not follow from the hash before: one of "
            "them was changed",
        )
    try:
        event = decode_line(text)
    except NewerEvent:
        raise
    except msgspec.DecodeError as error:
        raise _Difference("chain", f"audit, seq {row.seq}: the text is not an event: {error}") from None
    by_text = row_of(event, row.body, row.hash)
    if by_text != row or event.shard != shard:
        columns = (by_text.offer, by_text.type, by_text.at, by_text.seqs)
        raise _Difference(
            "chain",
            f"audit, seq {row.seq}: the other columns differ from the text: {columns} by the text",
        )
    return event, row.hash


def _compare_ledger(event: AnyEvent, transfers: Sequence[Transfer], lines: Sequence[LedgerRow]) -> None:
    expected = [
        LedgerRow(event.seq, leg, event.offer, *transfer, event.at) for leg, transfer in enumerate(transfers)
    ]
    actual = sorted(lines)
    if actual == expected:
        return
    missing = list(map(_shown, (Counter(expected) - Counter(actual)).elements()))
    surplus = list(map(_shown, (Counter(actual) - Counter(expected)).elements()))
    words = [f"{word} {', '.join(shown)}" for word, shown in (("lacks", missing), ("has", surplus)) if shown]
    raise _Difference(
        "ledger",
        f"transfers, seq {event.seq} ({event.offer}): the ledger {'; it '.join(words)}, which the event does "
        "not say",
    )


def _shown(line: LedgerRow) -> str:
    return f"{line.amount} {line.asset} {line.debit} → {line.credit}"


def _facts_of(gap: SetAsideRecord, lines: Mapping[int, list[LedgerRow]]) -> list[AuditedEvent]:
    """The events of a record that was set aside for the audit trail, with the transfers that the ledger has
    for them.
    """
    texts: Sequence[bytes] = gap.value.split(b"\n") if gap.readable else ()
    events: dict[int, AnyEvent] = {}
    for text in texts:
        events |= {event.seq: event for event in singles(decode_line(text))}
    return [
        AuditedEvent(
            seq,
            events.get(seq),
            [Transfer(line.asset, line.debit, line.credit, line.amount) for line in lines.get(seq, ())],
        )
        for seq in range(gap.first_seq, gap.last_seq + 1)
    ]


def numbers_in_words(numbers: tuple[int, int, int, int]) -> str:
    """The numbers (amount left, units left, held, grabs) as text for a finding."""
    return "left {}, units {}, held {}, grabs {}".format(*numbers)


# -- expected state ------------------------------------------------------------------------------------------


class OfferState(NamedTuple):
    """The state of an offer after its event `offer_seq`: the rest (in its asset, and in units), the held
    units, and the number of its grabs.
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
        """The numbers as text for a finding."""
        return numbers_in_words(self.numbers)

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """The numbers that are compared."""
        return (self.amount_left, self.units_left, self.held, self.grabs)


class _ExpectedTerms(msgspec.Struct):
    parts: int = 0


_terms = msgspec.json.Decoder(_ExpectedTerms).decode


def after(state: OfferState | None, event: AnyEvent) -> OfferState:
    """The state of an offer after its next event."""
    state = state or OfferState(event.offer, event.shard, 0, 0, 0, 0, 0, 0, False)
    left, held = state.amount_left, state.held
    account = "offer:" + event.offer
    for _, debit, credit, amount in transfers_of(event):
        left += amount * ((credit == account) - (debit == account))
        held += amount * (credit.startswith("hold:") - debit.startswith("hold:"))
    return OfferState(
        event.offer, event.shard, event.offer_seq, event.seq, left, _units_left(state, event), held,
        # After its retirement, an offer has only events about late payments.
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
    """The changes of accounts by the transfers of the ledger, by (account, asset)."""
    changes: defaultdict[tuple[str, str], int] = defaultdict(int)
    for fact in facts:
        for asset, debit, credit, amount in fact.transfers:
            changes[debit, asset] -= amount
            changes[credit, asset] += amount
    return dict(changes)
