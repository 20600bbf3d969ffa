"""`config`: the settings in force."""

from typing import Any

import click
from pydantic import SecretStr

from grabstream.crypto.sealing import SEALING, new_seal_key
from grabstream.models.identifiers import is_id
from grabstream.models.pseudonyms import user_of
from grabstream.ops.console.output import console, json_option, print_json, table
from grabstream.settings import (
    ADDRESSES,
    Settings,
    load_settings,
    origins,
    variable_of,
    without_password,
)
from grabstream.streams.journal_keys import new_key_pair


@click.command()
@click.option(
    "--new-seal-key",
    "wants_key",
    is_flag=True,
    help="Print a new value for GRAB_SEAL_KEYS and nothing else.",
)
@click.option(
    "--new-journal-key",
    "journal_key",
    metavar="ID",
    help="Print a new key pair of this id, as values for GRAB_JOURNAL_KEYS and GRAB_JOURNAL_PUBLIC_KEYS.",
)
@click.option(
    "--sealing-keys",
    "wants_sealing",
    is_flag=True,
    help="Print the sealing parts of GRAB_SEAL_KEYS, for processes that only seal, and nothing else.",
)
@click.option(
    "--user-of",
    "name",
    metavar="NAME",
    help="Print the id of the user that tokens name NAME (GRAB_JWT_USER_CLAIM), and nothing else.",
)
@json_option
def config(
    wants_key: bool, journal_key: str | None, wants_sealing: bool, name: str | None, as_json: bool
) -> None:
    """Print the settings in force, with meaning, unit and origin (default, .env, environment); secrets are
    masked.
    """
    if name is not None:
        try:
            user = user_of(name, load_settings().user_key)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--user-of") from None
        if as_json:
            print_json({"user": user})
        else:
            click.echo(user)
        return
    if wants_sealing:
        settings = load_settings()
        settings.require_seal_keys()
        # Imported here, since the clients of all servers come with it.
        from grabstream.connections.opening import sealer

        click.echo(sealer(settings).sealing_text())
        return
    if wants_key:
        click.echo(new_seal_key())
        return
    if journal_key is not None:
        private, public = _new_journal_key(journal_key)
        click.echo(f"GRAB_JOURNAL_KEYS={private}\nGRAB_JOURNAL_PUBLIC_KEYS={public}")
        return
    settings, from_where = load_settings(), origins()
    found = {
        variable_of(name): {
            "value": _shown(name, getattr(settings, name)),
            "unit": field.json_schema_extra["unit"] if isinstance(field.json_schema_extra, dict) else "",
            "origin": from_where[variable_of(name)],
            "meaning": field.description,
        }
        for name, field in Settings.model_fields.items()
    }
    if as_json:
        print_json(found)
    else:
        # Numbers without separators, so that they can be copied to .env.
        rows = ((name, *map(str, setting.values())) for name, setting in found.items())
        console.print(table("Settings", ("variable", "value", "unit", "origin", "meaning"), rows))


def _new_journal_key(key_id: str) -> tuple[str, str]:
    """A new private key and its public key, each with its id."""
    if not is_id(key_id) or ":" in key_id:
        raise click.BadParameter("an id has 1 to 64 letters, digits, '.', '_' and '-'", param_hint="ID")
    private, public = new_key_pair()
    return f"{key_id}:{private}", f"{key_id}:{public}"


def _masked(key: str) -> str:
    """The id of a key, and whether it only seals."""
    key_id, _, secret = key.partition(":")
    return f"{key_id}:…{' (only seals)' if secret.startswith(SEALING) else ''}"


def _shown(name: str, value: Any) -> Any:
    if name in ("seal_keys", "payment_keys", "journal_keys"):
        return ", ".join(map(_masked, filter(None, value.get_secret_value().split(","))))
    if isinstance(value, SecretStr):
        return "…" if value.get_secret_value() else ""
    return without_password(value) if name in ADDRESSES and value is not None else value
