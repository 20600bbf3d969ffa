"""Signed texts: who signed them, and what for."""

import hmac
import json
import secrets
from base64 import urlsafe_b64encode
from hashlib import sha256
from typing import Any

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grabstream.crypto import tickets
from grabstream.crypto.signing import HEADERS_KNOWN_MAX, NotSigned, Purpose, SigningKeys, read_keys
from tests.support.receipts import FOREIGN_KEYS, KEYS, KEYS_TEXT, OLD_KEYS, SECRET, as_text

PAYLOAD = b'{"a":1}'


def base64(raw: bytes) -> str:
    return urlsafe_b64encode(raw).decode().rstrip("=")


def hand_made(header: Any, payload: bytes = PAYLOAD, key: bytes = SECRET) -> str:
    """A text whose signature is right, whatever its header says."""
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    signing = f"{base64(head)}.{base64(payload)}"
    return f"{signing}.{base64(hmac.digest(key, signing.encode(), sha256))}"


GOOD = {"alg": "HS256", "kid": "new", "typ": Purpose.receipt.value}


@pytest.mark.parametrize("purpose", Purpose)
def test_signed_text_is_read_for_its_purpose_only(purpose: Purpose) -> None:
    text = KEYS.sign(purpose, PAYLOAD)
    for other in Purpose:
        if other is purpose:
            assert KEYS.read(other, text, 1_000) == PAYLOAD
        else:
            with pytest.raises(NotSigned):
                KEYS.read(other, text, 1_000)


def test_first_key_signs_and_all_verify() -> None:
    """The steps of a rotation: no text that a party signs is refused by the other."""
    old, new = secrets.token_bytes(32), secrets.token_bytes(32)
    before, both = SigningKeys({"a": old}), SigningKeys({"a": old, "b": new})
    turned, after = SigningKeys({"b": new, "a": old}), SigningKeys({"b": new})
    for one, other in ((before, both), (both, turned), (turned, after)):
        for signs, reads in ((one, other), (other, one)):
            assert reads.read(Purpose.receipt, signs.sign(Purpose.receipt, PAYLOAD), 1_000) == PAYLOAD
    with pytest.raises(NotSigned):
        after.read(Purpose.receipt, before.sign(Purpose.receipt, PAYLOAD), 1_000)
    assert OLD_KEYS.sign(Purpose.receipt, PAYLOAD) != KEYS.sign(Purpose.receipt, PAYLOAD)


@pytest.mark.parametrize(
    "text",
    [
        "", ".", "..", "a.b.c", "é.é.é", "." * 900, FOREIGN_KEYS.sign(Purpose.receipt, PAYLOAD),
        hand_made(GOOD, key=b"x" * 32), hand_made({**GOOD, "alg": "none"}),
        hand_made({**GOOD, "alg": "HS512"}), hand_made({**GOOD, "alg": "EdDSA"}),
        hand_made({**GOOD, "alg": ["HS256"]}), hand_made({**GOOD, "kid": "other"}),
        hand_made({**GOOD, "kid": ["new"]}), hand_made({**GOOD, "kid": None}),
        hand_made({"alg": "HS256", "kid": "new"}), hand_made({**GOOD, "typ": "JWT"}),
        hand_made({**GOOD, "typ": ["grab-receipt+jwt"]}), hand_made({**GOOD, "typ": "GRAB-RECEIPT+JWT"}),
        hand_made({**GOOD, "crit": ["exp"]}), hand_made({**GOOD, "b64": False, "crit": ["b64"]}),
        hand_made(b"[" * 600), hand_made(b"[]"), hand_made(b"\xff"), hand_made(b'{"kid":' + b"9" * 400),
        hand_made({**GOOD, "alg": "none"}).rpartition(".")[0] + ".",
        hand_made(b'{"alg":"HS256","kid":"old","typ":"grab-receipt+jwt","kid":"new"}'),
        hand_made(b'{"alg":"HS256","kid":"new","typ":"JWT","t\\u0079p":"grab-receipt+jwt"}'),
        KEYS.sign(Purpose.receipt, PAYLOAD) + "=", " " + KEYS.sign(Purpose.receipt, PAYLOAD),
        KEYS.sign(Purpose.receipt, b"x" * 1_000),
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_what_no_key_signed_for_this_is_refused(text: str) -> None:
    with pytest.raises(NotSigned) as raised:
        KEYS.read(Purpose.receipt, text, 1_000)
    assert str(raised.value) == ""


@given(st.data())
def test_any_change_of_a_signed_text_is_refused(data: st.DataObject) -> None:
    text = KEYS.sign(Purpose.receipt, PAYLOAD)
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from("ABab01-_.=").filter(lambda character: character != text[at]))
    with pytest.raises(NotSigned):
        KEYS.read(Purpose.receipt, text[:at] + other + text[at + 1 :], 1_000)


@given(st.binary(max_size=200), st.sampled_from(Purpose))
def test_texts_are_signed_as_the_library_signs_them(payload: bytes, purpose: Purpose) -> None:
    headers = {"typ": purpose.value, "kid": "new"}
    text = KEYS.sign(purpose, payload)
    assert text == jwt.PyJWS().encode(payload, SECRET, "HS256", headers)
    assert KEYS.read(purpose, text, 1_000) == payload


def reading(keys: SigningKeys, text: str) -> bytes | None:
    try:
        return keys.read(Purpose.receipt, text, 1_000)
    except NotSigned:
        return None


@given(st.data())
def test_a_known_header_changes_no_verdict(data: st.DataObject) -> None:
    """Keys that have verified a text with this header read every other text as new ones do."""
    known = SigningKeys({"new": SECRET})
    header = data.draw(st.sampled_from([GOOD, {**GOOD, "x": 1}]))
    assert known.read(Purpose.receipt, hand_made(header), 1_000) == PAYLOAD
    head, payload, signature = hand_made(header, data.draw(st.binary(max_size=9))).split(".")
    segments = st.sampled_from([head, payload, signature, "", "e30", "e31", "=", "+", "é", "e3 0"]) | st.text(
        "AQew-_.=+/ ", max_size=6
    )
    changed = [data.draw(st.just(part) | segments) for part in (head, payload, signature)]
    signing = ".".join(changed[: data.draw(st.sampled_from([2, 2, 1]))])
    if data.draw(st.booleans()):  # also what is signed rightly, but no text
        changed[2] = base64(hmac.digest(SECRET, signing.encode(), sha256))
    text = f"{signing}.{changed[2]}" + data.draw(st.sampled_from(["", ".", "A", "=", ".e30"]))
    assert reading(known, text) == reading(SigningKeys({"new": SECRET}), text)


def test_a_header_is_known_for_its_purpose_only() -> None:
    keys = SigningKeys({"new": SECRET})
    text = hand_made(GOOD)
    assert keys.read(Purpose.receipt, text, 1_000) == PAYLOAD
    for purpose in set(Purpose) - {Purpose.receipt}:
        with pytest.raises(NotSigned):
            keys.read(purpose, text, 1_000)


def test_a_key_that_left_the_setting_reads_no_known_header() -> None:
    text = hand_made(GOOD, key=OLD_KEYS._keys["old"])
    for _ in range(2):
        assert reading(KEYS, text) is None
        assert reading(KEYS, hand_made(GOOD)) == PAYLOAD


def test_headers_are_known_up_to_a_bound() -> None:
    keys = SigningKeys({"new": SECRET})
    for number in range(HEADERS_KNOWN_MAX + 10):
        assert keys.read(Purpose.receipt, hand_made({**GOOD, "n": number}), 1_000) == PAYLOAD
    assert len(keys._known) == HEADERS_KNOWN_MAX


def test_text_above_the_bound_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    text = KEYS.sign(Purpose.receipt, PAYLOAD)
    monkeypatch.setattr(jwt.PyJWS, "_load", lambda *arguments: pytest.fail("it was decoded"))
    with pytest.raises(NotSigned):
        KEYS.read(Purpose.receipt, text, len(text) - 1)


@pytest.mark.parametrize("kind", [Purpose.payment_token, "application/grab-payment+JWT", Purpose.receipt])
def test_no_other_signed_text_is_a_ticket(kind: str) -> None:
    """Even if it was signed with the key of tickets, and has the claims of one."""
    keys = tickets.TicketKeys({"new": SECRET})
    claims = {"sub": "ann", "aud": "o", "exp": 4_000_000_000}
    assert keys.read(jwt.encode(claims, SECRET, "HS256", {"kid": "new"}), "ann", "o") is not None
    assert keys.read(jwt.encode(claims, SECRET, "HS256", {"kid": "new", "typ": "at+jwt"}), "ann", "o")
    assert keys.read(jwt.encode(claims, SECRET, "HS256", {"kid": "new", "typ": kind}), "ann", "o") is None


def test_no_ticket_is_another_signed_text() -> None:
    ticket = tickets.sign("new", SECRET, user="ann", offer="o", expires_at_ms=4_000_000_000_000)
    for purpose in Purpose:
        with pytest.raises(NotSigned):
            KEYS.read(purpose, ticket, 4_096)


# -- keys ----------------------------------------------------------------------------------------------------


def test_keys_are_read_from_a_setting() -> None:
    keys = SigningKeys.from_text("GRAB_X", f" {KEYS_TEXT} ,")
    assert keys is not None
    assert keys.sign(Purpose.receipt, PAYLOAD) == KEYS.sign(Purpose.receipt, PAYLOAD)
    assert SigningKeys.from_text("GRAB_X", " , ") is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (as_text(SECRET), "key 1 has 1 fields; write it as id:key"),
        (f"a:HS256:{as_text(SECRET)}", "key 1 has 3 fields; write it as id:key"),
        (f"a:{as_text(SECRET[:31])}", "at least 32 bytes, it has 31"),
        (f"a:{as_text(SECRET)}!", "is not base64"),
        (f"é:{as_text(SECRET)}", "must match"), (f"{KEYS_TEXT},old:{as_text(SECRET)}", "key 3 has the id of"),
    ],
)  # fmt: skip
def test_wrong_key_is_named_by_its_number_and_never_shown(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as raised:
        read_keys("GRAB_X", text, "HS256")
    assert str(raised.value).startswith("GRAB_X: ")
    assert as_text(SECRET)[:8] not in str(raised.value)
