"""A command that comes alone, as most commands of a crowd do, on its way through the gate: it is decided and,
if that is promised, journaled. It needs no task and no future: whoever waits for it is called.
"""

import logging
from collections.abc import Callable
from typing import Literal, Protocol

from grabstream.gate.journaled import HistoryChanged, Journaled
from grabstream.gate.queue import QueueEntry
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
        """Has an entry decided again after its history was lost."""

    def ended(self, number: int, entry: QueueEntry, promise: Promise, error: BaseException | None) -> None:
        """The answer, or the error in its place, may be given now."""


class SingleCommand(QueueEntry, kw_only=True):
    """One command that is queued in a shard. `then` is called once, with its answer; or never, if `give` is
    called before.
    """

    gate: _Gate
    shard: int
    promise: Promise
    then: Then

    def settle(self) -> None:
        """The command is decided or refused, or has an error."""
        self.is_done = True
        if self.error is not None:
            self._end(self.error)
            return
        seq = self.answers[0].seq
        journaled = self.gate.journaled
        if self.promise == "decided" or not seq or journaled.is_known(self.shard, self.history, seq):
            self._end()
        else:
            journaled.call(self.shard, self.history, seq, self.deadline, self._released)

    def _released(self, error: BaseException | None) -> None:
        if self.given:
            return
        if isinstance(error, HistoryChanged):
            # The decision may be lost with its history; only the new answer counts.
            self.gate.ask_again(self.shard, self)
        elif isinstance(error, TimeoutError):
            self._end(not_journaled(self.shard, self.answers[0].seq or 0))
        else:
            self._end(error)

    def _end(self, error: BaseException | None = None) -> None:
        result: Answer | BaseException
        try:
            self.gate.ended(self.shard, self, self.promise, error)
            result = self.answers[0] if error is None else error
        except Exception as unexpected:
            result = unexpected
        self.give()
        try:
            self.then(result)
        except Exception:
            # Whoever releases this has others to release.
            log.exception("the answer to command %s was not taken", self.batch.commands[0].id)


def not_journaled(shard: int, seq: int) -> OutcomeUnknown:
    """Why a decided command has no answer."""
    return OutcomeUnknown(
        f"decided, but not journaled within the timeout (shard {shard}, seq {seq}; is a relay "
        f"running?){SEND_AGAIN}"
    )
