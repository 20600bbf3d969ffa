"""The checks of a verification: their subjects and results."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

POLL_SECONDS = 0.1
PROBLEMS_SHOWN_MAX = 5
#: Further problems of one check are counted, but not kept.
PROBLEMS_KEPT_MAX: Final = 200


class VerificationCheck(NamedTuple):
    """A check: the number and kind of things checked, the problems, and notes about decisions of operators
    and things not checked.
    """

    name: str
    checked: int
    of_what: str
    problems: list[str]
    notes: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Whether there is no problem."""
        return not self.problems


#: In place of a `journaled_seq` that is not a number.
UNREADABLE: Final = -1


class RedisShard(NamedTuple):
    """A shard's position in Redis: its seq, and its checkpoint: the last event known to be journaled, the
    chain's hash there, and the journal offset after it, with term and owner. `decides` is false while the
    shard is fenced or being rebuilt.
    """

    seq: int
    journaled_seq: int
    journaled_head: bytes
    journaled_offset: int = 0
    journaled_term: int = 0
    journaled_owner: str = ""
    decides: bool = False


Say = Callable[[str], None]


class VerificationProgress(Protocol):
    """Called with each step of a verification; and again with the number of events that it has done, of how
    many, where that is known.
    """

    def __call__(self, step: str, done: int = 0, total: int = 0) -> None:
        """Shows it, not too often."""


def no_progress(step: str, done: int = 0, total: int = 0) -> None:
    """Shows nothing."""


class Problems:
    """The problems of one check: the first PROBLEMS_KEPT_MAX as text, the others as a number."""

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._count = 0

    def add(self, problem: str) -> None:
        """Adds a problem."""
        self._count += 1
        if self._count <= PROBLEMS_KEPT_MAX:
            self._kept.append(problem)

    @property
    def lines(self) -> list[str]:
        """The problems as lines of a check."""
        more = self._count - len(self._kept)
        return [*self._kept, f"and {more:,} more"] if more else list(self._kept)
