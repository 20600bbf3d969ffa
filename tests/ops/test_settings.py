"""Settings: where values come from, and errors that name the variable and show no secret."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from grabstream.models.bounds import REASON_BYTES_MAX
from grabstream.ops.cli import grabstream
from grabstream.ops.commands.local.services import new_seal_key
from grabstream.ops.diagnosis.findings import address as finding_address
from grabstream.ops.settings import BadSettings, Settings, child_environment, load_settings, without_password


@pytest.mark.parametrize("value", ["x" * 100_000, "7" * 5_000, "a\x1b[2Jb" * 10_000])
def test_error_quotes_the_beginning_of_a_long_value(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("GRAB_SHARDS", value)
    with pytest.raises(BadSettings) as raised:
        load_settings()
    said = str(raised.value)
    assert said.startswith("GRAB_SHARDS: ")
    assert f"({len(value)} characters)" in said
    assert len(said.encode()) < REASON_BYTES_MAX
    assert said.isprintable()


def test_error_quotes_a_short_value_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAB_SHARDS", "many")
    with pytest.raises(BadSettings, match="GRAB_SHARDS: .*'many'"):
        load_settings()


def test_error_never_quotes_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAB_SEAL_KEYS", "c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0IDEyMzQ:k1")
    with pytest.raises(BadSettings) as raised:
        load_settings()
    assert "c2Vj" not in str(raised.value)


WITH_PASSWORDS = [
    ("REDIS_URL", "redis://app:hunter2@127.0.0.1:1/0", True),
    ("REDIS_URL", "rediss://:hunter2@127.0.0.1/0", True),
    ("REDIS_URL", "redis://127.0.0.1:1/0?password=hunter2&db=1", True),
    ("REDIS_URL", "redis-cluster://app:hunter2@a:1,b:2", True),
    ("REDIS_URL", "redis-cluster://app:hunter2@redis-1", False),
    ("REDIS_URL", "redis://app:hunter2/x@127.0.0.1:1", False),
    ("REDIS_URL", "redis://app:hun@hunter2@127.0.0.1:x", False),
    ("REDIS_URL", "app:hunter2@127.0.0.1://app:hunter2@b", False),
    ("CACHE_URL", "redis://app:hunter2@127.0.0.1:2/0", True),
    ("POSTGRES", "postgresql://app:hunter2@127.0.0.1:1/x", True),
    ("POSTGRES", "postgresql://127.0.0.1/x?user=app&password=hunter2", True),
    ("POSTGRES", "host=127.0.0.1 password=hunter2 user=x", True),
    ("POSTGRES", "host=127.0.0.1 password = 'hunter2 \\' x' user=x", True),
    ("POSTGRES", "host=127.0.0.1 sslpassword=hunter2", True),
    ("POSTGRES", "host=127.0.0.1 password=hunter2 colour=red", False),
    ("POSTGRES", "postgresql://app@server:hunter2@127.0.0.1:1/x", False),
    ("POSTGRES", "postgresql://app/x:hunter2@127.0.0.1:1/x", True),
    ("PAYMENT_CALLBACK_URL", "https://app:hunter2@pay.example/callback", False),
    ("PAYMENT_QUERY_URL", "http://:hunter2@127.0.0.1:1/query", False),
]


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql://user@host", "postgresql://user@host"),
        ("postgresql://user@host:5432/db", "postgresql://user@host:5432/db"),
        ("redis://user@[::1]:6379/0", "redis://user@[::1]:6379/0"),
        ("redis-cluster://user@a:1,b:2", "redis-cluster://user@a:1,b:2"),
        ("host=a user=b dbname=c", "host=a user=b dbname=c"),
        ("postgresql://user:hunter2@host", "postgresql://user:…@host"),
        ("redis://:hunter2@host:1/0", "redis://:…@host:1/0"),
        ("postgresql://user@server:hunter2@host", "postgresql://user@server:…@host"),
        ("user:hunter2@host", "user:…@host"),
        ("host=a password=hunter2 user=b", "host=a password=… user=b"),
    ],
)
def test_without_password_masks_only_the_password(address: str, shown: str) -> None:
    assert without_password(address) == shown


def test_empty_seal_keys_in_the_environment_do_not_override_the_key_in_env_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    key = new_seal_key()
    (tmp_path / ".env").write_text(f"GRAB_SEAL_KEYS={key}\n")
    monkeypatch.setenv("GRAB_SEAL_KEYS", "")
    assert load_settings().seal_keys.get_secret_value() == key
    shown = json.loads(CliRunner().invoke(grabstream, ["config", "--json"]).stdout)
    assert shown["GRAB_SEAL_KEYS"]["origin"] == ".env"


def test_seal_keys_in_the_environment_win_over_env_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text(f"GRAB_SEAL_KEYS={new_seal_key()}\n")
    key = new_seal_key()
    monkeypatch.setenv("GRAB_SEAL_KEYS", key)
    assert load_settings().seal_keys.get_secret_value() == key


@pytest.mark.parametrize(("variable", "address", "is_good"), WITH_PASSWORDS)
def test_password_is_never_shown(
    monkeypatch: pytest.MonkeyPatch, variable: str, address: str, is_good: bool
) -> None:
    monkeypatch.setenv(f"GRAB_{variable}", address)
    for words in (["config"], ["config", "--json"]):
        result = CliRunner().invoke(grabstream, words)
        assert isinstance(result.exception, BadSettings) is not is_good
        said = result.output + str(result.exception)
        assert "hunter2" not in said
        assert is_good or f"GRAB_{variable}: " in said
    if is_good:
        assert finding_address(f"GRAB_{variable}", address) == f'"$GRAB_{variable}"'


@pytest.mark.parametrize(
    ("variable", "value", "form"),
    [
        ("REDIS_URL", "localhost:46379", "redis://[user:password@]host:port/0"),
        ("REDIS_URL", "redis://localhost:port", "redis://[user:password@]host:port/0"),
        ("REDIS_URL", "", "redis://[user:password@]host:port/0"),
        ("CACHE_URL", "localhost", "redis://[user:password@]host:port/0"),
        ("KAFKA", "", "host:port,host:port,…"),
        ("KAFKA", "kafka://a:9092", "host:port,host:port,…"),
        ("KAFKA", "a:9092,,b:9092", "host:port,host:port,…"),
        ("KAFKA", "a:port", "host:port,host:port,…"),
        ("KAFKA", "a:99999", "host:port,host:port,…"),
        ("POSTGRES", "foo", "postgresql://[user:password@]host:port/database"),
        ("POSTGRES", "postgresql://a:port/b", "postgresql://[user:password@]host:port/database"),
        ("POSTGRES", "", "postgresql://[user:password@]host:port/database"),
        ("PAYMENT_QUERY_URL", "", "http://host:port/path"),
        ("PAYMENT_QUERY_URL", "ftp://host/", "http://host:port/path"),
        ("PAYMENT_QUERY_URL", "http://host:99999/", "http://host:port/path"),
        ("PAYMENT_QUERY_URL", "http:///x", "http://host:port/path"),
        ("PAYMENT_CALLBACK_URL", 'http://host/"', "http://host:port/path"),
        ("PAYMENT_CALLBACK_URL", "http://host/#x", "http://host:port/path"),
        ("PAYMENT_CALLBACK_URL", f"http://host/{'x' * 500}", "http://host:port/path"),
    ],
)
def test_error_for_a_wrong_address_is_one_line_with_the_right_form(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, form: str
) -> None:
    monkeypatch.setenv(f"GRAB_{variable}", value)
    with pytest.raises(BadSettings) as raised:
        load_settings()
    assert str(raised.value).startswith(f"GRAB_{variable}: must be {form}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "value", ["a", "a:1", "a:1,b.example:65535", "127.0.0.1:9092", "[::1]:9092,[fe80::1]:1"]
)
def test_brokers_may_have_a_port_or_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("GRAB_KAFKA", value)
    assert load_settings().kafka == value


def test_faust_app_reports_a_wrong_address_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "faust", "-A", "grabstream.streams.app", "worker"],
        env=child_environment(postgres="foo"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert "GRAB_POSTGRES: must be" in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_variable_causes_a_warning_with_the_most_similar_setting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("GRAB_PREFIXX=a\nOTHER=b\n")
    for name in ("GRAB_REDIS", "GRAB_SERVICES", "GRAB_PORT", "GRAB_WORKER_PORT_80_TCP_ADDR"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("GRAB_REDIS_SERVICE_HOST", "10.0.0.1")
    said = CliRunner().invoke(grabstream, ["config", "--json"]).stderr.splitlines()
    assert said == [
        "grabstream: GRAB_PREFIXX in .env is not a setting and is ignored; the nearest is GRAB_PREFIX",
        "grabstream: GRAB_REDIS in the environment is not a setting and is ignored; "
        "the nearest is GRAB_REDIS_URL",
    ]


def test_config_shows_meaning_unit_and_origin_of_every_setting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("GRAB_LEASE_MS=4000\nGRAB_SHARDS=4\n")
    for name in [name for name in os.environ if name.startswith("GRAB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GRAB_SHARDS", "2")
    found = json.loads(CliRunner().invoke(grabstream, ["config", "--json"]).stdout)
    assert set(found) == {f"GRAB_{name.upper().rstrip('_')}" for name in Settings.model_fields}
    assert all(one["meaning"].endswith(".") for one in found.values())
    assert {name: (one["value"], one["unit"], one["origin"]) for name, one in found.items()}.items() >= {
        "GRAB_LEASE_MS": (4000, "ms", ".env"),
        "GRAB_SHARDS": (2, "shards", "environment"),
        "GRAB_VERIFY_PERCENT": (5.0, "%", "default"),
        "GRAB_REFUSALS_DAYS": (14, "days", "default"),
    }.items()
    said = CliRunner().invoke(grabstream, ["config"]).stdout
    assert all(word in said for word in ("environment", ".env", "default", "ms", "lease"))


def test_payment_keys_are_shown_by_their_ids_only(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = new_seal_key(), new_seal_key()
    monkeypatch.setenv("GRAB_PAYMENT_KEYS", f"{one},{other}")
    monkeypatch.setenv("GRAB_PAYMENT_QUERY_URL", "https://pay.example/query?tenant=7")
    shown = json.loads(CliRunner().invoke(grabstream, ["config", "--json"]).stdout)
    ids = [key.partition(":")[0] for key in (one, other)]
    assert shown["GRAB_PAYMENT_KEYS"]["value"] == f"{ids[0]}:…, {ids[1]}:…"
    assert shown["GRAB_PAYMENT_QUERY_URL"]["value"] == "https://pay.example/query?tenant=7"
    monkeypatch.setenv("GRAB_PAYMENT_KEYS", f"{one},x:{'a' * 20}")
    with pytest.raises(BadSettings, match="GRAB_PAYMENT_KEYS: .*key 2: an HS256 secret must have") as raised:
        load_settings()
    assert one.partition(":")[2] not in str(raised.value)


def test_payment_side_cannot_be_asked_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAB_PAYMENT_KEYS", "")
    monkeypatch.setenv("GRAB_PAYMENT_QUERY_URL", "http://127.0.0.1:1/query")
    with pytest.raises(BadSettings) as raised:
        load_settings()
    assert str(raised.value).startswith("GRAB_PAYMENT_QUERY_URL needs GRAB_PAYMENT_KEYS")
