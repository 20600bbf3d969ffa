"""Batches: commands of one shard and type as keys and arguments of their script, and its rows as answers.

Everything goes over as one MessagePack string: packing thousands of arguments one by one would cost more than deciding them.
"""

import secrets
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import msgspec

from lua.keys import ShardKeys
from lua.sealing import Sealer
from models.answers import Answer
from models.commands import AnyCommand, Grab, Open, digest_of
from models.identifiers import campaign_of
from models.offers import ENVELOPE_LIFE_MS, EnvelopeTerms
from models.outcomes import OUTCOME_NAMES, Outcome
from models.splitting import check_split, pack_parts, split_ahead

#: Keys after the shard's own, and the arguments from ARGV[6] on.
Batch = tuple[list[str], list[bytes]]

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode
_json = msgspec.json.Encoder().encode

GRANTED = int(Outcome.granted)


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """A script's reply: code 0 with history and rows, or the refusal of the whole call with retry_at and message."""

    code: int
    history_or_retry_at: int = 0
    rows_or_message: Any = None


decode_reply = msgspec.msgpack.Decoder(Reply).decode


def grab_batch(keys: ShardKeys, commands: Sequence[Grab]) -> Batch:
    """Keys (after the shard's own) and the packed columns of a batch of grabs."""
    index: dict[str, int] = {}
    offer_of = [index.setdefault(command.offer, len(index) + 1) for command in commands]
    offers = list(index)
    campaigns: dict[str, int] = {}
    campaign_of_offer = [campaigns.setdefault(campaign_of(offer), len(campaigns) + 1) for offer in offers]
    names = [key for offer in offers for key in keys.of_offer(offer)]
    names += [keys.answers(campaign) for campaign in campaigns]
    columns = (
        offers,
        campaign_of_offer,
        list(campaigns),
        [command.id for command in commands],
        offer_of,
        [command.user for command in commands],
        [command.quantity for command in commands],
        [digest_of(command) for command in commands],
        [_json(command.attributes).decode() if command.attributes else "" for command in commands],
    )
    return names, [_pack(columns)]


def steer_batch(keys: ShardKeys, commands: Sequence[AnyCommand]) -> Batch:
    """Keys and packed list of commands about an offer itself: pause, resume, close."""
    rows = [(command.id, command.offer, campaign_of(command.offer), digest_of(command)) for command in commands]
    return _offer_keys(keys, commands), [_pack(rows)]


def open_batch(keys: ShardKeys, commands: Sequence[Open], sealer: Sealer) -> Batch:
    """Keys and packed list of offers to open; draws seeds and parts, which takes about 2 µs a part drawn ahead."""
    rows, parts = [], []
    for c in commands:
        seed = c.terms.seed or secrets.token_hex(32)
        terms = _terms_row(keys.shard, c.offer, c.terms, seed, sealer)
        rows.append((c.id, c.offer, campaign_of(c.offer), digest_of(c), terms))
        parts.append(_parts_packed(c.terms, seed))
    # The parts are arguments of their own: the MessagePack of Redis knows no binary strings.
    return _offer_keys(keys, commands), [_pack(rows), *parts]


def _offer_keys(keys: ShardKeys, commands: Sequence[AnyCommand]) -> list[str]:
    return [key for command in commands for key in (*keys.of_offer(command.offer), keys.answers(campaign_of(command.offer)))]


def _parts_packed(terms: EnvelopeTerms, seed: str) -> bytes:
    if terms.draw == "at_grab":
        return b""
    most = check_split(terms.law, terms.total, terms.parts, terms.min, terms.max)
    return pack_parts(split_ahead(terms.law, terms.total, terms.parts, terms.min, most, seed))


def _terms_row(shard: int, offer: str, terms: EnvelopeTerms, seed: str, sealer: Sealer) -> dict[str, object]:
    return {
        "kind": "envelope",
        "issuer": terms.issuer,
        "funding": terms.funding,
        "asset": terms.asset,
        "total": terms.total,
        "parts": terms.parts,
        "law": terms.law,
        "min": terms.min,
        "max": check_split(terms.law, terms.total, terms.parts, terms.min, terms.max),
        "draw": terms.draw,
        "opens_at": terms.opens_at or 0,
        "closes_at": terms.closes_at or 0,
        "life_ms": ENVELOPE_LIFE_MS,
        "seed": seed,
        "seed_sha256": sha256(bytes.fromhex(seed)).hexdigest(),
        "sealed_seed": sealer.seal(shard, offer, "seed", seed),
        # The seed of the command stays out of the event: the journal is read by many before the offer closes.
        "json": _json(msgspec.structs.replace(terms, seed=None)).decode(),
    }


def answer_of(shard: int, command: AnyCommand, row: list[int]) -> Answer:
    """A script's row {code, seq, at, amount, quantity, place, left, repeated, retry_at} as the answer to its command."""
    code = row[0]
    if code == GRANTED:
        return Answer(
            command.id, "granted", 0, command.offer, command.id, row[3], row[4], row[5], row[6],
            len(row) > 7 and row[7] == 1, None, shard, row[1], row[2],
        )  # fmt: skip
    if code < Outcome.invalid:
        return Answer(
            command.id, OUTCOME_NAMES[code], code, command.offer, amount=row[3] or None, left=row[6],
            repeated=len(row) > 7 and row[7] == 1, shard=shard, seq=row[1], at=row[2],
        )  # fmt: skip
    part = code == Outcome.already_taken and len(row) > 5
    return Answer(
        command.id, OUTCOME_NAMES[code], code, command.offer,
        amount=row[3] if part else None, quantity=row[4] if part else None, place=row[5] if part else None,
        repeated=len(row) > 7 and row[7] == 1, retry_at=row[8] if len(row) > 8 else None,
        shard=shard, seq=row[1] or None, at=row[2],
    )  # fmt: skip


def build(keys: ShardKeys, script: str, commands: Sequence[AnyCommand], sealer: Sealer) -> Batch:
    """Keys (after the shard's own) and packed argument for a script that decides commands of its name."""
    if script == "grab":
        return grab_batch(keys, commands)  # type: ignore[arg-type]
    if script == "open":
        return open_batch(keys, commands, sealer)  # type: ignore[arg-type]
    return steer_batch(keys, commands)
