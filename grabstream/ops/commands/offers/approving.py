"""`approve`: sign commands of operators off-line; and the options by which other verbs take signatures."""

from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from msgspec.structs import replace

from grabstream.crypto.signing import Purpose, sign_with
from grabstream.gate.calls import now_ms
from grabstream.models.approvals import approval_of, encode_approval
from grabstream.models.bounds import FILE_BYTES_MAX
from grabstream.models.calendar import utc_text
from grabstream.models.commands import APPROVALS_MAX, OfferCommand, Undecodable, commands_of
from grabstream.models.digests import body_of
from grabstream.models.identifiers import is_id
from grabstream.models.money import Invalid
from grabstream.models.offers import TIME_MS_MAX
from grabstream.ops.console.output import json_option, print_json
from grabstream.ops.formats.written_values import read_duration, read_time
from grabstream.settings import load_settings

_file = click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)
_KEYS = f"{__name__}.keys"
#: How long a signature that is made with the command lasts: the command is sent at once.
SIGNED_FOR_MS: Final = 60 * 60 * 1_000


class Signed(msgspec.Struct, forbid_unknown_fields=True):
    """One approval as `approve` prints it."""

    type: str
    id: str
    offer: str
    signer: str
    expires_at: int
    approval: str


@click.command()
@click.argument("file", type=_file)
@click.option("--key-id", required=True, help="The key's id in GRAB_OPERATOR_KEYS, which events will name.")
@click.option("--key", "key_file", type=_file, required=True, help="The Ed25519 private key, a PEM file.")
@click.option(
    "--expires",
    default="1h",
    show_default=True,
    help="A duration from now, or a time as in a file of offers.",
)
@json_option
def approve(file: Path, key_id: str, key_file: Path, expires: str, as_json: bool) -> None:
    """Approve the commands of FILE: one JSON object or an array, with ids, as services send them (`-` is
    standard input). Connects to no server; shows what is signed, then the signatures.

    Give the output to --approval, or put each `approval` into the command's field `approvals`. Another party
    may send the command: `operator` is not signed.
    """
    if not is_id(key_id):
        raise click.BadParameter(f"must match [A-Za-z0-9._-]{{1,64}}, got {key_id!r}", param_hint="--key-id")
    commands = _commands_in(_content(file))
    key = private_key(key_file, "--key")
    system, expires_at = load_settings().prefix, expiry(expires)
    signed = [sign(command, key_id, key, system, expires_at) for command in commands]
    if not as_json:
        for command in commands:
            click.echo(body_of(command), err=True)
        click.echo(f"signed by {key_id} for system {system} until {utc_text(expires_at)}", err=True)
    print_json(msgspec.to_builtins(signed))


def sign(command: OfferCommand, key_id: str, key: Ed25519PrivateKey, system: str, expires_at: int) -> Signed:
    """The approval of a command by the operator who has a key."""
    payload = encode_approval(approval_of(command, system, expires_at))
    text = sign_with(key_id, key, Purpose.approval, payload)
    return Signed(type(command).__name__.lower(), command.id, command.offer, key_id, expires_at, text)


def private_key(file: Path, option: str) -> Ed25519PrivateKey:
    """The private key in a file; raises BadParameter that does not quote the file."""
    try:
        key = signing_key(_content(file))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise click.BadParameter(
            "must be a PEM file with an Ed25519 private key; make one with `openssl genpkey -algorithm "
            "ed25519`", param_hint=option,
        )  # fmt: skip
    return key


def _content(file: Path) -> bytes:
    with click.get_binary_stream("stdin") if str(file) == "-" else file.open("rb") as stream:
        content: bytes = stream.read(FILE_BYTES_MAX + 1)
    if len(content) > FILE_BYTES_MAX:
        raise click.UsageError(f"{file}: has more than {FILE_BYTES_MAX:,} bytes")
    return content


def _commands_in(content: bytes) -> list[OfferCommand]:
    commands: list[OfferCommand] = []
    for number, command in enumerate(commands_of(content), 1):
        if isinstance(command, Undecodable):
            raise click.UsageError(f"command {number}: {command.reason}")
        if not isinstance(command, OfferCommand):
            name = type(command).__name__.lower()
            raise click.UsageError(
                f"command {number}: `{name}` needs no approval: it is not a command of operators"
            )
        commands.append(command)
    if not commands:
        raise click.UsageError("there is no command to approve")
    return commands


def expiry(expires: str) -> int:
    """The time (ms since 1970 UTC) that `--expires` names."""
    try:
        # Digits only are a time here: a duration has a unit, and no date.
        is_time = expires.isdigit() or "-" in expires
        expires_at_ms = read_time(expires) if is_time else now_ms() + read_duration(expires)
    except Invalid as error:
        raise click.BadParameter(str(error), param_hint="--expires") from None
    if not 1000 <= expires_at_ms <= TIME_MS_MAX:
        raise click.BadParameter(
            f"must be a time between 1970 and 2100, got {expires!r}", param_hint="--expires"
        )
    return expires_at_ms


def signing_key(raw: bytes) -> bytes | Ed25519PrivateKey:
    """The key of a key file; raises ValueError that names the error, without quoting the file."""
    if raw.lstrip().startswith(b"-----BEGIN"):
        try:
            key = load_pem_private_key(raw, None)
        except (TypeError, ValueError):
            raise ValueError("is not a PEM private key without a password") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError("must be an Ed25519 key; make one with `openssl genpkey -algorithm ed25519`")
        return key
    encoded = b"".join(raw.split()).rstrip(b"=").replace(b"-", b"+").replace(b"_", b"/")
    try:
        return b64decode(encoded + b"=" * (-len(encoded) % 4), validate=True)
    except ValueError:
        raise ValueError("is neither base64 nor PEM") from None


# -- the options of other verbs ------------------------------------------------------------------------------


def _add(context: click.Context, parameter: click.Parameter, files: Sequence[Path]) -> None:
    """Keeps the approvals for `with_approvals`."""
    found = context.meta.setdefault(__name__, [])
    for file in files:
        try:
            found += msgspec.json.decode(_content(file), type=list[Signed])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise click.BadParameter(
                f"{file}: is not the output of `grabstream approve`: {error}", context, parameter
            ) from None


approval_option = click.option(
    "--approval",
    type=_file,
    multiple=True,
    metavar="FILE",
    expose_value=False,
    callback=_add,
    help="The output of `grabstream approve` for this command; needs the id that was signed. Repeatable.",
)


def _add_key(context: click.Context, parameter: click.Parameter, written: Sequence[str]) -> None:
    """Keeps the private keys for `with_approvals`."""
    for text in written:
        key_id, equals, file = text.partition("=")
        if not equals or not is_id(key_id) or not Path(file).is_file():
            words = "must be written as KEY_ID=FILE, and the file must exist"
            raise click.BadParameter(words, context, parameter)
        context.meta.setdefault(_KEYS, []).append((key_id, private_key(Path(file), "--sign-with")))


sign_option = click.option(
    "--sign-with",
    multiple=True,
    metavar="KEY_ID=FILE",
    expose_value=False,
    callback=_add_key,
    help="Approve the command with this Ed25519 private key, a PEM file. Repeatable.",
)


def with_approvals(commands: Sequence[Any]) -> list[Any]:
    """The commands with the approvals that were given for them. Raises UsageError when one is for none of
    them.
    """
    context = click.get_current_context(silent=True)
    if context is None:
        return list(commands)
    given: list[Signed] = list(context.meta.get(__name__, ()))
    if keys := context.meta.get(_KEYS, ()):
        system, expires_at = load_settings().prefix, now_ms() + SIGNED_FOR_MS
        given += [
            sign(command, key_id, key, system, expires_at) for command in commands for key_id, key in keys
        ]
    if not given:
        return list(commands)
    by_command: dict[tuple[str, str, str], list[str]] = {}
    for one in given:
        by_command.setdefault((one.type, one.id, one.offer), []).append(one.approval)
    names = [(type(command).__name__.lower(), command.id, command.offer) for command in commands]
    if strange := sorted(by_command.keys() - set(names)):
        type_, id_, offer = strange[0]
        raise click.UsageError(
            f"--approval: it is for `{type_}` with the id {id_} of offer {offer}, which is not sent here; "
            "give the id that was signed (--id)"
        )
    if any(len(texts) > APPROVALS_MAX for texts in by_command.values()):
        raise click.UsageError(f"--approval: a command has at most {APPROVALS_MAX} approvals")
    return [
        replace(command, approvals=(*command.approvals, *by_command[name])) if name in by_command else command
        for command, name in zip(commands, names, strict=True)
    ]
