"""Batches: commands of one type that are decided together, of one caller or, in a script call, of several.
A batch is plain or mixed from the moment it is made, by its class; nothing asks its commands again.
"""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from grabstream.gate.drawing import DRAWN_IN_CALL_MAX, parts_drawn
from grabstream.gate.sizes import PLAIN_BYTES, total_size
from grabstream.models.answers import Answer, refusal
from grabstream.models.commands import basket_of, is_plain, is_right_and_plain, offers_of_right_grabs, user_of
from grabstream.models.outcomes import Outcome


class Batch(msgspec.Struct, eq=False, gc=False):
    """Valid commands of the type of a script, and the names of their offers. `bytes` is an estimate of what
    they take of a call's arguments.
    """

    commands: Sequence[Any]
    offers: Collection[str]
    bytes: int
    script: str = "grab"
    #: Whether it has so many parts that others of the shard are decided while they are drawn.
    draws: bool = False
    #: Two callers may use the same basket name, so batches with baskets never share a call.
    has_baskets: bool = False

    def refused(self, outcome: Outcome, message: str, retry_at: int | None = None) -> list[Answer]:
        """A refusal of each command."""
        return [refusal(c.id, outcome, c.offer, message, retry_at, user_of(c)) for c in self.commands]


class PlainBatch(Batch, eq=False, gc=False):
    """Grabs of one unit without further fields. Any other batch is mixed."""


def plain_batch(commands: Sequence[Any]) -> PlainBatch | None:
    """A batch of these commands, if all are plain grabs, and valid."""
    if len(commands) == 1:
        [command] = commands
        return PlainBatch(commands, (command.offer,), PLAIN_BYTES) if is_right_and_plain(command) else None
    offers = offers_of_right_grabs(commands)
    return PlainBatch(commands, offers, PLAIN_BYTES * len(commands)) if offers else None


def checked_batch(commands: Sequence[Any]) -> PlainBatch:
    """The batch of plain grabs that the caller has checked."""
    return PlainBatch(commands, {command.offer for command in commands}, PLAIN_BYTES * len(commands))


def batch_of(commands: Sequence[Any], whole: Batch | None = None) -> Batch:
    """The batch of valid commands of one type; `whole` is one that they are part of."""
    if whole is not None and len(whole.offers) == 1:
        offers = whole.offers
    else:
        offers = {command.offer for command in commands}
    script = type(commands[0]).__name__.lower()
    if isinstance(whole, PlainBatch) or (script == "grab" and all(map(is_plain, commands))):
        return PlainBatch(commands, offers, PLAIN_BYTES * len(commands))
    draws = script == "open" and parts_drawn(commands) > DRAWN_IN_CALL_MAX
    has_baskets = script == "grab" and any(map(basket_of, commands))
    return Batch(commands, offers, total_size(commands), script, draws, has_baskets)


def joined(batches: Sequence[Batch], offers: Collection[str]) -> Batch:
    """The batch of a call: the commands of these batches of one type, in their order."""
    if len(batches) == 1:
        return batches[0]
    commands = [command for batch in batches for command in batch.commands]
    if set(map(type, batches)) == {PlainBatch}:
        return PlainBatch(commands, offers, PLAIN_BYTES * len(commands))
    return Batch(commands, offers, sum(batch.bytes for batch in batches), batches[0].script)
