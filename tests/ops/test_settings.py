"""What is wrong with a setting is said by its name, and of what stands there no more than what shows it."""

import pytest

from models.bounds import REASON_BYTES_MAX
from ops.settings import BadSettings, load_settings


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
