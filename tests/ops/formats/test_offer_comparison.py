"""`offers --check`: every term that differs is a difference, and nothing else is."""

from typing import Any, get_args

import msgspec
import pytest

from grabstream.models.commands import Open
from grabstream.models.offers import CouponTerms, EnvelopeTerms, Hours, Limit, StockTerms, Terms, terms_of
from grabstream.ops.formats.offer_comparison import OfferDifference, differences_of

FRIDAY = 1_795_744_800_000
SAMPLES: dict[type[Any], Any] = {
    EnvelopeTerms: EnvelopeTerms(issuer="i", funding="f", asset="CNY", total=100, parts=5),
    CouponTerms: CouponTerms(issuer="i", total=5),
    StockTerms: StockTerms(issuer="i", total=5, timezone="Asia/Shanghai"),
}
#: Another value for each term.
OTHER: dict[str, Any] = {
    "issuer": "j", "title": "other", "total": 99, "opens_at": FRIDAY, "closes_at": FRIDAY,
    "timezone": "Asia/Tokyo", "hours": (Hours(weekdays=("fri",), from_="10:00", until="12:00"),),
    "audience": "list", "retire_after_ms": 900_000, "funding": "g", "asset": "sku:other", "parts": 4,
    "law": "equal", "min": 2, "max": 50, "draw": "at_grab", "beacon": "other",
    "limits": (Limit("user", "day", 2), Limit("card", "offer", 1, "campaign")), "max_per_grab": 2,
    "take": "up_to", "price": 100, "currency": "CNY", "hold_ms": 900_000, "extensions": 1, "late": "retake",
    "grace_ms": 60_000, "return_restores": True, "valid_until": FRIDAY, "waiting_list": True, "codes": True,
}  # fmt: skip
FIELDS = [
    (kind, name) for kind in get_args(Terms) for name in kind.__struct_fields__ if name != "seed"
]  # fmt: skip


def compared(of_file: Terms, of_system: Terms, state: str = "open") -> list[OfferDifference]:
    """The differences, of terms that were stored as the books store them."""
    stored = terms_of(msgspec.json.encode(of_system))
    return list(differences_of(Open(id="o", offer="a", terms=of_file), state, stored))


@pytest.mark.parametrize("kind", get_args(Terms))
def test_the_same_terms_have_no_difference(kind: Any) -> None:
    assert compared(SAMPLES[kind], SAMPLES[kind]) == []
    assert compared(SAMPLES[kind], SAMPLES[kind], "paused") == []


@pytest.mark.requirement("F10")
@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_each_term_that_differs_is_named_alone(kind: Any, name: str) -> None:
    terms, value = SAMPLES[kind], OTHER[name]
    other = msgspec.structs.replace(terms, **{name: value})
    before = getattr(terms, name)
    for of_file, of_system, values in ((terms, other, (before, value)), (other, terms, (value, before))):
        [difference] = compared(of_file, of_system)
        assert difference[:3] == ("a", "differs", name)
        assert (difference.file, difference.system) == values


def test_state_and_kind_differ() -> None:
    [closed] = compared(SAMPLES[StockTerms], SAMPLES[StockTerms], "closed")
    assert (closed.field, closed.file, closed.system) == ("state", "open", "closed")
    [kind] = compared(SAMPLES[StockTerms], SAMPLES[CouponTerms])
    assert (kind.field, kind.file, kind.system) == ("kind", "stock", "coupon")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("opens_at", "nothing in the file, 2026-11-27 10:00+08:00 in the system"),
        ("hold_ms", "nothing in the file, 15m in the system"),
        ("retire_after_ms", "7d in the file, 15m in the system"),
        ("limits", "nothing in the file, user/day/2; card/offer/1/campaign in the system"),
        ("hours", "nothing in the file, fri 10:00-12:00 in the system"),
        ("price", "nothing in the file, 100 in the system"),
        ("waiting_list", "false in the file, true in the system"), ("title", "nothing in the file, other"),
    ],
)  # fmt: skip
def test_people_read_values_as_files_have_them(name: str, words: str) -> None:
    terms = SAMPLES[StockTerms]
    [difference] = compared(terms, msgspec.structs.replace(terms, **{name: OTHER[name]}))
    assert difference.line().startswith(f"a: {name}: {words}")
