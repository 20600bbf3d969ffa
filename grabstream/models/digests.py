"""Digests: hashes that show whether two commands with the same id have the same body.

A digest names its form before a `$`, which no id contains. So a command can be compared with a digest of any
form, from any release and any seal key:

- `b2$…`: 128 bits of BLAKE2b over the canonical JSON of the command, 22 characters of base64.
- `k:<key id>$…`: the same hash, keyed with a key derived from that seal key. Used for commands that carry a
  secret (codes, a seed, a ticket): a reader of the journal could try all six-digit codes against a hash
  without a key.
- `plain`: a grab of one unit without further fields is not hashed, because its event contains all of it. A
  refusal has no event, so there the digest contains the grab: `plain$<offer>/<user>`.

The sender of a command, and its signers do not change what it requests: no form covers `operator`,
`approvals` and `receipt`.
"""

from binascii import b2a_base64
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from hmac import compare_digest
from typing import Final

import msgspec

from grabstream.models.commands import (
    Adjust,
    AnyCommand,
    Confirm,
    Grab,
    OfferCommand,
    encode_command,
    is_plain,
    secret_of,
)

PLAIN: Final = "plain"
HASHED: Final = "b2"
KEYED: Final = "k:"
BYTES: Final = 16

_json = msgspec.json.Encoder().encode

_PURPOSE: Final = b"grab digests"
_NAMES: Final = b"grab load ids"


class CannotCompare(Exception):
    """A digest was made with a seal key that is no longer configured, or has a form that this program does
    not know.
    """


class Digests:
    """Makes and compares digests. `keys` are the seal keys by id, 32 bytes each: the first key makes digests,
    all of them compare.

    Without keys, no digest is keyed. Rules without a server use this form.
    """

    def __init__(self, keys: Mapping[str, bytes] | None = None) -> None:
        self._use({key_id: digest_keys(key) for key_id, key in (keys or {}).items()})

    @classmethod
    def from_derived_keys(cls, keys: Mapping[str, tuple[bytes, bytes]]) -> "Digests":
        """Digests with keys that `digest_keys` has derived, by the ids of the seal keys."""
        digests = cls()
        digests._use(keys)
        return digests

    def _use(self, keys: Mapping[str, tuple[bytes, bytes]]) -> None:
        self._keys = {key_id: command_key for key_id, (command_key, _) in keys.items()}
        self._names = [name_key for _, name_key in keys.values()]
        self._first = next(iter(self._keys), None)

    def digest(self, command: AnyCommand) -> str:
        """The digest of a command, as its event contains it."""
        if type(command) is Confirm:
            # Frequent, and without secret.
            return f"{HASHED}${_text(body_of(command))}"
        if type(command) is Grab:
            if is_plain(command):
                return PLAIN
            key_id = self._first if command.ticket is not None else None
        else:
            key_id = self._first if secret_of(command) is not None else None
        body = body_of(command)
        if key_id is None:
            return f"{HASHED}${_text(body)}"
        return f"{KEYED}{key_id}${_text(body, self._keys[key_id])}"

    def remembered(self, command: AnyCommand) -> str:
        """The digest of a command to remember without an event: that of a plain grab contains the grab."""
        digest = self.digest(command)
        return plain_body(command) if digest == PLAIN and isinstance(command, Grab) else digest

    def matches(self, kept: str, command: AnyCommand) -> bool:
        """Whether `kept` (a digest of any form) is the digest of this command; raises CannotCompare when its
        key or form is unknown.
        """
        form, dollar, value = kept.rpartition("$")
        if not dollar:
            return False
        if form == PLAIN:
            return isinstance(command, Grab) and is_plain(command) and kept == plain_body(command)
        if form == HASHED:
            return compare_digest(value, _text(body_of(command)))
        key_id = form.removeprefix(KEYED)
        if not form.startswith(KEYED):
            raise CannotCompare(
                f"the digest of the first command with this id has form {form!r}, which a newer release "
                "writes: upgrade"
            )
        if key_id not in self._keys:
            raise CannotCompare(
                f"the digest of the first command with this id was made with key {key_id!r}, which is no "
                "longer in GRAB_SEAL_KEYS: add the key again after the new key, or send another id"
            )
        return compare_digest(value, _text(body_of(command), self._keys[key_id]))

    def names(self, text: str) -> list[str]:
        """Keyed hashes of a text, 30 hex digits each, one for each seal key in order. An id made from a
        secret this way does not reveal it.
        """
        return [blake2b(text.encode(), digest_size=15, key=key).hexdigest() for key in self._names]


def plain_body(command: Grab) -> str:
    """All that a plain grab requests."""
    return f"{PLAIN}${command.offer}/{command.user}"


def whole_of(command: AnyCommand) -> str | None:
    """The text of a command that is compared in full in addition to its digest: the entries of an `adjust`;
    None for other commands.
    """
    return (
        adjustment_text(command.transfers, command.reason, command.approved_by)
        if isinstance(command, Adjust)
        else None
    )


def adjustment_text(transfers: Sequence[object], reason: str, approved_by: str) -> str:
    """A correcting entry as its event contains it: fields of a JSON object, with a comma before the first."""
    return (
        f',"transfers":{_json(transfers).decode()},"reason":{_json(reason).decode()}'
        f',"approved_by":"{approved_by}"'
    )


def body_of(command: AnyCommand | OfferCommand) -> bytes:
    """What a command requests, as canonical JSON."""
    if isinstance(command, Confirm):
        if command.receipt is not None:
            command = msgspec.structs.replace(command, receipt=None)
    elif isinstance(command, OfferCommand) and (command.operator is not None or command.approvals):
        command = msgspec.structs.replace(command, operator=None, approvals=())
    if isinstance(command, Grab) and command.metadata is not None and not command.metadata:
        # An empty map asks for the same as none.
        command = msgspec.structs.replace(command, metadata=None)
    return encode_command(command)


def _text(body: bytes, key: bytes = b"") -> str:
    return b2a_base64(blake2b(body, digest_size=BYTES, key=key).digest()).decode().rstrip("=\n")


def digest_keys(key: bytes) -> tuple[bytes, bytes]:
    """The keys that a seal key gives digests of commands, and names."""
    return derived(key, _PURPOSE), derived(key, _NAMES)


def derived(key: bytes, purpose: bytes) -> bytes:
    """A key for one purpose. It reveals nothing about the keys for other purposes."""
    return blake2b(b"", digest_size=32, key=key, person=purpose).digest()
