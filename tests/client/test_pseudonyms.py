"""Pseudonyms are valid ids that say nothing without their key."""

import pytest

from grabstream import pseudonym
from grabstream.models.identifiers import is_id

KEY = bytes(range(32))


def test_a_pseudonym() -> None:
    found = pseudonym(KEY, "anna@example.org")
    assert found == pseudonym(KEY, "anna@example.org") == "krtntdhomfmd3tdgf6nwsfubelxean7q"
    assert is_id(found)
    assert len({found, pseudonym(KEY, "ben"), pseudonym(KEY, "anna@example.org", "device")}) == 3
    assert found != pseudonym(bytes(32), "anna@example.org")
    assert pseudonym(KEY, "b", "a") != pseudonym(KEY, "a:b")


def test_a_key_or_kind_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="at least 32 bytes, it has 31"):
        pseudonym(KEY[:31], "anna")
    for kind in ("", "a:b", "ä"):
        with pytest.raises(ValueError, match="kind"):
            pseudonym(KEY, "anna", kind)
