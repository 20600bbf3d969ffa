"""`rebuild redis`: rebuilds shards from the journal on request. Workers do the same automatically whenever
Redis has lost data.
"""

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import click

from grabstream.connections.opening import (
    check_system,
    key_space,
    open_redis,
    report_recovery,
    require_core,
    sealer,
    snapshots,
)
from grabstream.lua.keys import SHARD_FIELDS, ShardKeys
from grabstream.models.bounds import counted
from grabstream.ops.console.output import console, json_option, print_json, table
from grabstream.ops.console.progress import ProgressLine
from grabstream.ops.console.stopping import run_until_stopped
from grabstream.ops.diagnosis.findings import RESTORE
from grabstream.settings import Settings, load_settings
from grabstream.streams.journal import open_reader
from grabstream.streams.relaying.leases import BY_HAND, RENEWALS_PER_LEASE, by_hand, request_lease, text_of
from grabstream.streams.relaying.ownership import NewerProgram, NotReconciled, SteppedDown
from grabstream.streams.relaying.relay import ShardRelay
from grabstream.streams.topics import Topics

ATTEMPTS_MAX = 10
REASON = "an operator is rebuilding it"
OTHER_REBUILD = (
    "another `grabstream rebuild redis` is rebuilding it; if that was killed, try again in a few seconds"
)


class ShardResult(NamedTuple):
    """The result for a shard: events applied and seconds, if it was rebuilt."""

    shard: int
    done: str
    refused: bool = False
    applied: int | None = None
    seconds: float | None = None


@click.command("redis")
@click.option("--shard", "shards", type=int, multiple=True, help="Rebuild only this shard. Repeatable.")
@click.option("--dry-run", is_flag=True, help="Show the state of each shard, and change nothing.")
@json_option
def redis_command(shards: tuple[int, ...], dry_run: bool, as_json: bool) -> None:
    """Rebuild shards in Redis from the journal, whatever their present state. Events in their outboxes are
    journaled first.

    A shard decides nothing during its rebuild; a running worker takes it over again afterwards. Exit code 1:
    a shard stays fenced, with the reason.
    """
    settings = load_settings()
    settings.require_opening_keys("`rebuild redis`")
    unknown = [shard for shard in shards if not 0 <= shard < settings.shards]
    if unknown:
        raise click.BadParameter(
            f"{unknown[0]}: the system has shards 0 to {settings.shards - 1}", param_hint="--shard"
        )
    chosen = sorted(set(shards)) or list(range(settings.shards))
    word = "a worker, or this command, starts an unfinished shard again from the beginning"
    sys.exit(run_until_stopped(_run(settings, chosen, dry_run, as_json), word))


async def _run(settings: Settings, shards: list[int], dry_run: bool, as_json: bool) -> int:
    redis = open_redis(settings)
    results = []
    try:
        await check_system(settings, redis, seals=True)
        await require_core(redis)
        for shard in shards:
            if dry_run:
                results.append(await _plan(settings, redis, shard))
            else:
                results.append(await _rebuild(settings, redis, shard))
    finally:
        await redis.aclose()
    if as_json:
        print_json([result._asdict() for result in results])
    else:
        rows = [(result.shard, result.done) for result in results]
        console.print(table("Redis", ("shard", "done"), rows))
    return 1 if any(result.refused for result in results) else 0


async def _plan(settings: Settings, redis: Any, shard: int) -> ShardResult:
    """The result that the command would have for a shard."""
    state = key_space(settings).shard(shard).state
    found = await redis.hmget(state, list(SHARD_FIELDS))
    owner = await redis.hget(state, "journaled_owner") or b""
    fields = {name: value and value.decode() for name, value in zip(SHARD_FIELDS, found, strict=True)}
    journaled = int(fields["journaled_seq"] or 0)
    async with open_reader(settings.brokers, Topics(settings.prefix).journal) as reader:
        last_seq = await reader.last_seq(shard, owner.decode(errors="replace"))
    if last_seq < journaled:
        done = (
            f"would be refused: the journal ends at seq {last_seq}, {journaled} were acknowledged: {RESTORE}"
        )
        return ShardResult(shard, done, refused=True)
    done = f"would be rebuilt; it is at seq {fields['seq'] or 0}, journaled to {journaled}"
    return ShardResult(shard, done + (f", fenced: {fields['fault']}" if fields["fault"] else ""))


class _ObservedLease(NamedTuple):
    """The lease of a shard, as seen by the command that rebuilds the shard."""

    redis: Any
    keys: ShardKeys
    name: str

    async def is_held_by_other(self) -> bool:
        """Whether another command of this kind is rebuilding the shard."""
        holder = text_of(await self.redis.get(self.keys.lease))
        return by_hand(holder) and holder != self.name


@asynccontextmanager
async def _seized(settings: Settings, lease: _ObservedLease) -> AsyncIterator[None]:
    """Holds a shard's lease, so that the worker that relays the shard releases it, and takes it over again
    afterwards.
    """
    redis, keys, name = lease.redis, lease.keys, lease.name

    async def hold() -> None:
        # Of two commands that start together only one holds the lease; the other learns that when it is
        # stepped down.
        while not await lease.is_held_by_other():
            await request_lease(redis, keys, name, settings.lease_ms, seize=True)
            await asyncio.sleep(settings.lease_ms / 1000 / RENEWALS_PER_LEASE)

    holding = asyncio.create_task(hold())
    try:
        yield
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        await request_lease(redis, keys, name, 0)


async def _rebuild(settings: Settings, redis: Any, shard: int) -> ShardResult:
    lease = _ObservedLease(redis, key_space(settings).shard(shard), f"{BY_HAND}{secrets.token_hex(4)}")
    if await lease.is_held_by_other():
        return ShardResult(shard, OTHER_REBUILD, refused=True)
    async with _seized(settings, lease):
        return await _rebuild_owned(settings, lease, shard)


async def _rebuild_owned(settings: Settings, lease: _ObservedLease, shard: int) -> ShardResult:
    line, began = ProgressLine(), time.monotonic()
    applied = 0

    def progress(events: int) -> None:
        nonlocal applied
        applied = events
        line(f"shard {shard}", "applying", events, rate=events / (time.monotonic() - began))

    relay = ShardRelay(
        lease.redis, lease.keys, settings.shards, settings.brokers, Topics(settings.prefix).journal,
        sealer(settings),
        settings.block_events_max, snapshots=snapshots(settings),
        report=lambda done: report_recovery(settings, done), progress=progress,
    )  # fmt: skip
    for _ in range(ATTEMPTS_MAX):
        try:
            await relay.rebuild(REASON)
        except SteppedDown:
            if await lease.is_held_by_other():
                return ShardResult(shard, OTHER_REBUILD, refused=True)
            # The worker that relayed the shard has not released it yet.
            await asyncio.sleep(settings.lease_ms / 1000 / RENEWALS_PER_LEASE)
            continue
        except (NotReconciled, NewerProgram) as error:
            return ShardResult(shard, str(error), refused=True)
        seconds = round(time.monotonic() - began, 2)
        done = f"{counted(applied, 'events')} applied in {seconds} s"
        return ShardResult(shard, done, applied=applied, seconds=seconds)
    repeated = "another owner repeatedly takes the shard: stop one of the workers"
    return ShardResult(shard, repeated, refused=True)
