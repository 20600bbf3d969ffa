"""Encrypted texts: only their reader opens them, in one form alone."""

import json
import os
import re
import subprocess
from base64 import urlsafe_b64decode, urlsafe_b64encode
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.concatkdf import ConcatKDFHash
from hypothesis import given
from hypothesis import strategies as st

from grabstream.crypto.encryption import DecryptionKey, EncryptionKey, NotEncrypted
from grabstream.crypto.signing import Purpose
from grabstream.gateway.payment_tokens import PaymentTokens
from grabstream.models.identifiers import ID_LENGTH_MAX
from grabstream.models.money import AMOUNT_MAX
from grabstream.models.offers import TIME_MS_MAX
from grabstream.models.payments import (
    AUDIENCE_LENGTH_MAX,
    CALLBACK_LENGTH_MAX,
    TOKEN_LENGTH_MAX,
)
from grabstream.workshop.services.servers import PROJECT
from tests.support.encryption_keys import Pair, new_pair
from tests.support.nodejs import need_node
from tests.support.receipts import KEYS

PAGE = (PROJECT / "docs" / "http.md").read_text()
PAIR = new_pair()
SIGNED = KEYS.sign(Purpose.payment_token, b'{"offer":"phone","due":9900}')
TEXT = PAIR.encryption.encrypt(SIGNED)


def encoded(raw: bytes) -> str:
    return urlsafe_b64encode(raw).decode().rstrip("=")


def decoded(segment: str) -> bytes:
    return urlsafe_b64decode(segment + "=" * (-len(segment) % 4))


def header_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(decoded(text.split(".")[0]))
    return found


def is_refused(text: str, pair: Pair = PAIR, length_max: int = TOKEN_LENGTH_MAX) -> bool:
    try:
        pair.decryption.decrypt(text, length_max)
    except NotEncrypted:
        return True
    return False


def encrypted_with(changes: dict[str, Any], *, raw: str = "", tag_bytes: int = 16, iv_bytes: int = 12) -> str:
    """A text encrypted with the public key, with any header."""
    jwk = json.loads(PAIR.public)
    reader = ec.EllipticCurvePublicKey.from_encoded_point(
        ec.SECP256R1(), b"\x04" + decoded(jwk["x"]) + decoded(jwk["y"])
    )
    ephemeral = ec.generate_private_key(ec.SECP256R1())
    numbers = ephemeral.public_key().public_numbers()
    epk = {"kty": "EC", "crv": "P-256", "x": encoded(numbers.x.to_bytes(32, "big")),
           "y": encoded(numbers.y.to_bytes(32, "big"))}  # fmt: skip
    header = {"alg": "ECDH-ES", "enc": "A256GCM", "cty": "JWT", "kid": "pay.1", "epk": epk}
    if "epk" in changes:
        changes = changes | {"epk": epk | changes["epk"]}
    header = {name: value for name, value in (header | changes).items() if value is not None}
    protected = encoded((raw + json.dumps(header)[len(raw) and 1 :]).encode())
    info = b"\x00\x00\x00\x07A256GCM" + bytes(8) + b"\x00\x00\x01\x00"
    key = ConcatKDFHash(SHA256(), 32, info).derive(ephemeral.exchange(ec.ECDH(), reader))
    iv = os.urandom(iv_bytes)
    sealed = AESGCM(key).encrypt(iv, SIGNED.encode(), protected.encode())
    return ".".join((protected, "", encoded(iv), encoded(sealed[:-16]), encoded(sealed[-16:][:tag_bytes])))


def test_only_the_reader_opens_what_is_encrypted() -> None:
    assert PAIR.decryption.decrypt(TEXT, TOKEN_LENGTH_MAX) == SIGNED
    other = new_pair()
    assert is_refused(TEXT, other)
    assert PAIR.encryption.encrypt(SIGNED) != TEXT
    # No part shows what is in it.
    for part in TEXT.split("."):
        assert b"phone" not in decoded(part)
    assert header_of(TEXT) | {"epk": None} == {
        "alg": "ECDH-ES", "enc": "A256GCM", "cty": "JWT", "kid": "pay.1", "epk": None,
    }  # fmt: skip


@given(st.integers(0, len(TEXT) - 1), st.sampled_from("AZaz09-_.=+/ é"))
def test_a_text_with_another_character_is_refused(at: int, character: str) -> None:
    if TEXT[at] != character:
        assert is_refused(TEXT[:at] + character + TEXT[at + 1 :])


def test_an_honest_text_in_this_form_is_opened() -> None:
    """What the refusals of the next test differ from."""
    assert not is_refused(encrypted_with({}))


@pytest.mark.parametrize(
    "changes",
    [
        {"alg": "none"}, {"alg": "dir"}, {"alg": "ECDH-ES+A256KW"}, {"alg": "RSA-OAEP-256"},
        {"alg": "ecdh-es"}, {"alg": None}, {"alg": ["ECDH-ES"]}, {"enc": "A128GCM"},
        {"enc": "A128CBC-HS256"}, {"enc": None}, {"zip": "DEF"}, {"zip": None, "crit": []},
        {"crit": ["zip"], "zip": "DEF"}, {"cty": "JWE"}, {"cty": None}, {"kid": "pay.2"}, {"kid": None},
        {"kid": 1}, {"apu": "QWxpY2U"}, {"jku": "https://evil.example/keys"}, {"jwk": {}}, {"typ": "JWT"},
        {"epk": {"crv": "P-384"}}, {"epk": {"kty": "OKP"}}, {"epk": {"d": "AA"}},
        # Not on the curve, and the point at infinity.
        {"epk": {"x": encoded(bytes(31) + b"\x05")}},
        {"epk": {"x": encoded(bytes(32)), "y": encoded(bytes(32))}},
        {"epk": {"x": encoded(b"\xff" * 32)}}, {"epk": {"x": ""}}, {"epk": {"x": encoded(bytes(33))}},
    ],
    ids=str,
)  # fmt: skip
def test_another_header_is_refused(changes: dict[str, Any]) -> None:
    assert is_refused(encrypted_with(changes))


def test_another_form_is_refused() -> None:
    header, _, iv, sealed, tag = TEXT.split(".")
    for text in (
        "", ".", "....", SIGNED, f"{header}.{iv}.{sealed}.{tag}", f"{header}.AAAA.{iv}.{sealed}.{tag}",
        f"{TEXT}.", f"{TEXT}=", f" {TEXT}", f"{header}..{iv}=.{sealed}.{tag}", f"..{iv}.{sealed}.{tag}",
        f"{encoded(b'[]')}..{iv}.{sealed}.{tag}", f"{encoded(b'{')}..{iv}.{sealed}.{tag}",
    ):  # fmt: skip
        assert is_refused(text), text
    assert is_refused(encrypted_with({}, raw='{"kid":"pay.1",')), "a name that is given twice"
    assert is_refused(encrypted_with({}, tag_bytes=12)), "a tag that is easier to guess"
    assert is_refused(encrypted_with({}, iv_bytes=16))
    assert is_refused(TEXT, length_max=len(TEXT) - 1)
    assert not is_refused(TEXT, length_max=len(TEXT))


def test_the_longest_token_is_within_its_bound() -> None:
    longest = "x" * ID_LENGTH_MAX
    tokens = PaymentTokens(
        KEYS,
        "http://h/" + "/" * (CALLBACK_LENGTH_MAX - 9),
        "a" * AUDIENCE_LENGTH_MAX,
        new_pair(longest).encryption,
    )
    row: dict[str, Any] = {
        "state": "held", "due": AMOUNT_MAX, "taken": 0, "offer": longest, "grab": longest, "currency": "CNY",
        "deadline_at": TIME_MS_MAX, "at": TIME_MS_MAX,
    }  # fmt: skip
    tokens.add_to(row, longest)
    assert len(row["payment_token"]) <= TOKEN_LENGTH_MAX * 3 // 4


# -- keys ----------------------------------------------------------------------------------------------------


def jwk_with(**changes: Any) -> str:
    jwk = json.loads(PAIR.public) | changes
    return json.dumps({name: value for name, value in jwk.items() if value is not None})


#: Texts that are not a public key of this kind, and the error. Keys are random, so they are not in ids.
WRONG_KEYS = [
    ("x", "must be a JWK"), ("[]", "must be a JWK"), ("k1:" + "a" * 43, "must be a JWK"),
    (jwk_with(x5c="A" * 5_000), "at most 4,096 characters"), ('{"kty":"EC","kty":"EC"}', "must be a JWK"),
    (PAIR.private, "is a private key, which only the payment side may have"),
    (json.dumps({"kty": "RSA", "n": "AQAB", "e": "AQAB", "kid": "k"}), "must be an EC key on P-256"),
    (new_pair(curve=ec.SECP384R1()).public, "must be an EC key on P-256"),
    (jwk_with(crv=None), "must be an EC key on P-256"), (jwk_with(use="sig"), "its use must be enc"),
    (jwk_with(alg="ES256"), "its alg must be ECDH-ES"), (jwk_with(kid=None), "its kid"),
    (jwk_with(kid="a b"), "its kid"), (jwk_with(kid="k" * 65), "its kid"),
    (jwk_with(x="AA"), "not a point"), (jwk_with(y=encoded(bytes(32))), "not a point"),
    (jwk_with(y=None), "not a point"), (jwk_with(y=7), "not a point"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), WRONG_KEYS, ids=range(len(WRONG_KEYS)))
def test_a_wrong_key_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        EncryptionKey.from_text("GRAB_PAYMENT_ENCRYPTION_KEY", text)
    assert str(caught.value).startswith("GRAB_PAYMENT_ENCRYPTION_KEY")
    assert json.loads(PAIR.private)["d"] not in str(caught.value)


def test_a_key_may_say_what_it_is_for_and_none_is_none() -> None:
    for more in ({"use": "enc"}, {"alg": "ECDH-ES"}, {"key_ops": []}):
        assert EncryptionKey.from_text("", jwk_with(**more)) is not None
    assert EncryptionKey.from_text("", "") is None
    with pytest.raises(ValueError, match="is a public key"):
        DecryptionKey.from_text("KEY", PAIR.public)


# -- the payment side ----------------------------------------------------------------------------------------


@pytest.mark.requirement("F9")
def test_the_payment_side_opens_a_token_as_the_page_says(tmp_path: Path) -> None:
    """The lines of docs/http.md, which share nothing with this program, on Node.js."""
    need_node("the example of docs/http.md")
    [code] = re.findall(r"^```js\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    [makes_keys] = re.findall(r"^```sh\n(node -e .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    subprocess.run(["bash", "-euc", makes_keys], cwd=tmp_path, check=True, timeout=60)
    key = EncryptionKey.from_text("KEY", (tmp_path / "payment.pub.jwk").read_text())
    assert key is not None
    token = key.encrypt(SIGNED)
    script = tmp_path / "open.mjs"
    script.write_text(code + "\nprocess.stdout.write(signedToken(process.argv[2]))\n")

    def opened(text: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["node", str(script), text], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )

    assert opened(token).stdout == SIGNED
    header, _, iv, sealed, _ = token.split(".")
    for text in (f"{header}..{iv}.{sealed}.{encoded(bytes(16))}", token[:-1], TEXT, SIGNED):
        done = opened(text)
        assert (done.returncode, done.stdout) == (1, ""), done
