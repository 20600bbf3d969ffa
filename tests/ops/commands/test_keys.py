"""`grabstream keys`: keys are created, rotated, listed and revoked; only hashes of secrets are kept, and no
rebuild touches them.
"""

import json
import re
from hashlib import sha256
from typing import Any

import pytest
from click import BadParameter

from grabstream.ops.commands.operate.keys import create
from grabstream.projections.tables import api_keys
from grabstream.settings import Settings
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import rows

COLUMNS = "name, scopes, sha256, previous_sha256, previous_until, expires_at, revoked_at"


def keys(settings: Settings, *words: str, code: int = 0) -> Any:
    done = grabstream("keys", *words, **env_of(settings), shards=str(settings.shards))
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout) if code == 0 and "--json" in words else done.stdout + done.stderr


async def table_of(settings: Settings) -> list[Any]:
    return await rows(settings, f"SELECT {COLUMNS} FROM api_keys ORDER BY name")


def test_scopes_are_given_one_by_one_or_with_commas() -> None:
    def scopes(*words: str) -> list[str]:
        found = create.make_context("create", ["shop", *words]).params["scopes"]
        return [scope for several in found for scope in several]

    assert scopes("--scope", "grab,read", "--scope", "settle") == ["grab", "read", "settle"]
    with pytest.raises(BadParameter, match="'reed' is not one of"):
        scopes("--scope", "grab,reed")


@pytest.mark.long
async def test_life_of_a_key(system: Settings) -> None:
    assert "no keys" in keys(system, "list")
    assert keys(system, "list", "--json") == []
    would = keys(system, "create", "shop", "--scope", "grab", "--dry-run", "--json")
    assert (would["name"], would["scopes"], would["dry_run"], "secret" in would) == (
        "shop",
        ["grab"],
        True,
        False,
    )
    assert await table_of(system) == []

    said = keys(system, "create", "shop", "--scope", "read,grab", "--scope", "read")
    [secret] = re.findall(r"^(grabkey_[0-9a-f]{64})$", said, re.MULTILINE)
    [row] = await table_of(system)
    assert row[:3] == ("shop", ["grab", "read"], sha256(secret.encode()).digest())
    assert secret not in str(await rows(system, "SELECT row_to_json(api_keys)::text FROM api_keys"))
    for listed in (keys(system, "list"), str(keys(system, "list", "--json"))):
        assert "shop" in listed
        assert secret not in listed
        assert sha256(secret.encode()).hexdigest()[:16] not in listed
    assert "never used twice" in keys(system, "create", "shop", "--scope", "read", code=1)

    before = await table_of(system)
    keys(system, "rotate", "shop", "--dry-run")
    assert await table_of(system) == before
    rotated = keys(system, "rotate", "shop", "--grace", "1h", "--json")
    [row] = await table_of(system)
    assert row[2:4] == (sha256(rotated["secret"].encode()).digest(), sha256(secret.encode()).digest())
    assert 3_590_000 < rotated["previous_until"] - rotated["rotated_at"] <= 3_600_000
    assert "not valid" not in keys(system, "rotate", "shop")

    keys(system, "create", "old", "--scope", "operate", "--expires", "30d")
    keys(system, "revoke", "old", "--dry-run")
    assert [key["state"] for key in keys(system, "list", "--json")] == ["valid", "valid"]
    assert "within 5 s" in keys(system, "revoke", "old")
    first = keys(system, "revoke", "old", "--json")["revoked_at"]
    assert keys(system, "revoke", "old", "--json")["revoked_at"] == first
    assert "Was revoked before, at 20" in keys(system, "revoke", "old")
    assert {key["name"]: key["state"] for key in keys(system, "list", "--json")} == {
        "shop": "valid", "old": "revoked",
    }  # fmt: skip
    assert "is revoked" in keys(system, "rotate", "old", code=1)
    assert "no key nobody" in keys(system, "revoke", "nobody", code=1)

    before = await table_of(system)
    done = grabstream("rebuild", "all", **env_of(system), shards=str(system.shards))
    assert done.returncode == 0, done.stderr
    done = grabstream("init", **env_of(system), shards=str(system.shards))
    assert done.returncode == 0, done.stderr
    assert await table_of(system) == before


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("create", "shop"), "--scope"),
        (("create", "shop", "--scope", "all"), "'all' is not one of"),
        (("create", "a/b", "--scope", "read"), "NAME: must match|must match"),
        (("create", "a", "--scope", "read", "--expires", "yesterday"), "--expires"),
        (("create", "a", "--scope", "read", "--expires", "2020-01-01T00:00:00Z"), "in the future"),
        (("rotate", "a", "--grace", "31d"), "at most 30d"),
        (("rotate", "a", "--grace", "soon"), "--grace"),
    ],
)
def test_wrong_words_are_named(settings: Settings, words: tuple[str, ...], reason: str) -> None:
    assert re.search(reason, keys(settings, *words, code=2))


async def test_keys_are_bounded(system: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    from grabstream.connections.opening import checked_database

    monkeypatch.setattr(api_keys, "API_KEYS_MAX", 2)
    async with checked_database(system) as connection:
        for number in range(2):
            await api_keys.create(connection, f"k{number}", ["read"], bytes([number] * 32), None)
        with pytest.raises(api_keys.ApiKeyRefused, match="the maximum of a system"):
            await api_keys.create(connection, "k2", ["read"], bytes([2] * 32), None)
