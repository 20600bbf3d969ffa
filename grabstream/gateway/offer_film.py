"""The film of an offer, and the fairness of its parts, computed from the rows of the books.

The film folds the events of an offer up to a time, as a replay does: its numbers at that time are those of
`grabstream at`. Fairness compares the parts with what the law of an envelope gives: parts drawn again, from
fixed seeds.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from grabstream.gateway.bounds import FAIRNESS_BINS, FAIRNESS_DRAWS_MAX, FAIRNESS_GROUPS
from grabstream.models.events import GrabGranted, GrabHeld, GrabQueued
from grabstream.models.runs import decode_line, singles
from grabstream.models.splitting import Law, check_split, next_part, split_ahead

Row = dict[str, Any]

#: What the lines of an offer change, summed by frame. Half of the frames divide the time, the other half the
#: events: a rush of a second in an offer of a week has frames, too. Lines of the same time share a frame.
#: Parameters: the number of frames, shard, offer, time of the last event (ms).
FILM: Final = """
    WITH lines AS (
        SELECT seq + seqs - 1 AS seq, seqs, type, at, body::jsonb AS e
        FROM audit WHERE shard = %(shard)s AND offer = %(offer)s AND at <= %(at)s
    ), measured AS (
        SELECT *,
               coalesce((e->>'quantity')::bigint,
                   (SELECT sum(x::bigint) FROM jsonb_array_elements_text(e->'quantities') AS x), seqs
               ) AS units,
               coalesce(e->>'reason' = 'left_queue', false) AS left_queue,
               coalesce((e->>'waited')::boolean, false) AS waited
        FROM lines
    ), changes AS (
        SELECT seq, at, sum(seqs) OVER (ORDER BY at) AS events,
            CASE WHEN type IN ('grab.granted', 'grab.held') THEN seqs ELSE 0 END AS grabs,
            CASE type WHEN 'grab.granted' THEN coalesce((e->>'amount')::bigint,
                          (SELECT sum(x::bigint) FROM jsonb_array_elements_text(e->'amounts') AS x), units)
                      WHEN 'grab.confirmed' THEN units WHEN 'grab.returned' THEN -units ELSE 0 END AS given,
            CASE WHEN type = 'grab.held' THEN units
                 WHEN type = 'grab.confirmed' AND NOT coalesce((e->>'retaken')::boolean, false) THEN -units
                 WHEN type = 'grab.released' AND NOT left_queue THEN -units ELSE 0 END AS held,
            CASE WHEN type = 'grab.queued' THEN 1 WHEN type = 'grab.held' AND waited THEN -seqs
                 WHEN type = 'grab.released' AND left_queue THEN -1 ELSE 0 END AS waiting,
            CASE WHEN type IN ('grab.released', 'grab.returned') AND e->>'to' NOT LIKE 'offer:%%' THEN units
                 WHEN type = 'offer.closed' THEN (e->>'amount')::bigint ELSE 0 END AS refunded,
            CASE type WHEN 'offer.opened' THEN (e->>'total')::bigint
                      WHEN 'offer.amended' THEN coalesce((e->>'added')::bigint, 0)
                          - coalesce((e->>'removed')::bigint, 0) ELSE 0 END AS total,
            CASE WHEN type = 'offer.opened'
                     THEN coalesce((e->'terms'->>'parts')::bigint, (e->>'total')::bigint)
                 WHEN type = 'offer.closed' THEN 0
                 WHEN type IN ('grab.granted', 'grab.held', 'grab.confirmed', 'grab.released',
                               'grab.returned', 'offer.amended') THEN (e->>'left')::bigint
            END AS units_left,
            CASE type WHEN 'offer.opened' THEN 'open' WHEN 'offer.resumed' THEN 'open'
                      WHEN 'offer.paused' THEN 'paused' WHEN 'offer.closed' THEN 'closed'
                      WHEN 'offer.retired' THEN 'retired' END AS state
        FROM measured
    ), span AS (
        SELECT min(at) AS first, greatest(max(at) - min(at), 1) AS ms, sum(seqs) AS events FROM lines
    )
    SELECT (at - span.first) * %(frames)s / (2 * (span.ms + 1)) AS by_time,
           (changes.events - 1) * %(frames)s / (2 * span.events) AS by_events,
           max(at) AS at, max(seq) AS seq,
           sum(grabs)::bigint AS grabs, sum(given)::bigint AS given, sum(held)::bigint AS held,
           sum(waiting)::bigint AS waiting, sum(refunded)::bigint AS refunded, sum(total)::bigint AS total,
           (array_agg(units_left ORDER BY seq DESC) FILTER (WHERE units_left IS NOT NULL))[1] AS units_left,
           (array_agg(state ORDER BY seq DESC) FILTER (WHERE state IS NOT NULL))[1] AS state
    FROM changes, span GROUP BY 1, 2 ORDER BY 1, 2
"""
#: The lines with the newest grabs up to a time, the newest first.
NEWEST: Final = """
    SELECT body FROM (
        SELECT seq, body, sum(seqs) OVER (ORDER BY seq DESC) - seqs AS newer FROM (
            SELECT seq, seqs, body FROM audit WHERE shard = %(shard)s AND offer = %(offer)s AND at <= %(at)s
            AND type IN ('grab.granted', 'grab.held', 'grab.queued') ORDER BY seq DESC LIMIT %(grabs)s
        ) AS newest
    ) AS counted WHERE newer < %(grabs)s ORDER BY seq DESC
"""
PARTS: Final = "SELECT place, amount FROM grabs WHERE offer = %s AND NOT is_waiting ORDER BY place LIMIT %s"
_SUMS: Final = ("grabs", "given", "held", "waiting", "refunded", "total")


def frames_of(rows: Sequence[Row]) -> list[Row]:
    """The state of an offer at the end of each frame, from the changes of each."""
    state: Row = {**dict.fromkeys(_SUMS, 0), "units_left": 0, "state": "open"}
    frames = []
    for row in rows:
        state = {
            **state,
            **{name: state[name] + row[name] for name in _SUMS},
            **{name: row[name] for name in ("units_left", "state") if name in row},
            "at": row["at"],
            "seq": row["seq"],
        }
        state["amount_left"] = state["total"] - state["given"] - state["held"] - state["refunded"]
        frames.append(state)
    return frames


def grabs_of(rows: Sequence[Row], grabs_max: int) -> list[Row]:
    """The newest grabs of the lines of `NEWEST`, the newest first."""
    found = []
    for row in rows:
        for event in reversed(singles(decode_line(row["body"].encode()))):
            assert isinstance(event, GrabGranted | GrabHeld | GrabQueued)
            outcome = {GrabGranted: "granted", GrabHeld: "held", GrabQueued: "waiting"}[type(event)]
            found.append(
                {
                    "seq": event.seq, "at": event.at, "outcome": outcome, "user": event.user,
                    "grab": event.grab, "quantity": event.quantity, "amount": event.amount,
                    "asset": event.asset, "place": event.place, "left": event.left,
                }
            )  # fmt: skip
    return found[:grabs_max]


def fairness_of(offer: Mapping[str, Any], rows: Sequence[Row]) -> Row:
    """How the parts of an offer are distributed, and the mean part by place; for an envelope, also what its
    law gives. `rows` are places and amounts (minor units or pieces), by place.
    """
    amounts = [row["amount"] for row in rows]
    expected: tuple[int, ...] = ()
    document: Row = {"grabs": len(amounts)}
    if offer["kind"] == "envelope" and amounts:
        terms = offer["terms"]
        law, least = terms.get("law", "double_mean"), terms.get("min", 1)
        is_ahead = terms.get("draw", "ahead") == "ahead"
        if offer["units"] <= FAIRNESS_DRAWS_MAX:
            expected = _drawn(
                law, offer["total"], offer["units"], least, terms.get("max"), is_ahead, len(amounts)
            )
        document |= {"law": law, "mean": offer["total"] / offer["units"]}
    most = max((*amounts, *expected), default=0)
    width = max(-(-(most + 1) // FAIRNESS_BINS), 1)
    bins = [
        {"least": least, "most": least + width - 1, "grabs": 0} | ({"expected": 0.0} if expected else {})
        for least in range(0, most + 1, width)
    ]
    for amount in amounts:
        bins[amount // width]["grabs"] += 1
    for amount in expected:
        bins[amount // width]["expected"] += len(amounts) / len(expected)
    size = -(-len(amounts) // FAIRNESS_GROUPS) or 1
    places = [
        {
            "first": rows[at]["place"], "last": rows[min(at + size, len(rows)) - 1]["place"],
            "grabs": len(group), "mean": sum(group) / len(group),
        }
        for at in range(0, len(amounts), size)
        if (group := amounts[at : at + size])
    ]  # fmt: skip
    return {**document, "bins": bins, "places": places}


@lru_cache(maxsize=32)
def _drawn(
    law: Law, total: int, parts: int, least: int, most: int | None, is_ahead: bool, places: int
) -> tuple[int, ...]:
    """The first `places` parts of some envelopes with these terms. The seeds are numbers, so the same parts
    are drawn each time.
    """
    greatest = check_split(law, total, parts, least, most)
    found: list[int] = []
    for number in range(min(FAIRNESS_DRAWS_MAX // parts, 100)):
        seed = f"{number:032x}"
        if is_ahead:
            found += split_ahead(law, total, parts, least, greatest, seed)[:places]
            continue
        left = total
        for place in range(1, min(places, parts) + 1):
            part = next_part(law, left, parts - place + 1, least, greatest, seed, place)
            left -= part
            found.append(part)
    return tuple(found)
