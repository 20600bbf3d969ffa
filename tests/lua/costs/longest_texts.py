"""Texts, entries and commands that are as long as the bounds allow, for the tests of costs."""

from collections.abc import Sequence
from typing import Any, Final

from grabstream.models.commands import (
    METADATA_BYTES_MAX,
    METADATA_PAIRS_MAX,
    AnyCommand,
    Load,
    encode_metadata,
    in_chunks,
)
from grabstream.models.entries import Entry

#: A character of four bytes in UTF-8: it makes the longest texts for a bound in characters.
LONG: Final = "\N{GRINNING FACE}"
#: Metadata with as many pairs, and as long, as it may be.
METADATA: Final = {f"n{n:02}": "" for n in range(METADATA_PAIRS_MAX)}
METADATA["n00"] = "x" * (METADATA_BYTES_MAX - len(encode_metadata(METADATA)))
ATTRIBUTES: Final = {name + "n" * 60: "v" * 64 for name in "abcdefgh"}


ENTRIES: Final = tuple(
    Entry("sku:" + "a" * 64, "receivable:" + "x" * 64, f"receivable:{n:02}".ljust(64, "y"), 10**12)
    for n in range(16)
)


def codes(count: int, character: str = LONG) -> list[str]:
    return [f"{n:06}" + character * 194 for n in range(count)]


def loads(offer: str, what: Any, items: Sequence[str]) -> list[AnyCommand]:
    chunks = in_chunks(what, items)
    return [
        Load(id=f"{offer}-{n}", offer=offer, what=what, chunk=n, chunks=len(chunks), items=chunk_items)
        for n, chunk_items in enumerate(chunks, 1)
    ]
