"""What a field may be instead, in the reasons of commands that cannot be decoded."""

import json
from typing import Any

import pytest

from grabstream.gateway.problems import field_of
from grabstream.models.commands import Undecodable, decode_commands
from grabstream.models.decoding_words import without_what_may_be

TERMS = {"kind": "stock", "issuer": "shop", "total": 1}
OPEN = {"type": "open", "id": "a", "offer": "a", "terms": TERMS}
GRAB = {"type": "grab", "id": "a", "offer": "a", "user": "ann"}


@pytest.mark.parametrize(
    ("command", "words", "field"),
    [
        (OPEN | {"terms": TERMS | {"kind": "stok"}}, "one of envelope, coupon, stock", "terms.kind"),
        (OPEN | {"terms": TERMS | {"limits": [{"by": "user", "per": "fortnight", "max": 1}]}},
         "one of offer, hour, day, week", "terms.limits[0].per"),
        (OPEN | {"terms": TERMS | {"late": "never"}}, "one of refuse, grace, retake", "terms.late"),
        (OPEN | {"terms": TERMS | {"totl": 1}}, "the nearest is total", "terms.totl"),
        (GRAB | {"usr": "x"}, "the nearest is user", "usr"),
        (GRAB | {"zzz": "x"}, "the fields are id, offer, user, ", "zzz"),
        (GRAB | {"type": "grb"}, "one of open, grab, ", "type"),
        ({"type": "load", "id": "a", "offer": "a", "what": "x", "chunk": 0, "chunks": 1, "items": []},
         "one of codes, audience", "what"),
        # A field of another kind is not its own nearest.
        (OPEN | {"terms": TERMS | {"parts": 1}}, "unknown field `parts`", "terms.parts"),
    ],
)  # fmt: skip
def test_what_may_be_is_in_the_reason(command: dict[str, Any], words: str, field: str) -> None:
    [found] = decode_commands(json.dumps(command).encode())
    assert isinstance(found, Undecodable)
    assert words in found.reason
    assert field_of(found.reason) == field
    assert words not in without_what_may_be(found.reason) or "unknown field" in words


@pytest.mark.parametrize("quoted", ["never (must be one of a)", "never (the nearest is a) - at `$.b`"])
def test_a_value_that_looks_like_an_addition_stays(quoted: str) -> None:
    [found] = decode_commands(json.dumps(OPEN | {"terms": TERMS | {"late": quoted}}).encode())
    assert isinstance(found, Undecodable)
    as_decoded = f"Invalid enum value '{quoted}' - at `$.terms.late`"
    assert found.reason != as_decoded == without_what_may_be(found.reason)
    assert without_what_may_be(as_decoded) == as_decoded


def test_other_reasons_are_as_they_are() -> None:
    for raw in (b"{", b"5", b'{"type":"grab","id":"a","offer":"a"}', b'{"type":"grab","id":7}'):
        [found] = decode_commands(raw)
        assert isinstance(found, Undecodable)
        assert " (" not in found.reason, found.reason
