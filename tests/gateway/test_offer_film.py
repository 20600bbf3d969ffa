"""The film of an offer, from lines of its events, and fairness of parts, from rows alone."""

import json
from itertools import pairwise
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from grabstream.gateway.bounds import FAIRNESS_DRAWS_MAX, FILM_FRAMES
from grabstream.gateway.offer_film import FILM, fairness_of, frames_of
from grabstream.models.splitting import split_ahead
from grabstream.settings import Settings


def offer(parts: int, total: int, **terms: Any) -> dict[str, Any]:
    return {"kind": "envelope", "total": total, "units": parts, "terms": terms}


DAY_MS = 86_400_000


def film_of(servers: Settings, lines: list[tuple[str, int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The frames of an offer's lines: each has a type, a time in ms, and further fields."""
    with psycopg.connect(servers.postgres, row_factory=dict_row) as connection:
        connection.execute(
            "CREATE TEMP TABLE audit"
            " (shard int, offer text, seq bigint, seqs int, type text, at bigint, body text)"
        )
        seq = 1
        for kind, at, fields in lines:
            seqs = len(fields.get("amounts", [1]))
            values = (seq, seqs, kind, at, json.dumps(fields))
            connection.execute("INSERT INTO audit VALUES (0, 'o', %s, %s, %s, %s, %s)", values)
            seq += seqs
        asked = {"shard": 0, "offer": "o", "at": 9 * DAY_MS, "frames": FILM_FRAMES}
        found = connection.execute(FILM, asked).fetchall()
    return frames_of([{name: value for name, value in row.items() if value is not None} for row in found])


def test_a_rush_has_frames_though_it_is_a_moment_of_the_life_of_an_offer(servers: Settings) -> None:
    """An envelope that is opened a day before its rush of a second, and retires a week after it."""
    lines = [("offer.opened", 0, {"total": 10_000, "terms": {"parts": 500}})]
    for number in range(250):
        fields = {"amounts": [10, 10], "left": 498 - 2 * number}
        lines.append(("grab.granted", DAY_MS + number // 2 * 8, fields))
    lines.append(("offer.closed", 2 * DAY_MS, {"amount": 5_000}))
    lines.append(("offer.retired", 8 * DAY_MS, {}))
    frames = film_of(servers, lines)
    assert len(frames) <= FILM_FRAMES
    assert [frame["at"] for frame in frames] == sorted({frame["at"] for frame in frames})
    assert (frames[0]["given"], frames[0]["units_left"]) == (0, 500), "the opening, with a frame of its own"
    assert frames[-1]["state"] == "retired"
    rush = [frame for frame in frames if DAY_MS <= frame["at"] < DAY_MS + 1_000]
    assert len(rush) >= FILM_FRAMES / 3
    for before, frame in pairwise(frames):
        assert frame["given"] - before["given"] <= 5_000 / 40
    for frame in frames:
        granted = [fields for kind, at, fields in lines if kind == "grab.granted" and at <= frame["at"]]
        assert frame["given"] == sum(sum(fields["amounts"]) for fields in granted)


def test_a_crowd_of_one_moment_is_one_frame(servers: Settings) -> None:
    """What has the same time cannot be told apart by it."""
    lines = [("offer.opened", 5, {"total": 100, "terms": {"parts": 10}})]
    lines += [("grab.granted", 5, {"amount": 10, "left": 9 - number}) for number in range(10)]
    assert [frame["given"] for frame in film_of(servers, lines)] == [100]


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
    # The parts of a law have its mean, as far as the intervals show.
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
