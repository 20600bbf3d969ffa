"""The plan of `open --dry-run`: what would be opened, for people."""

from collections.abc import Sequence
from typing import Final

from grabstream.models.commands import Open
from grabstream.models.offers import (
    ENVELOPE_LIFE_MS,
    WEEKDAYS,
    EnvelopeTerms,
    Hours,
    Limit,
    StockTerms,
    Terms,
    asset_of,
)
from grabstream.ops.formats.written_values import shown_duration, shown_time

PLAN_COLUMNS: Final = ("offer", "kind", "total", "opens", "closes", "limits", "hold", "audience")


def plan_rows(opens: Sequence[Open]) -> list[tuple[str, ...]]:
    """A row with PLAN_COLUMNS for each offer. Times are in the offer's zone."""
    return [_plan_row(command.offer, command.terms) for command in opens]


def _plan_row(offer: str, terms: Terms) -> tuple[str, ...]:
    envelope = isinstance(terms, EnvelopeTerms)
    opens = shown_time(terms.opens_at, terms.timezone) if terms.opens_at else "at once"
    if terms.hours:
        opens += "; " + "; ".join(shown_hours(hours) for hours in terms.hours)
    if terms.closes_at:
        closes = shown_time(terms.closes_at, terms.timezone)
    elif envelope:
        closes = (
            shown_time(terms.opens_at + ENVELOPE_LIFE_MS, terms.timezone)
            if terms.opens_at
            else f"{shown_duration(ENVELOPE_LIFE_MS)} after opening"
        )
    else:
        closes = "never"
    if isinstance(terms, EnvelopeTerms):
        limits, hold = "1 a user", "–"
    else:
        limits = "; ".join(_shown_limit(limit) for limit in terms.limits) or "–"
        hold = shown_duration(terms.hold_ms) if terms.hold_ms else "–"
    return (
        offer,
        str(terms.__struct_config__.tag),
        _shown_total(offer, terms),
        opens,
        closes,
        limits,
        hold,
        terms.audience,
    )


def _shown_total(offer: str, terms: Terms) -> str:
    # Amounts of a currency are in minor units: a reader would take `1,000 CNY` for a hundred times the money.
    if isinstance(terms, EnvelopeTerms):
        return (
            f"{terms.total:,} minor units of {terms.asset} in {terms.parts:,} "
            f"part{'s' if terms.parts != 1 else ''}"
        )
    what = (
        asset_of(offer, terms)
        if isinstance(terms, StockTerms)
        else "coupon"
        if terms.total == 1
        else "coupons"
    )
    price = f", {terms.price:,} minor units of {terms.currency} each" if terms.price is not None else ""
    return f"{terms.total:,} {what}{price}"


def _shown_limit(limit: Limit) -> str:
    period = "in all" if limit.per == "offer" else f"{'an' if limit.per == 'hour' else 'a'} {limit.per}"
    return f"{limit.max:,} a {limit.by} {period}{' over the campaign' if limit.scope == 'campaign' else ''}"


def shown_hours(hours: Hours) -> str:
    """Opening hours as in a file."""
    days = "" if hours.weekdays == WEEKDAYS else f"{','.join(hours.weekdays)} "
    return f"{days}{hours.from_}-{hours.until}"
