"""Bounds of all input and output, and functions that quote input in messages. `docs/bounds.md` names
each with its value.

Bounds of a single field are defined next to the field (`models/offers.py`, `models/commands.py`). This module
has the bounds of whole commands, records and event lines.
"""

import re
from typing import Final

#: A record of any topic, with its key and headers.
RECORD_BYTES_MAX: Final = 4 * 1024 * 1024
#: A command as JSON, from any source.
COMMAND_BYTES_MAX: Final = 128 * 1024
#: The line of an event in the journal. A line below this bound fits a block. Readers accept longer lines.
EVENT_LINE_BYTES_MAX: Final = 256 * 1024
#: What a call of a script reads from Redis at most: as much as its cost allows, and the answers of a basket.
#: Nothing tests it at run time; it follows from the other bounds.
CALL_READ_BYTES_MAX: Final = 1_572_864
#: Codes that one grab may get; its event contains them, sealed. The greatest `max_per_grab` of an offer with
#: codes.
CODES_PER_GRAB_MAX: Final = 100
#: Grabs of a basket. One call decides them all; offers with long queues cost it most.
BASKET_GRABS_MAX: Final = 10
#: Grabs of a basket that a repeat may have. Earlier releases allowed this many; a repeat of such a basket
#: must get its first answer.
BASKET_GRABS_KNOWN_MAX: Final = 64
#: Spans of a week in which an offer takes grabs, after adjacent spans are joined.
HOURS_SPANS_MAX: Final = 64
#: Commands in one array.
ARRAY_COMMANDS_MAX: Final = 10_000
#: Commas in an array of commands, including those within texts. They are counted before the array is decoded,
#: because every decoded value costs memory.
ARRAY_COMMAS_MAX: Final = 200_000
#: The reason of a refusal, in bytes of UTF-8.
REASON_BYTES_MAX: Final = 1024
#: The part of an input that a message quotes, in characters.
QUOTED_CHARACTERS_MAX: Final = 40
#: Undecodable elements of one array that are kept as single records. With more of them, the whole array is
#: kept instead.
REJECTED_OF_ARRAY_MAX: Final = 100
#: A piece of a record in the topic `rejected`. With its headers, it fits the default limit of Kafka
#: (1,048,588 bytes).
REJECTED_PIECE_BYTES_MAX: Final = 1_000_000
#: The key of a record in the topic `rejected`. A longer key is kept in pieces, too.
REJECTED_KEY_BYTES_MAX: Final = 16 * 1024

#: A file of offers, codes or users.
FILE_BYTES_MAX: Final = 64 * 1024 * 1024
#: Values in a file of offers. Values that an alias repeats count each time.
FILE_VALUES_MAX: Final = 2_000_000

_unprintable = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def quoted(value: object) -> str:
    """An input as a message quotes it: `repr` of a scalar, with only the first characters of a text; the type
    of any other value.
    """
    if isinstance(value, str | bytes):
        return (
            repr(value)
            if len(value) <= QUOTED_CHARACTERS_MAX
            else f"{value[:QUOTED_CHARACTERS_MAX]!r}… ({len(value)} characters)"
        )
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return repr(value) if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"


def shortened(text: str, bytes_max: int = REASON_BYTES_MAX) -> str:
    """The text cut to `bytes_max` bytes of UTF-8, with control characters escaped, so that every topic, table
    and terminal can take it.
    """
    if 4 * len(text) <= bytes_max and text.isprintable():
        return text
    head = _unprintable.sub(lambda match: f"\\u{ord(match.group()):04x}", text[:bytes_max])
    raw = head.encode()
    if len(raw) <= bytes_max and len(text) <= bytes_max:
        return head
    return raw[: bytes_max - len("…".encode())].decode(errors="ignore") + "…"


def counted(number: int, things: str) -> str:
    """The number with its noun, which is given in the plural with s: `1 part`, `2,000 parts`."""
    return f"{number:,} {things.removesuffix('s') if number == 1 else things}"
