"""Events: facts, in the past tense, as they stand in the journal.

The Lua script that decides writes an event's text; Python only reads it. `encode_event` makes the same text from the pure
rules, so that the two can be compared byte for byte. Unknown fields are ignored, so that old readers survive new writers.
"""

from typing import Literal

import msgspec

from models.identifiers import Id


class Event(msgspec.Struct, tag_field="type", frozen=True, kw_only=True, omit_defaults=True):
    """What every event has.

    `v` version of the type · `shard`, `seq` its place in the shard, without gaps · `offer_seq` its place in the offer, without
    gaps · `at` milliseconds since 1970 UTC by the shard's clock · `command` the id of the command that caused it, or `sweep`.
    """

    v: int
    shard: int
    seq: int
    offer_seq: int
    offer: Id
    at: int
    command: Id


class OfferOpened(Event, tag="offer.opened", frozen=True, kw_only=True):
    """An offer was created and funded with `total` (minor units or pieces). `terms` is what was asked, as JSON.

    `seed_sha256` commits to the seed, `sealed_seed` is for recovery only (authenticated encryption).
    """

    kind: str
    issuer: Id
    funding: Id | None = None
    asset: str
    total: int
    opens_at: int
    closes_at: int
    terms: msgspec.Raw
    seed_sha256: str | None = None
    sealed_seed: str | None = None
    digest: str


class OfferPaused(Event, tag="offer.paused", frozen=True, kw_only=True):
    """Grabs are refused with `on_hold` from here on."""

    digest: str


class OfferResumed(Event, tag="offer.resumed", frozen=True, kw_only=True):
    """Grabs are taken again."""

    digest: str


class OfferClosed(Event, tag="offer.closed", frozen=True, kw_only=True):
    """The offer ended; `amount` (minor units or pieces) is what nobody took, `left` the parts or pieces it was in.

    `reason` says why; `refund_to` is the account that gets what is left; `seed` reveals what `seed_sha256` promised.
    """

    reason: Literal["command", "deadline", "drained"]
    asset: str
    amount: int
    left: int
    refund_to: str
    seed: str | None = None
    digest: str | None = None


class GrabGranted(Event, tag="grab.granted", frozen=True, kw_only=True):
    """A user got `amount` (minor units or pieces) for good; `place` is the how-manieth grab, `left` what is left after it."""

    grab: Id
    user: Id
    quantity: int
    amount: int
    asset: str
    place: int
    left: int
    attributes: dict[Id, Id] = {}
    digest: str


AnyEvent = OfferOpened | OfferPaused | OfferResumed | OfferClosed | GrabGranted

decode_event = msgspec.json.Decoder(AnyEvent).decode
#: Decodes `[line,line,…]` in one call, for whole blocks.
decode_event_list = msgspec.json.Decoder(list[AnyEvent]).decode
encode_event = msgspec.json.Encoder().encode
