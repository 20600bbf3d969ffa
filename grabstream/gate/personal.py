"""Personal data in events: seals the metadata of grabs under a key of their user, before a gate decides them.

Events are never changed, and everything that is computed from them has their text. So what must be forgotten
is only ever written sealed: deleting the key of a user deletes the user's metadata in the journal, in all
copies and in every read model, and changes no hash, sum or proof (`grabstream forget`).

Sealed metadata are metadata with one pair, `sealed`: `1.<name of the key>.<base64url>`. AES-SIV needs no
nonce: a command that is sent again has the same text, so it is a repeat. The text is bound to offer, user and
id of the grab.
"""

import asyncio
import logging
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from grabstream.models.commands import AnyCommand, Grab, check, encode_metadata
from grabstream.models.money import Invalid

log = logging.getLogger(__name__)

SEALED: Final = "sealed"
#: Shown in place of metadata whose key was deleted.
FORGOTTEN: Final = {"forgotten": "true"}
#: Maximum bytes of metadata as canonical JSON where they are sealed: the sealed text is a third longer.
SEALED_BYTES_MAX: Final = 700
KEY_BYTES: Final = 64
AGAIN_SECONDS: Final = 1.0
_FORM: Final = "1"


class _Sealed(dict[str, str]):
    """Metadata that this process has sealed. What a caller sends may look like it."""


_decode = msgspec.json.Decoder(dict[str, str]).decode


class KeysUnavailable(Exception):
    """The keys of users cannot be read now; the text says why."""


class UserKey(NamedTuple):
    """A key of a user: its name, 8 hex digits, and 64 bytes. A user who was forgotten gets another one."""

    name: str
    key: bytes


class UserKeys(Protocol):
    """The store of the keys of users."""

    async def keys_of(self, users: Collection[str]) -> Mapping[str, UserKey]:
        """The key of each user whose key can be opened; makes those that are missing. Raises
        KeysUnavailable.
        """
        ...


def seal_metadata(grab: Grab, key: UserKey) -> Grab:
    """The grab with its metadata sealed."""
    text = AESSIV(key.key).encrypt(encode_metadata(grab.metadata or {}), [_bound_to(grab)])
    sealed = f"{_FORM}.{key.name}.{urlsafe_b64encode(text).decode().rstrip('=')}"
    return msgspec.structs.replace(grab, metadata=_Sealed({SEALED: sealed}))


def is_sealed(metadata: Mapping[str, str] | None) -> bool:
    """Whether these metadata are sealed."""
    return metadata is not None and len(metadata) == 1 and metadata.get(SEALED, "").startswith(f"{_FORM}.")


def open_metadata(
    metadata: Mapping[str, str] | None, offer: str, user: str, grab: str, key: UserKey | None
) -> Mapping[str, str] | None:
    """The metadata of a grab as they were sent; FORGOTTEN if their key was deleted. Metadata that are not
    sealed, or were not sealed for this grab, are returned unchanged.
    """
    if metadata is None or not is_sealed(metadata):
        return metadata
    _, name, text = (*metadata[SEALED].split(".", 2), "")[:3]
    if key is None or key.name != name:
        return FORGOTTEN
    try:
        raw = urlsafe_b64decode(text + "=" * (-len(text) % 4))
        return _decode(AESSIV(key.key).decrypt(raw, [_bound_to(Grab(id=grab, offer=offer, user=user))]))
    except (InvalidTag, ValueError):
        return metadata


async def sealed(commands: Sequence[AnyCommand], keys: UserKeys) -> list[AnyCommand] | None:
    """The commands with the metadata of their grabs sealed; None if none has any. Commands that a gate
    refuses stay as they are, and those of users whose key cannot be opened. Raises KeysUnavailable.
    """
    chosen = [command for command in commands if isinstance(command, Grab) and _is_sealable(command)]
    if not chosen:
        return None
    found = await keys.keys_of({grab.user for grab in chosen})
    sealed_grabs = {id(grab): seal_metadata(grab, found[grab.user]) for grab in chosen if grab.user in found}
    return [sealed_grabs.get(id(command), command) for command in commands]


async def sealed_when_possible(commands: Sequence[AnyCommand], keys: UserKeys) -> list[AnyCommand] | None:
    """As `sealed`, but waits as long as the keys cannot be read."""
    while True:
        try:
            return await sealed(commands, keys)
        except KeysUnavailable as error:
            log.warning("keys of users: %s; trying again", error)
            await asyncio.sleep(AGAIN_SECONDS)


def must_be_sealed(command: AnyCommand) -> None:
    """Raises Invalid when a grab has metadata that are not sealed: they are too long, or the key of their
    user cannot be opened.
    """
    if type(command) is not Grab or not command.metadata or isinstance(command.metadata, _Sealed):
        return
    if len(encode_metadata(command.metadata)) <= SEALED_BYTES_MAX:
        raise Invalid(
            "metadata: cannot be sealed: the key of this user cannot be opened; send it again without "
            "metadata, and tell the operator"
        )
    raise Invalid(
        f"metadata: has at most {SEALED_BYTES_MAX} bytes as JSON without spaces where it is sealed "
        f"(GRAB_SEAL_METADATA), this has {len(encode_metadata(command.metadata))}; send a reference to "
        "longer data"
    )


def _is_sealable(grab: Grab) -> bool:
    if not grab.metadata:
        return False
    try:
        check(grab, True)
    except Exception:  # The gate answers it, with the reason.
        return False
    return len(encode_metadata(grab.metadata)) <= SEALED_BYTES_MAX


def _bound_to(grab: Grab) -> bytes:
    # No id contains `|`.
    return f"{grab.offer}|{grab.user}|{grab.id}".encode()
