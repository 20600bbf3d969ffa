"""Approvals: what operators sign, so that their command is executed.

An approval names the system, the command and the SHA-256 of its whole body, so it cannot be moved to another
command, nor to another system. It is a compact JWS in the field `approvals`; the id of its key names the
operator. Approvals are not part of the body: the same command with another valid signature is the same
command, and gets the first answer.
"""

from hashlib import sha256
from typing import Annotated, Final, NamedTuple

import msgspec

from grabstream.models.bounds import quoted
from grabstream.models.commands import Command, OfferCommand
from grabstream.models.digests import body_of
from grabstream.models.identifiers import Count, Id, in_schema
from grabstream.models.money import Invalid
from grabstream.models.unique_names import check_names_once, segment_of


class Approval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The claims of an approval, valid until `expires_at` (ms since 1970 UTC)."""

    system: Id
    type: str
    id: Id
    offer: Id
    command_sha256: Annotated[str, in_schema(pattern="^[0-9a-f]{64}$")]
    expires_at: Count


class _ApprovalHeader(msgspec.Struct):
    kid: str


_decode: Final = msgspec.json.Decoder(Approval).decode
_decode_header: Final = msgspec.json.Decoder(_ApprovalHeader).decode
encode_approval: Final = msgspec.json.Encoder().encode


def approval_of(command: OfferCommand, system: str, expires_at: int) -> Approval:
    """What is to be signed for a command of the system with this prefix."""
    return Approval(
        system=system, type=type(command).__name__.lower(), id=command.id, offer=command.offer,
        command_sha256=sha256(body_of(command)).hexdigest(), expires_at=expires_at,
    )  # fmt: skip


def check_approval(payload: bytes, command: OfferCommand, system: str) -> None:
    """Raises Invalid, naming the claim, when the claims of an approval are not for this command. The script
    decides whether they have expired: a repeat gets its first answer even then.
    """
    try:
        approval = _decode(payload)
        check_names_once(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(str(error)) from None
    expected = approval_of(command, system, approval.expires_at)
    for name in ("system", "type", "id", "offer"):
        signed, wanted = getattr(approval, name), getattr(expected, name)
        if signed != wanted:
            raise Invalid(f"{name}: {quoted(signed)} was signed, but this is {quoted(wanted)}")
    if approval.command_sha256 != expected.command_sha256:
        raise Invalid("command_sha256: another body was signed; sign this one")


class VerifiedApproval(NamedTuple):
    """What events and scripts need of a verified approval: the id of its key, and its expiry (ms since 1970
    UTC).
    """

    signer: str
    expires_at: int


def read_approvals(command: OfferCommand) -> tuple[VerifiedApproval, ...]:
    """The approvals of a command. They must have been verified, as a gate does."""
    return tuple(map(_read, command.approvals))


def signers_of(command: Command) -> tuple[str, ...]:
    """The ids of the keys that approved a command. Its approvals must have been verified, as a gate does."""
    if not isinstance(command, OfferCommand) or not command.approvals:
        return ()
    return tuple(approval.signer for approval in read_approvals(command))


def operator_of(key_id: str) -> str:
    """The operator who has a key: the part of its id before the first `.`, since a replaced key gets another
    id (`ann.1`, `ann.2`).
    """
    return key_id.partition(".")[0]


def key_id_of(text: str) -> str:
    """The id of the key that a compact JWS names; raises ValueError if it names none. A verifier uses the key
    of this id: if two readers read a header differently, the event would name another key.
    """
    try:
        return _decode_header(segment_of(text, 0)).kid
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


def _read(text: str) -> VerifiedApproval:
    return VerifiedApproval(key_id_of(text), _decode(segment_of(text, 1)).expires_at)
