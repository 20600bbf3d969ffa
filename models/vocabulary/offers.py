"""Terms of offers, their limits and hours, and what `amend` may change of them."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from grabstream.models import offers as wire
from grabstream.models.calendar import Period
from grabstream.models.offers import Audience, Draw, Late, Scope, Take, Weekday
from grabstream.models.splitting import Law
from grabstream.models.vocabulary.base import Absent, Flag, Model, Text, Whole, Wired, omitted

_RETIRE_AFTER_MS: Final = wire.RETIRE_AFTER_MS


class Limit(Model, Wired[wire.Limit], extra="forbid", frozen=True):
    """At most `max` units by one user (or by one value of the attribute `by`) in each hour, day or week, or
    in the whole offer.

    With `scope` campaign, grabs of all offers of the campaign count that have the same limit.
    """

    rules = (lambda limit: wire.check_limits((limit,)),)

    by: Text
    per: Period
    max: Whole
    scope: Scope = omitted("offer")


class Hours(Model, Wired[wire.Hours], extra="forbid", validate_by_name=True, frozen=True):
    """Hours of the week in which an offer takes grabs, by the offer's local clock: from `from` (in Python:
    `from_`) up to, not including, `until`; both as `HH:MM`, at most 24:00.
    """

    rules = (lambda hours: wire.check_hours((hours,)),)

    weekdays: tuple[Weekday, ...] = omitted(wire.WEEKDAYS)
    from_: Text = omitted("00:00", alias="from")
    until: Text = omitted("24:00")


class CommonTerms(Model, extra="forbid", frozen=True):
    """What all kinds of offers have.

    `total` counts minor units (envelope) or pieces (coupon, stock). `opens_at` and `closes_at` are
    milliseconds since 1970 UTC, `retire_after_ms` is in milliseconds.
    """

    rules = (wire.check_terms,)

    kind: str
    issuer: Text
    title: Text = omitted("")
    total: Whole
    opens_at: Whole | None = omitted(None)
    closes_at: Whole | None = omitted(None)
    timezone: Text = omitted("UTC")
    hours: tuple[Hours, ...] = omitted(())
    audience: Audience = omitted("everyone")
    retire_after_ms: Whole = omitted(_RETIRE_AFTER_MS)


class EnvelopeTerms(CommonTerms, Wired[wire.EnvelopeTerms], frozen=True):
    """Terms of an envelope: `total` minor units of the currency `asset` in `parts` random parts, one for each
    user. A part has `min` to `max` minor units. `seed` is hexadecimal, 16 to 64 bytes; `beacon` is
    `<chain>/<round>`.
    """

    kind: Literal["envelope"] = "envelope"
    funding: Text
    asset: Text
    parts: Whole
    law: Law = omitted("double_mean")
    min: Whole = omitted(1)
    max: Whole | None = omitted(None)
    draw: Draw = omitted("ahead")
    seed: Text | None = omitted(None)
    beacon: Text | None = omitted(None)


class PieceTerms(CommonTerms, frozen=True):
    """What offers of pieces have: units that are counted, limited, held until paid, and given back.

    `price` is in minor units of `currency` for one unit. `hold_ms` and `grace_ms` are in milliseconds,
    `valid_until` is in milliseconds since 1970 UTC.
    """

    limits: tuple[Limit, ...] = omitted(())
    max_per_grab: Whole = omitted(1)
    take: Take = omitted("all")
    price: Whole | None = omitted(None)
    currency: Text | None = omitted(None)
    hold_ms: Whole | None = omitted(None)
    extensions: Whole = omitted(0)
    late: Late = omitted("refuse")
    grace_ms: Whole = omitted(0)
    return_restores: Flag = omitted(False)
    valid_until: Whole | None = omitted(None)
    waiting_list: Flag = omitted(False)


class CouponTerms(PieceTerms, Wired[wire.CouponTerms], frozen=True):
    """Terms of coupons: units with limits, used by `redeem`. With `codes`, an offer takes grabs when as many
    codes as units are loaded.
    """

    kind: Literal["coupon"] = "coupon"
    codes: Flag = omitted(False)


class StockTerms(PieceTerms, Wired[wire.StockTerms], frozen=True):
    """Terms of stock: units of `asset` (absent: `sku:<offer>`), any quantity, held until paid with
    `hold_ms`.
    """

    kind: Literal["stock"] = "stock"
    asset: Text | None = omitted(None)


Terms = Annotated[EnvelopeTerms | CouponTerms | StockTerms, Field(discriminator="kind")]


class Changes(Model, Wired[wire.Changes], extra="forbid", frozen=True):
    """What `amend` changes; an absent field (None in Python) stays as it is. Units are those of the terms.

    An envelope's money and parts are promised and cannot be changed.
    """

    rules = (wire.check_changes,)

    title: Absent[Text] = omitted(None)
    total: Absent[Whole] = omitted(None)
    opens_at: Absent[Whole] = omitted(None)
    closes_at: Absent[Whole] = omitted(None)
    limits: Absent[tuple[Limit, ...]] = omitted(None)
    max_per_grab: Absent[Whole] = omitted(None)
    price: Absent[Whole] = omitted(None)
    hold_ms: Absent[Whole] = omitted(None)
    extensions: Absent[Whole] = omitted(None)
    late: Absent[Late] = omitted(None)
    grace_ms: Absent[Whole] = omitted(None)
    return_restores: Absent[Flag] = omitted(None)
    valid_until: Absent[Whole] = omitted(None)
    randomness: Absent[Text] = omitted(None)

    def fields(self) -> dict[str, Any]:
        """What changes, by name."""
        return {name: value for name, value in self if value is not None}
