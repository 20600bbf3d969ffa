"""Checks of a verification: what was checked, what is wrong with it, in how many words."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

POLL_SECONDS = 0.1
PROBLEMS_SHOWN_MAX = 5
#: Further problems of one kind are counted, and not kept.
PROBLEMS_KEPT_MAX: Final = 200
PROGRESS_SECONDS: Final = 1.0


class Check(NamedTuple):
    """One thing that was checked: how many of what, what is wrong (empty: nothing), and what is known and was
    decided by somebody.
    """

    name: str
    checked: int
    of_what: str
    problems: list[str]
    notes: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems


class RedisShard(NamedTuple):
    """How far a shard is by Redis: its seq, and the checkpoint, the last event it knows to be journaled, with
    the chain's hash there; and the journal offset behind it, with term and owner. `decides` is false while it
    is fenced, or being made anew.
    """

    seq: int
    journaled_seq: int
    journaled_head: bytes
    journaled_offset: int = 0
    journaled_term: int = 0
    journaled_owner: str = ""
    decides: bool = False


Say = Callable[[str], None]


class Problems:
    """What is wrong of one kind, in words: the first ones, and how many there are."""

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._count = 0

    def add(self, problem: str) -> None:
        """One more."""
        self._count += 1
        if self._count <= PROBLEMS_KEPT_MAX:
            self._kept.append(problem)

    @property
    def lines(self) -> list[str]:
        """For a check."""
        more = self._count - len(self._kept)
        return [*self._kept, f"and {more:,} more"] if more else list(self._kept)


def flattened(count: int, problems: list[str], of_what: str) -> tuple[int, str, list[str]]:
    """What a check is made of, after its name."""
    return count, of_what, problems
