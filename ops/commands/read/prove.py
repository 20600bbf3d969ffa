"""`prove`: a file that proves one grab, and its check."""

import asyncio
import sys
from pathlib import Path

import click

from grabstream.models.bounds import quoted
from grabstream.models.identifiers import is_id
from grabstream.ops.connections.opening import check_system, checked_books
from grabstream.ops.console.output import console, json_option, print_json
from grabstream.ops.formats.replay_request import ObjectAddress
from grabstream.ops.settings import Settings, load_settings
from grabstream.ops.verification.checkpoints import read_checkpoint
from grabstream.ops.verification.evidence import BadCheckpoint, sealed_json, write_new
from grabstream.ops.verification.proofs import NotProved, Proof, check_proof, make_proof, read_proof
from grabstream.streams.buckets import Place
from grabstream.streams.history.stores import in_thread
from grabstream.streams.topics import Topics

_file = click.Path(path_type=Path)


@click.command()
@click.argument("offer", required=False)
@click.argument("user", required=False)
@click.argument("grab", required=False)
@click.option(
    "--against",
    type=ObjectAddress(),
    metavar="FILE",
    help="The checkpoint to prove it against: a file, or s3://bucket/key, with ?versionId=ID for one "
    "version.",
)
@click.option("--output", type=_file, metavar="FILE", help="Write the proof to a new file.")
@click.option("--check", type=_file, metavar="FILE", help="Check the proof in this file; asks no server.")
@json_option
def prove(
    offer: str | None, user: str | None, grab: str | None, against: Path | Place | None, output: Path | None,
    check: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Write a proof that GRAB of USER is in the history of a checkpoint: the event of this grab, and hashes.
    It shows no other user, and anyone can check it with the public keys of the relays.

    With --check: say what a proof proves, and, with OFFER USER GRAB, that it is this grab. Exit code 1: it
    does not.
    """
    named = [name for name in (offer, user, grab) if name is not None]
    if len(named) not in ((0, 3) if check is not None else (3,)):
        raise click.UsageError("name the grab: OFFER USER GRAB")
    for name, value in (("OFFER", offer), ("USER", user), ("GRAB", grab)):
        if value is not None and not is_id(value):
            raise click.BadParameter(f"must match [A-Za-z0-9._:-]{{1,64}}, got {value!r}", param_hint=name)
    if (check is None) == (against is None):
        raise click.UsageError("give the checkpoint with --against FILE, or a proof with --check FILE")
    settings = load_settings()
    try:
        if check is not None:
            _say(read_proof(check), named, as_json, settings)
        elif offer is not None and user is not None and grab is not None and against is not None:
            made = asyncio.run(_make(settings, against, offer, user, grab))
            if output is None:
                click.echo(sealed_json(made), nl=False)
                return
            write_new(output, sealed_json(made), settings.store_login)
            _say(made, named, as_json, settings)
    except (BadCheckpoint, NotProved) as error:
        click.echo(f"grabstream: {error}", err=True)
        sys.exit(1)


async def _make(settings: Settings, against: Path | Place, offer: str, user: str, grab: str) -> Proof:
    await check_system(settings)
    checkpoint = (await in_thread(read_checkpoint, against, settings)).checkpoint
    async with checked_books(settings) as books:
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
            f"the proof is about grab {event.grab} of {event.user}, offer {event.offer}: not about the named "
            "one"
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
