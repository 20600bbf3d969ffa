"""What rows of the bench conclude from the answers that they have: (due, seconds to the answer, status)."""

from bench.crowds import recovery_seconds
from bench.stalls import Stall, longest_stalls

CALM = [(number / 128, 0.01, "201") for number in range(5 * 128)]


def _until(end: float, latency: float, status: str) -> list[tuple[float, float, str]]:
    return [(due, latency, status) if due < end else (due, *others) for due, *others in CALM]


def test_recovered_is_when_nothing_is_refused_late_or_left_out() -> None:
    assert recovery_seconds(CALM, 0, 50) == 0
    for disturbed in (_until(0.75, 0.01, "503"), _until(0.75, 0.2, "201"), CALM[96:]):
        assert 0.7 <= recovery_seconds(disturbed, 0, 50) <= 0.8


def test_a_moment_of_calm_is_no_recovery() -> None:
    again = [(due, latency, "503" if 1 < due < 1.01 else status) for due, latency, status in CALM]
    assert 1 <= recovery_seconds([*_until(0.75, 0.2, "201")[:128], *again[128:]], 0, 50) <= 1.1
    assert recovery_seconds([(due, 0.01, "503") for due, *_ in CALM], 0, 50) == 5


def test_the_longest_stalls_do_not_overlap() -> None:
    answers = [(0, 0.1, "201"), (1, 1, "201"), (1.2, 0.6, "201"), (1.9, 0.9, "201"), (4, 0.5, "503")]
    assert longest_stalls(answers) == [Stall(1, 2, 3), Stall(4, 4.5, 1), Stall(0, 0.1, 1)]
