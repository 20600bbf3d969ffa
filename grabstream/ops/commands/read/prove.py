"""`prove` and `verify-proof`: a file that proves one grab, and its check."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from grabstream.connections.opening import check_system, checked_database
from grabstream.models.bounds import quoted
from grabstream.models.identifiers import is_id
from grabstream.ops.console.output import console, json_option, print_json, refuse
from grabstream.ops.formats.replay_request import ObjectAddress
from grabstream.ops.verification.checkpoints import read_checkpoint
from grabstream.ops.verification.evidence import BadCheckpoint, sealed_json, write_new
from grabstream.ops.verification.proofs import NotProved, Proof, check_proof, make_proof, read_proof
from grabstream.settings import Settings, load_settings
from grabstream.streams.buckets import BucketAddress
from grabstream.streams.history.stores import in_thread
from grabstream.streams.topics import Topics

_file = click.Path(path_type=Path)


def _id(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not is_id(value):
        raise click.BadParameter(f"must match [A-Za-z0-9._:-]{{1,64}}, got {value!r}")
    return value


def _grab(required: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the arguments that name a grab."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for name in ("grab", "user", "offer"):
            command = click.argument(name, required=required, callback=_id)(command)
        return command

    return add


@click.command()
@_grab(required=True)
@click.option(
    "--against",
    type=ObjectAddress(),
    required=True,
    metavar="FILE",
    help="The checkpoint to prove it against: a file, or s3://bucket/key, with ?versionId=ID for one "
    "version.",
)
@click.option("--output", type=_file, metavar="FILE", help="Write the proof to a new file.")
@json_option
def prove(
    offer: str, user: str, grab: str, against: Path | BucketAddress, output: Path | None, as_json: bool
) -> None:
    """Write a proof that GRAB of USER is in the history of a checkpoint: the event of this grab, and hashes.
    It reveals no other user, and anyone can check it with the public keys of the relays: `verify-proof`.
    """
    settings = load_settings()
    with _refusing():
        made = asyncio.run(_make(settings, against, offer, user, grab))
        if output is None:
            click.echo(sealed_json(made), nl=False)
            return
        write_new(output, sealed_json(made), settings.store_login)
        _say(made, [offer, user, grab], as_json, settings)


@click.command()
@click.argument("file", type=_file)
@_grab(required=False)
@json_option
def verify_proof(file: Path, offer: str | None, user: str | None, grab: str | None, as_json: bool) -> None:
    """Show what FILE proves and, with OFFER USER GRAB, check that it is about this grab. Needs no server.

    Exit code 1: it does not.
    """
    named = [name for name in (offer, user, grab) if name is not None]
    if len(named) not in (0, 3):
        raise click.UsageError("name the grab: OFFER USER GRAB")
    with _refusing():
        _say(read_proof(file), named, as_json, load_settings())


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except (BadCheckpoint, NotProved) as error:
        refuse(error)


async def _make(settings: Settings, against: Path | BucketAddress, offer: str, user: str, grab: str) -> Proof:
    await check_system(settings)
    checkpoint = (await in_thread(read_checkpoint, against, settings)).checkpoint
    async with checked_database(settings) as books:
        return await make_proof(settings, books, checkpoint, offer, user, grab)


def _say(proof: Proof, named: list[str], as_json: bool, settings: Settings) -> None:
    """Prints what a proof proves; raises NotProved when it is not about the named grab, or of another
    journal.
    """
    event = check_proof(proof)
    journal = Topics(settings.prefix).journal
    if proof.checkpoint.journal != journal:
        raise NotProved(
            f"the proof is of the journal {quoted(proof.checkpoint.journal)}, this system's is {journal}: "
            "set GRAB_PREFIX to check it nevertheless"
        )
    if named and named != [event.offer, event.user, event.grab]:
        raise NotProved(
            f"the proof is about grab {event.grab} of {event.user}, offer {event.offer}, not about the grab "
            "that was named"
        )
    if as_json:
        print_json(
            {
                "offer": event.offer, "user": event.user, "grab": event.grab, "shard": proof.shard,
                "seq": proof.seq, "at": event.at, "amount": event.amount, "quantity": event.quantity,
                "journal": journal, "checkpoint_at": proof.checkpoint.at, "key": proof.checkpoint.key,
            }
        )  # fmt: skip
        return
    console.print(
        f"[green]✓[/] {event.offer}: grab {event.grab} of {event.user} is event {proof.seq} of shard "
        f"{proof.shard} of the journal {journal}, in the history that the key {proof.checkpoint.key} has "
        "signed.",
        highlight=False,
    )
