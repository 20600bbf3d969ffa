"""Hypothesis strategies: terms of every kind, and commands many of which can be executed."""

from typing import Any

from hypothesis import strategies as st

from grabstream.crypto.tickets import TicketKeys, sign
from grabstream.models.commands import (
    Adjust,
    Amend,
    AnyCommand,
    Close,
    Confirm,
    Extend,
    Grab,
    Load,
    Open,
    Pause,
    Redeem,
    Release,
    Resume,
    Return,
    Unredeem,
)
from grabstream.models.entries import Entry
from grabstream.models.identifiers import campaign_of
from grabstream.models.offers import Changes, CouponTerms, EnvelopeTerms, Hours, Limit, StockTerms
from tests.support.shards import NOW

OFFERS = ("c:a", "c:b", "d", "e", "f")
PIECES = ("p:a", "p:b", "p:c", "q", "r")
USERS = tuple(f"u{number}" for number in range(9))
# So many that equal ids are rarely drawn by chance: repeats come from commands that are sent again.
IDS = tuple(f"id{number}" for number in range(500))
ZONES = ("UTC", "Asia/Shanghai", "Europe/Berlin", "Australia/Lord_Howe", "America/St_Johns")
HOUR = 3_600_000
TICKET_SECRET = bytes(range(32))
TICKET_KEYS = {"t": TICKET_SECRET}
TICKETS = TicketKeys(TICKET_KEYS)
#: Times that pass between steps; the clock sometimes goes back.
PASSES_MS = (
    *(0, 1, 7, 500, 999, 1_000) * 4,
    *(3_000, 6_000, 60_000, -2_000) * 2,
    HOUR,
    3 * HOUR,
    11 * HOUR,
    24 * HOUR,
    7 * 24 * HOUR,
)

ids = st.sampled_from(IDS)
offers = st.sampled_from(OFFERS)
pieces = st.sampled_from(PIECES)
#: For grabs; the same texts in two orders are the same.
metadatas = st.sampled_from((*(None,) * 9, {"form_id": "f", "b": '"é'}, {"b": '"é', "form_id": "f"}, {}))
grabs = st.builds(
    Grab,
    id=ids,
    offer=offers,
    user=st.sampled_from(USERS),
    quantity=st.sampled_from((1, 1, 1, 1, 1, 2)),
    attributes=st.sampled_from(({}, {}, {}, {"card": "c:1"})),
    metadata=metadatas,
)
operators = st.sampled_from((None, None, "olga"))
offer_commands = st.one_of(
    *(st.builds(kind, id=ids, offer=offers, operator=operators) for kind in (Pause, Resume, Close))
)


@st.composite
def envelopes(draw: Any) -> Open:
    parts = draw(st.integers(1, 8))
    least = draw(st.integers(1, 3))
    law = draw(st.sampled_from(("double_mean", "bounded", "equal")))
    most = draw(st.integers(least, 40)) if law == "bounded" and draw(st.booleans()) else None
    total = draw(st.integers(parts * least, parts * (most or 10**6)))
    opens_at = draw(st.none() | st.none() | st.integers(NOW, NOW + 3_000))
    closes_at = draw(st.none() | st.integers(NOW + 500, NOW + 9_000))
    if opens_at is not None and closes_at is not None and closes_at <= opens_at:
        closes_at = opens_at + 1
    terms = EnvelopeTerms(
        issuer="alice", funding="pay", asset="CNY", total=total, parts=parts, min=least, max=most, law=law,
        draw=draw(st.sampled_from(("ahead", "at_grab"))), seed=f"{draw(st.integers(0, 2**32)):032x}",
        opens_at=opens_at, closes_at=closes_at, title=draw(st.sampled_from(("", 'a "b" \\ 你好'))),
        audience=draw(st.sampled_from(("everyone", "everyone", "everyone", "list", "ticket"))),
        hours=draw(st.sampled_from(((), (), ALWAYS_BUT_NOON))), timezone=draw(st.sampled_from(ZONES)),
        retire_after_ms=draw(st.sampled_from((3_000, 24 * HOUR, 7 * 24 * HOUR))),
    )  # fmt: skip
    return Open(id=draw(ids), offer=draw(offers), terms=terms, operator=draw(operators))


ALWAYS_BUT_NOON = (
    Hours(("mon", "tue", "wed", "thu", "fri"), "00:00", "12:00"),
    Hours(until="24:00", from_="13:30"),
)

MORNINGS = (Hours(from_="06:30", until="10:00"),)

limits = st.lists(
    st.builds(
        Limit,
        by=st.sampled_from(("user", "user", "user", "card")),
        per=st.sampled_from(("offer", "hour", "day", "week")),
        max=st.integers(1, 6),
        scope=st.sampled_from(("offer", "offer", "campaign")),
    ),
    max_size=3,
    unique_by=lambda limit: (limit.name, limit.scope),
).map(tuple)


@st.composite
def piece_terms(draw: Any, lively: bool = False) -> CouponTerms | StockTerms:
    """Terms of coupon and stock offers; with `lively`, open at once and without a closing time."""
    audience = draw(st.sampled_from(("everyone",) * 9 + ("list", "ticket", "ticket")))
    opens_at = (
        draw(st.sampled_from((None, NOW + 1))) if lively else draw(st.sampled_from((None, None, NOW + 500)))
    )
    if lively and audience == "list":
        opens_at = NOW + 1  # its list is loaded before it opens
    held = draw(st.sampled_from((True, True, False)))
    late = draw(st.sampled_from(("refuse", "grace", "retake"))) if held else "refuse"
    priced = held and draw(st.booleans())
    common: dict[str, Any] = {
        "issuer": "alice",
        "total": draw(st.integers(1, 12)),
        "limits": draw(limits) if draw(st.booleans()) else (),
        "max_per_grab": draw(st.sampled_from((1, 2, 3, 3, 3))),
        "take": draw(st.sampled_from(("all", "up_to"))),
        "hold_ms": draw(st.sampled_from((1_000, 6_000, HOUR, 24 * HOUR))) if held else None,
        "extensions": draw(st.integers(0, 2)) if held else 0,
        "late": late,
        "grace_ms": 999 if late == "grace" else 0,
        "price": draw(st.sampled_from((0, 7, 250))) if priced else None,
        "currency": "CNY" if priced else None,
        "return_restores": draw(st.booleans()),
        "valid_until": draw(st.sampled_from((None, NOW + 6_000, NOW + 48 * HOUR))),
        "waiting_list": held and draw(st.booleans()),
        "timezone": draw(st.sampled_from(ZONES)),
        "hours": draw(st.sampled_from(((), (), (), ALWAYS_BUT_NOON, MORNINGS))),
        "audience": audience,
        "opens_at": opens_at,
        "closes_at": None if lively else draw(st.sampled_from((None, None, NOW + 9_000, NOW + 40 * HOUR))),
        "retire_after_ms": draw(st.sampled_from((3_000, 24 * HOUR, 7 * 24 * HOUR))),
    }
    if draw(st.booleans()):
        return StockTerms(**common)
    return CouponTerms(**common, codes=draw(st.sampled_from((False, False, False, True))))


piece_opens = st.builds(Open, id=ids, offer=pieces, terms=piece_terms())
opens = st.one_of(envelopes(), piece_opens, piece_opens)
lively_opens = st.tuples(*(piece_terms(lively=True) for _ in PIECES)).map(
    lambda terms: [
        Open(id=f"open-{name}", offer=name, terms=of_offer)
        for name, of_offer in zip(PIECES, terms, strict=True)
    ]
)

quantities = st.sampled_from((None, None, 1, 1, 2, 3))
payments = st.one_of(
    st.just(None),
    *(st.integers(0, 10**6).map(lambda number: f"pay{number}"),) * 4,
    st.sampled_from(("p1", "p2", 'p/#" \\é', "p" * 254 + '"')),
)


@st.composite
def confirms(draw: Any, offer: str, grab: str, due: int) -> Confirm:
    payment = draw(payments)
    paid = 0 if payment is None else draw(st.sampled_from((due, due, due, due, due, due, 0, 7, 250, 500)))
    currency = draw(st.sampled_from(("CNY", "CNY", "CNY", "EUR"))) if paid else None
    quantity = draw(quantities) if not due else None
    return Confirm(
        id=draw(ids), offer=offer, grab=grab, payment=payment, paid=paid, currency=currency, quantity=quantity
    )


@st.composite
def grab_commands(draw: Any, offer: str, grab: str, due: int) -> AnyCommand:
    """A command about a grab that exists or not; `due` is its price in minor units."""
    kind = draw(
        st.sampled_from(
            (Confirm, Confirm, Confirm, Release, Extend, Return, Return, Redeem, Redeem, Unredeem)
        )
    )
    about: dict[str, Any] = {"id": draw(ids), "offer": offer, "grab": grab}
    if kind is Confirm:
        return draw(confirms(offer, grab, due))
    if kind is Return:
        return Return(**about, quantity=draw(quantities), reason=draw(st.sampled_from(("", 'too "small"'))))
    if kind is Redeem:
        return Redeem(**about, order=draw(st.sampled_from(("o1", "o2"))), quantity=draw(st.integers(1, 2)))
    if kind is Unredeem:
        return Unredeem(**about, order=draw(st.sampled_from(("o1", "o2"))))
    return kind(**about)


def ticket_for(user: str, offer: str, expires_at_ms: int, once: str) -> str:
    return sign("t", TICKET_SECRET, user=user, offer=offer, expires_at_ms=expires_at_ms, once_id=once)


@st.composite
def piece_grabs(draw: Any, now: int) -> Grab:
    offer, user = draw(st.sampled_from((*PIECES, *PIECES, *OFFERS))), draw(st.sampled_from(USERS))
    ticket = None
    if draw(st.booleans()):
        expires = draw(st.sampled_from((now + 100_000, now + 100_000, now + 1_000)))
        audience = draw(st.sampled_from((offer, campaign_of(offer))))
        ticket = ticket_for(
            user, audience, expires // 1000 * 1000, draw(st.sampled_from(("", "", "once1", "once2", "once3")))
        )
    return Grab(
        id=draw(ids), offer=offer, user=user, quantity=draw(st.sampled_from((1, 1, 1, 2,
        3))) if offer in PIECES else 1,
        attributes=draw(st.sampled_from(({"card": "c:1"}, *({"card": f"c:{n}"} for n in range(6)),
        {"card": "c:2", "a": "b"}, {}))),
        ticket=ticket, wait=draw(st.booleans()), metadata=draw(metadatas),
    )  # fmt: skip


@st.composite
def baskets(draw: Any) -> list[Grab]:
    """The grabs of one basket in one campaign, with different ids."""
    names = draw(st.lists(ids, min_size=2, max_size=4, unique=True))
    basket = draw(st.sampled_from(("b1", "b2")))
    return [
        Grab(
            id=name, offer=draw(st.sampled_from(("p:a", "p:b", "p:c"))), user=draw(st.sampled_from(USERS)),
            basket=basket,
            attributes={"card": draw(st.sampled_from(("c:1", "c:2", "c:3")))},
            quantity=draw(st.sampled_from((1, 1, 2))), metadata=draw(metadatas),
        )
        for name in names
    ]  # fmt: skip


@st.composite
def changes(draw: Any, now: int) -> Changes:
    possible = {
        "title": st.just("another"),
        "total": st.integers(1, 9),
        "opens_at": st.just(now + 500),
        "closes_at": st.sampled_from((now + 9_000, now + HOUR, now - 1)),
        "limits": limits,
        "max_per_grab": st.integers(1, 4),
        "price": st.sampled_from((1, 7)),
        "hold_ms": st.just(3_000),
        "extensions": st.integers(0, 3),
        "late": st.sampled_from(("refuse", "retake", "grace")),
        "grace_ms": st.sampled_from((0, 500)),
        "return_restores": st.booleans(),
        "valid_until": st.just(now + 5_000),
    }
    fields = draw(st.lists(st.sampled_from(sorted(possible)), min_size=1, max_size=2, unique=True))
    return Changes(**{field: draw(possible[field]) for field in fields})


@st.composite
def operations(draw: Any, now: int) -> AnyCommand:
    """A command of an operator, mostly about coupon and stock offers."""
    about: dict[str, Any] = {
        "id": draw(ids),
        "offer": draw(st.sampled_from((*PIECES, *PIECES, "e"))),
        "operator": draw(operators),
    }
    kind = draw(st.sampled_from((Amend, Amend, Amend, Load, Load, Adjust, Pause, Resume, Resume, Close)))
    if kind is Amend:
        return Amend(**about, changes=draw(changes(now)))
    if kind is Load:
        what = draw(st.sampled_from(("codes", "audience")))
        chunks = draw(st.sampled_from((1, 1, 2)))
        items = draw(
            st.lists(
                st.sampled_from(USERS if what == "audience" else CODES), min_size=1, max_size=5, unique=True
            )
        )
        return Load(**about, what=what, chunk=draw(st.integers(1, chunks)), chunks=chunks, items=tuple(items))
    if kind is Adjust:
        credit = draw(st.sampled_from(("wallet:u1", 'refund:p/#" \\é')))
        entry = Entry("CNY", "issuer:alice", credit, draw(st.integers(1, 10**13)))
        return Adjust(**about, transfers=(entry,), reason='a "mistake"', approved_by="boss")
    return kind(**about)


CODES = ("code 1", 'code "2"', "Ⅲ", "D-4")


@st.composite
def whole_lists(draw: Any, offer: str, total: int, what: str) -> list[Load]:
    """A complete list of codes or users, in one or two chunks."""
    items = USERS[:6] if what == "audience" else tuple(f"code {number}" for number in range(total))
    cut = draw(st.integers(1, len(items)))
    chunks = [items[:cut], items[cut:]] if cut < len(items) else [items]
    return [
        Load(
            id=f"load-{what}-{offer}-{number}",
            offer=offer,
            what=what,
            chunk=number,
            chunks=len(chunks),
            items=chunk,
        )  # type: ignore[arg-type]
        for number, chunk in enumerate(chunks, 1)
    ]
