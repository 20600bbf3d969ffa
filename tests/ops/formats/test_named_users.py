"""Users by their name in tokens, as a gateway has them: on the command line, and in settings."""

import json

import click
import pytest
from click.testing import CliRunner

from grabstream.models.pseudonyms import user_of
from grabstream.ops.cli import grabstream
from grabstream.ops.formats.named_users import user_named
from grabstream.settings import BadSettings, load_settings

KEY = "0f" * 32
NAME = "auth0|5f7c8ec7"
USER = user_of(NAME, bytes.fromhex(KEY))


def test_a_name_becomes_the_id_and_an_id_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAB_JWT_USER_KEY", KEY)
    settings = load_settings()
    assert [user_named(settings, text) for text in (NAME, USER, "ann", ".")] == [USER, USER, "ann", "."]
    for wrong in ("", "a" * 256):
        with pytest.raises(click.BadParameter, match="255 bytes of UTF-8; got"):
            user_named(settings, wrong)
    monkeypatch.delenv("GRAB_JWT_USER_KEY")
    for verb in (("why", NAME, "lunch"), ("forget", NAME, "--by", "eve"), ("config", "--user-of", NAME)):
        done = CliRunner().invoke(grabstream, verb)
        assert (done.exit_code, "GRAB_JWT_USER_KEY" in done.stderr) == (2, True), done.output


def test_config_prints_the_id_that_a_gateway_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAB_JWT_USER_KEY", KEY)
    assert CliRunner().invoke(grabstream, ["config", "--user-of", NAME]).stdout == f"{USER}\n"
    done = CliRunner().invoke(grabstream, ["config", "--user-of", "ann", "--json"])
    assert json.loads(done.stdout) == {"user": "ann"}
    # Also of a name that looks like the id of another one.
    forged = CliRunner().invoke(grabstream, ["config", "--user-of", USER]).stdout.strip()
    assert forged == user_of(USER, bytes.fromhex(KEY)) != USER


@pytest.mark.parametrize("key", ["0f" * 31, "0f" * 32 + "0", "zz" * 32, "k1:" + "0f" * 32])
def test_a_key_that_is_too_short_or_no_key(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("GRAB_JWT_USER_KEY", key)
    with pytest.raises(BadSettings, match="GRAB_JWT_USER_KEY: must have at least 64 hex digits") as raised:
        load_settings()
    assert key not in str(raised.value)


@pytest.mark.parametrize("claim", ["", "iss", "aud", "exp", "x" * 256])
def test_a_claim_that_names_no_user(monkeypatch: pytest.MonkeyPatch, claim: str) -> None:
    monkeypatch.setenv("GRAB_JWT_USER_CLAIM", claim)
    with pytest.raises(BadSettings, match="GRAB_JWT_USER_CLAIM"):
        load_settings()


def test_the_key_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAB_JWT_USER_KEY", KEY)
    for words in (["config"], ["config", "--json"]):
        shown = CliRunner().invoke(grabstream, words).stdout
        assert "GRAB_JWT_USER_KEY" in shown
        assert KEY not in shown
