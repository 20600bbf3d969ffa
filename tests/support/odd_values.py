"""Hypothesis strategies for input from outside: odd texts and numbers, documents with one wrong value,
damaged bytes, and commands made from arbitrary Python values.
"""

import json
from typing import Any, Final

from hypothesis import strategies as st

from grabstream.models.commands import Adjust, Amend, Confirm, Grab, Load, Open, Redeem, Return
from grabstream.models.entries import Entry
from grabstream.models.offers import Changes, CouponTerms, EnvelopeTerms, Hours, Limit, StockTerms

CODEPOINTS: Final = st.characters()
ODD_TEXTS: Final = st.one_of(
    st.text(CODEPOINTS, max_size=80),
    st.sampled_from(
        (
            "",
            "\0",
            "\ud800",
            "\x85",
            "\u2028",
            "x" * 5_000,
            "é" * 300,
            "🧧" * 300,
            '"' * 70,
            "\\" * 70,
            "null",
            "1e3",
            "-0",
            "*",
            "x/y",
        )
    ),
)
ODD_NUMBERS: Final = st.one_of(
    st.integers(),
    st.sampled_from((0, -1, 1, 10**13, 10**13 + 1, 2**53, 2**63, 2**64, 10**30, 10**400)),
    st.floats(),
    st.booleans(),
    st.none(),
)
ODD_VALUES: Final = st.recursive(
    st.one_of(ODD_TEXTS, ODD_NUMBERS),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(ODD_TEXTS, inner, max_size=5)),
    max_leaves=12,
)


def structured(value: Any) -> st.SearchStrategy[Any]:
    """A JSON value, or a copy of it in which some parts are replaced, removed or added."""
    if isinstance(value, dict):
        same = st.fixed_dictionaries({name: structured(member) for name, member in value.items()})
        fewer = st.sampled_from(sorted(value)).map(
            lambda removed: {name: member for name, member in value.items() if name != removed}
        )
        more = st.tuples(ODD_TEXTS, ODD_VALUES).map(lambda pair: {**value, pair[0]: pair[1]})
        return st.one_of(same, fewer, more) if value else more
    if isinstance(value, list):
        return st.one_of(
            st.just(value),
            st.lists(structured(value[0]), max_size=4) if value else st.just(value),
            ODD_VALUES,
        )
    return st.one_of(st.just(value), st.just(value), st.just(value), ODD_TEXTS, ODD_NUMBERS)


def encoded(value: Any) -> bytes:
    """JSON as Python writes it, with NaN and single halves of surrogate pairs."""
    return json.dumps(value).encode()


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Bytes of which some are removed, repeated or replaced."""
    raw = draw(whole)
    for _ in range(draw(st.integers(0, 3))):
        at, to = sorted((draw(st.integers(0, len(raw))), draw(st.integers(0, len(raw)))))
        raw = draw(
            st.sampled_from(
                (raw[:at] + raw[to:], raw[:to] + raw[at:], raw[:at] + draw(st.binary(max_size=8)) + raw[at:])
            )
        )
    return raw


# -- documents of commands ----------------------------------------------------------------------------------

ENVELOPE: Final = {
    "kind": "envelope",
    "issuer": "a",
    "funding": "f",
    "asset": "CNY",
    "total": 100,
    "parts": 10,
    "title": "t",
    "hours": [{"from": "10:00"}],
}
STOCK: Final = {
    "kind": "stock",
    "issuer": "a",
    "total": 9,
    "price": 5,
    "currency": "CNY",
    "hold_ms": 1000,
    "limits": [{"by": "user", "per": "day", "max": 1}],
    "hours": [{"weekdays": ["mon", "fri"], "from": "10:00", "until": "24:00"}],
    "timezone": "Europe/Berlin",
}
COMMANDS: Final[list[dict[str, Any]]] = [
    {"type": "grab", "id": "i", "offer": "o", "user": "u"},
    {
        "type": "grab",
        "id": "i",
        "offer": "o",
        "user": "u",
        "quantity": 2,
        "attributes": {"card": "1"},
        "ticket": "t",
        "basket": "b",
        "wait": False,
        "metadata": {"form_id": "f"},
    },
    {"type": "open", "id": "i", "offer": "o", "terms": ENVELOPE},
    {"type": "open", "id": "i", "offer": "o", "terms": STOCK, "operator": "p"},
    {
        "type": "amend",
        "id": "i",
        "offer": "o",
        "changes": {"title": "t", "limits": [{"by": "user", "per": "hour", "max": 2}], "total": 7},
    },
    {
        "type": "load",
        "id": "i",
        "offer": "o",
        "what": "audience",
        "chunk": 1,
        "chunks": 2,
        "items": ["a", "b"],
    },
    {"type": "load", "id": "i", "offer": "o", "what": "codes", "chunk": 1, "chunks": 2, "items": ["a", "b"]},
    {
        "type": "adjust",
        "id": "i",
        "offer": "o",
        "transfers": [{"asset": "CNY", "debit": "issuer:a", "credit": "wallet:b", "amount": 1}],
        "reason": "r",
        "approved_by": "p",
    },
    {
        "type": "confirm",
        "id": "i",
        "offer": "o",
        "grab": "g",
        "payment": "p",
        "paid": 5,
        "currency": "CNY",
        "quantity": 1,
    },
    {"type": "return", "id": "i", "offer": "o", "grab": "g", "reason": "r"},
    {"type": "redeem", "id": "i", "offer": "o", "grab": "g", "order": "x", "quantity": 1},
    {"type": "close", "id": "i", "offer": "o"},
]
of_command = st.sampled_from(COMMANDS).flatmap(structured)


# -- objects made in Python ----------------------------------------------------------------------------------

odd: Final[st.SearchStrategy[Any]] = st.one_of(st.sampled_from(("i", "o", "x" * 64)), ODD_TEXTS)
number: Final[st.SearchStrategy[Any]] = st.one_of(st.integers(0, 10), ODD_NUMBERS)
limit = st.builds(Limit, odd, odd, number, odd)
hour = st.builds(
    Hours, st.lists(st.one_of(st.sampled_from(("mon", "sun")), ODD_TEXTS), max_size=9).map(tuple), odd, odd
)
common: Final[dict[str, Any]] = {
    "issuer": odd,
    "title": odd,
    "total": number,
    "opens_at": number,
    "closes_at": number,
    "timezone": st.one_of(st.just("UTC"), odd),
    "hours": st.lists(hour, max_size=3).map(tuple),
    "audience": st.one_of(st.just("everyone"), odd),
    "retire_after_ms": number,
}
pieces: Final[dict[str, Any]] = {
    **common,
    "limits": st.lists(limit, max_size=3).map(tuple),
    "max_per_grab": number,
    "take": st.one_of(st.just("all"), odd),
    "price": number,
    "currency": st.one_of(st.none(), st.just("CNY"), odd),
    "hold_ms": number,
    "extensions": number,
    "grace_ms": number,
}
terms = st.one_of(
    st.builds(
        EnvelopeTerms,
        **common,
        funding=odd,
        asset=st.one_of(st.just("CNY"), odd),
        parts=number,
        min=number,
        max=number,
        seed=st.none() | odd,
    ),
    st.builds(CouponTerms, **pieces, codes=st.booleans()),
    st.builds(StockTerms, **pieces, asset=st.none() | odd),
)
of_offer: Final[dict[str, Any]] = {"id": odd, "offer": odd, "operator": st.none() | odd}
of_grab: Final[dict[str, Any]] = {"id": odd, "offer": odd, "grab": odd}
of_python: Final[st.SearchStrategy[Any]] = st.one_of(
    st.builds(Open, **of_offer, terms=terms),
    st.builds(
        Grab,
        id=odd,
        offer=odd,
        user=odd,
        quantity=number,
        attributes=st.dictionaries(odd, odd, max_size=10),
        ticket=st.none() | odd,
        basket=odd,
        metadata=st.none() | st.dictionaries(odd, odd, max_size=18) | odd,
    ),
    st.builds(
        Amend,
        **of_offer,
        changes=st.builds(
            Changes, title=odd, total=number, limits=st.lists(limit, max_size=2).map(tuple), hold_ms=number
        ),
    ),
    st.builds(
        Load,
        **of_offer,
        what=st.sampled_from(("codes", "audience", "x")),
        chunk=number,
        chunks=number,
        items=st.lists(odd, max_size=4).map(tuple),
    ),
    st.builds(
        Adjust,
        **of_offer,
        transfers=st.lists(st.builds(Entry, odd, odd, odd, number), max_size=3).map(tuple),
        reason=odd,
        approved_by=odd,
    ),
    st.builds(
        Confirm, **of_grab, payment=st.none() | odd, paid=number, currency=st.none() | odd, quantity=number
    ),
    st.builds(Return, **of_grab, quantity=number, reason=odd),
    st.builds(Redeem, **of_grab, order=odd, quantity=number),
)
