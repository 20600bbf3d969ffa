"""The crowd: the envelopes, and the grabs of users, their order and number. All follows from one seed."""

import random
from collections.abc import Iterator
from typing import Final, NamedTuple

from grabstream.models.commands import Grab, Open
from grabstream.models.offers import Draw, EnvelopeTerms
from grabstream.models.splitting import LAWS, Law

DRAWS: Final[tuple[Draw, ...]] = ("ahead", "at_grab")
SHARE_OF_DOUBLE_CLICKS: Final = 0.08
SHARE_OF_SECOND_TRIES: Final = 0.08
SHARE_OF_USERS_WITHOUT_PART: Final = 0.15
SECOND_TRY: Final = "-again"
#: The share of the parts that users want of an envelope with a deadline.
SHARE_WANTED_BEFORE_DEADLINE: Final = 0.6


class Envelope(NamedTuple):
    """An envelope of the rehearsal. `people` distinct users want a part of it.

    It closes `deadline_ms` after it was opened, or, without a deadline, with its last part.
    """

    open: Open
    people: int
    deadline_ms: int | None = None

    @property
    def offer(self) -> str:
        """The offer's id."""
        return self.open.offer

    @property
    def terms(self) -> EnvelopeTerms:
        """The offer's terms."""
        assert isinstance(self.open.terms, EnvelopeTerms)
        return self.open.terms

    @property
    def parts_wanted(self) -> int:
        """How many parts are taken when all users arrive before the deadline."""
        return min(self.people, self.terms.parts)


def envelopes(seed: int, big_parts: int, small: int, small_parts: int, deadline_ms: int) -> list[Envelope]:
    """One envelope of `big_parts`, `small` envelopes of `small_parts` each with all laws and draws, and two
    more of `small_parts` with a deadline.
    """
    chosen = [_envelope(seed, "big", big_parts, "double_mean", "ahead", None)]
    for number in range(small):
        law, draw = LAWS[number % len(LAWS)], DRAWS[number // len(LAWS) % len(DRAWS)]
        chosen.append(_envelope(seed, f"small-{number}", small_parts, law, draw, None))
    for number in range(2):
        chosen.append(
            _envelope(seed, f"deadline-{number}", small_parts, "bounded", DRAWS[number], deadline_ms)
        )
    return chosen


def _envelope(seed: int, name: str, parts: int, law: Law, draw: Draw, deadline_ms: int | None) -> Envelope:
    offer = f"rehearsal-{seed}-{name}"
    total = parts * 100 + parts // 3
    terms = EnvelopeTerms(
        issuer=f"issuer-{name}",
        funding=f"payment-{seed}-{name}",
        asset="CNY",
        total=total,
        parts=parts,
        law=law,
        draw=draw,
        max=400 if law == "bounded" else None,
        title=f"Rehearsal {name}",
    )
    share = 1 + SHARE_OF_USERS_WITHOUT_PART if deadline_ms is None else SHARE_WANTED_BEFORE_DEADLINE
    return Envelope(Open(id=f"open-{offer}", offer=offer, terms=terms), int(parts * share), deadline_ms)


def attempts(seed: int, chosen: list[Envelope]) -> list[Grab]:
    """All attempts in the order in which they are sent: one of each user, and further ones of some users, by
    a double click or a second try.
    """
    random_ = random.Random(seed)
    grabs: list[Grab] = []
    for envelope in chosen:
        for number in range(envelope.people):
            grabs.extend(_user_grabs(random_, envelope.offer, number))
    # In any order: a double click may be sent before its first click, or through another door.
    random_.shuffle(grabs)
    return grabs


def person_of(grab: str) -> str:
    """The id of the first attempt of the user who made this attempt."""
    return grab.removesuffix(SECOND_TRY)


def _user_grabs(random_: random.Random, offer: str, number: int) -> Iterator[Grab]:
    first = Grab(id=f"grab-{offer[10:]}-{number}", offer=offer, user=f"user-{number}")
    yield first
    if random_.random() < SHARE_OF_DOUBLE_CLICKS:
        yield first
    if random_.random() < SHARE_OF_SECOND_TRIES:
        yield Grab(id=f"{first.id}{SECOND_TRY}", offer=offer, user=first.user)
