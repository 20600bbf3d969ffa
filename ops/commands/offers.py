"""`open`, `pause`, `resume`, `close`, `grab`: single commands, through a gate of this process."""

import asyncio
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
import yaml

from models.answers import Answer, encode_answer
from models.commands import AnyCommand, Close, Grab, Open, Pause, Resume, Undecodable, decode_commands
from ops.connections import open_gate
from ops.output import console, json_option, print_json
from ops.settings import load_settings

id_option = click.option("--id", "command_id", help="The command's id; the same id gets the same answer again. Drawn if absent.")
offer_argument = click.argument("offer")


def _new_id() -> str:
    return f"cli-{secrets.token_hex(8)}"


def _carry_out(commands: Sequence[AnyCommand], as_json: bool) -> None:
    settings = load_settings()
    settings.require_seal_keys()

    async def decide() -> list[Answer]:
        async with open_gate(settings) as gate:
            return await gate.decide(commands, patience_ms=settings.patience_ms, timeout_ms=settings.patience_ms)

    answers = asyncio.run(decide())
    if as_json:
        print_json([msgspec.json.decode(encode_answer(answer)) for answer in answers])
    else:
        for answer in answers:
            colour = "green" if answer.positive else "red"
            said = msgspec.json.decode(encode_answer(answer))
            rest = "  ".join(f"{name}={value}" for name, value in said.items() if name not in ("outcome", "code"))
            console.print(f"[{colour}]{answer.outcome}[/]  {rest}", highlight=False)
    sys.exit(0 if all(answer.positive for answer in answers) else 1)


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.option("--dry-run", is_flag=True, help="Check all offers and open none.")
@json_option
def open(file: Path, dry_run: bool, as_json: bool) -> None:  # noqa: A001 - the verb's name
    """Open the offers of FILE (JSON or YAML; `-` is standard input): a list of {offer, terms}, and id where the same call may be repeated.

    All are checked before the first is opened.
    """
    text = sys.stdin.read() if str(file) == "-" else file.read_text()
    entries = yaml.safe_load(text)  # JSON is YAML too
    entries = entries if isinstance(entries, list) else [entries]
    raws = [{"type": "open", "id": f"open-{entry.get('offer')}", **entry} if isinstance(entry, dict) else entry for entry in entries]
    commands = decode_commands(msgspec.json.encode(raws))
    wrong = [(number, command.reason) for number, command in enumerate(commands, 1) if isinstance(command, Undecodable)]
    for number, reason in wrong:
        click.echo(f"grabstream: entry {number}: {reason}", err=True)
    if wrong:
        sys.exit(2)
    opens = [command for command in commands if isinstance(command, Open)]
    if not dry_run:
        _carry_out(opens, as_json)
    if as_json:
        print_json([{"offer": command.offer, "total": command.terms.total, "parts": command.terms.parts} for command in opens])
    else:
        for command in opens:
            console.print(
                f"would open {command.offer}: {command.terms.total:,} {command.terms.asset} in {command.terms.parts:,} parts",
                highlight=False,
            )


@click.command()
@offer_argument
@id_option
@json_option
def pause(offer: str, command_id: str | None, as_json: bool) -> None:
    """Refuse grabs of OFFER with `on_hold` until it is resumed."""
    _carry_out([Pause(id=command_id or _new_id(), offer=offer)], as_json)


@click.command()
@offer_argument
@id_option
@json_option
def resume(offer: str, command_id: str | None, as_json: bool) -> None:
    """Take grabs of OFFER again."""
    _carry_out([Resume(id=command_id or _new_id(), offer=offer)], as_json)


@click.command()
@offer_argument
@id_option
@json_option
def close(offer: str, command_id: str | None, as_json: bool) -> None:
    """End OFFER now; what is left goes back to its issuer, and its seed is revealed."""
    _carry_out([Close(id=command_id or _new_id(), offer=offer)], as_json)


@click.command()
@offer_argument
@click.argument("user")
@id_option
@json_option
def grab(offer: str, user: str, command_id: str | None, as_json: bool) -> None:
    """Grab a part of OFFER for USER."""
    _carry_out([Grab(id=command_id or _new_id(), offer=offer, user=user)], as_json)
