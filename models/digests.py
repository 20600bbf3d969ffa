"""Digests: what tells two bodies under one command id apart, and says how it was made.

A digest names its form before a `$`, which no id contains, so that it can be compared with a command in the
form it has, whichever release or seal key made it:

- 8 characters without a form: 48 bits of BLAKE2b; releases before 0.2 made them. They are still compared,
  never made.
- `b2$…`: 128 bits of BLAKE2b over the canonical JSON of the command, 22 characters of base64.
- `k:<key id>$…`: the same, keyed with a key that is derived from that seal key: of commands that carry a
  secret (codes, a seed, a ticket), since whoever reads the journal could try all codes of six digits against
  a plain hash.
- `plain`: a grab of one unit that asks for nothing more is not hashed at all: its event says all of it.
  Remembered with a refusal, which has no event, it is written in full, `plain$<offer>/<user>`.

Who sends a command does not change what it asks for, so `operator` is left out of every form.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from hmac import compare_digest
from typing import Final

import msgspec

from grabstream.models.commands import Adjust, AnyCommand, Grab, OfferCommand, encode_command, secret_of

PLAIN: Final = "plain"
HASHED: Final = "b2"
KEYED: Final = "k:"
BYTES: Final = 16
#: Of releases before 0.2.
FIRST_FORM_BYTES: Final = 6
FIRST_FORM_LENGTH: Final = 8

_json = msgspec.json.Encoder().encode

_PURPOSE: Final = b"grab digests"
_NAMES: Final = b"grab load ids"


class CannotCompare(Exception):
    """A digest was made with a key that is not there any more, or in a form that this program does not
    know.
    """


class Digests:
    """Makes and compares digests. `keys` are the seal keys by id, 32 bytes each: the first one makes, each
    one compares.

    Without keys nothing is keyed: for rules that run beside no server.
    """

    def __init__(self, keys: Mapping[str, bytes] | None = None) -> None:
        self._keys = {key_id: derived(key, _PURPOSE) for key_id, key in (keys or {}).items()}
        self._names = [derived(key, _NAMES) for key in (keys or {}).values()]
        self._first = next(iter(self._keys), None)

    def of(self, command: AnyCommand) -> str:
        """The digest of a command, as its event carries it."""
        if type(command) is Grab:
            if is_plain(command):
                return PLAIN
            key_id = self._first if command.ticket is not None else None
        else:
            key_id = self._first if secret_of(command) is not None else None
        body = _body(command)
        if key_id is None:
            return f"{HASHED}${_text(body, BYTES)}"
        return f"{KEYED}{key_id}${_text(body, BYTES, self._keys[key_id])}"

    def remembered(self, command: AnyCommand) -> str:
        """The digest of a command where no event says the rest: a plain grab in full."""
        digest = self.of(command)
        return plain_body(command) if digest == PLAIN and isinstance(command, Grab) else digest

    def is_of(self, kept: str, command: AnyCommand) -> bool:
        """Whether a remembered digest is that of this command, in whichever form it is; raises
        CannotCompare.
        """
        form, dollar, value = kept.rpartition("$")
        if not dollar:
            return len(kept) == FIRST_FORM_LENGTH and kept == _text(_body(command), FIRST_FORM_BYTES)
        if form == PLAIN:
            return isinstance(command, Grab) and is_plain(command) and kept == plain_body(command)
        if form == HASHED:
            return compare_digest(value, _text(_body(command), BYTES))
        key_id = form.removeprefix(KEYED)
        if not form.startswith(KEYED):
            raise CannotCompare(
                f"the first command under this id was remembered in form {form!r}, which a newer release "
                "writes: upgrade"
            )
        if key_id not in self._keys:
            raise CannotCompare(
                f"the first command under this id was remembered with key {key_id!r}, which is not in "
                "GRAB_SEAL_KEYS any more: "
                "add the key again after the new key, or send another id"
            )
        return compare_digest(value, _text(_body(command), BYTES, self._keys[key_id]))

    def names(self, text: str) -> list[str]:
        """Keyed names of a text, 30 hex digits, one a key, the first key's first: an id may follow from a
        secret, but not tell it.
        """
        return [blake2b(text.encode(), digest_size=15, key=key).hexdigest() for key in self._names]


def is_plain(command: Grab) -> bool:
    """Whether a grab is one unit for one user of one offer, and nothing more."""
    return command.quantity == 1 and not (
        command.attributes or command.ticket is not None or command.basket is not None or command.wait
    )


def plain_body(command: Grab) -> str:
    """All that a plain grab asks for."""
    return f"{PLAIN}${command.offer}/{command.user}"


def whole_of(command: AnyCommand) -> str | None:
    """What of a command is compared as a whole, beside its digest: entries in the books are."""
    return (
        adjustment_text(command.transfers, command.reason, command.approved_by)
        if isinstance(command, Adjust)
        else None
    )


def adjustment_text(transfers: Sequence[object], reason: str, approved_by: str) -> str:
    """A correcting entry as its event writes it: fields of a JSON object, with a comma before the first."""
    return (
        f',"transfers":{_json(transfers).decode()},"reason":{_json(reason).decode()},"approved_'
        f'by":"{approved_by}"'
    )


def _body(command: AnyCommand) -> bytes:
    if isinstance(command, OfferCommand) and command.operator is not None:
        command = msgspec.structs.replace(command, operator=None)
    return encode_command(command)


def _text(body: bytes, size: int, key: bytes = b"") -> str:
    return b64encode(blake2b(body, digest_size=size, key=key).digest()).decode().rstrip("=")


def derived(key: bytes, purpose: bytes) -> bytes:
    """A key for one purpose, which tells nothing about keys for others."""
    return blake2b(b"", digest_size=32, key=key, person=purpose).digest()
