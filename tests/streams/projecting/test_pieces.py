"""Read models of coupon and stock offers, from a long random history that the pure rules decided: the rows in
SQL must agree with the state of the rules.

The history is journaled in blocks of random sizes; a second run with other sizes must produce the same rows.
"""

import random
from collections.abc import Sequence
from copy import deepcopy
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

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
from grabstream.models.events import GrabGranted, GrabHeld, GrabQueued, decode_event, encode_event
from grabstream.models.offers import PAYMENTS_KNOWN_MS, Changes, Limit, StockTerms
from grabstream.models.rules import ShardState, decide, sweep
from grabstream.settings import Settings
from grabstream.workshop.rehearsal.stage import take_down
from tests.conftest import make_system
from tests.lua.histories.rows import GRAB_COLUMNS, OFFER_COLUMNS, differences
from tests.lua.histories.tables import limits_at
from tests.support.projecting import open_tables, rows
from tests.support.random_history import History, project, random_history

TABLES = {
    "offers": "offer", "grabs": "offer, grab", "accounts": "account, asset", "transfers": "shard, seq, leg",
    "balances": "user_id, asset",
    "payments": "payment", "audit": "shard, seq", "operations": "shard, seq", "waiting": "offer, position",
}  # fmt: skip


@pytest.mark.every_change("read models against the rules")
async def test_read_models_agree_with_the_rules(system: Settings, prefix: str) -> None:
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
    offers, grabs = [
        await rows(system, f"SELECT {columns} FROM {view}")
        for columns, view in ((OFFER_COLUMNS, "offers"), (GRAB_COLUMNS, "grabs"))
    ]
    assert differences(state, history.lines, offers, grabs) == []
    await _check_waiting(system, state)
    await _check_payments(system, state)
    await _check_metadata(system, history.lines)
    assert not await rows(system, "SELECT asset FROM accounts GROUP BY asset HAVING sum(posted) <> 0")
    holds = await rows(
        system,
        "SELECT coalesce(sum(held), 0) FROM balances WHERE asset LIKE 'sku:%' OR asset LIKE 'coupon:%'",
    )
    assert holds == [(sum(offer.held for offer in state.offers.values()),)]
    # A second system with blocks of other sizes: the same rows.
    again = system.model_copy(update={"prefix": prefix + "x", "schema_": prefix + "x"})
    await make_system(again)
    try:
        await project(again, history, random.Random(2))
        for table, order in TABLES.items():
            query = f"SELECT * FROM {table} ORDER BY {order}"
            assert await rows(system, query) == await rows(again, query), table
    finally:
        await take_down(again)


async def _check_waiting(settings: Settings, state: ShardState) -> None:
    waiting = await rows(settings, "SELECT offer, grab FROM waiting ORDER BY offer, position")
    assert waiting == [(name, grab) for name in sorted(state.offers) for grab in state.offers[name].queue]


async def _check_metadata(settings: Settings, lines: Sequence[bytes]) -> None:
    made = [
        event for event in map(decode_event, lines) if isinstance(event, GrabGranted | GrabHeld | GrabQueued)
    ]
    expected = {(event.offer, event.grab): event.metadata for event in made}
    found = await rows(settings, "SELECT offer, grab, metadata FROM grabs")
    assert {row[:2]: row[2] for row in found} == expected
    assert len([metadata for metadata in expected.values() if metadata]) > 100
    served = [event for event in made if isinstance(event, GrabHeld) and event.waited]
    assert {event.metadata is None for event in served} == {True, False}


async def _check_payments(settings: Settings, state: ShardState) -> None:
    payments = await rows(settings, "SELECT payment, offer, grab, outcome FROM payments")
    assert {row[0]: row[1:3] for row in payments} == {
        name: (payment.offer, payment.grab) for (_, name), payment in state.payments.items()
    }
    by_account = dict(
        await rows(settings, "SELECT account, posted FROM accounts WHERE account LIKE 'refund:%'")
    )
    owed = await rows(
        settings, "SELECT payment, CASE state WHEN 'refund_due' THEN amount ELSE refunded END FROM payments"
    )
    assert {f"refund:{payment}": amount for payment, amount in owed if amount} == by_account


async def test_a_payment_id_used_again_after_its_campaign_was_forgotten_is_a_new_row(
    system: Settings,
) -> None:
    """The read model has a row for each use of the id, a refund reduces the row of its own payment, and all
    events are applied.
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
    payments = await rows(
        system, "SELECT payment, offer, state, outcome, refunded FROM payments ORDER BY seq"
    )
    assert payments == [
        ("p", "m:a", "served", "confirmed", 0), ("p", "m:b", "served", "confirmed", 5),
        ("p", "m:c", "refund_due", "no_such_offer", 0),
    ]  # fmt: skip
    assert not await rows(system, "SELECT * FROM stopped_shards")


async def test_view_limits_agrees_with_the_rules(system: Settings) -> None:
    """The units left of each limit now: grabs of another day and released units do not count; a limit per
    campaign counts all its offers.
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
    in_view = {
        (offer, by, per, value): left
        for offer, by, per, value, left in await rows(
            system, "SELECT offer, by, per, value, \"left\" FROM limits WHERE offer = 'm:a'"
        )
    }
    # The rules state the units left after a grab, which is decided now.
    history.now += 1
    decided = decide(
        history.state, Grab(id="now", offer="m:a", user="u", attributes={"card": "k"}), history.now
    )
    by_rules = {(limit.by, limit.per): limit.left + 1 for limit in decided.answer.limits}
    assert {(by, per): left for (_, by, per, _), left in in_view.items()} == by_rules


@pytest.mark.long
async def test_view_limits_counts_retaken_units_in_the_window_of_their_payment(
    system: Settings,
) -> None:
    """Some units of a grab are paid within the hold, some a day after it, some later still; and some of these
    are returned.
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
    for later, paid, returned in (
        (DAY_MS, 3, {}),
        (2 * DAY_MS, 2, {"u": 1, "v": 4}),
        (0, 1, {"v": 2}),
        (0, 1, {"u": 1}),
    ):
        history.now += later
        history.lines += map(encode_event, sweep(history.state, history.now))
        for user, grab in grabs.items():
            history.send(Confirm, "m:a", grab=grab, quantity=paid)
            if user in returned:
                history.send(Return, "m:a", grab=grab, quantity=returned[user])
    await project(system, history, random.Random(5))
    by_rules: dict[tuple[str, str], int] = {}
    offer = history.state.offers["m:a"]
    for name, (window, count) in offer.counters.items():
        _, per, user = name.split("/")
        is_current = window == window_of(per, offer.offsets, now)  # type: ignore[arg-type]
        by_rules[user, per] = count if is_current else 0
    # A week may have begun on any of these days.
    assert by_rules["u", "day"] <= by_rules["u", "week"] <= by_rules["u", "offer"]
    assert by_rules["u", "day"] < by_rules["u", "offer"]
    query = "SELECT value, per, counted FROM limits WHERE offer = 'm:a'"
    assert {(value, per): counted for value, per, counted in await rows(system, query)} == by_rules


@pytest.mark.long
async def test_view_limits_follows_amendments_and_the_zone_of_the_campaign(
    system: Settings,
) -> None:
    """Limits are added by an amendment, changed, removed and added again, also after another offer of the
    campaign has retired, with offers in several zones. The view always agrees with the rules.
    """
    [(now,)] = await rows(system, "SELECT (extract(epoch FROM now()) * 1000)::bigint")
    history = History(1)
    history.now = now - 1_000
    per_hour, week = Limit("user", "hour", 90, "campaign"), Limit("user", "week", 90, "campaign")
    day, all_time = Limit("user", "day", 90), Limit("user", "offer", 90)
    zones = ("Australia/Lord_Howe", "Asia/Kathmandu", "America/St_Johns")
    limits = ((per_hour, week), (all_time, week), (day, per_hour))
    for name, zone, of_offer in zip("abc", zones, limits, strict=True):
        terms = StockTerms(
            issuer="shop", total=400, limits=of_offer, max_per_grab=9, timezone=zone, retire_after_ms=1
        )
        history.send(Open, f"m:{name}", terms=terms)

    def grab(offer: str) -> None:
        history.send(Grab, offer, user="u", quantity=2)

    for offer in ("m:a", "m:b", "m:c"):
        grab(offer)
    changes = [
        ("m:b", ()), ("m:b", (all_time, day)), ("m:c", (day, week)),
        ("m:c", (Limit("user", "day", 50), week)),
        ("m:b", (Limit("user", "day", 90, "campaign"), all_time)), ("m:c", (per_hour,)),
        ("m:c", (day, per_hour, week)),
    ]  # fmt: skip
    for offer, changed in changes:
        history.send(Amend, offer, changes=Changes(limits=changed))
        for each in ("m:a", "m:b", "m:c"):
            grab(each)
    history.send(Close, "m:a")
    history.now = now - 500
    history.lines += map(encode_event, sweep(history.state, history.now))
    assert "m:a" in history.state.retired
    history.now = now
    grab("m:b")
    await project(system, history, random.Random(3))
    in_view = {
        row[:4]: row[4]
        for row in await rows(system, "SELECT offer, by, per, scope, \"left\" FROM limits WHERE value = 'u'")
    }
    by_rules = {}
    for offer in ("m:b", "m:c"):
        # The rules state the units left after a grab. It is decided in a copy of the state.
        answer = decide(deepcopy(history.state), Grab(id="now", offer=offer, user="u"), history.now).answer
        by_rules |= {(offer, limit.by, limit.per, limit.scope): limit.left + 1 for limit in answer.limits}
    assert in_view == by_rules


#: Zones, and local times before a window ends in a night in which the clock changes: within the day, over
#: midnight (so that midnight does not exist, or comes twice), by half an hour, or not at all.
NIGHTS = (
    ("Europe/Berlin", "2027-03-28T01:30"), ("Europe/Berlin", "2027-10-31T01:30"),
    ("America/Havana", "2027-11-06T23:30"), ("America/Havana", "2027-11-07T00:30"),
    ("America/Havana", "2027-03-13T23:30"), ("Australia/Lord_Howe", "2027-04-03T23:30"),
    ("Asia/Kathmandu", "2027-12-31T23:59"),
)  # fmt: skip


async def test_view_limits_says_until_when_as_answers_do(system: Settings) -> None:
    """Days have 23 to 25 hours; the view at the time of a grab has the time that the answer to it has."""
    history = History(1)
    limits = tuple(Limit("user", per, 9) for per in ("hour", "day", "week", "offer"))
    told: dict[str, tuple[int, dict[str, int | None]]] = {}
    times = {
        f"o{number}": round(datetime.fromisoformat(local).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1000)
        for number, (zone, local) in enumerate(NIGHTS)
    }
    for offer, now in sorted(times.items(), key=lambda one: one[1]):
        history.now = now
        zone = NIGHTS[int(offer[1:])][0]
        history.send(Open, offer, terms=StockTerms(issuer="shop", total=9, limits=limits, timezone=zone))
        grab = Grab(id="of-answer", offer=offer, user="u")
        answer = decide(deepcopy(history.state), grab, now).answer
        history.send(Grab, offer, user="u", quantity=1)
        told[offer] = now, {limit.per: limit.resets_at for limit in answer.limits}
    await project(system, history, random.Random(3))
    async with await open_tables(system) as connection:
        for offer, (now, by_answer) in told.items():
            await connection.execute(limits_at(now).encode())
            found = await connection.execute(
                "SELECT per, resets_at, extract(epoch FROM resets_time) * 1000 FROM limits_then "
                "WHERE offer = %s",
                (offer,),
            )
            in_view = {per: (at, time) for per, at, time in await found.fetchall()}
            assert in_view == {per: (at, at) for per, at in by_answer.items()}, NIGHTS[int(offer[1:])]
            await connection.execute("DROP VIEW limits_then")
    ends = {offer: by_answer["day"] for offer, (_, by_answer) in told.items()}
    assert ends["o2"] == times["o2"] + 30 * 60_000, "the first of two midnights"


@pytest.mark.long
async def test_view_limits_restarts_a_campaign_like_redis_within_one_millisecond(
    system: Settings,
) -> None:
    """A shard's time does not advance while its server's clock is set back. One of two campaigns is removed
    before its next offer opens, the other is not, and all events have the same time.
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
    by_rules = {}
    for offer in ("gone:a", "there:a"):
        answer = decide(deepcopy(history.state), Grab(id="now", offer=offer, user="u"), history.now).answer
        by_rules |= {(offer, limit.per): limit.left + 1 for limit in answer.limits}
    assert (by_rules["gone:a", "week"], by_rules["there:a", "week"]) == (7, 2)
    in_view = {row[:2]: row[2] for row in await rows(system, 'SELECT offer, per, "left" FROM limits')}
    assert in_view == by_rules
