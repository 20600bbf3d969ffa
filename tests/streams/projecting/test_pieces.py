"""Read models of offers of pieces, from a long random history that the pure rules decided: SQL must say what
the rules know.

The history goes over the journal in blocks cut at random places; a second run cuts them elsewhere and must
give the same rows.
"""

import random
from copy import deepcopy
from typing import Any

from grabstream.models.calendar import DAY_MS, window_of
from grabstream.models.commands import (
    Amend,
    Close,
    Confirm,
    Grab,
    Open,
    Release,
    Return,
)
from grabstream.models.events import encode_event
from grabstream.models.offers import PAYMENTS_KNOWN_MS, Changes, Limit, StockTerms
from grabstream.models.rules import ShardState, decide, sweep
from grabstream.models.rules.state import Status
from grabstream.ops.rehearsal.stage import take_down
from grabstream.ops.settings import Settings
from tests.conftest import make_system
from tests.support.projecting import rows
from tests.support.random_history import History, project, random_history

TABLES = {
    "offers": "offer", "grabs": "offer, grab", "accounts": "account, asset", "transfers": "shard, seq, leg",
    "balances": "user_id, asset",
    "payments": "payment", "audit": "shard, seq", "operations": "shard, seq", "waiting": "offer, position",
}  # fmt: skip


async def test_sql_says_what_the_rules_know(system: Settings, prefix: str) -> None:
    history = random_history(20261121, 4_000)
    state = history.state
    seen = {line.split(b'"', 4)[3].decode() for line in history.lines}
    assert seen >= {
        "grab.granted", "grab.held", "grab.queued", "grab.extended", "grab.confirmed", "grab.released",
        "grab.returned", "grab.redeemed",
        "grab.unredeemed", "payment.refund_due", "ledger.adjusted", "offer.amended", "offer.paused",
        "offer.loaded", "offer.closed",
    }  # fmt: skip
    await project(system, history, random.Random(1))
    await _check_offers(system, state)
    await _check_grabs(system, state)
    await _check_payments(system, state)
    assert not await rows(system, "SELECT asset FROM accounts GROUP BY asset HAVING sum(posted) <> 0")
    holds = await rows(
        system,
        "SELECT coalesce(sum(held), 0) FROM balances WHERE asset LIKE 'sku:%' OR asset LIKE 'coupon:%'",
    )
    assert holds == [(sum(offer.held for offer in state.offers.values()),)]
    # A second system, blocks cut elsewhere: the same rows.
    again = system.model_copy(update={"prefix": prefix + "x", "schema_": prefix + "x"})
    await make_system(again)
    try:
        await project(again, history, random.Random(2))
        for table, order in TABLES.items():
            query = f"SELECT * FROM {table} ORDER BY {order}"
            assert await rows(system, query) == await rows(again, query), table
    finally:
        await take_down(again)


async def _check_offers(settings: Settings, state: ShardState) -> None:
    found = await rows(
        settings, "SELECT offer, total, units_left, amount_left, held, grabs, waiting, given FROM offers"
    )
    assert {row[0]: row[1:] for row in found} == {
        offer.name: (
            offer.terms.total, offer.units_left, offer.amount_left, offer.held, offer.places,
            sum(grab.status == Status.waiting for grab in offer.grabs.values()),
            sum(grab.taken for grab in offer.grabs.values()),
        )
        for offer in state.offers.values()
    }  # fmt: skip
    waiting = await rows(settings, "SELECT offer, grab FROM waiting ORDER BY offer, position")
    assert waiting == [(name, grab) for name in sorted(state.offers) for grab in state.offers[name].queue]


async def _check_grabs(settings: Settings, state: ShardState) -> None:
    found = await rows(
        settings, "SELECT offer, grab, user_id, quantity, held, taken, redeemed, place, state FROM grabs"
    )
    expected = {}
    for offer in state.offers.values():
        for name, grab in offer.grabs.items():
            waits = grab.status == Status.waiting
            units = (grab.held, grab.taken, grab.redeemed, grab.place)
            expected[offer.name, name] = (
                grab.user,
                grab.quantity,
                *units,
                _standing(offer, grab) if not waits else "waiting",
            )
    assert {row[:2]: row[2:] for row in found} == expected


def _standing(offer: Any, grab: Any) -> str:
    if grab.held:
        return "held"
    if grab.taken:
        return "granted" if offer.terms.hold_ms is None else "confirmed"
    if grab.lapsed and grab.status == Status.expired and not grab.confirmed[0]:
        return "expired"
    if grab.status == Status.released and not grab.confirmed[0]:
        return "released"
    return "returned" if grab.confirmed[0] or offer.terms.hold_ms is None else grab.status.name


async def _check_payments(settings: Settings, state: ShardState) -> None:
    found = await rows(settings, "SELECT payment, offer, grab, outcome FROM payments")
    assert {row[0]: row[1:3] for row in found} == {
        name: (payment.offer, payment.grab) for (_, name), payment in state.payments.items()
    }
    by_account = dict(
        await rows(settings, "SELECT account, posted FROM accounts WHERE account LIKE 'refund:%'")
    )
    owed = await rows(
        settings, "SELECT payment, CASE state WHEN 'refund_due' THEN amount ELSE refunded END FROM payments"
    )
    assert {f"refund:{payment}": amount for payment, amount in owed if amount} == by_account


async def test_a_payment_id_in_a_later_life_of_its_campaign_stops_nothing(system: Settings) -> None:
    """Its campaign has long forgotten it: a row for each time, what goes back is taken off the one it was
    paid by, and all is booked.
    """
    history = History(1)
    terms = StockTerms(issuer="shop", total=9, price=5, currency="CNY", hold_ms=60_000, retire_after_ms=1)
    paid = {"payment": "p", "paid": 5, "currency": "CNY"}
    for offer in ("m:a", "m:b", "m:c"):
        history.send(Open, offer, terms=terms)
        history.send(Grab, offer, user="u")
        grab = f"c{history.commands}"
        if offer != "m:c":
            history.send(Confirm, offer, grab=grab, **paid)
        if offer == "m:b":
            history.send(Return, offer, grab=grab)
        history.now += DAY_MS
        history.lines += map(encode_event, sweep(history.state, history.now))
        history.send(Close, offer)
        history.now += DAY_MS
        history.lines += map(encode_event, sweep(history.state, history.now))
        history.now += PAYMENTS_KNOWN_MS - 10 * DAY_MS if offer == "m:b" else PAYMENTS_KNOWN_MS
    history.send(Confirm, "m:c", grab=grab, **paid)
    assert history.lines[-1].startswith(b'{"type":"offer.retired"')
    history.now -= 10 * DAY_MS
    history.send(Confirm, "m:c", grab=grab, **paid)
    await project(system, history, random.Random(1))
    found = await rows(system, "SELECT payment, offer, state, outcome, refunded FROM payments ORDER BY seq")
    assert found == [
        ("p", "m:a", "served", "confirmed", 0), ("p", "m:b", "served", "confirmed", 5),
        ("p", "m:c", "refund_due", "no_such_offer", 0),
    ]  # fmt: skip
    assert not await rows(system, "SELECT * FROM stopped_shards")


async def test_limits_view(system: Settings) -> None:
    """What is left of each limit now: grabs of another day do not count, what went back does not, a campaign
    counts all its offers.
    """
    [(now,)] = await rows(system, "SELECT (extract(epoch FROM now()) * 1000)::bigint")
    history = History(1)
    history.now = now - 3 * DAY_MS
    limits = (
        Limit("user", "offer", 9),
        Limit("user", "day", 4),
        Limit("card", "week", 50, "campaign"),
        Limit("user", "hour", 4),
    )
    for offer in ("m:a", "m:b"):
        terms = StockTerms(
            issuer="shop",
            total=40,
            limits=limits,
            max_per_grab=3,
            timezone="Asia/Shanghai",
            hold_ms=DAY_MS * 9,
        )
        history.send(Open, offer, terms=terms)
    history.send(Grab, "m:a", user="u", quantity=3, attributes={"card": "k"})
    history.now = now
    history.send(Grab, "m:a", user="u", quantity=2, attributes={"card": "k"})
    history.send(Grab, "m:b", user="u", quantity=2, attributes={"card": "k"})
    history.send(Grab, "m:b", user="v", quantity=1, attributes={"card": "k"})
    history.send(Release, "m:b", grab=f"c{history.commands}")
    await project(system, history, random.Random(1))
    found = {
        (offer, by, per, value): left
        for offer, by, per, value, left in await rows(
            system, "SELECT offer, by, per, value, \"left\" FROM limits WHERE offer = 'm:a'"
        )
    }
    # The rules say what is left to whoever grabs now.
    history.now += 1
    decided = decide(
        history.state, Grab(id="now", offer="m:a", user="u", attributes={"card": "k"}), history.now
    )
    told = {(one.by, one.per): one.left + 1 for one in decided.answer.limits}
    assert {(by, per): left for (_, by, per, _), left in found.items()} == told


async def test_the_view_of_limits_counts_units_that_were_taken_anew_in_their_own_window(
    system: Settings,
) -> None:
    """Of one grab some units were paid in time, some late a day later, some later still; and some of these
    went back.
    """
    [(now,)] = await rows(system, "SELECT (extract(epoch FROM now()) * 1000)::bigint")
    history = History(1)
    history.now = now - 3 * DAY_MS
    limits = (Limit("user", "offer", 90), Limit("user", "day", 90), Limit("user", "week", 90))
    terms = StockTerms(
        issuer="shop",
        total=90,
        limits=limits,
        max_per_grab=9,
        hold_ms=1_000,
        late="retake",
        return_restores=True,
    )
    history.send(Open, "m:a", terms=terms)
    grabs = {}
    for user in ("u", "v"):
        history.send(Grab, "m:a", user=user, quantity=9)
        grabs[user] = f"c{history.commands}"
        history.send(Confirm, "m:a", grab=grabs[user], quantity=2)
    for later, paid, back in (
        (DAY_MS, 3, {}),
        (2 * DAY_MS, 2, {"u": 1, "v": 4}),
        (0, 1, {"v": 2}),
        (0, 1, {"u": 1}),
    ):
        history.now += later
        history.lines += map(encode_event, sweep(history.state, history.now))
        for user, grab in grabs.items():
            history.send(Confirm, "m:a", grab=grab, quantity=paid)
            if user in back:
                history.send(Return, "m:a", grab=grab, quantity=back[user])
    await project(system, history, random.Random(5))
    told: dict[tuple[str, str], int] = {}
    offer = history.state.offers["m:a"]
    for name, (window, count) in offer.counters.items():
        _, per, user = name.split("/")
        told[user, per] = count if window == window_of(per, offer.offsets, now) else 0  # type: ignore[arg-type]
    assert told["u", "day"] < told["u", "week"] <= told["u", "offer"]
    query = "SELECT value, per, counted FROM limits WHERE offer = 'm:a'"
    assert {(value, per): counted for value, per, counted in await rows(system, query)} == told


async def test_the_view_of_limits_counts_since_a_limit_was_added_and_in_the_zone_of_the_campaign(
    system: Settings,
) -> None:
    """Added by an amendment, changed, removed and added again, after a sister retired, in other zones: always
    what the rules say.
    """
    [(now,)] = await rows(system, "SELECT (extract(epoch FROM now()) * 1000)::bigint")
    history = History(1)
    history.now = now - 1_000
    per_hour, week = Limit("user", "hour", 90, "campaign"), Limit("user", "week", 90, "campaign")
    mine, all_time = Limit("user", "day", 90), Limit("user", "offer", 90)
    zones = ("Australia/Lord_Howe", "Asia/Kathmandu", "America/St_Johns")
    limits = ((per_hour, week), (all_time, week), (mine, per_hour))
    for name, zone, wanted in zip("abc", zones, limits, strict=True):
        terms = StockTerms(
            issuer="shop", total=400, limits=wanted, max_per_grab=9, timezone=zone, retire_after_ms=1
        )
        history.send(Open, f"m:{name}", terms=terms)

    def grab(offer: str) -> None:
        history.send(Grab, offer, user="u", quantity=2)

    for offer in ("m:a", "m:b", "m:c"):
        grab(offer)
    changes = [
        ("m:b", ()), ("m:b", (all_time, mine)), ("m:c", (mine, week)),
        ("m:c", (Limit("user", "day", 50), week)),
        ("m:b", (Limit("user", "day", 90, "campaign"), all_time)), ("m:c", (per_hour,)),
        ("m:c", (mine, per_hour, week)),
    ]  # fmt: skip
    for offer, changed in changes:
        history.send(Amend, offer, changes=Changes(limits=changed))
        for one in ("m:a", "m:b", "m:c"):
            grab(one)
    history.send(Close, "m:a")
    history.now = now - 500
    history.lines += map(encode_event, sweep(history.state, history.now))
    assert "m:a" in history.state.retired
    history.now = now
    grab("m:b")
    await project(system, history, random.Random(3))
    found = {
        row[:4]: row[4]
        for row in await rows(system, "SELECT offer, by, per, scope, \"left\" FROM limits WHERE value = 'u'")
    }
    told = {}
    for offer in ("m:b", "m:c"):
        # The rules say what is left behind a grab; it is decided in a state of its own.
        answer = decide(deepcopy(history.state), Grab(id="now", offer=offer, user="u"), history.now).answer
        told |= {(offer, one.by, one.per, one.scope): one.left + 1 for one in answer.limits}
    assert found == told


async def test_the_view_of_limits_begins_a_campaign_anew_where_redis_does_within_one_millisecond(
    system: Settings,
) -> None:
    """A shard's time stands still while its server's clock is set back. Of two campaigns one has gone when
    its next offer opens, the other has not: by their times nobody can tell.
    """
    [(now,)] = await rows(system, "SELECT (extract(epoch FROM now()) * 1000)::bigint")
    history = History(1)
    history.now = now - 10
    limits = (Limit("user", "offer", 9, "campaign"), Limit("user", "week", 9, "campaign"))
    terms = StockTerms(issuer="shop", total=40, limits=limits, max_per_grab=9, retire_after_ms=1)
    for offer in ("gone:b", "there:b"):
        history.send(Open, offer, terms=terms)
        history.send(Grab, offer, user="u", quantity=5)
        history.send(Close, offer)
    history.now = now
    history.send(Open, "there:a", terms=terms)
    history.lines += map(encode_event, sweep(history.state, history.now))
    assert set(history.state.retired) == {"gone:b", "there:b"}
    history.send(Open, "gone:a", terms=terms)
    for offer in ("gone:a", "there:a"):
        history.send(Grab, offer, user="u", quantity=2)
    await project(system, history, random.Random(3))
    assert await rows(
        system,
        "SELECT count(*) FROM offers WHERE greatest(opened_at, retired_at) = (SELECT max(at) FROM audit)",
    ) == [(4,)]
    told = {}
    for offer in ("gone:a", "there:a"):
        answer = decide(deepcopy(history.state), Grab(id="now", offer=offer, user="u"), history.now).answer
        told |= {(offer, one.per): one.left + 1 for one in answer.limits}
    assert (told["gone:a", "week"], told["there:a", "week"]) == (7, 2)
    assert {row[:2]: row[2] for row in await rows(system, 'SELECT offer, per, "left" FROM limits')} == told
