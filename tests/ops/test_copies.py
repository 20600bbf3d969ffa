"""A copy of a system that still runs: the command that makes it says which keys it must not share."""

import json

import pytest

from grabstream.ops.initialization import copy_in_words, keys_that_a_copy_shares
from grabstream.settings import Settings
from tests.support.command_line import env_of, grabstream

KEY = "c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0IDEyMzQ"
GIVEN = {"ticket_keys": f"t1:HS256:{KEY}", "payment_keys": f"p1:{KEY}"}
NAMES = ["GRAB_PAYMENT_KEYS", "GRAB_TICKET_KEYS"]


def test_the_words_name_keys_that_are_set_and_show_none() -> None:
    settings = Settings(_env_file=None, **GIVEN)  # type: ignore[call-arg, arg-type]
    assert keys_that_a_copy_shares(settings) == NAMES
    words = copy_in_words(NAMES)
    assert "still runs, change GRAB_PAYMENT_KEYS, GRAB_TICKET_KEYS here" in words
    assert copy_in_words(keys_that_a_copy_shares(Settings(_env_file=None))) == ""  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "words",
    [
        ("init", "--new-journal"),
        pytest.param(("rebuild", "journal", "--from", "audit", "--new-journal"), marks=pytest.mark.nightly),
        pytest.param(("init",), marks=pytest.mark.nightly),
    ],
)
def test_a_new_journal_names_the_keys_that_a_copy_shares(system: Settings, words: tuple[str, ...]) -> None:
    done = grabstream(*words, "--json", **env_of(system) | GIVEN, shards=str(system.shards))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["keys_that_a_copy_shares"] == (NAMES if words != ("init",) else [])
