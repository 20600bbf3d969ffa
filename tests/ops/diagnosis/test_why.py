"""`why`: the history of a user in an offer, played on a running system and shown as text and as JSON."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from grabstream.connections.opening import open_gate
from grabstream.gate.calls import now_ms
from grabstream.gate.gate import Gate
from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Close, Confirm, Grab, Open
from grabstream.models.events import GrabReturned
from grabstream.models.offers import EnvelopeTerms, Limit, StockTerms
from grabstream.ops.commands.read.why import as_json_of, gather
from grabstream.ops.diagnosis.story import _details, describe
from grabstream.settings import Settings
from tests.conftest import until
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import (
    SHARD,
    JournalWriter,
    catching_up,
    granted,
    journal,  # noqa: F401 - a fixture
    open_tables,
    opened,
    rows,
    until_at_seq,
)
from tests.support.stopped_shards import until_stopped

HOLD_MS = 1_000


async def why(settings: Settings, user: str, offer: str) -> Any:
    evidence, unbooked, redis = await gather(settings, user, offer)
    assert evidence is not None
    # As --json prints it.
    return json.loads(json.dumps(as_json_of(evidence, describe(evidence), unbooked, redis), default=str))


async def decide(gate: Gate, command: AnyCommand) -> Answer:
    [answer] = await gate.decide([command], patience_ms=20_000, timeout_ms=20_000)
    return answer


async def kept(settings: Settings, refusals: int, events: int) -> None:
    """Returns when `refusals` refusals are kept, and `events` events are in the audit trail and the
    ledger.
    """

    async def complete() -> bool:
        booked = "(SELECT sum(seq)::int FROM cursors WHERE projection = 'ledger')"
        [counts] = await rows(
            settings, f"SELECT (SELECT count(*) FROM refusals), (SELECT count(*) FROM audit), {booked}"
        )
        return bool(counts[0] >= refusals and counts[1] >= events and counts[2] >= events)

    await until(complete, 30, "the read models")


def moments(story: Any) -> list[tuple[str, bool]]:
    return [
        (moment["what"], moment["refused"])
        for moment in story["story"]
        if moment["grab"] or moment["refused"]
    ]


def test_voided_codes_are_counted_and_not_shown() -> None:
    event = GrabReturned(
        v=1, shard=0, seq=9, offer_seq=7, offer="o", at=1, command="r", grab="g", user="ann", quantity=2,
        amount=2, asset="coupon:o", place=1, left=0, to="offer:o", issuer="shop",
        voided_codes=("k1:SEALED", "k1:TOO"), digest="d",
    )  # fmt: skip
    details = _details(event)
    assert details["codes_voided"] == 2
    assert "k1:" not in json.dumps(details)


@pytest.mark.long
async def test_why_shows_attempts_lateness_limits_and_payments_of_a_sale(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """Too early, held, above the limit, sold out, expired, paid too late, paid in time, and over."""
    worker(system)
    async with open_gate(system) as gate:
        # The first answer shows that the worker has started: from here on, times of a second matter.
        assert (await decide(gate, Close(id="ready", offer="s"))).outcome == "no_such_offer"
        opens_at = now_ms() + 1_500
        terms = StockTerms(
            issuer="shop", total=2, hold_ms=HOLD_MS, price=5, currency="CNY",
            limits=(Limit("user", "offer", 1),), opens_at=opens_at
        )  # fmt: skip
        assert (await decide(gate, Open(id="o", offer="s", terms=terms))).outcome == "opened"
        early = await decide(gate, Grab(id="ann-0", offer="s", user="ann"))
        assert early.outcome == "not_open_yet"
        await until(lambda: now_ms() > opens_at + 5, 20, "the opening")
        held = await decide(gate, Grab(id="ann-1", offer="s", user="ann"))
        assert held.outcome == "held"
        paid = Confirm(id="ann-pays", offer="s", grab="ann-1", payment="pay-a", paid=5, currency="CNY")
        assert (await decide(gate, paid)).outcome == "confirmed"
        assert (await decide(gate, Grab(id="ann-2", offer="s", user="ann"))).outcome == "limit_reached"
        bob = await decide(gate, Grab(id="bob-1", offer="s", user="bob"))
        assert bob.outcome == "held"
        cid = await decide(gate, Grab(id="cid-1", offer="s", user="cid"))
        assert cid.outcome == "sold_out"
        await until(
            lambda: rows(system, "SELECT 1 FROM grabs WHERE grab = 'bob-1' AND state = 'expired'"),
            20,
            "the end of the hold",
        )
        late = Confirm(id="bob-pays", offer="s", grab="bob-1", payment="pay-b", paid=5, currency="CNY")
        expired = await decide(gate, late)
        assert expired.outcome == "expired"
        closed = await decide(gate, Close(id="c", offer="s"))
        over = await decide(gate, Grab(id="dan-1", offer="s", user="dan"))
        assert over.outcome == "over"
        await kept(system, 6, 7)

    ann = await why(system, "ann", "s")
    assert moments(ann) == [
        ("not_open_yet", True),
        ("grab.held", False),
        ("grab.confirmed", False),
        ("limit_reached", True),
    ]
    [too_early, holding, _, above] = [
        moment for moment in ann["story"] if moment["grab"] or moment["refused"]
    ]
    assert (too_early["late_ms"], too_early["late_behind"]) == (early.at - opens_at, "the opening")
    assert too_early["since_opening_ms"] == too_early["late_ms"] < 0
    assert holding["limits"] == [
        {"by": "user", "per": "offer", "scope": "offer", "value": "ann", "max": 1,
        "used": {"before": 0, "after": 1}}
    ]  # fmt: skip
    assert holding["since_opening_ms"] == held.at - opens_at
    assert above["limits"][0]["used"] == {"before": 1, "after": 1}
    assert [(line["debit"], line["credit"], line["amount"]) for line in ann["ledger"]] == [
        ("offer:s", "hold:ann", 1), ("hold:ann", "wallet:ann", 1), ("external:pay-a", "issuer:shop", 5)
    ]  # fmt: skip
    assert ann["now"]["redis"]["grabs"]["ann-1"]["taken"] == 1
    assert [(grab["state"], grab["taken"]) for grab in ann["now"]["grabs"]] == [("confirmed", 1)]

    of_bob = await why(system, "bob", "s")
    assert moments(of_bob) == [("grab.held", False), ("grab.released", False), ("payment.refund_due", False)]
    due = of_bob["story"][-2]
    assert (due["what"], due["late_behind"]) == ("payment.refund_due", "the deadline")
    assert due["late_ms"] == expired.at - bob.deadline_at > 0
    assert [(payment["payment"], payment["state"]) for payment in of_bob["payments"]] == [
        ("pay-b", "refund_due")
    ]
    released = next(moment for moment in of_bob["story"] if moment["what"] == "grab.released")
    assert released["limits"][0]["used"] == {"before": 1, "after": 0}

    [of_cid] = [moment for moment in (await why(system, "cid", "s"))["story"] if moment["refused"]]
    assert (of_cid["late_ms"], of_cid["late_behind"]) == (cid.at - bob.at, "the last unit was taken")
    [of_dan] = [moment for moment in (await why(system, "dan", "s"))["story"] if moment["refused"]]
    assert (of_dan["late_ms"], of_dan["late_behind"]) == (over.at - closed.at, "the close")

    shown = grabstream("why", "ann", "s", **env_of(system)).stdout
    assert f"grab refused: not_open_yet, {opens_at - early.at:,} ms before the opening" in shown
    assert f"{(held.at - opens_at) / 1000:+.3f} s  held 1 sku:s" in shown
    assert "limit user/offer (ann): 0 before, 1 after, of 1" in shown
    assert "paid 0.05 CNY by pay-a" in shown
    assert ": 0.05 CNY  external:pay-a → issuer:shop" in shown
    assert "confirm by" in shown
    shown = grabstream("why", "bob", "s", **env_of(system)).stdout
    assert f"{due['late_ms']:,} ms after the deadline" in shown
    assert "it is due for a refund" in shown
    assert "released 1 sku:s, expired" in shown
    assert "; bob-1 has 0 held and 0 taken" in shown


async def test_why_shows_part_place_and_rest_of_an_envelope(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """A user with a part, and a user who arrived after the last part was taken."""
    worker(system)
    async with open_gate(system) as gate:
        terms = EnvelopeTerms(issuer="alice", funding="f", asset="CNY", total=100, parts=2)
        assert (await decide(gate, Open(id="o", offer="e", terms=terms))).outcome == "opened"
        eve = await decide(gate, Grab(id="e1", offer="e", user="eve"))
        assert (await decide(gate, Grab(id="e2", offer="e", user="eve"))).outcome == "already_taken"
        last = await decide(gate, Grab(id="f1", offer="e", user="fay"))
        gus = await decide(gate, Grab(id="g1", offer="e", user="gus"))
        assert (last.outcome, gus.outcome) == ("granted", "sold_out")
        await kept(system, 2, 4)
    of_eve = await why(system, "eve", "e")
    assert moments(of_eve) == [("grab.granted", False), ("already_taken", True)]
    granted = next(moment for moment in of_eve["story"] if moment["what"] == "grab.granted")
    assert (granted["details"]["place"], granted["details"]["left"], granted["details"]["amount"]) == (
        1,
        1,
        eve.amount,
    )
    assert of_eve["now"]["redis"]["part"] == {"place": 1, "amount": eve.amount, "seq": eve.seq}
    [of_gus] = [moment for moment in (await why(system, "gus", "e"))["story"] if moment["refused"]]
    assert (of_gus["what"], of_gus["late_ms"]) == ("sold_out", gus.at - last.at)
    shown = grabstream("why", "eve", "e", **env_of(system)).stdout
    swapped = grabstream("why", "e", "eve", **env_of(system))
    assert (swapped.returncode, "e is an offer: `grabstream why eve e`" in swapped.stderr) == (1, True)
    assert "place 1, 1 part left after it" in shown
    assert f": 0.{eve.amount:02} CNY  offer:e → wallet:eve" in shown
    assert f"granted 0.{eve.amount:02} CNY" in shown
    assert f"the user has place 1 with 0.{eve.amount:02} CNY" in shown
    done = grabstream("why", "eve", "nothing", "--json", **env_of(system))
    assert (done.returncode, "no offer 'nothing'" in done.stderr) == (1, True)
    assert grabstream("why", "a b", "x", **env_of(system)).returncode == 2


@pytest.mark.long
async def test_why_says_why_the_ledger_lacks_an_event(system: Settings, journal: JournalWriter) -> None:
    """A grant is not booked: first the ledger lags, then it has stopped at the grant, then the grant is set
    aside.
    """

    async def reason() -> str:
        done = await asyncio.to_thread(grabstream, "why", "u3", "e", **env_of(system))
        assert done.returncode == 0, done.stderr
        [line] = [line.strip() for line in done.stdout.splitlines() if "is not booked" in line]
        assert "In the ledger" in done.stdout
        return line

    lines = [opened("e", 1), granted("e", 2), granted("e", 3), granted("e", 4)]
    async with await open_tables(system) as books:
        await books.execute("ALTER TABLE accounts_1 ADD CHECK (account <> 'wallet:u3')")
    await journal.marker(1, "a")
    for seq in range(1, 5):
        await journal.block(lines, seq, seq)
    async with catching_up(system, "audit", "balances"):
        await until_at_seq(system, 4, "audit", "balances")
    assert (await reason()).endswith(
        "seq 3, grab.granted, is not booked: the ledger has not applied this event yet"
    )
    async with catching_up(system, "ledger"):
        await until_stopped(system, "ledger")
        assert "is not booked: the ledger has stopped at shard" in await reason()
        done = await asyncio.to_thread(
            grabstream,
            "set-aside",
            "ledger",
            str(SHARD),
            "--reason",
            "ticket 17",
            "--operator",
            "olga",
            "--yes",
            **env_of(system),
        )
        assert done.returncode == 0, done.stderr
        await until_at_seq(system, 4, "ledger")
    line = await reason()
    assert "is not booked: set aside by olga on " in line
    assert line.endswith(": ticket 17")
    [missing] = (await why(system, "u3", "e"))["not_in_ledger"]
    assert (missing["seq"], missing["type"]) == (3, "grab.granted")
    assert (await why(system, "u2", "e"))["not_in_ledger"] == []
