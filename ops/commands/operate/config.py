"""`config`: the settings in force."""

from typing import Any

import click

from grabstream.ops.commands.local.services import new_seal_key
from grabstream.ops.console.output import console, json_option, print_json, table
from grabstream.ops.settings import (
    ADDRESSES,
    Settings,
    load_settings,
    origins,
    variable_of,
    without_password,
)


@click.command()
@click.option(
    "--new-seal-key",
    "wants_key",
    is_flag=True,
    help="Print a new value for GRAB_SEAL_KEYS and nothing else.",
)
@json_option
def config(wants_key: bool, as_json: bool) -> None:
    """Print the settings in force, with meaning, unit and origin (default, .env, environment); secrets are
    masked.
    """
    if wants_key:
        click.echo(new_seal_key())
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


def _shown(name: str, value: Any) -> Any:
    if name in ("seal_keys", "payment_keys"):
        return ", ".join(
            f"{part.partition(':')[0]}:…" for part in value.get_secret_value().split(",") if part
        )
    return without_password(value) if name in ADDRESSES and value is not None else value
