"""The keys of the journal: relays sign their records with them, and readers use them to see whose records
count (docs/protocol.md).

The keys are those of the process, not an argument of each reader: a reader added later that forgot to ask for
them would count forged records.
"""

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from grabstream.models.bounds import quoted
from grabstream.models.identifiers import is_id
from grabstream.models.journal import (
    Authority,
    Block,
    Headers,
    is_signed_owner,
    named,
    parse_block,
    parse_signed,
    signed_text,
)

KEY_BYTES: Final = 32
SIGNATURE_DIGITS: Final = 128
#: A record that is not signed, and does not claim to be: it counts as long as its shard has no signed marker.
NOT_SIGNED: Final = "it is not signed"


class Signer(NamedTuple):
    """The key that a relay signs with."""

    key_id: str
    key: Ed25519PrivateKey

    def sign(self, text: bytes) -> str:
        """The signature of a text, in hex."""
        return self.key.sign(text).hex()

    def signed(self, journal: str, shard: int, headers: Headers) -> list[tuple[str, bytes]]:
        """The headers of a record with key id and signature."""
        signature = self.sign(signed_text(journal, shard, named(headers)))
        return [*headers, ("key", self.key_id.encode()), ("sig", signature.encode())]


class JournalKeys(NamedTuple):
    """The public keys of the relays by id, and the key that this process signs with, if it has one."""

    public: Mapping[str, Ed25519PublicKey] = {}
    signer: Signer | None = None

    @classmethod
    def from_text(cls, private: str, public: str) -> "JournalKeys":
        """Reads both settings, `id:key,id:key`; the first private key signs, and the public keys of all of
        them are known as well. Raises ValueError that names the setting when a key cannot be read.
        """
        own = {
            key_id: Ed25519PrivateKey.from_private_bytes(raw)
            for key_id, raw in _read("GRAB_JOURNAL_KEYS", private).items()
        }
        known = {
            key_id: Ed25519PublicKey.from_public_bytes(raw)
            for key_id, raw in _read("GRAB_JOURNAL_PUBLIC_KEYS", public).items()
        }
        for key_id, key in own.items():
            if key_id in known and known[key_id] != key.public_key():
                raise ValueError(
                    f"GRAB_JOURNAL_PUBLIC_KEYS: the key of id {key_id} is not that of GRAB_JOURNAL_KEYS"
                )
            known[key_id] = key.public_key()
        return cls(known, next((Signer(key_id, key) for key_id, key in own.items()), None))

    def verifies(self, key_id: str, signature: str, text: bytes) -> bool:
        """Whether a known key made the signature of a text."""
        key = self.public.get(key_id)
        if key is None or len(signature) != SIGNATURE_DIGITS:
            return False
        try:
            key.verify(bytes.fromhex(signature), text)
        except (InvalidSignature, ValueError):
            return False
        return True

    def authority(self, journal: str, shard: int, headers: Headers) -> tuple[Authority, str]:
        """Whether a known relay signed a record of a partition, and why it did not."""
        if not self.public:
            return "unchecked", ""
        given = named(headers)
        owner, key_id, signature = (
            given.get(name, b"").decode("ascii", "replace") for name in ("owner", "key", "sig")
        )
        if not (key_id or signature or is_signed_owner(owner)):
            return "unsigned", NOT_SIGNED
        if not signature:
            return "forged", NOT_SIGNED
        if key_id not in self.public:
            return "forged", f"it is signed by the unknown key {quoted(key_id)}"
        if not is_signed_owner(owner) or not self.verifies(
            key_id, signature, signed_text(journal, shard, given)
        ):
            return "forged", f"its signature is not that of the key {key_id}"
        return "signed", ""

    def block(self, journal: str, shard: int, headers: Headers, value: bytes | None) -> Block:
        """The block in a record of a partition. Raises Corrupt when the record contradicts itself and no keys
        are known; with keys, `Cursor.feed` raises it if the record counts.
        """
        authority, why = self.authority(journal, shard, headers)
        if authority == "unchecked":
            return parse_block(headers, value)
        return parse_signed(headers, value, shard, authority, why)


_process_keys = JournalKeys()


def use_keys(keys: JournalKeys) -> None:
    """Makes these the keys of the process. `load_settings` calls it."""
    global _process_keys
    _process_keys = keys


def journal_keys() -> JournalKeys:
    """The keys of the process."""
    return _process_keys


def in_base64(key: Ed25519PublicKey) -> str:
    """A public key as the settings have it."""
    return b64encode(key.public_bytes_raw()).decode()


def lacking(keys: JournalKeys, recorded: Mapping[str, str]) -> str:
    """The recorded keys of relays that a process does not know, and the fix; '' if it knows all, or no keys
    at all: then it treats signed records as unsigned ones.
    """
    if not keys.public:
        return ""
    known = {key_id: in_base64(key) for key_id, key in keys.public.items()}
    missing = sorted(key_id for key_id in recorded if key_id not in known)
    other = sorted(key_id for key_id, key in recorded.items() if known.get(key_id, key) != key)
    if missing:
        return (
            f"GRAB_JOURNAL_PUBLIC_KEYS lacks the key {', '.join(missing)}, with which relays of this system "
            "sign: records that it signed would not count here. Add it, and never remove it"
        )
    if other:
        return (
            f"GRAB_JOURNAL_PUBLIC_KEYS has another key under the id {', '.join(other)} than the relays of "
            "this system. Restore the key of the relays; if yours is a new key, give it another id"
        )
    return ""


def new_key_pair() -> tuple[str, str]:
    """A new private key and its public key, in base64."""
    key = Ed25519PrivateKey.generate()
    private, public = key.private_bytes_raw(), key.public_key().public_bytes_raw()
    return b64encode(private).decode(), b64encode(public).decode()


def _read(setting: str, text: str) -> dict[str, bytes]:
    keys: dict[str, bytes] = {}
    for number, part in enumerate(filter(None, map(str.strip, text.split(","))), start=1):
        # Errors name a key by its number: in a mistyped setting the secret may be in any field.
        name = f"{setting}: key {number}"
        key_id, colon, encoded = part.partition(":")
        if not colon or not is_id(key_id):
            raise ValueError(f"{name} must be id:key, the id of letters, digits, '.', '_' and '-'")
        if key_id in keys:
            raise ValueError(f"{name} has the id of another key; give the new key a different id")
        encoded = encoded.rstrip("=").replace("-", "+").replace("_", "/")
        try:
            keys[key_id] = b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
        except ValueError:
            raise ValueError(f"{name} is not base64") from None
        if len(keys[key_id]) != KEY_BYTES:
            raise ValueError(f"{name}: an Ed25519 key has {KEY_BYTES} bytes, this has {len(keys[key_id])}")
    return keys
