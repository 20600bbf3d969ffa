"""Keys in files are replaced while a process runs."""

import logging
import os
from base64 import b64encode, urlsafe_b64decode
from contextlib import suppress
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from grabstream.connections.key_files import KeyFiles
from grabstream.connections.opening import gate_limits, payment_keys, ticket_keys
from grabstream.crypto.signing import NotSigned, Purpose, SigningKeys, sign_with
from grabstream.settings import load_settings
from grabstream.streams.journal_keys import journal_keys, new_key_pair, use_keys

OLD, NEW = "k1:" + "a" * 43, "k2:" + "b" * 43


def write(path: Path, text: str) -> None:
    """Replaces a file as Kubernetes does."""
    path.with_suffix(".new").touch(mode=0o600)
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    return path


def test_keys_of_a_payment_side_are_added_put_first_and_removed(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(file, OLD)
    monkeypatch.setenv("GRAB_PAYMENT_KEYS_FILE", str(file))
    caplog.set_level(logging.INFO)
    settings = load_settings()
    keys, files = payment_keys(settings), KeyFiles(settings)
    old, new = (SigningKeys.from_text("", text) for text in (OLD, NEW))
    assert keys is not None and old is not None and new is not None  # noqa: PT018

    def signs_as(signing: SigningKeys) -> bool:
        return keys.sign(Purpose.receipt, b"{}") == signing.sign(Purpose.receipt, b"{}")

    def takes(signing: SigningKeys) -> bool:
        try:
            return keys.read(Purpose.receipt, signing.sign(Purpose.receipt, b"{}"), 1_000) == b"{}"
        except NotSigned:
            return False

    files.refresh()
    assert (takes(old), takes(new), signs_as(old)) == (True, False, True)
    assert caplog.records == []
    write(file, f"{OLD},{NEW}")
    files.refresh()
    assert (takes(old), takes(new), signs_as(old)) == (True, True, True)
    write(file, f"{NEW},{OLD}")
    files.refresh()
    assert (takes(old), takes(new), signs_as(new)) == (True, True, True)
    write(file, NEW)
    files.refresh()
    assert (takes(old), takes(new), signs_as(new)) == (False, True, True)
    assert [one.levelname for one in caplog.records] == ["INFO"] * 3
    assert "GRAB_PAYMENT_KEYS_FILE has changed; its keys are now in use" in caplog.text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("k1:short", "GRAB_PAYMENT_KEYS: key 1"),
        ("", "is empty"),
        (",", "it contains no key"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_changes_nothing(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    content: str | None,
    why: str,
) -> None:
    write(file, OLD)
    monkeypatch.setenv("GRAB_PAYMENT_KEYS_FILE", str(file))
    settings = load_settings()
    keys, files = payment_keys(settings), KeyFiles(settings)
    assert keys is not None
    signed = keys.sign(Purpose.receipt, b"{}")
    if content is None:
        file.unlink()
    else:
        write(file, content)
    for _ in range(2):
        files.refresh()
    [record] = caplog.records
    assert why in record.getMessage()
    assert "short" not in record.getMessage()
    assert files.refused.keys() == {"payment_keys"}
    assert keys.sign(Purpose.receipt, b"{}") == signed
    write(file, NEW)
    files.refresh()
    assert files.refused == {}
    assert keys.sign(Purpose.receipt, b"{}") != signed


def test_an_approval_of_a_removed_operator_counts_no_more(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {name: Ed25519PrivateKey.generate() for name in ("ann", "bob")}
    public = {
        name: b64encode(secret.public_key().public_bytes_raw()).decode() for name, secret in secrets.items()
    }
    write(file, f"ann:{public['ann']}")
    monkeypatch.setenv("GRAB_OPERATOR_KEYS_FILE", str(file))
    settings = load_settings()
    keys: Any = gate_limits(settings).authority._operator_keys
    files = KeyFiles(settings)

    def signers() -> set[str]:
        found = set()
        for name, secret in secrets.items():
            with suppress(NotSigned):
                text = sign_with(name, secret, Purpose.approval, b"{}")
                found.add(keys.read(Purpose.approval, text, 1_000)[0])
        return found

    assert signers() == {"ann"}
    write(file, f"ann:{public['ann']},bob:{public['bob']}")
    files.refresh()
    assert signers() == {"ann", "bob"}
    write(file, f"bob:{public['bob']}")
    files.refresh()
    assert signers() == {"bob"}


def test_a_relay_signs_with_a_new_key_when_it_is_first(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, pairs = journal_keys(), [new_key_pair() for _ in range(2)]
    private, public = (dict(zip(("old", "new"), of, strict=True)) for of in zip(*pairs, strict=True))
    known = file.with_name("public")
    write(file, f"old:{private['old']}")
    write(known, f"old:{public['old']}")
    monkeypatch.setenv("GRAB_JOURNAL_KEYS_FILE", str(file))
    monkeypatch.setenv("GRAB_JOURNAL_PUBLIC_KEYS_FILE", str(known))
    try:
        files = KeyFiles(load_settings())
        write(known, f"old:{public['old']},new:{public['new']}")
        files.refresh()
        assert journal_keys().public.keys() == {"old", "new"}
        write(file, f"new:{private['new']},old:{private['old']}")
        files.refresh()
        signer = journal_keys().signer
        assert signer is not None
        assert signer.key_id == "new"
        assert journal_keys().verifies("new", signer.sign(b"text"), b"text")
        write(file, f"new:{private['new']}")
        files.refresh()
        assert (files.refused, journal_keys().public.keys()) == ({}, {"old", "new"})
        for path, bad in ((file, ","), (known, f"new:{public['new']}"), (known, f"old:{public['new']}")):
            good = path.read_text()
            write(path, bad)
            files.refresh()
            assert files.refused, bad
            assert journal_keys().public.keys() == {"old", "new"}
            assert journal_keys().signer is not None
            assert journal_keys().signer.key_id == "new"  # type: ignore[union-attr]
            write(path, good)
            files.refresh()
            assert files.refused == {}
    finally:
        use_keys(before)


def test_a_good_file_counts_when_another_one_is_bad(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes changes all files of a secret at once. What was removed must not count any more, as the key
    of a ticket that was verified before.
    """
    tickets = tmp_path / "tickets"
    write(file, OLD)
    write(tickets, f"shop:HS256:{'s' * 43}")
    monkeypatch.setenv("GRAB_PAYMENT_KEYS_FILE", str(file))
    monkeypatch.setenv("GRAB_TICKET_KEYS_FILE", str(tickets))
    settings = load_settings()
    keys, files = ticket_keys(settings), KeyFiles(settings)
    claims = {"sub": "anna", "aud": "sale", "exp": 4_000_000_000}
    token = jwt.encode(claims, urlsafe_b64decode("s" * 43 + "="), "HS256", {"kid": "shop"})
    assert keys.read(token, "anna", "sale") is not None
    write(file, "bad")
    write(tickets, f"shop:HS256:{'t' * 43}")
    files.refresh()
    assert files.refused.keys() == {"payment_keys"}
    assert keys.read(token, "anna", "sale") is None
    write(file, NEW)
    files.refresh()
    assert files.refused == {}
