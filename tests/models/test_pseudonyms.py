"""Pseudonyms are valid ids that say nothing without their key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grabstream import pseudonym
from grabstream.models.identifiers import is_id
from grabstream.models.pseudonyms import NAMED_USERS, USER_NAME_BYTES_MAX, user_of

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


NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=USER_NAME_BYTES_MAX // 4)
IDS = st.from_regex(r"[A-Za-z0-9._:-]{1,64}", fullmatch=True)
#: Names that a user might choose to become another user: the id of that user, or what it is made of.
CHOSEN = st.builds(
    str.__add__, st.sampled_from(["", NAMED_USERS]), NAMES | NAMES.map(lambda name: user_of(name, KEY))
)


def test_a_name_that_is_an_id_is_the_user() -> None:
    for name in ("ann", "a" * 64, "0", "SUB:x", "sub", "sub.x", "grabstream:x", "sweep"):
        assert user_of(name, KEY) == user_of(name, None) == name


@pytest.mark.parametrize(
    "name",
    [
        "auth0|5f7c8ec7c33c6c004bbafe82", "ann@example.org", "a" * 65, ".", "..", "ann\n", "ann\0",
        "\u0430nn", "ä" * 127, "sub:", "sub:krtntdhomfmd3tdgf6nwsfubelxean7q",
    ],
)  # fmt: skip
def test_another_name_gives_an_id_under_a_key_only(name: str) -> None:
    user = user_of(name, KEY)
    assert user == f"sub:{pseudonym(KEY, name)}"
    assert user not in (name, user_of(name, bytes(32)))
    assert is_id(user)
    with pytest.raises(ValueError, match="GRAB_JWT_USER_KEY"):
        user_of(name, None)


def test_the_id_of_a_name_stays_as_it_is() -> None:
    """Grabs, limits and balances of the user are found by it."""
    assert user_of("anna@example.org", KEY) == "sub:krtntdhomfmd3tdgf6nwsfubelxean7q"


@pytest.mark.parametrize("name", ["", "a" * 256, "ä" * 128, "x" * 10_000, "\ud800"])
@pytest.mark.parametrize("key", [KEY, None])
def test_a_name_that_nobody_may_have(name: str, key: bytes | None) -> None:
    with pytest.raises(ValueError, match="255 bytes|surrogate"):
        user_of(name, key)


@given(NAMES | IDS | CHOSEN, NAMES | IDS | CHOSEN)
def test_no_two_names_are_one_user(one: str, other: str) -> None:
    """Also for names chosen with all ids of users known."""
    users = [user_of(name, KEY) for name in (one, other) if len(name.encode()) <= USER_NAME_BYTES_MAX]
    assert all(map(is_id, users))
    if len(users) == 2:
        assert (users[0] == users[1]) is (one == other)
        # Without the key, those who have an id nevertheless are the same.
        assert all(user.startswith(NAMED_USERS) or user == user_of(user, None) for user in users)


@given(NAMES)
def test_nobody_gets_the_id_of_another_one_by_its_name(name: str) -> None:
    user = user_of(name, KEY)
    assert user_of(user, KEY) == (user if user == name else f"sub:{pseudonym(KEY, user)}")
