"""Scenes: short histories of one offer that hostile traffic plays too seldom, told step by step. In addition
to the traffic of a plan, some callers play one.

Each needs several rare commands in one order: a payment that comes again after its campaign has gone, say.
What goes wrong meanwhile is for the faults of the plan.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from grabstream.models.calendar import HOUR_MS
from grabstream.models.commands import AnyCommand, Close, Confirm, Grab, Load, Open, Return
from grabstream.models.identifiers import shard_of
from grabstream.models.offers import CouponTerms, EnvelopeTerms, Limit, StockTerms

#: How long the sweeper may take for what is due, in virtual seconds: it comes every 0.9 s.
SWEPT_SECONDS: Final = 2.5
#: Grabs of each offer of neighbouring shards: more than a decider has calls in flight.
GRABS: Final = 12
#: Pairs of users with one id.
PAIRS: Final = 12


class Moment(NamedTuple):
    """What happens in a scene: after a gap, commands are sent, or time passes."""

    commands: Sequence[AnyCommand] = ()
    gap_seconds: float = 0.05
    pass_ms: int = 0


class _Stage:
    """The offer of a scene: the only one of its campaign."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.offer = f"scene{draw.randrange(1_000)}"
        self._ids = 0

    def command(self, kind: Callable[..., Any], **fields: Any) -> Any:
        """A command with its own id about the offer."""
        self._ids += 1
        return kind(**{"id": f"{self.offer}:{self._ids}", "offer": self.offer} | fields)

    def sold(self, **terms: Any) -> Open:
        """Opens an offer of stock."""
        made: Any = self.command(Open, terms=StockTerms(**{"issuer": "scene", "total": 5} | terms))
        assert isinstance(made, Open)
        return made


def _held_codes_at_the_close(stage: _Stage) -> list[Moment]:
    """Coupons with codes are confirmed after their offer has closed."""
    terms = CouponTerms(issuer="scene", total=3, codes=True, hold_ms=60_000)
    grabs = [stage.command(Grab, user=f"u{number}") for number in range(2)]
    codes = stage.command(Load, what="codes", chunk=1, chunks=1, items=("c1", "c2", "c3"))
    return [
        Moment([stage.command(Open, terms=terms)]),
        Moment([codes]),
        Moment(grabs),
        Moment([stage.command(Close)]),
        Moment([stage.command(Confirm, grab=grabs[stage.draw.randrange(2)].id)]),
    ]


def _payment_after_the_campaign(stage: _Stage) -> list[Moment]:
    """A payment comes again when the last offer of its campaign has retired."""
    grab = stage.command(Grab, user="u")
    paid = {"grab": grab.id, "payment": "scene:p", "paid": 7, "currency": "CNY"}
    return [
        Moment([stage.sold(price=7, currency="CNY", hold_ms=60_000, retire_after_ms=1)]),
        Moment([grab]),
        Moment([stage.command(Confirm, **paid)]),
        Moment([stage.command(Close)]),
        Moment([stage.command(Confirm, **paid)], SWEPT_SECONDS),
    ]


def _units_taken_again_in_the_next_window(stage: _Stage) -> list[Moment]:
    """A late payment takes units again in another window than that of units which the grab has kept; they are
    returned, and the user takes as many as the limit leaves.
    """
    terms = {
        "total": 20, "max_per_grab": 3, "hold_ms": 1_000, "late": "retake", "return_restores": True,
        "limits": (Limit("user", "hour", 3),),
    }  # fmt: skip
    grab = stage.command(Grab, user="u", quantity=3)
    return [
        Moment([stage.sold(**terms)]),
        Moment([grab]),
        Moment([stage.command(Confirm, grab=grab.id, quantity=1)]),
        Moment(pass_ms=HOUR_MS),
        Moment([stage.command(Confirm, grab=grab.id, quantity=2)], stage.draw.choice((0.05, SWEPT_SECONDS))),
        Moment([stage.command(Return, grab=grab.id, quantity=2)]),
        Moment([stage.command(Grab, user="u", quantity=3)]),
    ]


def of_neighbours(draw: random.Random, shards: int) -> list[Moment]:
    """Grabs of an offer in each shard, in turn."""
    stages: list[_Stage] = []
    while len(stages) < shards:
        stage = _Stage(draw)
        if shard_of(stage.offer, shards) == len(stages):
            stages.append(stage)
    grabs = [stage.command(Grab, user=f"u{turn}") for turn in range(GRABS) for stage in stages]
    return [
        *(Moment([stage.sold(total=GRABS, hold_ms=None)]) for stage in stages),
        *(Moment([grab], 0.1) for grab in grabs),
    ]


def of_one_id(draw: random.Random) -> list[Moment]:
    """Pairs of users grab parts of an envelope, each pair under one id."""
    stage = _Stage(draw)
    terms = EnvelopeTerms(issuer="scene", funding="f", asset="CNY", total=10_000, parts=100)
    pairs = [
        [stage.command(Grab, id=f"{stage.offer}:pair{pair}", user=f"u{pair}{name}") for name in "ab"]
        for pair in range(PAIRS)
    ]
    return [Moment([stage.command(Open, terms=terms)]), *(Moment(pair, 0.1) for pair in pairs)]


SCENES: Final = (
    _held_codes_at_the_close,
    _payment_after_the_campaign,
    _units_taken_again_in_the_next_window,
)


def scene_of(draw: random.Random) -> list[Moment]:
    """One of the scenes."""
    return draw.choice(SCENES)(_Stage(draw))
