"""What is wrong with a setting is said by its name, and of what stands there no more than what shows it."""

import pytest
from click.testing import CliRunner

from grabstream.models.bounds import REASON_BYTES_MAX
from grabstream.ops.cli import grabstream
from grabstream.ops.diagnosis.findings import address as finding_address
from grabstream.ops.settings import BadSettings, load_settings


@pytest.mark.parametrize("value", ["x" * 100_000, "7" * 5_000, "a\x1b[2Jb" * 10_000])
def test_a_long_value_is_quoted_by_its_beginning(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("GRAB_SHARDS", value)
    with pytest.raises(BadSettings) as raised:
        load_settings()
    said = str(raised.value)
    assert said.startswith("GRAB_SHARDS: ")
    assert f"({len(value)} characters)" in said
    assert len(said.encode()) < REASON_BYTES_MAX
    assert said.isprintable()


def test_a_short_one_is_quoted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAB_SHARDS", "many")
    with pytest.raises(BadSettings, match="GRAB_SHARDS: .*'many'"):
        load_settings()


def test_a_key_is_never_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
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
    ("POSTGRES", "host=127.0.0.1 password=hunter2 user=x", True), ("POSTGRES",
    "host=127.0.0.1 password = "
    "'hunter2 \\' x' user=x",
                                                                               True),
    ("POSTGRES", "host=127.0.0.1 sslpassword=hunter2", True), ("POSTGRES",
    "host=127.0.0.1 password=hunter2 "
    "colour=red", False),
]  # fmt: skip


@pytest.mark.parametrize(("variable", "address", "is_good"), WITH_PASSWORDS)
def test_a_password_is_never_shown(
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
