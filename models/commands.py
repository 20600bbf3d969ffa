"""Commands: what somebody wants done. Imperative names, an id chosen by the sender, no history.

`decode_commands` is the door for bytes, `check` the door for objects made in Python; both say which field is wrong.
"""

from base64 import b64encode
from hashlib import blake2b
from typing import Final

import msgspec

from models.identifiers import Id, is_id
from models.money import Invalid, check_amount
from models.offers import Terms, check_terms

ATTRIBUTES_MAX: Final = 8


class Command(msgspec.Struct, tag_field="type", tag=str.lower, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What every command has: an id unique within its campaign, and the offer it is about."""

    id: Id
    offer: Id


class Open(Command, frozen=True, kw_only=True):
    """Create and fund an offer."""

    terms: Terms


class Grab(Command, frozen=True, kw_only=True):
    """One user's attempt; `attributes` are names and values that limits may count by."""

    user: Id
    quantity: int = 1
    attributes: dict[Id, Id] = {}


class Pause(Command, frozen=True, kw_only=True):
    """Refuse grabs with `on_hold` until resumed."""


class Resume(Command, frozen=True, kw_only=True):
    """Take grabs again."""


class Close(Command, frozen=True, kw_only=True):
    """End the offer now; what is left goes back to where the terms say."""


AnyCommand = Open | Grab | Pause | Resume | Close

_encode = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder(AnyCommand).decode
_decode_raw_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


class _Addressed(msgspec.Struct):
    """As much of a broken command as is needed to answer it."""

    id: str
    offer: str | None = None


_decode_addressed = msgspec.json.Decoder(_Addressed).decode


class Undecodable(Exception):
    """One command that could not be understood: `raw` are its bytes, `id` and `offer` are set when they are readable."""

    def __init__(self, reason: str, raw: bytes, id: str | None = None, offer: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.raw = raw
        self.id = id
        self.offer = offer


def check(command: AnyCommand) -> None:
    """Raises Invalid, naming the field and the fix, when the command must not reach a script."""
    if not is_id(command.id):
        raise Invalid(f"id: must match [A-Za-z0-9._:-]{{1,64}}, got {command.id!r}")
    if not is_id(command.offer):
        raise Invalid(f"offer: must match [A-Za-z0-9._:-]{{1,64}}, got {command.offer!r}")
    if isinstance(command, Grab):
        if not is_id(command.user):
            raise Invalid(f"user: must match [A-Za-z0-9._:-]{{1,64}}, got {command.user!r}")
        check_amount("quantity", command.quantity, least=1)
        if command.attributes:
            _check_attributes(command.attributes)
    elif isinstance(command, Open):
        check_terms(command.terms)


def _check_attributes(attributes: dict[str, str]) -> None:
    if len(attributes) > ATTRIBUTES_MAX:
        raise Invalid(f"attributes: at most {ATTRIBUTES_MAX}, got {len(attributes)}")
    for name, value in attributes.items():
        if not is_id(name) or not is_id(value):
            raise Invalid(f"attributes.{name}: name and value must match [A-Za-z0-9._:-]{{1,64}}, got {value!r}")


def decode_command(raw: bytes) -> AnyCommand:
    """One command from JSON; raises Undecodable with the reason, and with id and offer when they can be read."""
    try:
        command: AnyCommand = _decode(raw)
        check(command)
    except (msgspec.DecodeError, Invalid, UnicodeDecodeError, RecursionError) as error:
        raise _undecodable(str(error), raw) from None
    return command


def _undecodable(reason: str, raw: bytes) -> Undecodable:
    try:
        addressed = _decode_addressed(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Undecodable(reason, raw)
    if not is_id(addressed.id):
        return Undecodable(reason, raw)
    offer = addressed.offer if addressed.offer is not None and is_id(addressed.offer) else None
    return Undecodable(reason, raw, addressed.id, offer)


def decode_commands(value: bytes) -> list[AnyCommand | Undecodable]:
    """The commands of one record, an object or an array of objects, in order; a bad one does not stop the others.

    A record that is no JSON at all is one Undecodable with all its bytes.
    """
    if not value.lstrip().startswith(b"["):
        return [_decode_or_reason(value)]
    try:
        raws = _decode_raw_list(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return [Undecodable(str(error), value)]
    return [_decode_or_reason(bytes(raw)) for raw in raws]


def _decode_or_reason(raw: bytes) -> AnyCommand | Undecodable:
    try:
        return decode_command(raw)
    except Undecodable as error:
        return error


def encode_command(command: AnyCommand) -> bytes:
    """The command as canonical JSON: defaults left out, so that equal commands have equal bytes."""
    return _encode(command)


def digest_of(command: AnyCommand) -> str:
    """What tells two bodies under one id apart: 48 bits of BLAKE2b over the canonical JSON, 8 characters of base64.

    It guards against mistakes, not against forgery: the worst a collision can do is to repeat the first answer.
    """
    return b64encode(blake2b(_encode(command), digest_size=6).digest()).decode()
