"""`grabstream approve`: off-line signatures, and the verbs that send them, on a real system."""

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from grabstream.settings import Settings
from tests.support.command_line import env_of, grabstream
from tests.support.receipts import as_text

KEYS = {
    name: Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n, name in enumerate(("ann", "bob"), 1)
}
OPERATOR_KEYS = ",".join(
    f"{name}:{as_text(key.public_key().public_bytes_raw())}" for name, key in KEYS.items()
)


@pytest.fixture
def pem(tmp_path: Path) -> dict[str, Path]:
    files = {}
    for name, key in KEYS.items():
        files[name] = tmp_path / f"{name}.pem"
        files[name].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files


@pytest.mark.long
def test_it_shows_what_is_signed_and_refuses_what_needs_no_approval(tmp_path: Path, pem: Any) -> None:
    file = tmp_path / "commands.json"
    file.write_text(
        '[{"type":"close","id":"c","offer":"o","operator":"door"},{"type":"pause","id":"p","offer":"o"}]'
    )
    done = grabstream("approve", str(file), "--key", str(pem["ann"]), "--key-id", "ann", prefix="shop")
    assert done.returncode == 0, done.stderr
    assert [(one["type"], one["id"], one["offer"], one["signer"]) for one in json.loads(done.stdout)] == [
        ("close", "c", "o", "ann"), ("pause", "p", "o", "ann"),
    ]  # fmt: skip
    assert '{"type":"close","id":"c","offer":"o"}' in done.stderr
    assert "signed by ann for system shop until" in done.stderr
    file.write_text('{"type":"grab","id":"g","offer":"o","user":"u"}')
    done = grabstream("approve", str(file), "--key", str(pem["ann"]), "--key-id", "ann")
    assert (done.returncode, "command 1: `grab` needs no approval" in done.stderr) == (2, True)
    pem["ann"].write_text("secret-text")
    done = grabstream("approve", str(file), "--key", str(pem["ann"]), "--key-id", "ann")
    assert done.returncode == 2
    assert "secret-text" not in done.stdout + done.stderr


@pytest.mark.nightly
async def test_verbs_send_signatures(system: Settings, worker: Any, tmp_path: Path, pem: Any) -> None:
    worker(system, "decide,relay")

    def run(*words: str) -> Any:
        return grabstream(*words, **env_of(system), operator_keys=OPERATOR_KEYS, patience_ms="30000",
            adjust_two_signatures_above="100")  # fmt: skip

    offer = tmp_path / "offer.yaml"
    offer.write_text("- {offer: x, terms: {kind: coupon, issuer: i, total: 9}}\n")
    assert "approvals: is required" in run("open", str(offer)).stdout
    assert "opened" in run("open", str(offer), "--sign-with", f"ann={pem['ann']}").stdout
    move = ("--transfer", "101 CNY issuer:i wallet:u", "--reason", "r", "--approved-by", "boss")
    one = ("--sign-with", f"ann={pem['ann']}")
    assert "two operators" in run("adjust", "x", *move, *one).stdout
    assert "adjusted" in run("adjust", "x", *move, *one, "--sign-with", f"bob={pem['bob']}").stdout
    command, approval = tmp_path / "close.json", tmp_path / "approval.json"
    command.write_text('{"type":"close","id":"end","offer":"x"}')
    signing = run("approve", str(command), "--key", str(pem["bob"]), "--key-id", "bob")
    approval.write_text(signing.stdout)
    done = run("close", "x", "--approval", str(approval))
    assert (done.returncode, "give the id that was signed" in done.stderr) == (2, True)
    assert "closed" in run("close", "x", "--id", "end", "--approval", str(approval)).stdout
