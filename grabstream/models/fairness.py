"""Fairness of an envelope: recomputes every part from the events of the envelope alone, and states what that
proves. `tests/models/recompute.py` does the same without this project.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final, NamedTuple

from grabstream.models.beacon import Beacon, beacon_of, mixed, round_of
from grabstream.models.bounds import quoted
from grabstream.models.digests import HASHED, KEYED
from grabstream.models.events import AnyEvent, GrabGranted, OfferAmended, OfferClosed, OfferOpened
from grabstream.models.money import Invalid
from grabstream.models.offers import EnvelopeTerms, changes_of, terms_of
from grabstream.models.splitting import check_split, next_part, split_ahead

#: What no event can prove.
SEED_TRUSTED: Final = (
    "that the seed was drawn at random: the operators of the gates are trusted for that. They know the "
    "seed from the opening on, and so does anyone who can read Redis"
)
#: In its place, of an envelope with a beacon. Fields: address of the round.
BEACON_TO_COMPARE: Final = (
    "that the randomness is that of the beacon's round: compare it with {} . If it is, no one could "
    "choose the parts; from the round on, the operators of the gates know them, and so does anyone who "
    "can read Redis"
)
ALWAYS_NOT_PROVED: Final = (
    "that users were served in the order in which they sent their grabs: the order is that in which Redis "
    "decided them",
    "that these are the events that all other readers see: `grabstream verify` compares them with the "
    "books and with Redis",
)
#: What is not proved of an envelope without a beacon.
NOT_PROVED: Final = (SEED_TRUSTED, *ALWAYS_NOT_PROVED)
COMMITTED: Final = "the seed is the one that was committed to at the opening"
BEACON: Final = "the randomness given for the named round was mixed in, after that round was due"
DRAWN: Final = "the seed was not given by the opener"
ONE_EACH: Final = "places follow each other, and each user has one part"
PARTS: Final = "every part follows from the seed"
REST: Final = "what was left went back"


class FairnessCheck(NamedTuple):
    """A check and its result; `problem` is None if it passed."""

    name: str
    problem: str | None


class CannotVerify(Exception):
    """The events do not suffice; the text says why."""


class Fairness(NamedTuple):
    """The result of all checks. `parts` were taken of `of_parts`; `seed` is hexadecimal."""

    offer: str
    seed: str
    seed_sha256: str
    parts: int
    of_parts: int
    checks: list[FairnessCheck]
    #: `<chain>/<round>` of its beacon, and `<round>/<randomness>/<signature>`; None without one.
    beacon: str | None = None
    randomness: str | None = None

    @property
    def not_proved(self) -> tuple[str, ...]:
        """What the events cannot prove."""
        if self.beacon is None:
            return NOT_PROVED
        chain, _, number = self.beacon.partition("/")
        return (BEACON_TO_COMPARE.format(Beacon(chain, int(number)).address), *ALWAYS_NOT_PROVED)

    @property
    def is_proved(self) -> bool:
        """Whether all checks passed."""
        return all(check.problem is None for check in self.checks)


def verify_fairness(offer: str, events: Iterable[AnyEvent]) -> Fairness:
    """Checks an envelope. `events` are those of the offer, in order; others are skipped.

    Raises CannotVerify when there is no such envelope, or it is still open.
    """
    opened: OfferOpened | None = None
    closed: OfferClosed | None = None
    granted: list[GrabGranted] = []
    given: list[tuple[str, int]] = []
    late = early = 0
    for event in events:
        if event.offer != offer:
            continue
        if isinstance(event, OfferOpened):
            opened = event
        elif isinstance(event, OfferClosed):
            closed = event
        elif isinstance(event, OfferAmended):
            randomness = changes_of(event.changes).randomness
            given += [(randomness, event.at)] if randomness else []
        elif isinstance(event, GrabGranted):
            granted.append(event)
            early += not given
            late += closed is not None
    if opened is None:
        raise CannotVerify(f"there is no offer {offer}")
    terms = terms_of(opened.terms)
    if not isinstance(terms, EnvelopeTerms) or opened.seed_sha256 is None:
        raise CannotVerify(f"{offer} is not an envelope: nothing in it is drawn")
    if closed is None:
        raise CannotVerify(f"{offer} is still open: its seed is revealed when it closes")
    seed = closed.seed or ""
    source, beacon = seed, []
    if terms.beacon is not None:
        problem, mixed_in = _beacon(terms.beacon, opened.at, given, early)
        source, beacon = mixed(seed, mixed_in), [FairnessCheck(BEACON, problem)]
    checks = [
        FairnessCheck(COMMITTED, _committed(seed, opened.seed_sha256)),
        FairnessCheck(DRAWN, _drawn(opened.digest)),
        *beacon,
        FairnessCheck(ONE_EACH, _one_each(granted, late)),
        FairnessCheck(PARTS, _parts(terms, source, granted)),
        FairnessCheck(REST, _rest(terms, closed, granted)),
    ]
    return Fairness(
        offer, seed, opened.seed_sha256, len(granted), terms.parts, checks, terms.beacon,
        given[0][0] if given else None,
    )  # fmt: skip


def _beacon(
    beacon_text: str, opened_at: int, given: Sequence[tuple[str, int]], early: int
) -> tuple[str | None, str | None]:
    """The problem with the beacon of an envelope, if any, and the randomness that was mixed in."""
    if not given:
        return (f"{early} parts were taken without it" if early else None), None
    try:
        text, given_at = given[0]
        beacon, found = beacon_of(beacon_text), round_of(text)
    except Invalid as error:
        return str(error), None
    if len(given) > 1 or early:
        return f"it was given {len(given)} times, after {early} parts", found.randomness
    if found.number != beacon.number:
        return f"round {found.number} was given, but the offer names round {beacon.number}", found.randomness
    if given_at < beacon.at:
        return "it was given before the round was due", found.randomness
    if beacon.at <= opened_at:
        return "the round was due before the envelope was opened", found.randomness
    return None, found.randomness


def _committed(seed: str, seed_sha256: str) -> str | None:
    try:
        actual = sha256(bytes.fromhex(seed)).hexdigest()
    except ValueError:
        return f"{quoted(seed)} is not a seed"
    return None if actual == seed_sha256 else f"its SHA-256 is {actual}, but {seed_sha256} was committed to"


def _drawn(digest: str) -> str | None:
    # The digest of a command that carries a secret is keyed, and that of other commands is not.
    if digest.startswith(KEYED):
        return "the command that opened the envelope had a seed, so its sender could choose every part"
    if not digest.startswith(f"{HASHED}$"):
        return f"the digest {quoted(digest)} does not say whether the command that opened it had a seed"
    return None


def _one_each(granted: list[GrabGranted], late: int) -> str | None:
    places = [event.place for event in granted]
    if places != list(range(1, len(granted) + 1)):
        return f"the places are not 1 to {len(granted)} in this order"
    if len({event.user for event in granted}) != len(granted):
        return "a user has several parts"
    return f"{late} parts were taken after the close" if late else None


def _parts(terms: EnvelopeTerms, seed: str, granted: list[GrabGranted]) -> str | None:
    if len(granted) > terms.parts:
        return f"{len(granted)} parts were taken of {terms.parts}"
    most = check_split(terms.law, terms.total, terms.parts, terms.min, terms.max)
    if terms.draw == "ahead":
        expected = split_ahead(terms.law, terms.total, terms.parts, terms.min, most, seed)
    else:
        expected, left = [], terms.total
        for place in range(1, len(granted) + 1):
            rest = terms.parts - place + 1
            expected.append(next_part(terms.law, left, rest, terms.min, most, seed, place))
            left -= expected[-1]
    for event, amount in zip(granted, expected, strict=False):
        if event.amount != amount:
            return f"the part at place {event.place} is {event.amount}, but {amount} follows from the seed"
    return None


def _rest(terms: EnvelopeTerms, closed: OfferClosed, granted: list[GrabGranted]) -> str | None:
    taken = sum(event.amount for event in granted)
    if taken + closed.amount != terms.total or len(granted) + closed.left != terms.parts:
        return (
            f"{taken} in {len(granted)} parts were taken, and {closed.amount} in {closed.left} parts went "
            f"back: that is not {terms.total} in {terms.parts}"
        )
    return None
