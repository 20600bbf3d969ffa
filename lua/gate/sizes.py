"""How many bytes commands take as arguments of a script: a call bounds them, since Redis reads and unpacks
all of them, also of those that the call has no room for and that come again with the next one.

It is an estimate from what may be long in a command; where ids are all there is, a constant.
"""

from collections.abc import Sequence
from typing import Final

from grabstream.lua.gate.staging import INLINE_BYTES_MAX
from grabstream.models.commands import (
    Adjust,
    Amend,
    AnyCommand,
    Grab,
    Load,
    Open,
    Return,
    bytes_of_code,
    encode_command,
)
from grabstream.models.offers import EnvelopeTerms

#: Arguments of one call, in bytes. A command, or a basket, that has more goes alone.
CALL_BYTES_MAX: Final = 128 * 1024
#: A command that has ids and numbers only.
PLAIN_BYTES: Final = 64
_PART_BYTES: Final = 6


def size_of(command: AnyCommand) -> int:
    """About how many bytes a command takes of a call's arguments."""
    if isinstance(command, Grab):
        # As text for the event, and one by one.
        return PLAIN_BYTES + 2 * sum(len(name) + len(value) + 6 for name, value in command.attributes.items())
    if isinstance(command, Load):
        of_item = bytes_of_code if command.what == "codes" else len
        return PLAIN_BYTES + sum(map(of_item, command.items))
    if (
        isinstance(command, Open)
        and isinstance(command.terms, EnvelopeTerms)
        and command.terms.draw == "ahead"
    ):
        parts = command.terms.parts * _PART_BYTES
        return 2 * len(encode_command(command)) + (parts if parts <= INLINE_BYTES_MAX else 0)
    if isinstance(command, Open | Amend | Adjust | Return):
        # What is changed goes as text for the event, and by itself.
        return (2 if isinstance(command, Open | Amend) else 1) * len(encode_command(command))
    return PLAIN_BYTES


def size_of_all(commands: Sequence[AnyCommand]) -> int:
    """The same of commands of one type."""
    if type(commands[0]) is Grab and not any(command.attributes for command in commands):  # type: ignore[union-attr]
        return PLAIN_BYTES * len(commands)
    return sum(map(size_of, commands))


def fitting(commands: Sequence[AnyCommand]) -> int:
    """How many of the first of these, of one type, go into one call; at least one."""
    if size_of_all(commands) <= CALL_BYTES_MAX:
        return len(commands)
    size = 0
    for place, command in enumerate(commands):
        size += size_of(command)
        if size > CALL_BYTES_MAX:
            return max(place, 1)
    return len(commands)
