"""The shape of a crowd: how many users arrive when, and how some of them misbehave. Read from a file, JSON or
TOML; unknown fields are refused, and everything has a bound.
"""

import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

from grabstream.models.money import Invalid

FILE_BYTES_MAX: Final = 64 * 1024
TITLE_LENGTH_MAX: Final = 80
OFFERS_MAX: Final = 100
PARTS_MAX: Final = 100_000
POINTS_MAX: Final = 100
SECONDS_MAX: Final = 600
PER_SECOND_MAX: Final = 5_000
USERS_MAX: Final = 100_000
#: Requests that are expected of a shape, before any is repeated.
REQUESTS_MAX: Final = 200_000
CONNECTIONS_MAX: Final = 2_000
ATTEMPTS_MAX: Final = 1_000
DOUBLE_MAX: Final = 10
REPEATS_MAX: Final = 5
WAIT_MS_MAX: Final = 60_000


class ArrivalPoint(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A point of the curve of arrivals: the users who arrive per second at this time. Between two points, the
    rate changes evenly.
    """

    at_seconds: int
    per_second: int


class Bots(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Users who try often: `attempts` grabs of one user, each under its own id, `pause_ms` apart."""

    share: float = 0.02
    attempts: int = 20
    pause_ms: int = 20


class DoubleClicks(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Users who send one grab, with one Idempotency-Key, at once on several connections."""

    share: float = 0.08
    connections: int = 3


class SlowClients(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Users who send their request in drips, for `send_ms`, and read the answer as slowly."""

    share: float = 0.02
    send_ms: int = 2_000


class VanishingClients(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Users who close the connection before the answer, come back after `back_after_ms`, and send the same
    request `repeats` times.
    """

    share: float = 0.05
    back_after_ms: int = 500
    repeats: int = 2


class Shape(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The shape of a crowd. Each share is one of all users; the rest sends one request each."""

    title: str = "A rush, and its end"
    #: Envelopes, and parts of each. Absent: enough parts that nine of ten users get one.
    offers: int = 4
    parts: int | None = None
    #: Connections that the crowd has open at once, at most; a user who finds none waits, and the wait counts.
    connections_max: int = 400
    arrivals: tuple[ArrivalPoint, ...] = (
        ArrivalPoint(0, 20),
        ArrivalPoint(4, 60),
        ArrivalPoint(5, 400),
        ArrivalPoint(10, 400),
        ArrivalPoint(16, 40),
    )
    bots: Bots = Bots()
    double_clicks: DoubleClicks = DoubleClicks()
    slow: SlowClients = SlowClients()
    vanishing: VanishingClients = VanishingClients()

    @property
    def seconds(self) -> int:
        """How long users arrive."""
        return self.arrivals[-1].at_seconds

    @property
    def users_expected(self) -> float:
        """The area under the curve of arrivals."""
        return sum(
            (after.at_seconds - before.at_seconds) * (before.per_second + after.per_second) / 2
            for before, after in pairwise(self.arrivals)
        )

    @property
    def requests_expected(self) -> float:
        """How many requests the users send, before any is repeated for want of an answer."""
        extra = (
            self.bots.share * (self.bots.attempts - 1)
            + self.double_clicks.share * (self.double_clicks.connections - 1)
            + self.vanishing.share * self.vanishing.repeats
        )
        return self.users_expected * (1 + extra)


def read_shape(path: Path) -> Shape:
    """The shape in a file, by its suffix: `.toml`, or `.json`. Raises Invalid, which names the error."""
    if path.suffix not in (".toml", ".json"):
        raise Invalid(f"{path.name}: a shape is a .toml or a .json file")
    with path.open("rb") as file:
        text = file.read(FILE_BYTES_MAX + 1)
    if len(text) > FILE_BYTES_MAX:
        raise Invalid(f"{path.name}: has more than {FILE_BYTES_MAX} bytes")
    try:
        raw: Any = tomllib.loads(text.decode()) if path.suffix == ".toml" else msgspec.json.decode(text)
        shape = msgspec.convert(raw, Shape)
        _check(shape)
    except (ValueError, RecursionError) as error:  # of TOML, JSON, UTF-8, types, and bounds
        raise Invalid(f"{path.name}: {error}") from None
    return shape


def _check(shape: Shape) -> None:
    """Raises Invalid for what is above a bound."""
    if not 1 <= len(shape.title) <= TITLE_LENGTH_MAX or not shape.title.isprintable():
        raise Invalid(f"title: must have 1 to {TITLE_LENGTH_MAX} printable characters")
    _within("offers", shape.offers, 1, OFFERS_MAX)
    if shape.parts is not None:
        _within("parts", shape.parts, 1, PARTS_MAX)
    _within("connections_max", shape.connections_max, 10, CONNECTIONS_MAX)
    _check_arrivals(shape.arrivals)
    kinds = {
        "bots": shape.bots.share, "double_clicks": shape.double_clicks.share, "slow": shape.slow.share,
        "vanishing": shape.vanishing.share,
    }  # fmt: skip
    for name, share in kinds.items():
        # In this form, a share that is not a number is refused too.
        if not 0 <= share <= 1:
            raise Invalid(f"{name}.share: must be 0 to 1, got {share}")
    if not sum(kinds.values()) <= 1:
        raise Invalid(f"shares: {' + '.join(kinds)} must be at most 1, got {sum(kinds.values()):g}")
    _within("bots.attempts", shape.bots.attempts, 1, ATTEMPTS_MAX)
    _within("bots.pause_ms", shape.bots.pause_ms, 0, WAIT_MS_MAX)
    _within("double_clicks.connections", shape.double_clicks.connections, 2, DOUBLE_MAX)
    _within("slow.send_ms", shape.slow.send_ms, 1, WAIT_MS_MAX)
    _within("vanishing.back_after_ms", shape.vanishing.back_after_ms, 0, WAIT_MS_MAX)
    _within("vanishing.repeats", shape.vanishing.repeats, 1, REPEATS_MAX)
    if not 1 <= shape.users_expected <= USERS_MAX:
        raise Invalid(f"arrivals: are {shape.users_expected:,.0f} users, must be 1 to {USERS_MAX:,}")
    if shape.requests_expected > REQUESTS_MAX:
        raise Invalid(
            f"the crowd would send {shape.requests_expected:,.0f} requests, at most {REQUESTS_MAX:,} are sent"
        )


def _check_arrivals(arrivals: tuple[ArrivalPoint, ...]) -> None:
    _within("arrivals: number of points", len(arrivals), 2, POINTS_MAX)
    if arrivals[0].at_seconds != 0:
        raise Invalid("arrivals: the first point must be at_seconds 0")
    for before, after in pairwise(arrivals):
        if after.at_seconds <= before.at_seconds:
            raise Invalid(
                f"arrivals: at_seconds must rise, but {after.at_seconds} follows {before.at_seconds}"
            )
    _within("arrivals: at_seconds of the last point", arrivals[-1].at_seconds, 1, SECONDS_MAX)
    for point in arrivals:
        _within("arrivals: per_second", point.per_second, 0, PER_SECOND_MAX)


def _within(name: str, value: int, minimum: int, maximum: int) -> None:
    if not minimum <= value <= maximum:
        raise Invalid(f"{name}: must be {minimum:,} to {maximum:,}, got {value:,}")
