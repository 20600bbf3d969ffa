"""What a phase of a crowd has measured: attempts, answers in each slice of time, and latencies by door."""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Final

import msgspec

#: The phases of the crowd at envelopes, in order. A crowd in a shape has only the last one.
CALIBRATION: Final = "calibration"
STEADY: Final = "steady"
RUSH: Final = "rush"
SLICES_PER_SECOND: Final = 10


class Phase(msgspec.Struct):
    """A phase that runs or has ended; times are of the monotonic clock, latencies in seconds."""

    name: str
    began: float = msgspec.field(default_factory=time.monotonic)
    ended: float = 0.0
    #: The load of the machine (mean of a minute) when it ended.
    load: float = 0.0
    #: Attempts a second that were offered; 0: all at once, or as in the shape.
    offered_per_second: float = 0.0
    #: slice of time since the phase began → answers
    answers: Counter[int] = msgspec.field(default_factory=Counter)
    latencies: dict[str, list[float]] = msgspec.field(default_factory=lambda: defaultdict(list))

    def count(self, now: float) -> None:
        """Counts an answer."""
        self.answers[int((now - self.began) * SLICES_PER_SECOND)] += 1

    def best_second(self) -> int:
        """The answers of the second that had the most."""
        return max(
            (sum(self.answers[at + ahead] for ahead in range(SLICES_PER_SECOND)) for at in self.answers),
            default=0,
        )

    def numbers(self) -> dict[str, Any]:
        """The phase as JSON."""
        count, seconds = self.answers.total(), max(self.ended - self.began, 0.001)
        return {
            "attempts": count,
            "seconds": round(seconds, 3),
            "load": round(self.load, 1),
            "offered_per_second": round(self.offered_per_second, 1) or None,
            "per_second": round(count / seconds, 1),
            # A phase of less than a second has no second that was its best.
            "best_second": self.best_second() if seconds >= 1 else None,
            "latency_ms": {
                door: quantiles_ms(values, (50, 99, 99.9)) for door, values in self.latencies.items()
            },
        }


def quantiles_ms(seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Percentiles in milliseconds; empty without values."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {
        f"p{percent:g}": round(ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)] * 1000, 2)
        for percent in percentiles
    }
