"""Signed texts: compact JWS (RFC 7515), as tickets, payment tokens and receipts are.

A key determines its algorithm, never the text; so a public key cannot be used as a secret to sign with.
Several keys verify, and the first of them signs: a new key is first added last everywhere, then moved to the
front; the old one is removed when nothing it signed is valid any more. The header `typ` names the purpose of
a text, so a text signed for one purpose is refused for every other one, also with the same keys.
"""

import hmac
from base64 import b64decode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import jwt  # the usual library for these texts; it signs and verifies with `cryptography`
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from grabstream.models.approvals import key_id_of
from grabstream.models.identifiers import is_id
from grabstream.models.unique_names import check_header

SECRET_BYTES_MIN: Final = 32
PUBLIC_KEY_BYTES: Final = 32
#: Headers of texts that were verified, which the library need not check again.
HEADERS_KNOWN_MAX: Final = 64

VerifyingKey = bytes | Ed25519PublicKey

_jws: Final = jwt.PyJWS()


class Purpose(StrEnum):
    """What a text is signed for: the value of its header `typ`. Tickets have none, or `JWT`."""

    payment_token = "grab-payment+jwt"  # noqa: S105 - no secret
    receipt = "grab-receipt+jwt"
    payment_query = "grab-payment-query+jwt"
    payment_answer = "grab-payment-answer+jwt"
    approval = "grab-approval+jwt"


_PURPOSES: Final = frozenset(Purpose)


class NotSigned(Exception):
    """A text is not signed by one of the keys, or not for this purpose. It does not say why: a forger must
    not learn how far the text came.
    """


class SigningKeys:
    """Secrets by key id, shared with another party: the first one signs, all verify (HS256).

    The library writes the header of each purpose once, and reads each header that comes, until it has
    verified a text with it. Then a text with this header needs one HMAC: 5 µs in place of 55, and 3 in place
    of 17 to sign. Any other text is left to the library.
    """

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        """Takes the keys, at least one."""
        self._keys = dict(keys)
        self._first = next(iter(keys))
        #: The beginnings of texts that are signed, by purpose.
        self._written: dict[Purpose, bytes] = {}
        #: The keys of texts that were verified, by purpose and header.
        self._known: dict[tuple[Purpose, str], bytes] = {}

    def replace(self, other: "SigningKeys") -> None:
        """Takes other keys in place of these."""
        self._keys, self._first = other._keys, other._first
        self._written, self._known = {}, {}

    @classmethod
    def from_text(cls, setting: str, text: str) -> "SigningKeys | None":
        """Reads keys from `id:key,id:key`, secrets of at least 32 bytes in base64 or base64url; None without
        any. Raises ValueError that names the setting when a key cannot be read.
        """
        keys = {
            name: key for name, key in read_keys(setting, text, "HS256").items() if isinstance(key, bytes)
        }
        return cls(keys) if keys else None

    def sign(self, purpose: Purpose, payload: bytes) -> str:
        """Returns the payload, signed for a purpose with the first key."""
        key = self._keys[self._first]
        header = self._written.get(purpose)
        if header is None:
            empty_token = _jws.encode(b"", key, "HS256", {"typ": purpose.value, "kid": self._first})
            header = self._written[purpose] = empty_token.partition(".")[0].encode()
        signed = b"%b.%b" % (header, urlsafe_b64encode(payload).rstrip(b"="))
        return (signed + b"." + _signature(key, signed)).decode()

    def read(self, purpose: Purpose, text: str, length_max: int) -> bytes:
        """Returns the payload of a text that one of the keys signed for a purpose; raises NotSigned. Nothing
        of a text longer than `length_max` characters is decoded.
        """
        # The library takes padding, which would give one text several forms.
        if len(text) > length_max or not text.isascii() or "=" in text:
            raise NotSigned
        first = text.partition(".")[0]
        known = self._known.get((purpose, first))
        if known is not None and text.count(".") == 2:
            signed, _, signature = text.rpartition(".")
            if hmac.compare_digest(_signature(known, signed.encode()), signature.encode()):
                written = decoded_segment(signed[len(first) + 1 :].encode())
                if written is not None:
                    return written
        key_id, payload = _read(self._keys, purpose, text, length_max)
        if len(self._known) < HEADERS_KNOWN_MAX:
            self._known[purpose, first] = self._keys[key_id]
        return payload


class PublicKeys:
    """Ed25519 public keys by key id, of parties with their own private keys (EdDSA)."""

    def __init__(self, keys: Mapping[str, Ed25519PublicKey]) -> None:
        """Takes the keys, at least one."""
        self._keys = dict(keys)

    @classmethod
    def from_text(cls, setting: str, text: str) -> "PublicKeys | None":
        """Reads keys from `id:key,id:key`, each of 32 bytes in base64 or base64url; None without any. Raises
        ValueError that names the setting when a key cannot be read, or occurs under two ids: one signer would
        count as two.
        """
        keys = {
            name: key
            for name, key in read_keys(setting, text, "EdDSA").items()
            if isinstance(key, Ed25519PublicKey)
        }
        if len({key.public_bytes_raw() for key in keys.values()}) < len(keys):
            raise ValueError(f"{setting}: two ids have the same key; each operator has a key of their own")
        return cls(keys) if keys else None

    def replace(self, other: "PublicKeys") -> None:
        """Takes other keys in place of these."""
        self._keys = other._keys

    def read(self, purpose: Purpose, text: str, length_max: int) -> tuple[str, bytes]:
        """Returns the id of the key that signed a text for a purpose, and the payload; raises NotSigned."""
        return _read(self._keys, purpose, text, length_max)


def sign_with(key_id: str, key: Ed25519PrivateKey, purpose: Purpose, payload: bytes) -> str:
    """Returns the payload, signed for a purpose with a private key."""
    return _jws.encode(payload, key, algorithm_of(key), {"typ": purpose.value, "kid": key_id})


def _read(
    keys: Mapping[str, VerifyingKey], purpose: Purpose, text: str, length_max: int
) -> tuple[str, bytes]:
    # The library takes padding, which would give one text several forms.
    if len(text) > length_max or not text.isascii() or "=" in text:
        raise NotSigned
    try:
        header = _jws.get_unverified_header(text)
        check_header(text)
        key_id = key_id_of(text)
        key = keys.get(key_id)
        if key is None or header.get("typ") != purpose.value:
            raise NotSigned
        payload: bytes = _jws.decode_complete(text, key, algorithms=[algorithm_of(key)])["payload"]
    except (jwt.InvalidTokenError, ValueError):
        raise NotSigned from None
    return key_id, payload


def _signature(key: bytes, signed: bytes) -> bytes:
    return urlsafe_b64encode(hmac.digest(key, signed, "sha256")).rstrip(b"=")


def decoded_segment(segment: bytes) -> bytes | None:
    """The bytes of a segment; None for one that does not follow RFC 7515."""
    try:
        decoded = urlsafe_b64decode(segment + b"=" * (-len(segment) % 4))
    except ValueError:
        return None
    return decoded if urlsafe_b64encode(decoded).rstrip(b"=") == segment else None


def has_another_purpose(header: Mapping[str, object]) -> bool:
    """Whether the header of a ticket says that the text was signed for something else."""
    kind = header.get("typ")
    return isinstance(kind, str) and kind.lower().removeprefix("application/") in _PURPOSES


# -- keys ----------------------------------------------------------------------------------------------------


def algorithm_of(key: VerifyingKey | Ed25519PrivateKey) -> str:
    """The algorithm of a key: HS256 for a secret, EdDSA for an Ed25519 key."""
    return "HS256" if isinstance(key, bytes) else "EdDSA"


def read_keys(setting: str, text: str, algorithm: str | None = None) -> dict[str, VerifyingKey]:
    """Reads keys from `id:algorithm:key,…`, or, if all have one algorithm, from `id:key,…`; raises ValueError
    that names the setting when a key cannot be read.

    HS256 has a secret of at least 32 bytes, EdDSA an Ed25519 public key of 32 bytes; both in base64 or
    base64url.
    """
    form = "id:key" if algorithm else "id:algorithm:key"
    keys: dict[str, VerifyingKey] = {}
    for number, part in enumerate(filter(None, map(str.strip, text.split(","))), start=1):
        # Errors name a key by its number: in a mistyped setting the secret may be in any field, and errors
        # are logged.
        name = f"{setting}: key {number}"
        fields = part.split(":")
        if len(fields) != len(form.split(":")):
            raise ValueError(f"{name} has {len(fields)} fields; write it as {form}")
        key_id, encoded = fields[0], fields[-1]
        if not is_id(key_id):
            raise ValueError(f"{name}: the id before the first ':' must match [A-Za-z0-9._-]{{1,64}}")
        # If two keys had one id, texts signed by the first would be refused without an error.
        if key_id in keys:
            raise ValueError(f"{name} has the id of another key; give the new key a different id")
        keys[key_id] = _read_key(name, algorithm or fields[1], encoded)
    return keys


def _read_key(name: str, algorithm: str, encoded: str) -> VerifyingKey:
    """Reads a key from its algorithm and base64; `name` begins the text of the ValueError."""
    if algorithm not in ("HS256", "EdDSA"):
        raise ValueError(f"{name}: the algorithm between the ':' must be HS256 or EdDSA")
    # `openssl rand -base64` and a JWK use different alphabets, with and without padding.
    encoded = encoded.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        raw = b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except ValueError:
        raise ValueError(f"{name} is not base64") from None
    if algorithm == "EdDSA":
        if len(raw) != PUBLIC_KEY_BYTES:
            raise ValueError(
                f"{name}: an Ed25519 public key has {PUBLIC_KEY_BYTES} bytes, this has {len(raw)}; give it "
                "without its frame"
            )
        return Ed25519PublicKey.from_public_bytes(raw)
    if len(raw) < SECRET_BYTES_MIN:
        raise ValueError(
            f"{name}: an HS256 secret must have at least {SECRET_BYTES_MIN} bytes, it has {len(raw)}"
        )
    try:
        jwt.get_algorithm_by_name("HS256").prepare_key(raw)
    except jwt.InvalidKeyError:
        # The library would refuse every text with such a key, since a public file must not be a secret.
        raise ValueError(f"{name}: the HS256 secret is a PEM, SSH or JWK file; give random bytes") from None
    return raw
