"""Sealing: encrypts what a recovery needs from the journal but readers of the journal must not see (seeds,
coupon codes).

AES-256-GCM, bound to shard, offer and purpose, so that a sealed text is invalid anywhere else. A seed gets a
random nonce. The nonce of a coupon code is derived from key, offer and code: equal codes of an offer have
equal sealed texts, so a script can detect that a code is already in the offer's list
(lua/includes/codes.lua). Two codes have the same nonce as rarely as two random nonces are equal, and without
the key a nonce does not reveal its code.
"""

import os
from base64 import b64decode, b64encode, urlsafe_b64decode
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # the field's usual library for this

from grabstream.models.bounds import quoted
from grabstream.models.digests import Digests, derived
from grabstream.models.identifiers import is_id

NONCE_BYTES = 12
TAG_BYTES = 16
#: The name of a sealed code is its first 12 characters of base64, that is 9 bytes of its nonce. Among ten
#: million codes of an offer, two have the same name in one of 10^8 lists.
NAME_LENGTH = 12
_NONCES = b"grab code nonces"


class CannotOpen(Exception):
    """The key of a sealed text is missing, or the text was changed or moved."""


class Sealer:
    """Seals with the first key and opens with any key; keys are `id:key`, 32 bytes in base64url."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        if not keys:
            raise ValueError("GRAB_SEAL_KEYS: at least one id:key is needed")
        self._keys = {key_id: AESGCM(key) for key_id, key in keys.items()}
        self._nonces = {key_id: derived(key, _NONCES) for key_id, key in keys.items()}
        self._first = next(iter(keys))
        #: Digests of commands, with keys that are derived from these.
        self.digests = Digests(keys)

    @classmethod
    def from_text(cls, text: str) -> "Sealer":
        """Reads keys from `id:key,id:key`; raises ValueError that names the setting when a key cannot be
        read.
        """
        keys: dict[str, bytes] = {}
        for number, part in enumerate(filter(None, map(str.strip, text.split(","))), 1):
            # Errors name a key by its number: in a mistyped setting the key may be where its id belongs, and
            # errors are logged.
            named = f"GRAB_SEAL_KEYS: key {number}"
            key_id, colon, key = part.partition(":")
            if not colon:
                raise ValueError(f"{named} has no id; write it as id:key")
            # The id is part of events, unescaped. If two keys had one id, texts that the first key sealed
            # could never be opened.
            if not is_id(key_id):
                raise ValueError(f"{named}: the id before ':' must match [A-Za-z0-9._-]{{1,64}}")
            if key_id in keys:
                raise ValueError(f"{named} has the id of another key; give the new key a different id")
            try:
                keys[key_id] = urlsafe_b64decode(key + "=" * (-len(key) % 4))
            except ValueError:
                raise ValueError(f"{named} is not base64url") from None
            if len(keys[key_id]) != 32:
                raise ValueError(f"{named} must have 32 bytes, it has {len(keys[key_id])}")
        return cls(keys)

    def seal(self, shard: int, offer: str, purpose: str, text: str) -> str:
        """Returns the sealed text: `<key id>:<base64 of nonce and ciphertext>`."""
        return self._sealed(os.urandom(NONCE_BYTES), text, _bound_to(shard, offer, purpose))

    def seal_code(self, shard: int, offer: str, code: str) -> str:
        """Returns a sealed coupon code. It is always the same text for this offer, code and key, and begins
        with its name.
        """
        bound_to = _bound_to(shard, offer, "code")
        return self._sealed(_nonce(self._nonces[self._first], bound_to, code), code, bound_to)

    def other_names(self, shard: int, offer: str, codes: Sequence[str]) -> dict[str, list[str]]:
        """Returns the names that these codes get under each key but the first, by key id."""
        bound_to = _bound_to(shard, offer, "code")
        return {
            key_id: [b64encode(_nonce(key, bound_to, code)).decode()[:NAME_LENGTH] for code in codes]
            for key_id, key in self._nonces.items()
            if key_id != self._first
        }

    def _sealed(self, nonce: bytes, text: str, bound_to: bytes) -> str:
        sealed = self._keys[self._first].encrypt(nonce, text.encode(), bound_to)
        return f"{self._first}:{b64encode(nonce + sealed).decode()}"

    def open(self, shard: int, offer: str, purpose: str, sealed: str) -> str:
        """Returns the text that was sealed for this shard, offer and purpose; raises CannotOpen."""
        key_id, _, body = sealed.partition(":")
        if key_id not in self._keys:
            raise CannotOpen(f"no key {quoted(key_id)} in GRAB_SEAL_KEYS")
        try:
            raw = b64decode(body, validate=True)
        except ValueError:
            raise CannotOpen(f"{purpose} of offer {offer}: not a sealed text, it is not base64") from None
        if len(raw) < NONCE_BYTES + TAG_BYTES:
            raise CannotOpen(f"{purpose} of offer {offer}: not a sealed text, it has only {len(raw)} bytes")
        try:
            opened = self._keys[key_id].decrypt(
                raw[:NONCE_BYTES], raw[NONCE_BYTES:], _bound_to(shard, offer, purpose)
            )
        except InvalidTag:
            raise CannotOpen(
                f"{purpose} of offer {offer}: sealed with another key, changed, or moved here"
            ) from None
        return opened.decode()


def _nonce(key: bytes, bound_to: bytes, text: str) -> bytes:
    # `bound_to` has exactly two `|`, so two different pairs of it and a text are never joined to the same
    # bytes.
    return blake2b(bound_to + b"|" + text.encode(), digest_size=NONCE_BYTES, key=key).digest()


def _bound_to(shard: int, offer: str, purpose: str) -> bytes:
    return f"{shard}|{offer}|{purpose}".encode()
