"""JSON in which an object names a field twice: readers disagree about which value counts, so one may check a
different value than another executes. Every decider refuses it.
"""

import json
from base64 import urlsafe_b64decode
from collections.abc import Callable

from grabstream.models.bounds import quoted
from grabstream.models.money import Invalid


def check_names_once(raw: bytes, encoded: bytes | None = None) -> None:
    """Raises Invalid when an object of a JSON text names a field twice, or the text cannot be read.

    `encoded` is the text as this program writes what it has decoded from `raw`. A text without escapes that
    has as many quotes has no additional names. So most texts are not parsed a second time.
    """
    if encoded is None or raw.count(b'"') != encoded.count(b'"') or b"\\" in raw:
        _parsed(raw, _check)


def check_outer_names_once(raw: bytes, encoded: bytes | None = None) -> None:
    """The same for the outermost object alone: its contents are checked separately, and are the same in
    `encoded` and `raw`.
    """
    if encoded is None or any(raw.count(sign) != encoded.count(sign) for sign in (b'"', b"\\")):
        pairs = _parsed(raw, list)
        if isinstance(pairs, list):
            _check(pairs)


def check_header(text: str) -> None:
    """The same for the header of a compact JWS, as RFC 7515 (section 4) requires."""
    check_names_once(segment_of(text, 0))


def check_claims(text: str) -> None:
    """The same for the claims of a compact JWS."""
    check_names_once(segment_of(text, 1))


def segment_of(text: str, index: int) -> bytes:
    """The object in a segment of a compact JWS: the header (0) or the claims (1)."""
    segment = text.split(".")[index]
    return urlsafe_b64decode(segment + "=" * (-len(segment) % 4))


def _parsed(raw: bytes, hook: Callable[[list[tuple[str, object]]], object]) -> object:
    try:
        # Numbers stay texts: one of thousands of digits would be an error.
        return json.loads(raw, object_pairs_hook=hook, parse_int=str)
    except Invalid:
        raise
    except (ValueError, RecursionError) as error:
        raise Invalid(f"cannot be read: {error}") from None


def _check(pairs: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise Invalid(f"{quoted(name)}: is named twice; keep one")
        seen.add(name)
