"""Reports equal what a separate program computes from the events: of random histories, with single events and
with runs.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from statistics import fmean
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from psycopg import AsyncConnection
from psycopg.rows import dict_row

from grabstream.models.commands import Adjust
from grabstream.models.entries import Entry
from grabstream.models.events import (
    GrabConfirmed,
    GrabExtended,
    GrabGranted,
    GrabHeld,
    GrabQueued,
    GrabReleased,
    GrabReturned,
    OfferAmended,
    OfferOpened,
    PaymentRefundDue,
    decode_event,
)
from grabstream.models.transfers import transfers_of
from grabstream.projections import versions
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.read_models import READ_MODELS
from grabstream.settings import Settings
from tests.projections.test_columns import facts, in_groups
from tests.support.random_history import random_history
from tests.support.runs import as_lines, as_runs

#: Refusals of an offer: outcome → count. Those of `extend` and `confirm` are counted, too.
REFUSALS = {"sold_out": 7, "limit_reached": 3, "not_held": 2}


async def fill(connection: AsyncConnection[Any], schema: str, lines: Sequence[bytes]) -> None:
    for name, model in READ_MODELS.items():
        await versions.use_read_model(connection, schema, name)
        async with connection.transaction():
            for group in in_groups(facts(lines), [100]):
                await model.apply(connection, group)
    await use_schema(connection, schema)


class Offer:
    """What the events say of one offer."""

    def __init__(self, opened: OfferOpened) -> None:
        terms = msgspec.json.decode(opened.terms)
        zone = opened.campaign_zone.timezone if opened.campaign_zone else terms.get("timezone", "UTC")
        self.opens_at, self.zone, self.kind = opened.opens_at, ZoneInfo(zone), opened.kind
        self.units = terms.get("parts") or opened.total
        self.terms = (terms.get("law", "double_mean"), opened.total, self.units)
        self.sums: Counter[str] = Counter()
        self.sold_out_at: int | None = None

    def row(self) -> dict[str, Any]:
        """The row of `results_by_week`."""
        sums, opens = self.sums, datetime.fromtimestamp(self.opens_at / 1000, self.zone)
        year, week, _ = opens.isocalendar()
        sold_out = None if self.sold_out_at is None else _moment(self.sold_out_at)
        return {
            "week": f"{year}-W{week:02}", "offered": self.units,
            **{name: sums[name] for name in (
                "grabs", "granted", "held", "sold", "retaken", "released", "returned", "payments",
                "paid", "late_payments",
                "late_served", "late_paid", "refunded", "refund_due",
            )},
            "kept": sums["sold"] - sums["returned"],
            "pending": sums["held"] - (sums["sold"] - sums["granted"] - sums["retaken"]) - sums["released"],
            "revenue": sums["paid"] - sums["refunded"], "sold_out_time": sold_out,
            "sold_out_after": None if sold_out is None else sold_out - _moment(self.opens_at),
        }  # fmt: skip


def _moment(at: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at)


class Told:
    """What the events say, for all reports."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        self.offers: dict[str, Offer] = {}
        self.revenue: defaultdict[tuple[str, str, int], Counter[str]] = defaultdict(Counter)
        self.flows: Counter[tuple[str, str, str, str]] = Counter()
        self.parts: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        self._deadlines: dict[tuple[str, str], int] = {}
        self.accepted: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
        for line in lines:
            self._add(decode_event(line))

    def _add(self, event: Any) -> None:
        for transfer in transfers_of(event):
            kinds = transfer.debit.split(":")[0], transfer.credit.split(":")[0]
            self.flows[event.offer, transfer.asset, *kinds] += transfer.amount
        if isinstance(event, OfferOpened):
            self.offers[event.offer] = Offer(event)
            return
        offer = self.offers[event.offer]
        if isinstance(event, OfferAmended):
            offer.units += event.added - event.removed
            offer.opens_at = msgspec.json.decode(event.changes).get("opens_at", offer.opens_at)
            return
        sums = offer.sums
        if isinstance(event, GrabGranted | GrabHeld | GrabQueued):
            self.accepted[event.offer].add((event.user, event.grab))
        if isinstance(event, GrabGranted | GrabHeld):
            sums["grabs"] += 1
        if isinstance(event, GrabGranted):
            sums.update(sold=event.quantity, granted=event.quantity)
            if offer.kind == "envelope":
                self.parts[*offer.terms, event.place].append(event.amount)
        elif isinstance(event, GrabHeld):
            sums["held"] += event.quantity
            self._deadlines[event.offer, event.grab] = event.deadline_at
        elif isinstance(event, GrabExtended):
            self._deadlines[event.offer, event.grab] = event.deadline_at
        elif isinstance(event, GrabConfirmed):
            sums.update(sold=event.quantity, retaken=event.quantity if event.retaken else 0)
            if event.paid:
                self._paid(sums, event, event.paid, True)
        elif isinstance(event, PaymentRefundDue):
            self._paid(sums, event, event.amount, False)
        elif isinstance(event, GrabReleased):
            sums["released"] += event.amount
        elif isinstance(event, GrabReturned):
            sums.update(returned=event.quantity, refunded=sum(amount for _, amount in event.refunds))
            if event.refunds:
                key = event.offer, event.currency or "", event.at - event.at % 60_000
                self.revenue[key]["refunded"] += sum(amount for _, amount in event.refunds)
        takes = isinstance(event, GrabGranted | GrabHeld) or (
            isinstance(event, GrabConfirmed) and event.retaken
        )
        if takes and event.left == 0 and offer.sold_out_at is None:
            offer.sold_out_at = event.at

    def _paid(self, sums: Counter[str], event: Any, amount: int, served: bool) -> None:
        late = event.at >= self._deadlines.get((event.offer, event.grab), event.at + 1)
        sums["late_payments"] += late
        if served:
            sums.update(payments=1, paid=amount, late_served=late, late_paid=amount if late else 0)
            key = event.offer, event.currency, event.at - event.at % 60_000
            self.revenue[key].update(payments=1, paid=amount)
        else:
            sums["refund_due"] += amount

    def funnel(self, name: str) -> dict[str, Any]:
        """The row of `funnel`, with REFUSALS."""
        sums, accepted = self.offers[name].sums, len(self.accepted[name])
        return {
            "attempts": accepted + 10, "refused": 10, "accepted": accepted, "granted": sums["granted"],
            "held": sums["held"], "confirmed": sums["sold"] - sums["granted"], "retaken": sums["retaken"],
            "released": sums["released"], "returned": sums["returned"], "refusals": REFUSALS,
        }  # fmt: skip


@pytest.mark.parametrize(("seed", "in_runs"), [(1, False), (2, True), (3, True)])
async def test_reports_are_what_the_events_say(
    connection: AsyncConnection[Any], settings: Settings, seed: int, in_runs: bool
) -> None:
    history = random_history(seed, 1_200)
    # Corrections between the accounts of payments and issuers are not revenue.
    corrections = [("external:p", "issuer:i"), ("issuer:i", "refund:p"), ("external:p", "issuer:i")]
    entries = tuple(Entry("CNY", debit, credit, 10_000) for debit, credit in corrections)
    history.send(Adjust, history.names[0], transfers=entries, reason="why", approved_by="olga")
    lines = history.lines
    told = Told(lines)
    await fill(connection, settings.schema_, as_runs(lines) if in_runs else as_lines(lines))
    await connection.execute(
        "INSERT INTO demand_1 SELECT 0, 1795344321 + number, outcomes.code, offer, 1 FROM offers, "
        "jsonb_each_text(%s) AS refused (name, count) JOIN outcomes USING (name), "
        "generate_series(1, count::integer) AS number",
        (msgspec.json.encode(REFUSALS).decode(),),
    )
    results = await rows(connection, "SELECT * FROM results_by_week ORDER BY offer")
    for row in results:
        expected = told.offers[row["offer"]].row()
        assert {name: row[name] for name in expected} == expected, row["offer"]
    assert {row["offer"] for row in results} == told.offers.keys()
    funnels = await rows(connection, "SELECT * FROM funnel")
    for row in funnels:
        expected = told.funnel(row["offer"])
        assert {name: row[name] for name in expected} == expected, row["offer"]
    flows = await rows(connection, "SELECT * FROM flows")
    keys = ("offer", "asset", "debit_kind", "credit_kind")
    assert {tuple(row[key] for key in keys): row["amount"] for row in flows} == dict(told.flows)
    assert {
        (row["offer"], row["currency"], row["minute_at"]): (row["payments"], row["paid"], row["refunded"])
        for row in await rows(connection, "SELECT * FROM revenue")
    } == {key: (one["payments"], one["paid"], one["refunded"]) for key, one in told.revenue.items()}
    fairness = await rows(connection, "SELECT * FROM fairness")
    assert {
        (row["law"], row["total"], row["parts"], row["place"]): (row["grabs"], row["amount_min"])
        for row in fairness
    } == {key: (len(amounts), min(amounts)) for key, amounts in told.parts.items()}
    for row in fairness:
        amounts = told.parts[row["law"], row["total"], row["parts"], row["place"]]
        assert float(row["amount_mean"]) == pytest.approx(fmean(amounts))
        assert row["law_mean"] * row["parts"] == pytest.approx(Decimal(row["total"]))
    # What is checked has occurred.
    totals = sum((offer.sums for offer in told.offers.values()), Counter())
    assert totals >= Counter(
        ("grabs", "held", "sold", "granted", "released", "returned", "payments", "late_payments", "refunded")
    )


async def rows(connection: AsyncConnection[Any], query: str) -> list[dict[str, Any]]:
    async with connection.cursor(row_factory=dict_row) as cursor:
        return await (await cursor.execute(query.encode())).fetchall()
