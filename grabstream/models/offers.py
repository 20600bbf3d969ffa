"""The terms of offers, and their checks.

Each kind of offer is one member of the union `Terms`. Scripts and tables treat kinds by their terms, with few
exceptions (docs/extending.md). The descriptions of the fields become the table in docs/commands.md.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from grabstream.models.beacon import BEACON_PATTERN, RANDOMNESS_PATTERN, beacon_of, round_of
from grabstream.models.bounds import CODES_PER_GRAB_MAX, HOURS_SPANS_MAX, quoted
from grabstream.models.calendar import Period, check_timezone
from grabstream.models.identifiers import Id, in_schema, is_id
from grabstream.models.money import AMOUNT_MAX, PARTS_MAX, Invalid, check_amount
from grabstream.models.splitting import LAWS, Law, check_split

ENVELOPE_LIFE_MS: Final = 24 * 3600 * 1000
RETIRE_AFTER_MS: Final = 7 * 24 * 3600 * 1000
#: How long after an offer retired its payments are known, and other payments for it are booked as refunds
#: due. Their records are deleted a day later, so that a clock that is wrong by less than a day still finds
#: them.
PAYMENTS_KNOWN_MS: Final = 180 * 24 * 3600 * 1000
PAYMENTS_KEPT_MS: Final = PAYMENTS_KNOWN_MS + 24 * 3600 * 1000
TIME_MS_MAX: Final = 4_102_444_800_000
HOLD_MS_MAX: Final = 366 * 24 * 3600 * 1000
LINE_LENGTH_MAX: Final = 200
#: Besides control characters, line and paragraph separators, and the embeddings, overrides and isolates of
#: bidirectional text: with them, a line would be shown as several, or in another order than it is read in.
LINE_PATTERN: Final = r"^[^\u0000-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069]*$"
LIMITS_MAX: Final = 8
HOURS_MAX: Final = 64
EXTENSIONS_MAX: Final = 1_000
#: The maximum of number fields that are not amounts.
MOST_OF: Final = {
    **dict.fromkeys(("opens_at", "closes_at", "valid_until", "retire_after_ms"), TIME_MS_MAX),
    **dict.fromkeys(("hold_ms", "grace_ms"), HOLD_MS_MAX),
    "extensions": EXTENSIONS_MAX,
}
#: The message for `max_per_grab` and quantities of an offer whose grabs get codes.
WITH_CODES: Final = f"at most {CODES_PER_GRAB_MAX} where grabs get codes"
WEEKDAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_is_currency = re.compile(r"[A-Z]{3}\Z").match
_is_stock_asset = re.compile(r"sku:[A-Za-z0-9._:-]{1,64}\Z").match
_is_time_of_day = re.compile(r"([01]\d|2[0-4]):([0-5]\d)\Z").match
# PostgreSQL refuses NUL, UTF-8 has no single surrogates, and a title is one line.
_find_forbidden = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]").search
_is_seed = re.compile(r"(?:[0-9a-f]{2}){16,64}\Z").match

Draw = Literal["ahead", "at_grab"]
Take = Literal["all", "up_to"]
Late = Literal["refuse", "grace", "retake"]
Audience = Literal["everyone", "list", "ticket"]
Scope = Literal["offer", "campaign"]
Weekday = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
Amount = Annotated[int, Meta(ge=0, le=AMOUNT_MAX)]
TimeMs = Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]
HoldMs = Annotated[int, Meta(ge=1, le=HOLD_MS_MAX)]
BeaconText = Annotated[str, in_schema(pattern=BEACON_PATTERN)]
RandomnessText = Annotated[str, in_schema(pattern=RANDOMNESS_PATTERN)]
Seed = Annotated[str, in_schema(pattern="^([0-9a-f]{2}){16,64}$")]
TimeOfDay = Annotated[str, in_schema(pattern="^(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)$")]


class Limit(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """At most `max` units by one user (or by one value of the attribute `by`) in each hour, day or week, or
    in the whole offer.

    With `scope` campaign, grabs of all offers of the campaign count that have the same limit.
    """

    by: Id
    per: Period
    max: Annotated[int, Meta(ge=1, le=AMOUNT_MAX)]
    scope: Scope = "offer"

    @property
    def name(self) -> str:
        """The name of its counters; with the scope, it is unique within an offer."""
        return f"{self.by}/{self.per}"


class Hours(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, rename={"from_": "from"}
):
    """Hours of the week in which an offer takes grabs, by the offer's local clock: from `from` up to, not
    including, `until`; both as `HH:MM`, at most 24:00.
    """

    weekdays: Annotated[tuple[Weekday, ...], in_schema(minItems=1)] = WEEKDAYS
    from_: TimeOfDay = "00:00"
    until: TimeOfDay = "24:00"


class _BaseTerms(
    msgspec.Struct,
    tag_field="kind",
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """What all kinds of offers have."""

    issuer: Annotated[Id, Meta(description="who gives the offer; gets back what no one takes")]
    title: Annotated[
        str,
        Meta(
            max_length=LINE_LENGTH_MAX,
            extra_json_schema={"pattern": LINE_PATTERN},
            description="one line of text for people",
        ),
    ] = ""
    total: Annotated[Amount, Meta(description="size of the offer, in minor units or pieces")]
    opens_at: Annotated[
        TimeMs | None, Meta(description="grabs before are `not_open_yet`; absent: at once")
    ] = None
    closes_at: Annotated[
        TimeMs | None,
        Meta(
            description="closes automatically then; absent: 24 h after opening (envelope), never (coupon, "
            "stock)"
        ),
    ] = None
    timezone: Annotated[str, Meta(description="the time zone for `limits` and `hours`")] = "UTC"
    hours: Annotated[
        tuple[Hours, ...],
        Meta(
            extra_json_schema={"maxItems": HOURS_MAX},
            description="`{weekdays, from, until}`: outside of these hours grabs are `not_open_yet`; absent: "
            "always open",
        ),
    ] = ()
    audience: Annotated[
        Audience,
        Meta(
            description="who may grab: `everyone`, the users of a loaded `list`, or users with a signed "
            "`ticket`"
        ),
    ] = "everyone"
    retire_after_ms: Annotated[
        TimeMs,
        Meta(
            description="how long an offer stays in Redis after its close (at least until `valid_until`); "
            "its id is never used again"
        ),
    ] = RETIRE_AFTER_MS


class EnvelopeTerms(_BaseTerms, tag="envelope", frozen=True, kw_only=True):
    """A sum of money in random parts, one for each user."""

    funding: Annotated[Id, Meta(description="id of the payment that funded the offer")]
    asset: Annotated[
        str, Meta(extra_json_schema={"pattern": "^[A-Z]{3}$"}, description="the currency, such as CNY")
    ]
    parts: Annotated[int, Meta(ge=1, le=PARTS_MAX, description="how many parts")]
    law: Annotated[
        Law,
        Meta(
            description="`double_mean` (min … twice the mean), `bounded` (as wide as `min` and `max` allow), "
            "`equal`"
        ),
    ] = "double_mean"
    min: Annotated[Amount, Meta(description="the smallest part")] = 1
    max: Annotated[Amount | None, Meta(description="the greatest part; only with law `bounded`")] = None
    draw: Annotated[Draw, Meta(description="`ahead` (parts drawn and shuffled at opening) or `at_grab`")] = (
        "ahead"
    )
    seed: Annotated[
        Seed | None,
        Meta(
            description="16 to 64 bytes in hex from which all parts follow; absent: the gate draws it. "
            "Refused unless `GRAB_ISSUER_SEEDS=true`"
        ),
    ] = None
    beacon: Annotated[
        BeaconText | None,
        Meta(
            description="`<chain>/<round>` of a public randomness beacon, a round that is not due yet; "
            "with `draw: at_grab`. Grabs are `not_open_yet` until `amend` gives its `randomness`, from "
            "which the parts follow too"
        ),
    ] = None


class _PieceTerms(_BaseTerms, frozen=True, kw_only=True):
    """Units that are counted, limited, held until paid, and given back."""

    limits: Annotated[
        tuple[Limit, ...],
        Meta(
            extra_json_schema={"maxItems": LIMITS_MAX},
            description="`{by, per, max, scope}`: by `user` or an attribute, per `offer`, `hour`, `day` or "
            "`week`",
        ),
    ] = ()
    max_per_grab: Annotated[
        int, Meta(ge=1, le=AMOUNT_MAX, description="the greatest `quantity` of one grab")
    ] = 1
    take: Annotated[Take, Meta(description="`all` of the quantity or nothing, or `up_to` what is left")] = (
        "all"
    )
    price: Annotated[
        Amount | None, Meta(description="of one unit, minor units of `currency`; needs `hold_ms`")
    ] = None
    currency: Annotated[
        str | None, Meta(extra_json_schema={"pattern": "^[A-Z]{3}$"}, description="of `price`")
    ] = None
    hold_ms: Annotated[
        HoldMs | None,
        Meta(description="how long a grab is held for `confirm`; absent: granted at once"),
    ] = None
    extensions: Annotated[
        int, Meta(ge=0, le=EXTENSIONS_MAX, description="how often a hold may be extended by `hold_ms`")
    ] = 0
    late: Annotated[
        Late,
        Meta(
            description="a payment after the deadline: `refuse` it, accept it within the `grace` time "
            "(units stay held), or `retake` units if some are left"
        ),
    ] = "refuse"
    grace_ms: Annotated[
        int, Meta(ge=0, le=HOLD_MS_MAX, description="with `late: grace`, how long after the deadline")
    ] = 0
    return_restores: Annotated[bool, Meta(description="whether a return gives the user's limits back")] = (
        False
    )
    valid_until: Annotated[TimeMs | None, Meta(description="last time to redeem; absent: no end")] = None
    waiting_list: Annotated[
        bool, Meta(description="whether users may join a waiting list when it is sold out")
    ] = False


class CouponTerms(_PieceTerms, tag="coupon", frozen=True, kw_only=True):
    """Coupons: units with limits, used by `redeem`."""

    codes: Annotated[
        bool, Meta(description="if true, grabs are `not_open_yet` until there is a code for each unit")
    ] = False


class StockTerms(_PieceTerms, tag="stock", frozen=True, kw_only=True):
    """Stock: items in any quantity; with `hold_ms`, held until paid."""

    asset: Annotated[
        str | None,
        Meta(
            extra_json_schema={"pattern": "^sku:[A-Za-z0-9._:-]{1,64}$"},
            description="what is counted; absent: `sku:<offer>`",
        ),
    ] = None


PieceTerms = CouponTerms | StockTerms
Terms = EnvelopeTerms | CouponTerms | StockTerms


class Changes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What `amend` changes; an absent field stays as it is. An envelope's money and parts are promised and
    cannot be changed. `randomness` is `<round>/<randomness>/<signature>` of the awaited round.
    """

    title: Annotated[str, in_schema(maxLength=LINE_LENGTH_MAX, pattern=LINE_PATTERN)] | UnsetType = UNSET
    total: Amount | UnsetType = UNSET
    opens_at: TimeMs | UnsetType = UNSET
    closes_at: TimeMs | UnsetType = UNSET
    limits: Annotated[tuple[Limit, ...], in_schema(maxItems=LIMITS_MAX)] | UnsetType = UNSET
    max_per_grab: Annotated[int, Meta(ge=1, le=AMOUNT_MAX)] | UnsetType = UNSET
    price: Amount | UnsetType = UNSET
    hold_ms: HoldMs | UnsetType = UNSET
    extensions: Annotated[int, Meta(ge=0, le=EXTENSIONS_MAX)] | UnsetType = UNSET
    late: Late | UnsetType = UNSET
    grace_ms: Annotated[int, Meta(ge=0, le=HOLD_MS_MAX)] | UnsetType = UNSET
    return_restores: bool | UnsetType = UNSET
    valid_until: TimeMs | UnsetType = UNSET
    randomness: RandomnessText | UnsetType = UNSET

    def fields(self) -> dict[str, Any]:
        """What changes, by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}


def terms_of(text: bytes) -> Terms:
    """The terms in an `offer.opened`. Ignores unknown fields and does not check bounds, which may have been
    different when the offer was opened. Raises ValueError when the text is not terms.
    """
    document = _object_of(text)
    struct = _TERMS_BY_KIND.get(document.get("kind", ""))
    if struct is None:
        raise ValueError(f"an offer of kind {quoted(document.get('kind'))} is not known to this program")
    terms: Terms = _read_as(struct, document)
    return terms


def changes_of(text: bytes) -> Changes:
    """The changes in an `offer.amended`, read like `terms_of`; raises ValueError when the text is not
    changes.
    """
    changes: Changes = _read_as(Changes, _object_of(text))
    return changes


def _object_of(text: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"not a JSON object: {error}") from None


def _read_as(struct: type[msgspec.Struct], document: dict[str, Any]) -> Any:
    """A struct with those fields of the document that it has. msgspec does not check values when Python makes
    a struct.
    """
    names = zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True)
    fields = {name: document[encoded] for name, encoded in names if encoded in document}
    try:
        for name, kind in (("limits", Limit), ("hours", Hours)):
            if name in fields:
                fields[name] = tuple(_read_as(kind, member) for member in fields[name])
        if "weekdays" in fields:
            fields["weekdays"] = tuple(fields["weekdays"])
        return struct(**fields)
    except TypeError as error:
        raise ValueError(f"fields do not fit {struct.__name__}: {error}") from None


_TERMS_BY_KIND: Final = {str(struct.__struct_config__.tag): struct for struct in get_args(Terms)}


#: The fields of an envelope that may be amended.
ENVELOPE_CHANGES: Final = frozenset({"title", "opens_at", "closes_at", "randomness"})


def asset_of(offer: str, terms: Terms) -> str:
    """The asset that an offer counts: that of its terms, or one made from the offer's id."""
    if isinstance(terms, CouponTerms):
        return f"coupon:{offer}"
    return terms.asset or f"sku:{offer}"


def units_of(terms: Terms) -> int:
    """The units of an offer at opening: parts or pieces."""
    return terms.parts if isinstance(terms, EnvelopeTerms) else terms.total


def week_minutes(hours: tuple[Hours, ...]) -> list[tuple[int, int]]:
    """Hours of the week as sorted pairs of minutes since Monday 00:00, adjacent spans joined (for
    `calendar.opens_next`).
    """
    spans: list[tuple[int, int]] = []
    for begins, ends in sorted(
        (WEEKDAYS.index(day) * 1440 + _minutes(span.from_), WEEKDAYS.index(day) * 1440 + _minutes(span.until))
        for span in hours
        for day in span.weekdays
    ):
        if spans and begins <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], ends))
        else:
            spans.append((begins, ends))
    return spans


def _minutes(time_of_day: str) -> int:
    hour, _, minute = time_of_day.partition(":")
    return int(hour) * 60 + int(minute)


def published(terms: Terms) -> Terms:
    """The terms as the journal contains them: without the seed, which must stay secret until the offer
    closes.
    """
    return msgspec.structs.replace(terms, seed=None) if isinstance(terms, EnvelopeTerms) else terms


# -- checks --------------------------------------------------------------------------------------------------


def check_terms(terms: Terms) -> None:
    """Raises Invalid, naming the field and what is allowed, when an offer with these terms could not keep its
    promises.
    """
    _check_id("issuer", terms.issuer)
    check_line("terms.title", terms.title)
    for field in ("total", "opens_at", "closes_at", "retire_after_ms"):
        _check_number(terms, field)
    check_timezone(terms.timezone)
    check_hours(terms.hours)
    if terms.audience not in ("everyone", "list", "ticket"):
        raise Invalid(f"terms.audience: must be everyone, list or ticket, got {quoted(terms.audience)}")
    # Without opens_at, the offer opens at once, so a closes_at of 0 is over. It must not reach a script,
    # where 0 means absent.
    if terms.closes_at is not None and terms.closes_at <= (terms.opens_at or 0):
        raise Invalid(
            f"terms.closes_at: must be after opens_at ({terms.opens_at or 'at once'}), got {terms.closes_at}"
        )
    if isinstance(terms, EnvelopeTerms):
        _check_envelope(terms)
    else:
        _check_pieces(terms)


def _check_envelope(terms: EnvelopeTerms) -> None:
    _check_id("funding", terms.funding)
    if not _is_currency(terms.asset):
        raise Invalid(
            f"terms.asset: must be a currency of three capital letters such as CNY, got {quoted(terms.asset)}"
        )
    for field in ("parts", "min", "max"):
        _check_number(terms, field)
    if terms.law not in LAWS:
        raise Invalid(f"terms.law: must be one of {', '.join(LAWS)}, got {quoted(terms.law)}")
    if terms.draw not in ("ahead", "at_grab"):
        raise Invalid(f"terms.draw: must be ahead or at_grab, got {quoted(terms.draw)}")
    if terms.seed is not None and not _is_seed(terms.seed):
        raise Invalid(
            "terms.seed: must be 16 to 64 bytes in lower-case hexadecimal; leave it out for a random seed"
        )
    if terms.beacon is not None:
        _check_by(beacon_of, "terms.beacon", terms.beacon)
        if terms.draw != "at_grab":
            raise Invalid("terms.beacon: needs draw at_grab: ahead of the round, no part is known")
    try:
        check_split(terms.law, terms.total, terms.parts, terms.min, terms.max)
    except Invalid as error:
        raise Invalid(f"terms.{error}") from None


def _check_pieces(terms: PieceTerms) -> None:
    if isinstance(terms, StockTerms) and terms.asset is not None and not _is_stock_asset(terms.asset):
        raise Invalid(
            f"terms.asset: must be sku: and a name of [A-Za-z0-9._:-]{{1,64}}, got {quoted(terms.asset)}"
        )
    check_amount("terms.total", terms.total, least=1)
    check_amount("terms.max_per_grab", terms.max_per_grab, least=1)
    if isinstance(terms, CouponTerms) and terms.codes and terms.max_per_grab > CODES_PER_GRAB_MAX:
        raise Invalid(f"terms.max_per_grab: {WITH_CODES}, got {terms.max_per_grab}")
    for field in ("price", "grace_ms", "extensions", "valid_until"):
        _check_number(terms, field)
    if terms.hold_ms is not None:
        check_amount("terms.hold_ms", terms.hold_ms, least=1, most=HOLD_MS_MAX)
    check_limits(terms.limits)
    if (terms.price is None) != (terms.currency is None):
        raise Invalid("terms.price: price and currency belong together; give both or neither")
    if terms.currency is not None and not _is_currency(terms.currency):
        raise Invalid(
            f"terms.currency: must be three capital letters such as CNY, got {quoted(terms.currency)}"
        )
    if terms.take not in ("all", "up_to") or terms.late not in ("refuse", "grace", "retake"):
        raise Invalid(
            "terms.take: must be all or up_to, terms.late refuse, grace or retake; got "
            f"{quoted(terms.take)}, {quoted(terms.late)}"
        )
    for field in ("price", "extensions", "grace_ms", "waiting_list"):
        if getattr(terms, field) and terms.hold_ms is None:
            raise Invalid(
                f"terms.{field}: needs hold_ms, the time for which a grab is held until it is confirmed"
            )
    if (terms.late == "grace") != bool(terms.grace_ms):
        raise Invalid("terms.grace_ms: is required with late: grace, and only with it")
    if terms.price is not None and terms.price * terms.max_per_grab > AMOUNT_MAX:
        raise Invalid(
            f"terms.price: price × max_per_grab must not be above {AMOUNT_MAX}, got "
            f"{terms.price * terms.max_per_grab}"
        )


def check_limits(limits: tuple[Limit, ...]) -> None:
    """Raises Invalid when a limit is wrong, or two limits have the same counters."""
    if len(limits) > LIMITS_MAX:
        raise Invalid(f"terms.limits: at most {LIMITS_MAX}, got {len(limits)}")
    for limit in limits:
        _check_id("limits.by", limit.by)
        if limit.per not in ("offer", "hour", "day", "week") or limit.scope not in ("offer", "campaign"):
            raise Invalid(
                f"terms.limits: per must be offer, hour, day or week, scope offer or campaign; "
                f"got {quoted(limit.per)}, {quoted(limit.scope)}"
            )
        check_amount("terms.limits.max", limit.max, least=1)
    names = [(limit.name, limit.scope) for limit in limits]
    for name in names:
        if names.count(name) > 1:
            raise Invalid(
                f"terms.limits: two limits count by {name[0].replace('/', ' per ')}; keep the smaller"
            )


def check_changes(changes: Changes) -> None:
    """Raises Invalid when a change is wrong for every offer. Scripts check what depends on the offer."""
    fields = changes.fields()
    if not fields:
        raise Invalid("changes: is empty; name at least one field")
    if "title" in fields:
        check_line("terms.title", fields["title"])
    if "limits" in fields:
        check_limits(fields["limits"])
    if "randomness" in fields:
        _check_by(round_of, "changes.randomness", fields["randomness"])
    for field, value in fields.items():
        if field in ("total", "max_per_grab", "hold_ms"):
            check_amount(f"changes.{field}", value, least=1, most=MOST_OF.get(field, AMOUNT_MAX))
        elif field in ("opens_at", "closes_at", "price", "extensions", "grace_ms", "valid_until"):
            check_amount(f"changes.{field}", value, most=MOST_OF.get(field, AMOUNT_MAX))


def check_line(field: str, text: str, characters_max: int = LINE_LENGTH_MAX) -> None:
    """Raises Invalid unless the text is one line that Redis, Kafka and PostgreSQL can store."""
    if len(text) > characters_max:
        raise Invalid(f"{field}: at most {characters_max} characters, got {len(text)}")
    if forbidden := _find_forbidden(text):
        raise Invalid(
            f"{field}: must be one line of text, without control characters and those of bidirectional text; "
            f"got {quoted(forbidden.group())} at {forbidden.start()}"
        )


def _check_by(read: Callable[[str], object], field: str, value: Any) -> None:
    """Raises Invalid that names the field when this function cannot read it."""
    if not isinstance(value, str):
        raise Invalid(f"{field}: must be a string, got {quoted(value)}")
    try:
        read(value)
    except Invalid as error:
        raise Invalid(f"{field}: {error}") from None


def _check_id(field: str, value: Any) -> None:
    if not isinstance(value, str) or not is_id(value):
        raise Invalid(f"terms.{field}: must match [A-Za-z0-9._:-]{{1,64}}, got {quoted(value)}")


def _check_number(terms: Any, field: str) -> None:
    value = getattr(terms, field)
    if value is not None:
        check_amount(f"terms.{field}", value, most=MOST_OF.get(field, AMOUNT_MAX))


def check_hours(hours: tuple[Hours, ...]) -> None:
    """Raises Invalid when opening hours are wrong, or more than an offer may have."""
    if len(hours) > HOURS_MAX:
        raise Invalid(f"terms.hours: at most {HOURS_MAX}, got {len(hours)}")
    for span in hours:
        for field, text in (("from", span.from_), ("until", span.until)):
            if not _is_time_of_day(text) or _minutes(text) > 1440:
                raise Invalid(
                    f"terms.hours.{field}: must be a time of day such as 10:00, at most 24:00; got "
                    f"{quoted(text)}"
                )
        if _minutes(span.from_) >= _minutes(span.until):
            raise Invalid(
                f"terms.hours: from must be before until, got {span.from_} – {span.until}; give two entries "
                "for a night"
            )
        days = span.weekdays
        if not 0 < len(days) <= len(WEEKDAYS) or len(set(days) & set(WEEKDAYS)) < len(days):
            raise Invalid(f"terms.hours.weekdays: must be some of {', '.join(WEEKDAYS)}, each once")
    if len(spans := week_minutes(hours)) > HOURS_SPANS_MAX:
        raise Invalid(f"terms.hours: at most {HOURS_SPANS_MAX} spans in a week, these make {len(spans)}")
