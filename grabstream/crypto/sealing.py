"""Sealing: encrypts what a recovery needs from the journal and its readers must not see (seeds, coupon
codes).

AES-256-GCM, bound to shard, offer and purpose, so that a sealed text is invalid anywhere else. A seed gets a
random nonce. The nonce of a coupon code is derived from key, offer and code: equal codes of an offer have
equal sealed texts, so a script can detect that a code is already in the offer's list
(lua/includes/codes.lua). Two codes have the same nonce as rarely as two random nonces are equal, and without
the key a nonce does not reveal its code.

A key seals in one of two forms, which the sealed text names before its colon:

- `<key id>:…`: with the key itself. Its holder can also open.
- `<key id>~box:…`: to the X25519 public key that follows from the key, by an ephemeral key, HKDF-SHA256 and
  AES-256-GCM. The *sealing part* of a key suffices for it, and opens nothing. It is for processes that hand
  out no coupon codes and recover no shard. It also has the keys of digests and nonces, so that repeats are
  compared and codes are listed once, whichever process sealed them: with it, a guessed code can be tested.
"""

import os
import secrets
from base64 import b64decode, b64encode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # the field's usual library for this
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from grabstream.models.bounds import quoted
from grabstream.models.digests import Digests, derived, digest_keys
from grabstream.models.identifiers import is_id

NONCE_BYTES = 12
TAG_BYTES = 16
#: The name of a sealed code is its first 12 characters of base64, that is 9 bytes of its nonce. Among ten
#: million codes of an offer, two have the same name in one of 10^8 lists.
NAME_LENGTH = 12
KEY_BYTES: Final = 32
_NONCES = b"grab code nonces"
_FINGERPRINTS = b"grab seal key"
_BOXES = b"grab seal boxes"
_EPHEMERAL = b"grab box senders"
#: Ends the key id of a text that was sealed with the sealing part of a key. No key id contains `~`.
BOX: Final = "~box"
#: Begins the sealing part of a key in a setting. No key contains `.`.
SEALING: Final = "seals."
_CHECK_BYTES: Final = 4


def new_seal_key() -> str:
    """A new random `id:key` for GRAB_SEAL_KEYS."""
    return f"k{secrets.token_hex(2)}:{urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip('=')}"


class CannotOpen(Exception):
    """The key of a sealed text is missing, or the text was changed or moved."""


class SealingPart(NamedTuple):
    """What a process needs to seal, and to compare digests: the X25519 public key, the keys of nonces,
    digests and names, 32 bytes each, and the fingerprint of the whole key, 16 bytes.
    """

    public: bytes
    nonces: bytes
    digests: bytes
    names: bytes
    fingerprint: bytes

    @classmethod
    def of(cls, key: bytes) -> "SealingPart":
        """The sealing part of a key."""
        digests, names = digest_keys(key)
        return cls(
            _private(key).public_key().public_bytes_raw(), derived(key, _NONCES), digests, names,
            derived(key, _FINGERPRINTS)[:16],
        )  # fmt: skip

    def to_text(self) -> str:
        """The sealing part as a setting has it after the key id."""
        raw = b"".join(self)
        return SEALING + urlsafe_b64encode(raw + _check_of(raw)).decode().rstrip("=")

    @classmethod
    def from_raw(cls, raw: bytes) -> "SealingPart":
        """Raises ValueError when the bytes are not those of a sealing part, or were changed."""
        sizes = (KEY_BYTES, KEY_BYTES, KEY_BYTES, KEY_BYTES, 16)
        whole, check = raw[:-_CHECK_BYTES], raw[-_CHECK_BYTES:]
        if len(whole) != sum(sizes) or check != _check_of(whole):
            raise ValueError("is not the sealing part of a key as `config --sealing-keys` prints it")
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return cls(*(whole[start : start + size] for start, size in zip(starts, sizes, strict=True)))


class Sealer:
    """Seals with the first key and opens with any key of which it has more than the sealing part. Keys are
    `id:key`, 32 bytes in base64url, or `id:seals.…`, the sealing part.
    """

    def __init__(self, keys: Mapping[str, bytes | SealingPart]) -> None:
        if not keys:
            raise ValueError("GRAB_SEAL_KEYS: at least one id:key is needed")
        whole = {key_id: key for key_id, key in keys.items() if isinstance(key, bytes)}
        self._parts = {
            key_id: key if isinstance(key, SealingPart) else SealingPart.of(key)
            for key_id, key in keys.items()
        }
        self._keys = {key_id: AESGCM(key) for key_id, key in whole.items()}
        self._private = {key_id: _private(key) for key_id, key in whole.items()}
        #: The id of the key that seals.
        self.first = next(iter(keys))
        #: The ids of keys that do not open.
        self.only_sealing = [key_id for key_id in keys if key_id not in whole]
        #: The fingerprint of each key, by its id, which does not reveal the key: 32 hex digits.
        self.fingerprints = {key_id: part.fingerprint.hex() for key_id, part in self._parts.items()}
        #: Digests of commands, with keys that are derived from these.
        self.digests = Digests.from_derived_keys(
            {key_id: (part.digests, part.names) for key_id, part in self._parts.items()}
        )

    @classmethod
    def from_text(cls, text: str) -> "Sealer":
        """Reads keys from `id:key,id:key`; raises ValueError that names the setting when a key cannot be
        read.
        """
        keys: dict[str, bytes | SealingPart] = {}
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
            only_seals = key.startswith(SEALING)
            key = key.removeprefix(SEALING)
            try:
                raw = urlsafe_b64decode(key + "=" * (-len(key) % 4))
            except ValueError:
                raise ValueError(f"{named} is not base64url") from None
            if only_seals:
                try:
                    keys[key_id] = SealingPart.from_raw(raw)
                except ValueError as error:
                    raise ValueError(f"{named} {error}") from None
                continue
            if len(raw) != KEY_BYTES:
                raise ValueError(f"{named} must have 32 bytes, it has {len(raw)}")
            keys[key_id] = raw
        return cls(keys)

    def sealing_text(self) -> str:
        """The sealing parts of all keys, as GRAB_SEAL_KEYS of a process that does not open."""
        return ",".join(f"{key_id}:{part.to_text()}" for key_id, part in self._parts.items())

    def only_seals(self, sealed: str) -> bool:
        """Whether this process has only the sealing part of the key that sealed a text."""
        return key_id_of(sealed) in self.only_sealing

    def seal(self, shard: int, offer: str, purpose: str, text: str) -> str:
        """Returns the sealed text: `<key id>:<base64 of nonce and ciphertext>`, or `<key id>~box:<base64 of
        nonce, ephemeral public key and ciphertext>` with the sealing part of a key.
        """
        return self._sealed(os.urandom(NONCE_BYTES), text, _bound_to(shard, offer, purpose), os.urandom(32))

    def seal_code(self, shard: int, offer: str, code: str) -> str:
        """Returns a sealed coupon code. It is always the same text for this offer, code, key and form, and
        begins with its name, which is the same in both forms.
        """
        bound_to, key = _bound_to(shard, offer, "code"), self._parts[self.first].nonces
        ephemeral = blake2b(
            bound_to + b"|" + code.encode(), digest_size=32, key=key, person=_EPHEMERAL
        ).digest()
        return self._sealed(_nonce(key, bound_to, code), code, bound_to, ephemeral)

    def other_names(self, shard: int, offer: str, codes: Sequence[str]) -> dict[str, list[str]]:
        """Returns the names that these codes get under each key but the first, by key id."""
        bound_to = _bound_to(shard, offer, "code")
        return {
            key_id: [b64encode(_nonce(key, bound_to, code)).decode()[:NAME_LENGTH] for code in codes]
            for key_id, key in ((key_id, part.nonces) for key_id, part in self._parts.items())
            if key_id != self.first
        }

    def _sealed(self, nonce: bytes, text: str, bound_to: bytes, ephemeral: bytes) -> str:
        if self.first in self._keys:
            sealed = self._keys[self.first].encrypt(nonce, text.encode(), bound_to)
            return f"{self.first}:{b64encode(nonce + sealed).decode()}"
        sender = X25519PrivateKey.from_private_bytes(ephemeral)
        public, to = sender.public_key().public_bytes_raw(), self._parts[self.first].public
        shared = sender.exchange(X25519PublicKey.from_public_bytes(to))
        sealed = _box(shared, public, to).encrypt(nonce, text.encode(), bound_to)
        return f"{self.first}{BOX}:{b64encode(nonce + public + sealed).decode()}"

    def open(self, shard: int, offer: str, purpose: str, sealed: str) -> str:
        """Returns the text that was sealed for this shard, offer and purpose; raises CannotOpen."""
        named, _, body = sealed.partition(":")
        key_id, is_box = named.removesuffix(BOX), named.endswith(BOX)
        if key_id not in self._parts:
            raise CannotOpen(f"no key {quoted(key_id)} in GRAB_SEAL_KEYS")
        if key_id not in self._keys:
            raise CannotOpen(
                f"key {quoted(key_id)} in GRAB_SEAL_KEYS is a sealing part, which cannot open anything: use "
                "a process with the whole key"
            )
        try:
            raw = b64decode(body, validate=True)
        except ValueError:
            raise CannotOpen(f"{purpose} of offer {offer}: not a sealed text, it is not base64") from None
        head = NONCE_BYTES + (KEY_BYTES if is_box else 0)
        if len(raw) < head + TAG_BYTES:
            raise CannotOpen(f"{purpose} of offer {offer}: not a sealed text, it has only {len(raw)} bytes")
        try:
            cipher = self._cipher_of(key_id, raw[NONCE_BYTES:head])
            opened = cipher.decrypt(raw[:NONCE_BYTES], raw[head:], _bound_to(shard, offer, purpose))
        except (InvalidTag, ValueError):
            # ValueError: no key can be agreed on with such a public key.
            raise CannotOpen(
                f"{purpose} of offer {offer}: sealed with another key, changed, or moved here"
            ) from None
        return opened.decode()

    def _cipher_of(self, key_id: str, sender: bytes) -> AESGCM:
        """What opens a text; `sender` is the ephemeral public key of a box, empty for the other form."""
        if not sender:
            return self._keys[key_id]
        shared = self._private[key_id].exchange(X25519PublicKey.from_public_bytes(sender))
        return _box(shared, sender, self._parts[key_id].public)


def key_id_of(sealed: str) -> str:
    """The id of the key that has sealed a text, in either form."""
    return sealed.partition(":")[0].removesuffix(BOX)


def _private(key: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(derived(key, _BOXES))


def _box(shared: bytes, sender: bytes, recipient: bytes) -> AESGCM:
    key = HKDF(SHA256(), KEY_BYTES, salt=sender + recipient, info=_BOXES).derive(shared)
    return AESGCM(key)


def _check_of(raw: bytes) -> bytes:
    return blake2b(raw, digest_size=_CHECK_BYTES).digest()


def _nonce(key: bytes, bound_to: bytes, text: str) -> bytes:
    # `bound_to` has exactly two `|`, so two different pairs of it and a text are never joined to the same
    # bytes.
    return blake2b(bound_to + b"|" + text.encode(), digest_size=NONCE_BYTES, key=key).digest()


def _bound_to(shard: int, offer: str, purpose: str) -> bytes:
    return f"{shard}|{offer}|{purpose}".encode()
