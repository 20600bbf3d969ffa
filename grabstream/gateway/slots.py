"""Slots for questions: those in progress are bounded in sum and per caller, so one caller leaves room for
others.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from grabstream.gateway.bounds import RETRY_SOON_SECONDS
from grabstream.gateway.problems import Problem, retry_soon


class Room(NamedTuple):
    """The room of one question. `ask` takes room to ask PostgreSQL, `join` room to wait for an answer that is
    being made for another question; each gives back what the question had, and raises Problem when there is
    no room.
    """

    ask: Callable[[], None]
    join: Callable[[], None]


class Slots:
    """Counts questions in progress, by caller; `things` are its name in the plural. Callers are words that
    may begin a sentence: `ann`, `The API key shop`.
    """

    def __init__(self, slots_max: int, things: str) -> None:
        self._slots_max = slots_max
        self._things = things
        self._taken = 0
        self._of = Counter[str]()

    @contextmanager
    def taken(self, caller: str, caller_max: int) -> Iterator[None]:
        """Has a slot; raises Problem (`busy`) when there is none, or when the caller already has its
        share.
        """
        if self._taken >= self._slots_max:
            raise self._busy(f"The gateway has {self._slots_max} {self._things}, its maximum")
        if self._of[caller] >= caller_max:
            raise self._busy(
                f"{caller} has {caller_max} {self._things} at this gateway, the maximum of a caller"
            )
        self._taken += 1
        self._of[caller] += 1
        try:
            yield
        finally:
            self._taken -= 1
            self._of[caller] -= 1
            if not self._of[caller]:
                del self._of[caller]

    @staticmethod
    def _busy(words: str) -> Problem:
        return retry_soon("busy", f"{words}; ask again after {RETRY_SOON_SECONDS} s.")
