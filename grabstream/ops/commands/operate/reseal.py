"""`reseal`: for a rotation of the seal keys: reseals the secrets in the tables, and retires old keys."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import click
from aiokafka import AIOKafkaConsumer
from psycopg import AsyncConnection

from grabstream.connections.opening import check_system, checked_database, sealer
from grabstream.connections.seal_keys import require_seal_keys
from grabstream.connections.user_keys import SEALED_FOR as USER_KEYS_SEALED_FOR
from grabstream.crypto.sealing import CannotOpen, Sealer
from grabstream.ops.console.arguments import require_id_alone
from grabstream.ops.console.output import console, json_option, print_json, refuse, say, table
from grabstream.ops.diagnosis.database_checks import read_last_seqs
from grabstream.ops.diagnosis.seal_keys import uses_text
from grabstream.projections import cursors
from grabstream.projections.checking.snapshots import newest
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.tables import seal_keys, user_keys, webhooks
from grabstream.projections.tables.seal_keys import SealKey, Uses
from grabstream.settings import Settings, load_settings
from grabstream.streams import brokers
from grabstream.streams.clients import started
from grabstream.streams.webhooks.messages import SEALED_FOR
from grabstream.streams.webhooks.sending import secrets_now

#: Keys of users that are sealed again in one transaction.
USERS_A_STEP: Final = 1_000
NO_USES: Final = Uses(0, 0, 0)
NOT_KNOWN: Final = (
    "It is not known whether a running process still seals with key {key}, the first one in its "
    "GRAB_SEAL_KEYS. What such a process seals needs the key again: give every worker, gate and gateway "
    "the new settings and restart them before you remove the key."
)


class CannotRetire(Exception):
    """A key must be kept; the text says why."""


@click.command()
@click.option("--retire", metavar="KEY", help="Retire the old key with this id, if it is no longer needed.")
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@json_option
def reseal(retire: str | None, dry_run: bool, as_json: bool) -> None:
    """Seal the secrets of webhooks and the keys of users with the first key of GRAB_SEAL_KEYS, and show what
    each key is needed for. It may be interrupted and repeated at any time.

    Events and Redis keep values sealed by an old key, so that key is needed until their offers have ended
    (docs/operating.md, A new seal key). It is not known here whether a process still seals with the key to
    retire: give every process the new settings first. Exit code 1: the key to retire is needed.
    """
    if retire is not None:
        require_id_alone(retire, "--retire")
    settings = load_settings()
    settings.require_opening_keys("`reseal`")
    try:
        done = asyncio.run(_reseal(settings, retire, dry_run))
    except (CannotRetire, CannotOpen) as error:
        refuse(error)
    if as_json:
        print_json(done)
        return
    verb = "would be sealed" if dry_run else "sealed"
    names = ", ".join(done["webhooks_resealed"]) or "none"
    console.print(f"Secrets of webhooks {verb} with key {done['seals']}: {names}.", highlight=False)
    console.print(f"Keys of users {verb}: {done['user_keys_resealed']:,}.", highlight=False)
    if retire:
        console.print(f"Key {retire} {'would be' if dry_run else 'is'} retired.", highlight=False)
    for note in done["notes"]:
        say(note)
    rows = ((key, one["state"], one["needed_for"] or "nothing") for key, one in done["keys"].items())
    console.print(table("Seal keys", ("key", "state", "needed for"), rows))


async def _reseal(settings: Settings, retire: str | None, dry_run: bool) -> dict[str, Any]:
    await check_system(settings, seals=True)
    async with checked_database(settings) as connection:
        await require_seal_keys(connection, settings)
        resealed = await _reseal_webhooks(connection, sealer(settings), dry_run)
        users = await _reseal_user_keys(connection, sealer(settings), dry_run)
        if retire is not None:
            # Before what the keys are needed for is read: it is read from the audit trail.
            await _require_whole_audit(connection, settings, retire)
        counts = await seal_keys.uses(connection)
        known = await seal_keys.find_all(connection) or []
        if retire is not None:
            _require_unneeded(settings, retire, counts, known, (resealed, users) if dry_run else ([], 0))
            if not dry_run:
                await seal_keys.retire(connection, retire)
                known = await seal_keys.find_all(connection) or []
    return {
        "seals": sealer(settings).first,
        "webhooks_resealed": resealed,
        "user_keys_resealed": users,
        "retired": retire,
        "dry_run": dry_run,
        "notes": [] if retire is None else [NOT_KNOWN.format(key=retire)],
        "keys": {
            key.key_id: {
                "state": _state(key, sealer(settings).first),
                "needed_for": uses_text(counts.get(key.key_id, NO_USES)),
                **counts.get(key.key_id, NO_USES)._asdict(),
            }
            for key in known
        },
    }


def _state(key: SealKey, first: str) -> str:
    if key.retired_at is not None:
        return "retired"
    return "seals" if key.key_id == first else "opens"


async def _reseal_webhooks(connection: AsyncConnection[Any], keys: Sealer, dry_run: bool) -> list[str]:
    """Seals with the first key what another one has sealed; returns the names of the webhooks."""
    resealed = []
    for webhook in await webhooks.find_all(connection):
        before = secrets_now(webhook, datetime.now(UTC))
        sealed, *previous = after = [_resealed(keys, webhook.webhook, secret) for secret in before]
        if after == before:
            continue
        # A secret that was rotated or removed meanwhile is as its command has left it.
        if dry_run or await webhooks.reseal(connection, webhook, sealed, previous[0] if previous else None):
            resealed.append(webhook.webhook)
    return resealed


async def _reseal_user_keys(connection: AsyncConnection[Any], keys: Sealer, dry_run: bool) -> int:
    """Seals with the first key what another one has sealed; returns the number of keys of users."""
    resealed, after = 0, ""
    while rows := await user_keys.sealed_by_others(connection, keys.first, after, USERS_A_STEP):
        async with connection.transaction():
            for row in rows:
                text = keys.open(0, row.user_id, USER_KEYS_SEALED_FOR, row.sealed_key)
                sealed = keys.seal(0, row.user_id, USER_KEYS_SEALED_FOR, text)
                # A user who was forgotten meanwhile stays forgotten.
                resealed += dry_run or await user_keys.reseal(connection, row, sealed)
        after = rows[-1].user_id
    return resealed


def _resealed(keys: Sealer, webhook: str, sealed: str) -> str:
    """A secret, sealed with the first key."""
    if sealed.partition(":")[0] == keys.first:
        return sealed
    return keys.seal(0, webhook, SEALED_FOR, keys.open(0, webhook, SEALED_FOR, sealed))


def _require_unneeded(
    settings: Settings,
    key_id: str,
    counts: dict[str, Uses],
    known: Sequence[SealKey],
    would_be_resealed: tuple[Sequence[str], int],
) -> None:
    """Raises CannotRetire when a key is needed."""
    if key_id == sealer(settings).first:
        raise CannotRetire(f"key {key_id} is the key that seals: put another key before it")
    if key_id not in {key.key_id for key in known}:
        raise CannotRetire(f"key {key_id} is not a key of this system")
    needed = counts.get(key_id, NO_USES)
    if would_be_resealed[0]:
        needed = needed._replace(webhooks=0)
    if would_be_resealed[1]:
        needed = needed._replace(user_keys=0)
    if needed.is_any:
        raise CannotRetire(f"key {key_id} is still needed for {uses_text(needed)}")


async def _require_whole_audit(connection: AsyncConnection[Any], settings: Settings, key_id: str) -> None:
    """Raises CannotRetire when the audit trail lacks events that the journal has now."""
    consumer = AIOKafkaConsumer(
        **brokers.at(settings.brokers), auto_offset_reset="earliest", enable_auto_commit=False
    )
    await use_schema(connection, settings.schema_)
    audit = await cursors.load(connection, "audit")
    async with started(consumer) as reading:
        last_seqs = await read_last_seqs(settings, audit, reading)
    for shard, seq in last_seqs.items():
        if (await newest(connection, shard)).seq < seq:
            raise CannotRetire(
                f"the audit trail lacks events of shard {shard}, which may still need key {key_id}: repeat "
                "the command when `grabstream doctor` no longer shows that it lags"
            )
