"""What an offer says of itself: its terms, and the checks that stand at the door.

A kind of offer is one member of the union `Terms`; scripts, tables and agents do not know kinds beyond what the terms say.
"""

import re
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from models.identifiers import Id, is_id
from models.money import AMOUNT_MAX, PARTS_MAX, Invalid, check_amount
from models.splitting import LAWS, Law, check_split

ENVELOPE_LIFE_MS: Final = 24 * 3600 * 1000
RETIRE_AFTER_MS: Final = 7 * 24 * 3600 * 1000
TIME_MS_MAX: Final = 4_102_444_800_000
TITLE_LENGTH_MAX: Final = 200

_is_currency = re.compile(r"[A-Z]{3}\Z").match
# PostgreSQL takes no NUL, UTF-8 no half of a surrogate pair, and a title is one line.
_is_no_text = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]").search
_is_seed = re.compile(r"(?:[0-9a-f]{2}){16,64}\Z").match

Draw = Literal["ahead", "at_grab"]
Amount = Annotated[int, Meta(ge=0, le=AMOUNT_MAX)]
TimeMs = Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]


class EnvelopeTerms(
    msgspec.Struct, tag_field="kind", tag="envelope", frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A sum of money in random parts, one a user.

    `total`, `min` and `max` are minor units of `asset`; times are milliseconds since 1970 UTC; `opens_at` absent means now,
    `closes_at` absent means 24 hours after opening.
    """

    issuer: Id
    funding: Id
    asset: Annotated[str, Meta(extra_json_schema={"pattern": "^[A-Z]{3}$"})]
    total: Amount
    parts: Annotated[int, Meta(ge=1, le=PARTS_MAX)]
    title: Annotated[str, Meta(max_length=TITLE_LENGTH_MAX)] = ""
    law: Law = "double_mean"
    min: Amount = 1
    max: Amount | None = None
    draw: Draw = "ahead"
    seed: str | None = None
    opens_at: TimeMs | None = None
    closes_at: TimeMs | None = None
    retire_after_ms: Annotated[int, Meta(ge=0, le=TIME_MS_MAX)] = RETIRE_AFTER_MS


# Coupons and stock join this union; a decoder chooses by `kind`.
Terms = EnvelopeTerms


def check_terms(terms: Terms) -> None:
    """Raises Invalid, naming the field and the fix, when an offer with these terms could not keep its promises."""
    for field in ("issuer", "funding"):
        if not is_id(getattr(terms, field)):
            raise Invalid(f"terms.{field}: must match [A-Za-z0-9._:-]{{1,64}}, got {getattr(terms, field)!r}")
    if not _is_currency(terms.asset):
        raise Invalid(f"terms.asset: must be a currency of three capitals such as CNY, got {terms.asset!r}")
    if len(terms.title) > TITLE_LENGTH_MAX:
        raise Invalid(f"terms.title: at most {TITLE_LENGTH_MAX} characters, got {len(terms.title)}")
    if found := _is_no_text(terms.title):
        raise Invalid(f"terms.title: must be one line of text, without control characters; got {found.group()!r} at {found.start()}")
    for field in ("total", "parts", "min", "max", "opens_at", "closes_at", "retire_after_ms"):
        value = getattr(terms, field)
        if value is not None:
            check_amount(f"terms.{field}", value)
    if terms.law not in LAWS:
        raise Invalid(f"terms.law: must be one of {', '.join(LAWS)}, got {terms.law!r}")
    if terms.draw not in ("ahead", "at_grab"):
        raise Invalid(f"terms.draw: must be ahead or at_grab, got {terms.draw!r}")
    if terms.seed is not None and not _is_seed(terms.seed):
        raise Invalid("terms.seed: must be 16 to 64 bytes in lower-case hexadecimal; leave it out to have one drawn")
    if terms.opens_at is not None and terms.closes_at is not None and terms.closes_at <= terms.opens_at:
        raise Invalid(f"terms.closes_at: must be after opens_at ({terms.opens_at}), got {terms.closes_at}")
    try:
        check_split(terms.law, terms.total, terms.parts, terms.min, terms.max)
    except Invalid as error:
        raise Invalid(f"terms.{error}") from None
