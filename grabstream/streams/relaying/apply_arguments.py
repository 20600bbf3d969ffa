"""Builds keys and arguments of the script `apply` from events of the journal; `apply` makes the state that
deciding the events had made.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, TypeAlias

import msgspec

from grabstream.crypto.sealing import CannotOpen, Sealer
from grabstream.gate.encoding import CallOffers, changes_row, drawing_parts, envelope_row, terms_row
from grabstream.gate.staging import INLINE_BYTES_MAX, ScriptCall, Staged
from grabstream.lua.keys import ShardKeys
from grabstream.models.commands import carried_by, carried_texts
from grabstream.models.digests import adjustment_text
from grabstream.models.events import (
    AnyEvent,
    GrabConfirmed,
    GrabQueued,
    LedgerAdjusted,
    OfferAmended,
    OfferOpened,
    PaymentRefundDue,
)
from grabstream.models.identifiers import encoded_payment
from grabstream.models.offers import EnvelopeTerms, changes_of, terms_of
from grabstream.models.runs import AnyLine, GrantedRun, singles

_pack = msgspec.msgpack.Encoder().encode
_json = msgspec.json.Encoder().encode

#: The grabs that `in_columns` puts together at most: with others, they are applied in one call.
PARTS_MAX: Final = 128


class PlainGrabs(msgspec.Struct, tag_field="type", tag="parts", gc=False):
    """Consecutive plain grabs of an envelope in a shard, in columns: place and offer_seq are those of the
    first, `at` (ms) is that of the last, and `times` are (time in ms, number of grabs) of each stretch.
    """

    offer: str
    seq: int
    last_seq: int
    offer_seq: int
    place: int
    at: int
    times: list[tuple[int, int]]
    grabs: list[str]
    users: list[str]
    amounts: list[int]


#: What is applied in one step.
Applicable: TypeAlias = AnyEvent | PlainGrabs


def last_seq(event: Applicable) -> int:
    """The seq of the last of the events that are applied in one step."""
    return event.last_seq if isinstance(event, PlainGrabs) else event.seq


def in_columns(lines: Iterable[AnyLine], after: int) -> list[Applicable]:
    """The events of lines after a seq: plain grabs of an envelope in columns, runs of others one by one."""
    found: list[Applicable] = []
    plain: PlainGrabs | None = None
    for line in lines:
        if not isinstance(line, GrantedRun) or not _are_plain_parts(line):
            plain = None
            found += [event for event in singles(line) if event.seq > after]
            continue
        for begin in range(max(after + 1 - line.seq, 0), line.seqs, PARTS_MAX):
            end = min(begin + PARTS_MAX, line.seqs)
            if plain is None or not _continues(plain, line, begin, end):
                first = (line.seq + begin, 0, line.offer_seq + begin, line.place + begin)
                plain = PlainGrabs(line.offer, *first, line.at, [], [], [], [])
                found.append(plain)
            plain.last_seq, plain.at = line.seq + end - 1, line.at
            plain.times.append((line.at, end - begin))
            plain.grabs += line.grabs[begin:end]
            plain.users += line.users[begin:end]
            plain.amounts += line.amounts[begin:end]
    return found


def _continues(plain: PlainGrabs, line: GrantedRun, begin: int, end: int) -> bool:
    """Whether these grabs of a line follow others directly, and there is room for them."""
    follow = plain.offer == line.offer and plain.last_seq + 1 == line.seq + begin
    return follow and len(plain.grabs) + end - begin <= PARTS_MAX


def _are_plain_parts(run: GrantedRun) -> bool:
    """Whether the grabs of a run are of an envelope, and have nothing that only some grabs have. Only runs of
    envelopes have amounts.
    """
    return bool(run.amounts) and not (
        run.command or run.quantities or run.asked or run.attributes or carried_by(run) or run.tickets
        or run.basket or run.digests or run.codes
    )  # fmt: skip


def building(
    keys: ShardKeys, events: Sequence[Applicable], sealer: Sealer, retired: Sequence[str] = (),
    seeds: Mapping[str, str] = {}
) -> Generator[None, None, ScriptCall]:  # fmt: skip
    """Makes keys (after the keys of the shard) and packed arguments, in steps. `seeds` has, by offer, the
    seeds that were revealed when envelopes closed.

    Raises CannotOpen when a seed was sealed with a key that is missing, and `seeds` lacks it; ValueError when
    terms or changes cannot be decoded. The caller writes what is `staged` to its keys before, by the script
    `apply_parts`.
    """
    call_offers = CallOffers([event.offer for event in events])
    rows: list[Any] = []
    parts: list[bytes] = []
    staged: list[Staged] = []
    for event in events:
        if isinstance(event, OfferOpened):
            row, drawn = yield from _opened(keys.shard, event, sealer, seeds)
            if len(drawn) > INLINE_BYTES_MAX:
                staged.append(Staged(len(parts), keys.parts(event.offer), drawn))
                drawn = b""
            rows.append(row)
            parts.append(drawn)
        else:
            rows.append(
                _amended(event)
                if isinstance(event, OfferAmended)
                else _adjusted(event)
                if isinstance(event, LedgerAdjusted)
                else _queued(event)
                if isinstance(event, GrabQueued) and carried_by(event)
                else _paid(event)
                if isinstance(event, GrabConfirmed | PaymentRefundDue) and event.payment
                else event
            )
    columns = (
        call_offers.offers,
        call_offers.campaign_of,
        call_offers.campaigns,
        rows,
        call_offers.offer_of,
        retired,
    )
    return ScriptCall(call_offers.keys(keys), [_pack(columns), *parts], staged)


def _opened(
    shard: int, event: OfferOpened, sealer: Sealer, seeds: Mapping[str, str]
) -> Generator[None, None, tuple[dict[str, Any], bytes]]:
    terms = terms_of(event.terms)
    row, parts = terms_row(event.offer, terms, event.offsets), b""
    if event.campaign_zone is not None:
        row["campaign_zone_json"] = _json(event.campaign_zone).decode()
    if isinstance(terms, EnvelopeTerms):
        seed = _seed(shard, event, sealer, seeds)
        row |= envelope_row(terms, seed)
        parts = yield from drawing_parts(terms, seed)
    return _head(event) | {"opens_at": event.opens_at, "closes_at": event.closes_at, "row": row}, parts


def _seed(shard: int, event: OfferOpened, sealer: Sealer, seeds: Mapping[str, str]) -> str:
    try:
        return sealer.open(shard, event.offer, "seed", event.sealed_seed or "")
    except CannotOpen:
        revealed = seeds.get(event.offer)
        if revealed is None or sha256(bytes.fromhex(revealed)).hexdigest() != event.seed_sha256:
            raise
        return revealed


def _amended(event: OfferAmended) -> dict[str, Any]:
    changes = changes_row(changes_of(event.changes))
    return _head(event) | {"added": event.added, "removed": event.removed, "changes": changes}


def _adjusted(event: LedgerAdjusted) -> dict[str, Any]:
    return _head(event) | {"whole": adjustment_text(event.transfers, event.reason, event.approved_by)}


def _queued(event: GrabQueued) -> dict[str, Any]:
    # The grab keeps them for the event that serves it.
    return msgspec.to_builtins(event) | {"carried": carried_texts(carried_by(event))}  # type: ignore[no-any-return]


def _paid(event: GrabConfirmed | PaymentRefundDue) -> AnyEvent:
    # As `confirm` gets it.
    return msgspec.structs.replace(event, payment=encoded_payment(event.payment or ""))


def _head(event: OfferOpened | OfferAmended | LedgerAdjusted) -> dict[str, Any]:
    fields = ("seq", "at", "offer_seq", "command", "digest")
    return {"type": event.__struct_config__.tag} | {name: getattr(event, name) for name in fields}
