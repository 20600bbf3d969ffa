"""`config`: the settings in force."""

import click

from ops.commands.services import new_seal_key
from ops.output import console, json_option, print_json, table
from ops.settings import load_settings


@click.command()
@click.option("--new-seal-key", "wants_key", is_flag=True, help="Print a fresh value for GRAB_SEAL_KEYS and nothing else.")
@json_option
def config(wants_key: bool, as_json: bool) -> None:
    """Print the settings in force, secrets masked."""
    if wants_key:
        click.echo(new_seal_key())
        return
    values = {}
    for name, value in load_settings().model_dump().items():
        key_ids = [part.partition(":")[0] for part in value.get_secret_value().split(",") if part] if name == "seal_keys" else None
        values[f"GRAB_{name.upper().rstrip('_')}"] = value if key_ids is None else ", ".join(f"{key}:…" for key in key_ids)
    if as_json:
        print_json(values)
    else:
        console.print(table("Settings", ("variable", "value"), ((name, str(value)) for name, value in values.items())))
