"""Settings: where values come from, and errors that name the variable and show no secret."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from grabstream.crypto.sealing import new_seal_key
from grabstream.models.bounds import REASON_BYTES_MAX
from grabstream.ops.cli import grabstream
from grabstream.ops.diagnosis.findings import address as finding_address
from grabstream.settings import (
    FILE_BYTES_MAX,
    BadSettings,
    Settings,
    child_environment,
    host_and_port,
    load_settings,
    without_password,
)
from grabstream.streams.journal_keys import JournalKeys, journal_keys, new_key_pair, use_keys


@pytest.fixture(autouse=True)
def no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers of a run may have other ports than usual."""
    for name in ("REDIS_URL", "KAFKA", "POSTGRES"):
        monkeypatch.delenv(f"GRAB_{name}", raising=False)


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


def test_seal_keys_in_the_environment_win_over_env_file_unless_they_are_empty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    key = new_seal_key()
    (tmp_path / ".env").write_text(f"GRAB_SEAL_KEYS={key}\n")
    monkeypatch.setenv("GRAB_SEAL_KEYS", "")
    assert load_settings().seal_keys.get_secret_value() == key
    shown = json.loads(CliRunner().invoke(grabstream, ["config", "--json"]).stdout)
    assert shown["GRAB_SEAL_KEYS"]["origin"] == ".env"
    assert shown["GRAB_SEAL_KEYS"]["value"] == f"{key.partition(':')[0]}:…"
    other = new_seal_key()
    monkeypatch.setenv("GRAB_SEAL_KEYS", other)
    assert load_settings().seal_keys.get_secret_value() == other


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
    if not is_good:
        # A program that makes its settings itself.
        with pytest.raises(ValidationError) as raised:
            Settings()
        assert "hunter2" not in str(raised.value)
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


@pytest.mark.long
def test_faust_app_reports_a_wrong_address_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "faust", "-A", "grabstream.streams.app", "worker"],
        env=child_environment(postgres="foo"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2, done.stderr
    assert "GRAB_POSTGRES: must be" in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_variables_are_refused_with_the_most_similar_setting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("GRAB_PREFIXX=a\nOTHER=b\n")
    for name in ("GRAB_REDIS", "GRAB_SERVICES", "grab_test_seed"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("GRAB_GATEWAY_PORT", "8080")
    with pytest.raises(BadSettings) as raised:
        load_settings()
    assert str(raised.value).split("; ") == [
        "GRAB_PREFIXX in .env is not a setting (the nearest is GRAB_PREFIX)",
        "GRAB_GATEWAY_PORT in the environment is not a setting (the nearest is GRAB_GATEWAY_HOSTS)",
        "GRAB_REDIS in the environment is not a setting (the nearest is GRAB_REDIS_CA)",
    ]
    done = CliRunner().invoke(grabstream, ["config"])
    assert isinstance(done.exception, BadSettings)
    assert CliRunner().invoke(grabstream, ["config", "--new-seal-key"]).exit_code == 0


def test_variables_of_container_platforms_are_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (
        ("GRAB_PORT", "tcp://10.0.0.1:80"),
        ("GRAB_WORKER_PORT", "tcp://10.0.0.1:80"),
        ("GRAB_WORKER_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("GRAB_WORKER_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("GRAB_REDIS_SERVICE_HOST", "10.0.0.1"),
        ("GRAB_REDIS_SERVICE_PORT_HTTP", "80"),
    ):
        monkeypatch.setenv(name, value)
    load_settings()


SECRET_FILES = [
    ("REDIS_URL", "redis://app:hunter2@127.0.0.1:1/0"),
    ("CACHE_URL", "redis://app:hunter2@127.0.0.1:2/0"),
    ("POSTGRES", "postgresql://app:hunter2@127.0.0.1:1/x"),
    ("SEAL_KEYS", "k1:" + "hunter2" * 6 + "0"),
    ("PAYMENT_KEYS", "k1:" + "hunter2" * 6 + "0"),
    ("TICKET_KEYS", "k1:HS256:" + "hunter2" * 6 + "0"),
]


@pytest.mark.parametrize("origin", ["environment", ".env"])
@pytest.mark.parametrize(("variable", "value"), SECRET_FILES)
def test_a_secret_may_be_the_content_of_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, value: str, origin: str
) -> None:
    monkeypatch.chdir(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text(f"{value}\n")
    secret.chmod(0o640)
    if origin == ".env":
        # The environment wins over .env, by the value or by a file.
        (tmp_path / ".env").write_text(f"GRAB_{variable}_FILE={secret}\n")
    else:
        (tmp_path / ".env").write_text(f"GRAB_{variable}=unused\n")
        monkeypatch.setenv(f"GRAB_{variable}_FILE", str(secret))
    found = getattr(load_settings(), variable.lower())
    assert (found if isinstance(found, str) else found.get_secret_value()) == value
    done = CliRunner().invoke(grabstream, ["config", "--json"])
    assert (done.exit_code, done.stderr, "hunter2" in done.output) == (0, "", False)
    assert json.loads(done.stdout)[f"GRAB_{variable}"]["origin"] == f"{origin}, file"
    assert "hunter2" not in repr(load_settings())


def test_environment_wins_over_a_file_that_env_file_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("GRAB_REDIS_URL_FILE=/missing\n")
    monkeypatch.setenv("GRAB_REDIS_URL", "redis://127.0.0.1:3/0")
    assert load_settings().redis_url == "redis://127.0.0.1:3/0"
    # A child gets the value that its parent gives it, also when the parent has it from a file.
    monkeypatch.setenv("GRAB_POSTGRES_FILE", "/missing")
    child = child_environment(postgres="postgresql://127.0.0.1/x")
    assert child["GRAB_POSTGRES"] == "postgresql://127.0.0.1/x"
    assert "GRAB_POSTGRES_FILE" not in child


def test_unfit_secret_files_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    long, empty, binary, wrong, pipe = (tmp_path / name for name in ("long", "empty", "bin", "wrong", "pipe"))
    long.write_text("x" * (FILE_BYTES_MAX + 1))
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe")
    wrong.write_text("k1:hunter2")
    os.mkfifo(pipe)
    for path, said in (
        (tmp_path / "missing", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (pipe, "is not a file"),
        (long, "has more than 65,536 bytes"),
        (empty, "is empty"),
        (binary, "is not a text in UTF-8"),
        (wrong, "GRAB_SEAL_KEYS: .*key 1 "),
    ):
        monkeypatch.setenv("GRAB_SEAL_KEYS_FILE", str(path))
        with pytest.raises(BadSettings, match=said) as raised:
            load_settings()
        assert str(raised.value).startswith("GRAB_SEAL_KEYS")
        assert "hunter2" not in str(raised.value)
    monkeypatch.setenv("GRAB_SEAL_KEYS", new_seal_key())
    with pytest.raises(BadSettings, match="GRAB_SEAL_KEYS and GRAB_SEAL_KEYS_FILE are both set"):
        load_settings()


def test_a_file_that_others_can_read_causes_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("redis://app:hunter2@127.0.0.1:1/0")
    secret.chmod(0o644)
    monkeypatch.setenv("GRAB_REDIS_URL_FILE", str(secret))
    load_settings()
    load_settings()
    assert [record.getMessage() for record in caplog.records] == [
        f"GRAB_REDIS_URL_FILE: every user of this machine can read {secret}: `chmod o-r` it"
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


def test_journal_keys_are_used_by_the_process_and_shown_by_their_ids_only(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: use_keys(JournalKeys()))
    made = CliRunner().invoke(grabstream, ["config", "--new-journal-key", "k1"]).stdout
    for line in made.splitlines():
        name, _, value = line.partition("=")
        monkeypatch.setenv(name, value)
    shown = json.loads(CliRunner().invoke(grabstream, ["config", "--json"]).stdout)
    private, public = os.environ["GRAB_JOURNAL_KEYS"], os.environ["GRAB_JOURNAL_PUBLIC_KEYS"]
    assert shown["GRAB_JOURNAL_KEYS"]["value"] == "k1:…"
    assert shown["GRAB_JOURNAL_PUBLIC_KEYS"]["value"] == public
    signer = journal_keys().signer
    assert signer is not None
    assert (signer.key_id, list(journal_keys().public)) == ("k1", ["k1"])
    monkeypatch.setenv("GRAB_JOURNAL_PUBLIC_KEYS", f"k1:{new_key_pair()[1]}")
    with pytest.raises(BadSettings, match="the key of id k1 is not that of GRAB_JOURNAL_KEYS") as raised:
        load_settings()
    monkeypatch.setenv("GRAB_JOURNAL_KEYS", f"{private},k2:abc")
    with pytest.raises(
        BadSettings, match="GRAB_JOURNAL_KEYS: .*key 2: an Ed25519 key has 32 bytes"
    ) as raised:
        load_settings()
    assert private.partition(":")[2] not in str(raised.value)
    refused = CliRunner().invoke(grabstream, ["config", "--new-journal-key", "k:1"])
    assert (refused.exit_code, "letters" in refused.output) == (2, True)


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


def test_a_secret_is_shown_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAB_S3_ACCESS_KEY", "me")
    monkeypatch.setenv("GRAB_S3_SECRET_KEY", "s3cret")
    shown = json.loads(CliRunner().invoke(grabstream, ["config", "--json"]).output)
    assert [shown[f"GRAB_{name}"]["value"] for name in ("S3_SECRET_KEY", "KAFKA_PASSWORD")] == ["…", ""]


def test_payment_side_cannot_be_asked_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAB_PAYMENT_KEYS", "")
    monkeypatch.setenv("GRAB_PAYMENT_QUERY_URL", "http://127.0.0.1:1/query")
    with pytest.raises(BadSettings) as raised:
        load_settings()
    assert str(raised.value).startswith("GRAB_PAYMENT_QUERY_URL needs GRAB_PAYMENT_KEYS")


@pytest.mark.parametrize(
    ("value", "listens"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)), ("[::1]:0", ("::1", 0)), ("a-1:65535", ("a-1", 65_535)),
        ("", None), ("9464", None), ("host:65536", None), ("http://host:1", None), ("::1:9464", None),
    ],
)  # fmt: skip
def test_metrics_are_served_on_a_host_and_a_port(
    value: str, listens: tuple[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAB_METRICS_LISTEN", value)
    if listens is None and value:
        with pytest.raises(BadSettings, match="GRAB_METRICS_LISTEN: must be host:port"):
            load_settings()
        return
    found = load_settings().metrics_listen
    assert (host_and_port(found) if found else None) == listens
