"""Outcomes: the possible results of a command, numbered in order of precedence.

The number is the same in Lua, Python, HTTP, topics and metrics. A command that is wrong in two ways gets the
refusal with the smaller number. The extensions of a hold, the units of a grab and the amount due are checked
only if the grab holds units; else the outcome is `expired` or `not_held`.
"""

from enum import IntEnum
from typing import Annotated, Final

from grabstream.models.identifiers import in_schema


class Outcome(IntEnum):
    """Below 20: the command was executed, and an event records it. From 20: it was refused, and changed
    nothing.
    """

    granted = 0
    held = 1
    confirmed = 2
    released = 3
    returned = 4
    opened = 5
    amended = 6
    closed = 7
    paused = 8
    resumed = 9
    extended = 10
    redeemed = 11
    unredeemed = 12
    loaded = 13
    adjusted = 14
    waiting = 15
    invalid = 20
    fenced = 21
    busy = 22
    conflict = 23
    no_such_offer = 24
    no_such_grab = 25
    already_taken = 26
    not_open_yet = 27
    on_hold = 28
    over = 29
    not_eligible = 30
    limit_reached = 31
    sold_out = 32
    not_enough_left = 33
    expired = 34
    not_held = 35
    not_redeemable = 36

    @property
    def positive(self) -> bool:
        """Whether the command was executed."""
        return self < Outcome.invalid


OUTCOME_NAMES: Final[dict[int, str]] = {int(outcome): outcome.name for outcome in Outcome}
OutcomeName = Annotated[str, in_schema(enum=list(OUTCOME_NAMES.values()))]

#: Refusals of a whole call: nothing was decided. The same command may be sent again at `retry_at`.
NOT_DECIDED: Final = frozenset({Outcome.fenced, Outcome.busy})


#: What a caller does about an unknown outcome. Doors that name the id themselves leave it out.
SEND_AGAIN: Final = ": send the commands again under their ids"


class OutcomeUnknown(Exception):
    """The time ran out after the commands were sent: they may be decided or not. Send them again under the
    same ids.
    """

    @property
    def cause(self) -> str:
        """The text without the advice."""
        return str(self).removesuffix(SEND_AGAIN)
