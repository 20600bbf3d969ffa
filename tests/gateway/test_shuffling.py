"""The random order of offers of each visitor: all of them once, in pages of any size; what a page costs."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grabstream.gateway import shuffling
from grabstream.gateway.shuffling import BUCKET_OFFERS_MAX, Shuffled

VISITORS = st.text("abc:", min_size=1, max_size=4)


def offers_of(count: int) -> list[str]:
    return [f"offer:{number}" for number in range(count)]


def all_of(shuffled: Shuffled, visitor: str, rows: int) -> list[str]:
    """The offers of all pages of a visitor."""
    found: list[str] = []
    while page := shuffled.page(visitor, found[-1] if found else None, rows):
        found += page
    return found


@given(st.integers(0, 600), VISITORS, st.integers(20, 400), st.data())
def test_a_visitor_gets_all_offers_in_one_order_in_pages_of_any_size(
    count: int, visitor: str, rows: int, data: st.DataObject
) -> None:
    shuffled = Shuffled(offers_of(count))
    order = shuffled.page(visitor, None, count + 1)
    assert sorted(order) == sorted(offers_of(count))
    assert all_of(shuffled, visitor, rows) == order
    # The order does not depend on that of the list, and an offer that is gone moves no other; the page after
    # it is the same.
    if (count - 1) % BUCKET_OFFERS_MAX:
        gone = data.draw(st.sampled_from(offers_of(count))) if count else "offer"
        rest = [offer for offer in reversed(offers_of(count)) if offer != gone]
        without = Shuffled(rest)
        assert without.page(visitor, None, count + 1) == [offer for offer in order if offer != gone]
        assert without.page(visitor, gone, 5) == shuffled.page(visitor, gone, 5)


def test_visitors_get_other_orders_and_all_offers_are_first_equally_often() -> None:
    """Over four buckets."""
    offers = offers_of(3 * BUCKET_OFFERS_MAX)
    shuffled = Shuffled(offers)
    first = Counter(shuffled.page(f"visitor-{number}", None, 1)[0] for number in range(1_500))
    by_tenth = Counter(int(offer.removeprefix("offer:")) % 10 for offer in first.elements())
    assert len(first) > 0.75 * len(offers)
    # 150 each, with a standard deviation of 12; buckets differ in their numbers of offers.
    assert all(100 < by_tenth[tenth] < 200 for tenth in range(10)), by_tenth
    orders = {tuple(shuffled.page(f"visitor-{number}", None, 20)) for number in range(200)}
    assert len(orders) == 200


def test_a_page_of_many_offers_looks_at_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    shuffled, place, looked = Shuffled(offers_of(10_000)), shuffling._spot, []

    def counted(name: str, visitor: str) -> str:
        looked.append(name)
        return place(name, visitor)

    monkeypatch.setattr(shuffling, "_spot", counted)
    page: list[str] = []
    for _ in range(20):
        looked.clear()
        page = shuffled.page("ann", page[-1] if page else None, 101)
        assert len(page) == 101
        # The buckets, and the offers of at most three of them.
        assert len(looked) < 64 + 3 * BUCKET_OFFERS_MAX
