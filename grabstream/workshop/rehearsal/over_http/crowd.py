"""The crowd of a shape: the arrivals of users, and their behaviour. All follows from the shape and one
seed.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, Literal, NamedTuple

from grabstream.models.commands import Grab, Open
from grabstream.models.offers import EnvelopeTerms
from grabstream.workshop.rehearsal.crowd import Envelope
from grabstream.workshop.rehearsal.over_http.shape import Shape

Kind = Literal["ordinary", "bots", "double_clicks", "slow", "vanishing"]

#: For an envelope without a number of parts: the share of its users who get one.
SHARE_SERVED: Final = 0.9
#: The mean of a part, in minor units.
MEAN_PART: Final = 100


class Visitor(NamedTuple):
    """A user who arrives `at_seconds` after the first moment, and all grabs that this user sends: of a bot
    many, else one.
    """

    at_seconds: float
    kind: Kind
    grabs: tuple[Grab, ...]


class Crowd(NamedTuple):
    """The users in the order in which they arrive, and the envelopes that they want a part of."""

    visitors: tuple[Visitor, ...]
    envelopes: tuple[Envelope, ...]


def crowd_of(shape: Shape, seed: int) -> Crowd:
    """The crowd of a shape. Arrivals are independent of each other (a Poisson process)."""
    random_ = random.Random(seed)
    offers = [f"rush-{seed}-{number}" for number in range(shape.offers)]
    visitors = tuple(
        _visitor(shape, random_, at_seconds, number, random_.choice(offers))
        for number, at_seconds in enumerate(_arrivals(shape, random_))
    )
    people = Counter(visitor.grabs[0].offer for visitor in visitors)
    return Crowd(visitors, tuple(_envelope(shape, seed, offer, people[offer]) for offer in offers))


def requests_of(shape: Shape, visitors: Sequence[Visitor]) -> int:
    """How many answers the visitors wait for."""
    answers = {
        "double_clicks": shape.double_clicks.connections,
        "vanishing": shape.vanishing.repeats,
    }
    return sum(len(visitor.grabs) * answers.get(visitor.kind, 1) for visitor in visitors)


def _arrivals(shape: Shape, random_: random.Random) -> Iterator[float]:
    """The times of arrivals, s. Arrivals at the highest rate are thinned out to the rate of their time."""
    highest = max(point.per_second for point in shape.arrivals)
    for before, after in pairwise(shape.arrivals):
        seconds = after.at_seconds - before.at_seconds
        rise = after.per_second - before.per_second
        passed = random_.expovariate(highest)
        while passed < seconds:
            if random_.random() * highest < before.per_second + rise * passed / seconds:
                yield before.at_seconds + passed
            passed += random_.expovariate(highest)


def _visitor(shape: Shape, random_: random.Random, at_seconds: float, number: int, offer: str) -> Visitor:
    kind = _kind_of(shape, random_.random())
    attempts = shape.bots.attempts if kind == "bots" else 1
    grabs = (
        Grab(id=f"rush-{number}-{attempt}", offer=offer, user=f"user-{number}") for attempt in range(attempts)
    )
    return Visitor(at_seconds, kind, tuple(grabs))


def _kind_of(shape: Shape, drawn: float) -> Kind:
    """The kind of a user, by a number between 0 and 1."""
    shares: tuple[tuple[Kind, float], ...] = (
        ("bots", shape.bots.share), ("double_clicks", shape.double_clicks.share),
        ("slow", shape.slow.share), ("vanishing", shape.vanishing.share),
    )  # fmt: skip
    for kind, share in shares:
        if drawn < share:
            return kind
        drawn -= share
    return "ordinary"


def _envelope(shape: Shape, seed: int, offer: str, people: int) -> Envelope:
    parts = shape.parts if shape.parts is not None else max(1, int(people * SHARE_SERVED))
    terms = EnvelopeTerms(
        issuer="issuer-rush",
        funding=f"payment-{offer}",
        asset="CNY",
        total=parts * MEAN_PART + parts // 3,
        parts=parts,
        title=f"Rehearsal {seed}",
    )
    return Envelope(Open(id=f"open-{offer}", offer=offer, terms=terms), people)
