"""Builds keys and arguments of the script `apply` from events of the journal; `apply` makes the state that
deciding the events had made.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from grabstream.lua.gate.encoding import CallOffers, envelope_row, limit_rows, parts_packed, terms_row
from grabstream.lua.gate.sealing import CannotOpen, Sealer
from grabstream.lua.gate.staging import INLINE_BYTES_MAX, ScriptCall, Staged
from grabstream.lua.keys import ShardKeys
from grabstream.models.digests import adjustment_text
from grabstream.models.events import AnyEvent, LedgerAdjusted, OfferAmended, OfferOpened
from grabstream.models.offers import EnvelopeTerms, changes_of, terms_of

_pack = msgspec.msgpack.Encoder().encode
_json = msgspec.json.Encoder().encode


def build(
    keys: ShardKeys, events: Sequence[AnyEvent], sealer: Sealer, retired: Sequence[str] = (),
    seeds: Mapping[str, str] = {}
) -> ScriptCall:  # fmt: skip
    """Returns keys (after the keys of the shard) and packed arguments. `seeds` has, by offer, the seeds that
    were revealed when envelopes closed.

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
            row, drawn = _opened(keys.shard, event, sealer, seeds)
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
) -> tuple[dict[str, Any], bytes]:
    terms = terms_of(event.terms)
    row, parts = terms_row(event.offer, terms, event.offsets), b""
    if event.campaign_zone is not None:
        row["campaign_zone_json"] = _json(event.campaign_zone).decode()
    if isinstance(terms, EnvelopeTerms):
        seed = _seed(shard, event, sealer, seeds)
        row |= envelope_row(terms, seed)
        parts = parts_packed(terms, seed)
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
    changes = changes_of(event.changes).fields()
    if "limits" in changes:
        changes["limits"] = limit_rows(changes["limits"])
    return _head(event) | {"added": event.added, "removed": event.removed, "changes": changes}


def _adjusted(event: LedgerAdjusted) -> dict[str, Any]:
    return _head(event) | {"whole": adjustment_text(event.transfers, event.reason, event.approved_by)}


def _head(event: OfferOpened | OfferAmended | LedgerAdjusted) -> dict[str, Any]:
    fields = ("seq", "at", "offer_seq", "command", "digest")
    return {"type": event.__struct_config__.tag} | {name: getattr(event, name) for name in fields}
