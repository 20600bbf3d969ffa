"""Draws the parts of large envelopes in slices, so that the process does other work in between.

A million parts take seconds. A thread would hold the interpreter's lock for most of that time, and several
threads would starve the event loop. So they are drawn in the event loop itself: after each slice, other ready
tasks run. One large envelope is drawn at a time in a process; meanwhile its gate decides the other commands
of the same shard (`gate.py`).
"""

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

from grabstream.models.commands import AnyCommand, Open
from grabstream.models.offers import EnvelopeTerms

#: So many parts are drawn within a call, in some ms; more are drawn before it.
DRAWN_IN_CALL_MAX: Final = 2_000

_T = TypeVar("_T")
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


class NotWanted(Exception):
    """No caller waits for the parts any more."""


def parts_drawn(commands: Sequence[AnyCommand]) -> int:
    """How many parts must be drawn before these commands can be decided."""
    return sum(
        command.terms.parts
        for command in commands
        if isinstance(command, Open)
        and isinstance(command.terms, EnvelopeTerms)
        and command.terms.draw == "ahead"
    )


def turn() -> asyncio.Lock:
    """Held while large envelopes are drawn in this event loop: the next draw waits."""
    return _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())


async def in_slices(steps: Generator[None, None, _T], is_wanted: Callable[[], bool] = lambda: True) -> _T:
    """Runs steps; returns their result. Other ready tasks run after each step. Raises NotWanted."""
    while is_wanted():
        try:
            next(steps)
        except StopIteration as ended:
            result: _T = ended.value
            return result
        await asyncio.sleep(0)
    raise NotWanted
