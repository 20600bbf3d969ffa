"""Estimates how many bytes commands take as arguments of a script. A call bounds them, since Redis reads and
unpacks all arguments, even those of commands that do not fit into the call and are sent again.

The estimate counts the fields that may be long; a command that has only ids and numbers has a constant size.
"""

from collections.abc import Sequence
from typing import Final

from grabstream.gate.staging import INLINE_BYTES_MAX
from grabstream.models.commands import (
    Adjust,
    Amend,
    AnyCommand,
    Confirm,
    Grab,
    Load,
    Open,
    Return,
    bytes_of_code,
    carried_by,
    carried_texts,
    encode_command,
)
from grabstream.models.identifiers import ID_LENGTH_MAX, encoded_payment
from grabstream.models.offers import EnvelopeTerms

#: Bytes of arguments of one call. A command or a basket with more gets its own call.
CALL_BYTES_MAX: Final = 128 * 1024
#: The size of a command that has only ids and numbers.
PLAIN_BYTES: Final = 64
_PART_BYTES: Final = 6


def size_of(command: AnyCommand) -> int:
    """Returns an estimate of the bytes that a command takes of a call's arguments."""
    if isinstance(command, Grab):
        size = PLAIN_BYTES
        if carried := carried_by(command):
            size += sum(len(name) + len(text.encode()) for name, text in carried_texts(carried))
        if attributes := command.attributes:
            # They are sent twice: as text for the event, and as a map.
            size += 2 * sum(len(name) + len(value) + 6 for name, value in attributes.items())
        return size
    if isinstance(command, Load):
        item_bytes = bytes_of_code if command.what == "codes" else len
        return PLAIN_BYTES + sum(map(item_bytes, command.items))
    if (
        isinstance(command, Open)
        and isinstance(command.terms, EnvelopeTerms)
        and command.terms.draw == "ahead"
    ):
        parts = command.terms.parts * _PART_BYTES
        return 2 * len(encode_command(command)) + (parts if parts <= INLINE_BYTES_MAX else 0)
    if isinstance(command, Open | Amend | Adjust | Return):
        # Terms and changes are sent twice: as text for the event, and as a map.
        return (2 if isinstance(command, Open | Amend) else 1) * len(encode_command(command))
    return PLAIN_BYTES + (_beyond_plain(command) if isinstance(command, Confirm) else 0)


def _beyond_plain(command: Confirm) -> int:
    """The bytes of a payment, unless they are as few as those of an id."""
    payment = command.payment
    if payment is None or (len(payment) <= ID_LENGTH_MAX and payment.isascii()):
        return 0
    return len(encoded_payment(payment).encode())


def total_size(commands: Sequence[AnyCommand]) -> int:
    """Returns the sum for commands of one type."""
    if len(commands) == 1:
        return size_of(commands[0])
    if type(commands[0]) is Confirm:
        return PLAIN_BYTES * len(commands) + sum(map(_beyond_plain, commands))  # type: ignore[arg-type]
    return sum(map(size_of, commands))


def fitting(commands: Sequence[AnyCommand]) -> int:
    """Returns how many of the first of these commands fit into one call; at least 1."""
    size = 0
    for index, command in enumerate(commands):
        size += size_of(command)
        if size > CALL_BYTES_MAX:
            return max(index, 1)
    return len(commands)
