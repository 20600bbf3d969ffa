"""`config`: the settings in force."""

from typing import Any

import click

from grabstream.ops.commands.local.services import new_seal_key
from grabstream.ops.console.output import console, json_option, print_json, table
from grabstream.ops.settings import ADDRESSES, load_settings, without_password


@click.command()
@click.option(
    "--new-seal-key",
    "wants_key",
    is_flag=True,
    help="Print a fresh value for GRAB_SEAL_KEYS and nothing else.",
)
@json_option
def config(wants_key: bool, as_json: bool) -> None:
    """Print the settings in force, secrets masked."""
    if wants_key:
        click.echo(new_seal_key())
        return
    values = {
        f"GRAB_{name.upper().rstrip('_')}": _shown(name, value)
        for name, value in load_settings().model_dump().items()
    }
    if as_json:
        print_json(values)
    else:
        console.print(
            table("Settings", ("variable", "value"), ((name, str(value)) for name, value in values.items()))
        )


def _shown(name: str, value: Any) -> Any:
    if name == "seal_keys":
        return ", ".join(
            f"{part.partition(':')[0]}:…" for part in value.get_secret_value().split(",") if part
        )
    return without_password(value) if name in ADDRESSES and value is not None else value
