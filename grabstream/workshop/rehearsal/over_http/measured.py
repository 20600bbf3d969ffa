"""What a rehearsal over HTTP has measured: every answer, and from them the numbers of each slice of time."""

from collections import Counter
from typing import Any, Final, NamedTuple

from grabstream.models.answers import Answer
from grabstream.workshop.rehearsal.over_http.crowd import Kind
from grabstream.workshop.rehearsal.phases import quantiles_ms

#: A timeline has at most this many slices; each takes whole seconds, or a half.
SLICES_MAX: Final = 60
PERCENTILES: Final = (50, 90, 99)


class Answered(NamedTuple):
    """An answer: to whom, when it came (seconds since the first moment), and how long it took from the moment
    at which the request was due.
    """

    kind: Kind
    at_seconds: float
    seconds: float
    answer: Answer


class Measured:
    """Arrivals and answers. `contradictions` are second answers that differ from the first."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.answered: list[Answered] = []
        self.first: dict[str, Answer] = {}
        self.contradictions: dict[Kind, list[str]] = {}

    def take(self, answered: Answered) -> None:
        """Keeps an answer, and compares it with the first one of the same request."""
        self.answered.append(answered)
        first = self.first.setdefault(answered.answer.id, answered.answer)
        if what_counts(first) != what_counts(answered.answer):
            self.contradictions.setdefault(answered.kind, []).append(
                f"{first.id}: {what_counts(first)} and then {what_counts(answered.answer)}"
            )


def what_counts(answer: Answer) -> tuple[Any, ...]:
    """What must be the same in each answer to a request."""
    return (answer.outcome, answer.grab, answer.amount, answer.place, answer.shard, answer.seq)


def timeline(measured: Measured) -> dict[str, Any]:
    """Arrivals a second, answers a second by outcome, and latencies, of each slice of time.

    Latencies are those of the users who do not dawdle: a slow client waits for itself.
    """
    last = max([*measured.arrivals, *(one.at_seconds for one in measured.answered)], default=0.0)
    width = _width(last)
    count = int(last / width) + 1
    arrivals = [0.0] * count
    for at in measured.arrivals:
        arrivals[int(at / width)] += 1 / width
    outcomes: dict[str, list[float]] = {
        outcome: [0.0] * count
        for outcome, _ in Counter(one.answer.outcome for one in measured.answered).most_common()
    }
    latencies: list[list[float]] = [[] for _ in range(count)]
    for one in measured.answered:
        place = int(one.at_seconds / width)
        outcomes[one.answer.outcome][place] += 1 / width
        if one.kind != "slow":
            latencies[place].append(one.seconds)
    return {
        "slice_seconds": width,
        "arrivals_per_second": [round(rate, 2) for rate in arrivals],
        "answers_per_second": {name: [round(rate, 2) for rate in rates] for name, rates in outcomes.items()},
        "latency_ms": [quantiles_ms(values, PERCENTILES) for values in latencies],
    }


def _width(seconds: float) -> float:
    """The width of a slice, s: a half, or as many whole seconds as are needed."""
    return 0.5 if seconds < SLICES_MAX / 2 else float(-(-int(seconds + 1) // SLICES_MAX))
