"""Fairness of parts, from rows alone."""

from typing import Any

import pytest

from grabstream.gateway.bounds import FAIRNESS_DRAWS_MAX
from grabstream.gateway.filming import fairness_of
from grabstream.models.splitting import split_ahead


def offer(parts: int, total: int, **terms: Any) -> dict[str, Any]:
    return {"kind": "envelope", "total": total, "units": parts, "terms": terms}


def rows_of(amounts: list[int]) -> list[dict[str, Any]]:
    return [{"place": place, "amount": amount} for place, amount in enumerate(amounts, 1)]


@pytest.mark.parametrize("terms", [{}, {"law": "equal"}, {"law": "bounded", "min": 50, "max": 150}])
@pytest.mark.parametrize("draw", ["ahead", "at_grab"])
def test_law_gives_what_its_envelopes_have(terms: dict[str, Any], draw: str) -> None:
    """Every part of the law's envelopes is where its own limits allow, and the whole is as many as taken."""
    law, least, most = terms.get("law", "double_mean"), terms.get("min", 1), terms.get("max", 10_000)
    amounts = split_ahead(law, 10_000, 100, least, most, "ab" * 16)
    found = fairness_of(offer(100, 10_000, **terms, draw=draw), rows_of(amounts[:40]))
    assert sum(one["expected"] for one in found["bins"]) == pytest.approx(40)
    assert sum(one["grabs"] for one in found["bins"]) == 40
    assert all(one["expected"] == 0 for one in found["bins"] if one["most"] < least or one["least"] > most)
    # The parts of a law have its mean, as far as the intervals tell.
    middle = sum(one["expected"] * (one["least"] + one["most"]) / 2 for one in found["bins"]) / 40
    width = found["bins"][0]["most"] + 1
    assert found["mean"] == 100
    assert abs(middle - 100) < width


def test_large_envelope_has_the_mean_of_its_law_only() -> None:
    parts = FAIRNESS_DRAWS_MAX + 1
    found = fairness_of(offer(parts, parts * 10), rows_of([10, 12, 8]))
    assert (found["law"], found["mean"], found["grabs"]) == ("double_mean", 10, 3)
    assert all("expected" not in one for one in found["bins"])


def test_nothing_taken_has_no_places() -> None:
    found = fairness_of(offer(5, 100), [])
    assert (found["grabs"], found["places"]) == (0, [])
    pieces = fairness_of({"kind": "stock", "total": 5, "units": 5, "terms": {}}, rows_of([1, 2]))
    assert "law" not in pieces
    assert [one["grabs"] for one in pieces["bins"]] == [0, 1, 1]
