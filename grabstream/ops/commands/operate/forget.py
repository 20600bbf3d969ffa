"""`forget`: makes the personal data of a user unreadable, everywhere and permanently."""

import asyncio
from typing import Any

import click

from grabstream.connections.opening import check_system, checked_database, sealer
from grabstream.connections.seal_keys import require_seal_keys
from grabstream.models.bounds import counted
from grabstream.models.identifiers import is_id
from grabstream.ops.console.output import console, json_option, print_json
from grabstream.ops.formats.named_users import user_named
from grabstream.projections.tables import user_keys
from grabstream.settings import Settings, load_settings


@click.command()
@click.argument("user")
@click.option(
    "--by",
    "by_name",
    required=True,
    metavar="NAME",
    help="Who does it: an id, which is recorded permanently.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, and change nothing.")
@json_option
def forget(user: str, by_name: str, dry_run: bool, as_json: bool) -> None:
    """Delete the key under which events have sealed the metadata of USER, and the kept refusals of USER.
    After that, the metadata are unreadable, in the journal and in everything computed from it; sums, hashes
    and proofs do not change. It cannot be undone.

    USER is an id, or the name in tokens from which GRAB_JWT_USER_KEY makes the id. The id itself stays in the
    events: use pseudonyms as ids, and delete your own mapping too (docs/privacy.md). An older copy of
    PostgreSQL still has the key.
    """
    if not is_id(by_name):
        raise click.BadParameter(
            f"must match [A-Za-z0-9._:-]{{1,64}}, got {by_name[:80]!r}", param_hint="--by"
        )
    settings = load_settings()
    user = user_named(settings, user)
    settings.require_seal_keys()
    done = asyncio.run(_forget(settings, user, by_name, dry_run))
    if as_json:
        print_json(done)
        return
    key = "no key" if done["key"] is None else f"the key {done['key']}"
    verb = "would be deleted" if dry_run else "deleted"
    refusals = counted(done["refusals"], "kept refusals")
    console.print(f"{user}: {key} and {refusals} {verb}.", highlight=False)
    for before in done["before"]:
        console.print(f"Was forgotten before: {before['at']}, by {before['by']}.", highlight=False)
    if not dry_run:
        console.print(f"Recorded under the digest {done['digest']}.", highlight=False)


async def _forget(settings: Settings, user: str, by_name: str, dry_run: bool) -> dict[str, Any]:
    await check_system(settings, seals=True)
    # Keyed: without a seal key or a sealing part, it does not reveal whether a user was forgotten.
    digests = sealer(settings).digests.names(f"forgotten/{user}")
    async with checked_database(settings) as connection:
        await require_seal_keys(connection, settings)
        before = await user_keys.times_forgotten(connection, digests)
        async with connection.transaction():
            found = (
                await user_keys.would_forget(connection, user)
                if dry_run
                else await user_keys.forget(connection, user, digests[0], by_name)
            )
    return {
        "user": user,
        "key": found.key_name,
        "refusals": found.refusals,
        "digest": digests[0],
        "by": by_name,
        "dry_run": dry_run,
        "before": [{"at": one["at"].isoformat(), "by": one["by"]} for one in before],
    }
