"""A command that comes alone, as most of a crowd's do, on its way through the gate: it is decided and,
if that is promised, journaled. It needs no task of its own, and one future; whoever waits for it is called.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Literal, Protocol

from grabstream.lua.gate.journaled import HistoryChanged, Journaled
from grabstream.lua.gate.queue import QueueEntry
from grabstream.models.answers import Answer
from grabstream.models.outcomes import SEND_AGAIN, OutcomeUnknown

log = logging.getLogger(__name__)

Promise = Literal["journaled", "decided"]
#: Takes the answer to a command, or the reason why it has none.
Then = Callable[[Answer | BaseException], None]


class _Gate(Protocol):
    """What a command needs of its gate."""

    journaled: Journaled

    def ask_again(self, number: int, entry: QueueEntry) -> None:
        """Has an entry decided again whose history is lost."""

    def ended(self, number: int, entry: QueueEntry, promise: Promise, error: BaseException | None) -> None:
        """The answer may be given now, or there is none."""


class SingleCommand:
    """One command that is queued."""

    __slots__ = ("_entry", "_gate", "_is_over", "_promise", "_shard", "_then")

    def __init__(self, gate: _Gate, shard: int, entry: QueueEntry, promise: Promise, then: Then) -> None:
        self._gate = gate
        self._shard = shard
        self._entry = entry
        self._promise = promise
        self._then = then
        self._is_over = False
        entry.done.add_done_callback(self._decided)

    @property
    def fault(self) -> str | None:
        """Why no script can decide the command."""
        return self._entry.fault

    def leave(self) -> None:
        """Nobody waits any longer: the command is dropped if it was not sent, and `then` is not called."""
        self._is_over = True
        self._entry.give()

    def _decided(self, done: "asyncio.Future[None]") -> None:
        entry = self._entry
        if self._is_over:
            return
        if done is not entry.done:
            # It has to be decided again, and got a new future meanwhile.
            entry.done.add_done_callback(self._decided)
            return
        if done.cancelled():
            self._end(asyncio.CancelledError())
            return
        if (error := done.exception()) is not None:
            self._end(error)
            return
        seq = entry.answers[0].seq
        journaled = self._gate.journaled
        if self._promise == "decided" or not seq or journaled.is_known(self._shard, entry.history, seq):
            self._end()
        else:
            journaled.call(self._shard, entry.history, seq, entry.deadline, self._released)

    def _released(self, error: BaseException | None) -> None:
        if self._is_over:
            return
        if isinstance(error, HistoryChanged):
            # The decision may be lost with its history; only the new answer counts.
            self._gate.ask_again(self._shard, self._entry)
            self._entry.done.add_done_callback(self._decided)
        elif isinstance(error, TimeoutError):
            self._end(not_journaled(self._shard, self._entry.answers[0].seq or 0))
        else:
            self._end(error)

    def _end(self, error: BaseException | None = None) -> None:
        self._is_over = True
        result: Answer | BaseException
        try:
            self._gate.ended(self._shard, self._entry, self._promise, error)
            result = self._entry.answers[0] if error is None else error
        except Exception as unexpected:
            result = unexpected
        self._entry.give()
        try:
            self._then(result)
        except Exception:
            # Whoever releases this has others to release.
            log.exception("the answer to command %s was not taken", self._entry.commands[0].id)


def not_journaled(shard: int, seq: int) -> OutcomeUnknown:
    """The reason why a decided command has no answer."""
    return OutcomeUnknown(
        f"decided, but not journaled within the timeout (shard {shard}, seq {seq}; is a relay "
        f"running?){SEND_AGAIN}"
    )
