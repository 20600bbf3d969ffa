"""What a payment side signs, and the keys that it shares with a gateway."""

import json
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import sha256
from typing import Any

from grabstream.crypto.signing import Purpose, SigningKeys
from grabstream.models.payments import TOKEN_LENGTH_MAX, PaymentToken, decode_token

# The same in all processes of a parallel run, since they name tests.
SECRET, OLD_SECRET, FOREIGN_SECRET = (sha256(name).digest() for name in (b"new", b"old", b"foreign"))


def as_text(key: bytes) -> str:
    """A key as settings have it."""
    return urlsafe_b64encode(key).decode().rstrip("=")


#: The first key signs, both verify.
KEYS_TEXT = f"new:{as_text(SECRET)},old:{as_text(OLD_SECRET)}"
KEYS = SigningKeys({"new": SECRET, "old": OLD_SECRET})
OLD_KEYS = SigningKeys({"old": OLD_SECRET})
FOREIGN_KEYS = SigningKeys({"new": FOREIGN_SECRET})
#: For rules and gates without servers.
AUDIENCE = "shop@cluster"
CALLBACK = "http://127.0.0.1:18080/v1/payments/callback"


def claims_of(text: str) -> dict[str, Any]:
    """The claims of a signed text, unverified."""
    payload = text.split(".")[1]
    claims: dict[str, Any] = json.loads(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return claims


def read_token(text: str) -> PaymentToken:
    """The claims of a payment token, verified."""
    return decode_token(KEYS.read(Purpose.payment_token, text, TOKEN_LENGTH_MAX))


def receipt_for(held: dict[str, Any], payment: str, status: str = "paid", **changes: Any) -> dict[str, Any]:
    """The claims of a receipt for an answer to a grab; `changes` replace some, None removes one. `aud` is
    that of the payment token, if the answer has one.
    """
    token = held.get("payment_token")
    claims = {
        "aud": claims_of(token)["aud"] if token else AUDIENCE,
        "payment": payment, "offer": held["offer"], "grab": held["grab"], "user": held["user"],
        "status": status, "at": time.time_ns() // 1_000_000,
    }  # fmt: skip
    if status == "paid":
        claims |= {"paid": held["due"], "currency": held["currency"]}
    return {name: value for name, value in (claims | changes).items() if value is not None}


def signed(claims: dict[str, Any], keys: SigningKeys = KEYS, purpose: Purpose = Purpose.receipt) -> str:
    """Signed claims."""
    return keys.sign(purpose, json.dumps(claims).encode())
