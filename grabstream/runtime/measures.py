"""Counters of a process as plain numbers: one addition per event, without names, labels or locks.
`metrics/` reads them when metrics are requested.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

#: Upper bounds of durations, in seconds: of a call to Redis, and of work that may wait for Kafka, PostgreSQL
#: or a client.
CALL_SECONDS_BOUNDS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0
)  # fmt: skip
WORK_SECONDS_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Histogram:
    """For each bound, the number of values up to it; and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        #: Values of each bucket alone; the last one has those above all bounds.
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class GateMeasures:
    """Answers of a gate: by the type of the command, a number for each code of an outcome. `unknown` counts
    the callers that got OutcomeUnknown, `not_decided` the script calls that decided nothing, by the reason,
    `refusals_dropped` the refusals of the sample that were not written, by place. `lost_answers` counts
    answers that were given as decided and that a recovery lost: `found`, then `written` or `dropped`, which
    are in the log only; and answers that were not followed, so that it is unknown whether they are lost.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Counter[int]] = defaultdict(Counter)
        self.unknown = 0
        self.not_decided = {"refused": 0, "history": 0, "undecidable": 0, "broken_off": 0, "trouble": 0}
        self.refusals_dropped: dict[str, int] = {}
        self.lost_answers = {"found": 0, "written": 0, "dropped": 0, "not_followed": 0}


#: Seconds of the calls of each function of the library, until the reply or the error; one for the process.
FUNCTION_SECONDS: Final[dict[str, Histogram]] = defaultdict(lambda: Histogram(CALL_SECONDS_BOUNDS))
