"""Bounds of everything that comes in and is written, and the texts that quote what came in. `docs/limits.md`
is made from these.

Numbers that belong to one field stand beside it (`models/offers.py`, `models/commands.py`); here are those of
whole commands, records and event lines.
"""

import re
from typing import Final

#: A record of any topic, with its key and headers.
RECORD_BYTES_MAX: Final = 4 * 1024 * 1024
#: A command as JSON, whichever way it comes.
COMMAND_BYTES_MAX: Final = 128 * 1024
#: An event as it stands in the journal. What is written below this bound fits a block; readers accept longer
#: lines.
EVENT_LINE_BYTES_MAX: Final = 256 * 1024
#: Codes that one grab may get: they stand in its event, sealed. The greatest `max_per_grab` of an offer with
#: codes.
CODES_PER_GRAB_MAX: Final = 100
#: Grabs of a basket, which one call decides: offers with long queues cost it most.
BASKET_GRABS_MAX: Final = 10
#: Grabs of a basket that are looked at at all: so many could be in one before, and a repeat of those gets its
#: first answer.
BASKET_GRABS_KNOWN_MAX: Final = 64
#: Spans of a week in which an offer takes grabs, after those that touch are joined.
HOURS_SPANS_MAX: Final = 64
#: Commands in one array.
ARRAY_COMMANDS_MAX: Final = 10_000
#: Commas in an array of commands, also those within texts: counted before anything is decoded, since every
#: value costs memory.
ARRAY_COMMAS_MAX: Final = 200_000
#: A text that says why something was refused, in bytes of UTF-8.
REASON_BYTES_MAX: Final = 1024
#: What such a text quotes of an input, in characters.
QUOTED_CHARACTERS_MAX: Final = 40
#: Elements of one array that are kept one by one when they are not understood; of more, the whole array is
#: kept instead.
REJECTED_OF_ARRAY_MAX: Final = 100
#: A piece of what is kept in `rejected`: with its headers it fits a topic that nobody has configured
#: (1,048,588 bytes).
REJECTED_PIECE_BYTES_MAX: Final = 1_000_000
#: A record's key in `rejected`; a longer one is kept in pieces, too.
REJECTED_KEY_BYTES_MAX: Final = 16 * 1024

#: A file of offers, codes or users.
FILE_BYTES_MAX: Final = 64 * 1024 * 1024
#: Values that a file of offers may hold, those that an alias repeats counted again.
FILE_VALUES_MAX: Final = 2_000_000

_unprintable = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def quoted(value: object) -> str:
    """How a message quotes an input: as Python writes it, the first characters of a text only. What is no
    scalar is named by its type.
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
    """A message that every topic, table and terminal can keep: at most so many bytes of UTF-8, control
    characters as escapes.
    """
    if 4 * len(text) <= bytes_max and text.isprintable():
        return text
    head = _unprintable.sub(lambda found: f"\\u{ord(found.group()):04x}", text[:bytes_max])
    raw = head.encode()
    if len(raw) <= bytes_max and len(text) <= bytes_max:
        return head
    return raw[: bytes_max - len("…".encode())].decode(errors="ignore") + "…"
