"""Turns commands of one shard and type into keys and arguments of their script, and the script's rows into
answers.

The arguments are sent as one MessagePack string, because packing thousands of single ones would cost more
than deciding the commands. Plain grabs of one offer also send two texts, with their ids and their users.
"""

import secrets
from collections.abc import Generator, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import count, repeat
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from grabstream.crypto.sealing import Sealer
from grabstream.crypto.tickets import TicketKeys
from grabstream.gate.batches import Batch, PlainBatch
from grabstream.gate.staging import INLINE_BYTES_MAX, ScriptCall, Staged
from grabstream.lua.keys import ShardKeys
from grabstream.models.answers import Answer, LimitState
from grabstream.models.approvals import read_approvals
from grabstream.models.beacon import beacon_of, round_of
from grabstream.models.calendar import Offsets, offsets_of
from grabstream.models.commands import (
    Adjust,
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
    carried_by,
    carried_texts,
    is_signed,
    metadata_of,
    user_of,
)
from grabstream.models.digests import CannotCompare, whole_of
from grabstream.models.events import CampaignZone
from grabstream.models.identifiers import campaign_of, encoded_payment
from grabstream.models.offers import (
    ENVELOPE_LIFE_MS,
    TIME_MS_MAX,
    Changes,
    CouponTerms,
    EnvelopeTerms,
    PieceTerms,
    Terms,
    asset_of,
    published,
    units_of,
    week_minutes,
)
from grabstream.models.outcomes import OUTCOME_NAMES, Outcome
from grabstream.models.splitting import check_split, packing_parts, splitting_ahead

#: In place of coupon codes, of a gate that has the sealing part of their key alone.
CODES_ELSEWHERE = (
    "the coupon code is sealed, and this gate cannot open it: send the same command through a gate that has "
    "the whole seal key, which answers with the code"
)

_pack = msgspec.msgpack.Encoder().encode
_json = msgspec.json.Encoder().encode

GRANTED = int(Outcome.granted)
HELD = int(Outcome.held)
CONFIRMED = int(Outcome.confirmed)
INVALID = int(Outcome.invalid)
#: The details of a grab that got pieces, without codes.
_TAKEN_DETAILS = {"limits", "number", "deadline_at", "due", "currency"}
#: The details of a confirmed hold without codes.
_CONFIRMED_DETAILS = {"number"}


class Secrets(NamedTuple):
    """The keys with which a gate seals seeds and codes, opens codes for their takers, and checks signed
    tickets.
    """

    sealer: Sealer
    tickets: TicketKeys


class PlainGrants(msgspec.Struct, frozen=True, array_like=True):
    """A run of consecutive plain grants: seq, place and time of the first, units left after it, and the
    amounts, with commas between them.
    """

    seq: int
    place: int
    left: int
    at: int
    amounts: str


class AnswerRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The answer to a command, as `list_row` in includes/packed_values.lua lists it: the last places are
    omitted if they are empty. An empty table of details is a list.
    """

    code: int
    seq: int
    at: int
    amount: int = 0
    quantity: int = 0
    place: int = 0
    left: int = 0
    repeated: int = 0
    retry_at: int = 0
    details: Any = None


class ScriptReply(msgspec.Struct, frozen=True, array_like=True):
    """A script's reply: code 0 with history and rows, and a run of grants that comes before the rows; or the
    code of the call's refusal, with retry_at and message.
    """

    code: int
    history_or_retry_at: int = 0
    rows_or_message: list[AnswerRow] | str = ""
    run: PlainGrants | None = None


def granted_answers(shard: int, commands: Sequence[Any], run: PlainGrants) -> list[Answer]:
    """Returns the answers to the grabs of a run, which are the first of these commands."""
    amounts = list(map(int, run.amounts.split(",")))
    grabs = commands[: len(amounts)]
    ids = [grab.id for grab in grabs]
    return list(
        map(
            Answer, ids, repeat("granted"), repeat(GRANTED), repeat(grabs[0].offer),
            [grab.user for grab in grabs], ids, amounts, repeat(1), count(run.place), count(run.left, -1),
            repeat(False), repeat(None), repeat(shard), count(run.seq), repeat(run.at),
        )
    )  # fmt: skip


def are_confirmed(rows: Sequence[AnswerRow]) -> bool:
    """Whether all rows are those of holds that were confirmed for the first time, without coupons."""
    codes = [row.code for row in rows if not (row.repeated or row.retry_at or row.details)]
    return 0 < len(rows) == codes.count(CONFIRMED)


def confirmed_answers(shard: int, commands: Sequence[Confirm], rows: Sequence[AnswerRow]) -> list[Answer]:
    """Returns the answers to the first of these commands, those with such rows (`are_confirmed`)."""
    seqs, times, amounts, quantities, places, lefts = zip(*map(_numbers_of_row, rows), strict=True)
    ids, grabs, users, offers = zip(*map(_named_by_confirm, commands[: len(rows)]), strict=True)
    return list(
        map(
            Answer, ids, repeat("confirmed"), repeat(CONFIRMED), offers, users, grabs, amounts, quantities,
            places, lefts, repeat(False), repeat(None), repeat(shard), seqs, times,
        )
    )  # fmt: skip


_named_by_confirm = attrgetter("id", "grab", "user", "offer")
_numbers_of_row = attrgetter("seq", "at", "amount", "quantity", "place", "left")

decode_reply = msgspec.msgpack.Decoder(ScriptReply).decode


class CallOffers:
    """The offers and campaigns of a call: their keys, and the index of each command's offer (from 1, as in
    Lua).
    """

    def __init__(self, offers_of_commands: Sequence[str]) -> None:
        index: dict[str, int] = {}
        self.offer_of = [index.setdefault(offer, len(index) + 1) for offer in offers_of_commands]
        self.offers = list(index)
        campaigns: dict[str, int] = {}
        self.campaign_of = [
            campaigns.setdefault(campaign_of(offer), len(campaigns) + 1) for offer in self.offers
        ]
        self.campaigns = list(campaigns)

    def keys(self, keys: ShardKeys) -> list[str]:
        """Returns the keys after those of the shard: of each offer, then of each campaign."""
        names = [key for offer in self.offers for key in keys.offer_keys(offer)]
        return names + [key for campaign in self.campaigns for key in keys.campaign_keys(campaign)]


def build(keys: ShardKeys, batch: Batch, gate_secrets: Secrets) -> ScriptCall:
    """Returns keys (after those of the shard) and packed arguments for the script that decides a batch,
    except `open` (`building_open`).
    """
    if isinstance(batch, PlainBatch):
        return _plain_call(keys, batch)
    commands, script = batch.commands, batch.script
    call_offers = CallOffers([command.offer for command in commands])
    if len(call_offers.offers) == 1:
        names: Sequence[str] = _keys_for_offer(keys, call_offers.offers[0])[0]
    else:
        names = call_offers.keys(keys)
    if script == "confirm":
        return ScriptCall(names, _confirm_arguments(commands, gate_secrets.sealer, call_offers))
    columns = _first_columns(call_offers, commands, gate_secrets)
    if script == "grab":
        columns += _last_columns_of_grab(commands, gate_secrets.tickets)
    else:
        columns.append([_body(keys.shard, command, gate_secrets.sealer) for command in commands])
    return ScriptCall(names, [_pack(columns)])


def building_open(
    keys: ShardKeys, commands: Sequence[Open], gate_secrets: Secrets, now_ms: int
) -> Generator[None, None, ScriptCall]:
    """What `build` does for `open`, in steps: drawing many parts takes long."""
    call_offers = CallOffers([command.offer for command in commands])
    columns = _first_columns(call_offers, commands, gate_secrets)
    terms, parts, staged = yield from _open_columns(keys, commands, gate_secrets.sealer, now_ms)
    columns.append(terms)
    names = [*call_offers.keys(keys), *(entry.key for entry in staged)]
    return ScriptCall(names, [_pack(columns), *parts], staged)


def _first_columns(
    call_offers: CallOffers, commands: Sequence[AnyCommand], gate_secrets: Secrets
) -> list[Any]:
    return [
        call_offers.offers,
        call_offers.campaign_of,
        call_offers.campaigns,
        [c.id for c in commands],
        call_offers.offer_of,
        list(map(gate_secrets.sealer.digests.digest, commands)),
    ]


# -- grab ----------------------------------------------------------------------------------------------------


def _plain_call(keys: ShardKeys, batch: PlainBatch) -> ScriptCall:
    """Returns what `build` does, for plain grabs: the script tests none of them for other fields."""
    ids, users = [c.id for c in batch.commands], [c.user for c in batch.commands]
    if len(batch.offers) == 1 and len(set(users)) == len(users):
        [offer] = batch.offers
        names, campaign = _keys_for_offer(keys, offer)
        return ScriptCall(names, _plain_arguments(offer, campaign, ids, users))
    call_offers = CallOffers([c.offer for c in batch.commands])
    columns = [call_offers.offers, call_offers.campaign_of, call_offers.campaigns, ids, call_offers.offer_of]
    return ScriptCall(call_offers.keys(keys), [_pack([*columns, False, users, *[False] * 4])])


@lru_cache(maxsize=1024)
def _keys_for_offer(keys: ShardKeys, offer: str) -> tuple[Sequence[str], str]:
    """The keys after those of the shard for a call about one offer, and its campaign."""
    campaign = campaign_of(offer)
    return (*keys.offer_keys(offer), *keys.campaign_keys(campaign)), campaign


def _plain_arguments(offer: str, campaign: str, ids: Sequence[str], users: Sequence[str]) -> list[bytes]:
    """Returns the arguments of `grab` for plain grabs of distinct users."""
    columns: list[Any] = [[offer], [1], [campaign], *[False] * 7, (len(ids), _width(ids), _width(users))]
    return [_pack(columns), '","'.join(ids).encode(), '","'.join(users).encode()]


def _last_columns_of_grab(commands: Sequence[Grab], tickets: TicketKeys) -> list[Any]:
    """Returns the columns of `grab` after those of all commands."""
    return [
        [c.user for c in commands],
        [c.quantity for c in commands],
        [_json(c.attributes).decode() if c.attributes else "" for c in commands],
        [_extra_of(command, tickets) for command in commands],
        False,
    ]


def _width(values: Sequence[str]) -> int | str:
    """Returns the length of all values or, if they differ, the format by which Lua's `struct.unpack` finds
    them in a text that has three characters between them.
    """
    # In characters, unless some take several bytes.
    lengths = list(map(len, values if "".join(values).isascii() else map(str.encode, values)))
    if lengths.count(lengths[0]) == len(lengths):
        return lengths[0]
    return "xxx".join(map("c%d".__mod__, lengths))


def _extra_of(command: Grab, tickets: TicketKeys) -> Any:
    """Returns the fields that few grabs have, or False. This checks the signature of a ticket; the script
    decides whether the ticket has expired or was used.
    """
    extra: dict[str, object] = {}
    if command.attributes:
        extra["attributes"] = command.attributes
    if command.basket is not None:
        extra["basket"] = command.basket
    if command.wait:
        extra["wait"] = True
    if carried := carried_texts(carried_by(command)):
        extra["carried"] = carried
    if command.ticket is not None and (ticket := tickets.read(command.ticket, command.user, command.offer)):
        extra["ticket_expires_at"], extra["ticket_once"] = ticket.expires_at_ms, ticket.once_id
        if ticket.is_campaign_wide:
            extra["ticket_ends_at"] = ticket.expires_at_ms
    return extra or False


# -- confirm -------------------------------------------------------------------------------------------------

_columns_of_confirm = attrgetter("id", "grab", "payment", "user", "paid", "currency", "quantity")


def _confirm_arguments(commands: Sequence[Confirm], sealer: Sealer, call_offers: CallOffers) -> list[bytes]:
    """Returns the packed arguments of `confirm`: what all confirmations have is sent as texts."""
    ids, grabs, payments, users, paid, currencies, quantities = zip(
        *map(_columns_of_confirm, commands), strict=True
    )
    digests = list(map(sealer.digests.digest, commands))
    all_pay = None not in payments
    # Compared, kept and joined into events in their one encoding.
    payments = tuple([payment and encoded_payment(payment) for payment in payments])
    sizes = [len(ids), _width(ids), _width(digests), _width(grabs), _width(payments) if all_pay else False]
    columns: list[Any] = [
        call_offers.offers,
        call_offers.campaign_of,
        call_offers.campaigns,
        _same_or_all(call_offers.offer_of),
        sizes,
        False if all_pay else _given(payments, ""),
        _given(users, ""),
        _same_or_all(paid),
        _same_or_all([currency or "" for currency in currencies]),
        _given(quantities, 0),
        _same_or_all(list(map(is_signed, commands))),
    ]
    texts = [ids, digests, grabs, payments if all_pay else ()]
    return [_pack(columns), *['","'.join(text).encode() for text in texts]]


def _same_or_all(values: Sequence[Any]) -> Any:
    """The value that all have, or all values."""
    return values[0] if values.count(values[0]) == len(values) else values


def _given(values: Sequence[Any], none: Any) -> Any:
    """Values with `none` in place of None; False if there are no others."""
    if values.count(None) == len(values):
        return False
    return [none if value is None else value for value in values]


# -- open ----------------------------------------------------------------------------------------------------


def _open_columns(
    keys: ShardKeys, commands: Sequence[Open], sealer: Sealer, now_ms: int
) -> Generator[None, None, tuple[list[Any], list[bytes], list[Staged]]]:  # fmt: skip
    """Returns the terms of each offer, its parts drawn ahead (drawing takes about 2 µs per part), and the
    parts that are to be staged; in steps.
    """
    rows: list[Any] = []
    parts: list[bytes] = []
    staged: list[Staged] = []
    for c in commands:
        row = terms_row(c.offer, c.terms, offsets_of(c.terms.timezone, now_ms))
        if c.operator is not None:
            row["operator"] = c.operator
        if c.approvals:
            row |= _approved(c)
        drawn = b""
        if isinstance(c.terms, EnvelopeTerms):
            seed = c.terms.seed or secrets.token_hex(32)
            row |= envelope_row(c.terms, seed)
            row |= {
                "seed_sha256": sha256(bytes.fromhex(seed)).hexdigest(),
                "sealed_seed": sealer.seal(keys.shard, c.offer, "seed", seed),
            }
            drawn = yield from drawing_parts(c.terms, seed)
            if len(drawn) > INLINE_BYTES_MAX:
                staged.append(Staged(len(rows), keys.staged(secrets.token_hex(16)), drawn))
                row["staged"], drawn = len(staged), b""
        rows.append(row)
        # The parts are separate arguments: the MessagePack library of Redis has no binary strings.
        parts.append(drawn)
    return rows, parts, staged


def drawing_parts(terms: EnvelopeTerms, seed: str) -> Generator[None, None, bytes]:
    """Makes the parts drawn ahead, 6 bytes each, in steps; b"" when parts are drawn at the grab."""
    if terms.draw == "at_grab":
        return b""
    most = check_split(terms.law, terms.total, terms.parts, terms.min, terms.max)
    amounts = yield from splitting_ahead(terms.law, terms.total, terms.parts, terms.min, most, seed)
    return (yield from packing_parts(amounts))


def terms_row(offer: str, terms: Terms, offsets: Offsets) -> dict[str, Any]:
    """Returns an offer's terms as the scripts take them; `offsets` are those of its time zone."""
    return {
        "kind": terms.__struct_config__.tag,
        "issuer": terms.issuer,
        "asset": asset_of(offer, terms),
        "total": terms.total,
        "units": units_of(terms),
        "opens_at": terms.opens_at or 0,
        "closes_at": terms.closes_at or (0 if isinstance(terms, EnvelopeTerms) else TIME_MS_MAX),
        "life_ms": ENVELOPE_LIFE_MS,
        # The event does not have the seed: the journal has many readers before the offer closes.
        "json": _json(published(terms)).decode(),
        "offsets_json": _json(offsets).decode() if offsets else "",
        "zone_json": _json(CampaignZone(terms.timezone, tuple(offsets))).decode(),
        "rules": _rules(terms, offsets),
    }


def _rules(terms: Terms, offsets: Offsets) -> dict[str, Any]:
    """Returns the terms that the scripts store in one field, apart from the numbers that change; terms that
    do not apply are absent.
    """
    rules: dict[str, Any] = {"retire_after_ms": terms.retire_after_ms, "offsets": offsets}
    if terms.hours:
        rules["hours"] = week_minutes(terms.hours)
    if terms.audience != "everyone":
        rules["audience"] = terms.audience
    if isinstance(terms, EnvelopeTerms):
        rules["funding"] = terms.funding
        if terms.beacon:
            beacon = beacon_of(terms.beacon)
            rules |= {"beacon_round": beacon.number, "beacon_at": beacon.at}
        return rules
    return rules | _piece_rules(terms)


def _piece_rules(terms: PieceTerms) -> dict[str, Any]:
    optional = {name: getattr(terms, name) for name in ("price", "currency", "hold_ms", "valid_until")}
    return {
        **{name: value for name, value in optional.items() if value is not None},
        "limits": limit_rows(terms.limits),
        "max_per_grab": terms.max_per_grab,
        "take": terms.take,
        "extensions": terms.extensions,
        "late": terms.late,
        "grace_ms": terms.grace_ms,
        "return_restores": terms.return_restores,
        "waiting_list": terms.waiting_list,
        "codes": isinstance(terms, CouponTerms) and terms.codes,
    }


def limit_rows(limits: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns limits as the scripts take them."""
    return [{"by": limit.by, "per": limit.per, "max": limit.max, "scope": limit.scope} for limit in limits]


def changes_row(changes: Changes) -> dict[str, Any]:
    """Returns changes as the scripts take them."""
    fields = changes.fields()
    if "limits" in fields:
        fields["limits"] = limit_rows(fields["limits"])
    if "randomness" in fields:
        given = round_of(fields.pop("randomness"))
        fields |= {"beacon": given.randomness, "beacon_round": given.number}
    return fields


def envelope_row(terms: EnvelopeTerms, seed: str) -> dict[str, Any]:
    """Returns the terms of an envelope that terms_row lacks, as the scripts take them."""
    most = check_split(terms.law, terms.total, terms.parts, terms.min, terms.max)
    return {
        "funding": terms.funding,
        "law": terms.law,
        "min": terms.min,
        "max": most,
        "draw": terms.draw,
        "seed": seed,
    } | ({"beacon_at": beacon_of(terms.beacon).at} if terms.beacon else {})


# -- other commands ------------------------------------------------------------------------------------------


def _approved(command: OfferCommand) -> dict[str, Any]:
    """What a script needs of approvals that were verified: who signed, and when they expire. Only the script
    knows whether a command is a repeat, which needs no approval.
    """
    approvals = read_approvals(command)
    return {
        "signers": _json([approval.signer for approval in approvals]).decode(),
        "approved_until": min(approval.expires_at for approval in approvals),
    }


def _body(shard: int, command: AnyCommand, sealer: Sealer) -> dict[str, Any]:
    """Returns the fields of a command that its script needs, apart from id, offer and digest."""
    body: dict[str, Any] = {}
    if isinstance(command, OfferCommand) and command.operator is not None:
        body["operator"] = command.operator
    if isinstance(command, OfferCommand) and command.approvals:
        body |= _approved(command)
    if isinstance(command, GrabCommand):
        body["grab"] = command.grab
        if command.user is not None:
            body["user"] = command.user
    if isinstance(command, Return):
        body["reason"] = _json(command.reason).decode()
        if command.quantity is not None:
            body["quantity"] = command.quantity
    elif isinstance(command, Redeem):
        body |= {"order": command.order, "quantity": command.quantity}
    elif isinstance(command, Unredeem):
        body["order"] = command.order
    elif isinstance(command, Amend):
        body |= {"changes": changes_row(command.changes), "json": _json(command.changes).decode()}
    elif isinstance(command, Load):
        items: Sequence[str] = command.items
        if command.what == "codes":
            items = [sealer.seal_code(shard, command.offer, code) for code in command.items]
            if others := sealer.other_names(shard, command.offer, command.items):
                body["other_names"] = others
        body |= {"what": command.what, "chunk": command.chunk, "chunks": command.chunks, "items": items}
    elif isinstance(command, Adjust):
        body["whole"] = whole_of(command)
    return body


# -- answers -------------------------------------------------------------------------------------------------


def answer_of(shard: int, command: AnyCommand, row: AnswerRow, sealer: Sealer) -> Answer:
    """Returns the answer to a command from its row."""
    code = row.code
    if not row.details and type(command) is Grab:
        if code == GRANTED:
            return Answer(
                command.id, "granted", 0, command.offer, command.user, command.id, row.amount, row.quantity,
                row.place, row.left, row.repeated == 1, None, shard, row.seq, row.at,
            )  # fmt: skip
        if code >= INVALID and not (row.place or row.repeated or row.retry_at):
            # The usual refusal.
            return Answer(
                command.id, OUTCOME_NAMES[code], code, command.offer, command.user,
                shard=shard, seq=row.seq or None, at=row.at,
            )  # fmt: skip
    details: dict[str, Any] = row.details or {}
    if code <= HELD and type(command) is Grab and details.keys() <= _TAKEN_DETAILS:
        # The usual answer to a grab of pieces.
        number = details.get("number")
        return Answer(
            command.id, OUTCOME_NAMES[code], code, command.offer, command.user, command.id, row.amount,
            row.quantity, row.place, row.left, row.repeated == 1, row.retry_at or None, shard,
            row.seq or None, row.at, None,
            details.get("deadline_at"), details.get("due"), details.get("currency"), None,
            tuple([_limit_state(*limit) for limit in details["limits"]]) if "limits" in details else (),
            None if number is None else str(number),
        )  # fmt: skip
    if code == CONFIRMED and type(command) is Confirm and details.keys() <= _CONFIRMED_DETAILS:
        # The usual answer to a confirmation.
        number = details.get("number")
        return Answer(
            command.id, "confirmed", code, command.offer, command.user, command.grab, row.amount,
            row.quantity, row.place, row.left, row.repeated == 1, row.retry_at or None, shard,
            row.seq or None, row.at,
            coupon_code=None if number is None else str(number),
        )  # fmt: skip
    if "kept" in details:
        return answer_of(shard, command, _compared(command, row, details, sealer), sealer)
    fields: dict[str, Any] = {"repeated": row.repeated == 1, "retry_at": row.retry_at or None}
    if isinstance(command, GrabCommand) and details.get("again"):
        fields |= {"grab": command.grab, "quantity": row.quantity or None}
    elif code >= INVALID:
        if code == Outcome.already_taken and row.place:
            fields |= {"amount": row.amount, "quantity": row.quantity, "place": row.place}
    elif isinstance(command, Grab | GrabCommand):
        grab = command.id if isinstance(command, Grab) else command.grab
        fields |= {"grab": grab, "amount": row.amount, "quantity": row.quantity, "place": row.place}
        fields["left"] = row.left
    else:
        fields |= {"amount": row.amount or None, "quantity": row.quantity or None, "left": row.left}
    fields |= _fields_of_details(shard, command, details, sealer)
    return Answer(
        command.id, OUTCOME_NAMES[code], code, command.offer, user_of(command),
        shard=shard, seq=row.seq or None, at=row.at, **fields,
    )  # fmt: skip


def with_metadata(commands: Sequence[AnyCommand], answers: Sequence[Answer]) -> list[Answer]:
    """Returns the answers to the first of these commands, with the metadata of the grabs that were granted,
    held or queued. The scripts keep no metadata for answers: a repeat has those of the first command, or it
    is a conflict.
    """
    return [
        msgspec.structs.replace(answer, metadata=metadata)
        if answer.positive and (metadata := metadata_of(command))
        else answer
        for command, answer in zip(commands, answers, strict=False)
    ]


def as_sent(commands: Sequence[AnyCommand], answers: Sequence[Answer]) -> list[Answer]:
    """Returns answers that have metadata, which were sealed, with those of their commands."""
    return [
        answer if answer.metadata is None else msgspec.structs.replace(answer, metadata=metadata_of(command))
        for command, answer in zip(commands, answers, strict=True)
    ]


def _compared(command: AnyCommand, row: AnswerRow, details: dict[str, Any], sealer: Sealer) -> AnswerRow:
    """Returns the row of a command whose stored digest has another form or key than the digest sent: compares
    the stored digest with the command here.
    """
    try:
        if sealer.digests.matches(details["kept"], command):
            return AnswerRow(*details["first"])
        others = {name: value for name, value in details.items() if name not in ("kept", "first")}
        return msgspec.structs.replace(row, details=others)
    except CannotCompare as error:
        return AnswerRow(int(Outcome.conflict), 0, row.at, details={"message": str(error)})


def _fields_of_details(
    shard: int, command: AnyCommand, details: dict[str, Any], sealer: Sealer
) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name: details[name]
        for name in ("left", "message", "deadline_at", "due", "currency")
        if name in details
    }
    if "limit" in details:
        fields["limit"] = _limit_state(*details["limit"])
    if "limits" in details:
        fields["limits"] = tuple(_limit_state(*limit) for limit in details["limits"])
    if "number" in details:
        fields["coupon_code"] = str(details["number"])
    if sealed_codes := details.get("codes") or details.get("voided_codes"):
        if any(map(sealer.only_seals, sealed_codes)):
            # The command is decided. A repeat gets this answer with the code.
            return fields | {"message": CODES_ELSEWHERE}
        codes = tuple(sealer.open(shard, command.offer, "code", sealed) for sealed in sealed_codes)
        if "codes" in details:
            fields |= {"coupon_code": codes[0], "coupon_codes": codes if len(codes) > 1 else ()}
        else:
            fields["voided_codes"] = codes
    return fields


# The limits of a crowd's grabs leave the same to most of its users.
@lru_cache(maxsize=4096)
def _limit_state(by: str, per: str, most: int, left: int, resets_at: int, scope: str) -> LimitState:
    return LimitState(by, per, most, left, resets_at or None, scope)
