"""JSON with an escape of half of a surrogate pair. It is JSON, but not Unicode text: the decoder refuses all
of it, even if only one of many parts has such an escape.
"""

from collections.abc import Iterator, Sequence

import msgspec


def without_surrogates(raw: bytes) -> bytes:
    """The JSON with other escapes in place of those of surrogates. Its parts have the same places."""
    return raw.replace(b"\\ud", b"\\u0").replace(b"\\uD", b"\\u0")


def at_places(raw: bytes, decoded: bytes, parts: Sequence[msgspec.Raw]) -> Iterator[bytes]:
    """The bytes in `raw` of the elements of an array in it, which are `parts` of `decoded`, the JSON without
    surrogates. A part that is an object or an array does not begin before its place.
    """
    end = 0
    for part in parts:
        start = decoded.index(part, end)
        end = start + len(part)
        yield raw[start:end]
