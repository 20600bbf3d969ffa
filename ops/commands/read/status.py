"""`status`: which servers answer, how far every shard is, and what has stopped."""

import asyncio
import sys
from typing import Any, Final

import click
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from psycopg import AsyncConnection, OperationalError, sql
from psycopg.errors import UndefinedTable
from psycopg.rows import dict_row
from redis.exceptions import RedisError
from rich.markup import escape

from grabstream.lua.keys import SHARD_FIELDS, ShardKeys
from grabstream.ops.connections.opening import key_space, mixed_systems, open_redis
from grabstream.ops.connections.redis_servers import ANSWER_SECONDS_MAX, information, of_each
from grabstream.ops.console.output import console, json_option, print_json, table
from grabstream.ops.diagnosis.slow_scripts import script_calls, slow_scripts
from grabstream.ops.settings import Settings, load_settings
from grabstream.projections import cursors
from grabstream.projections.checking import verified
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import connect
from grabstream.projections.definitions import PROJECTIONS, definition_of
from grabstream.projections.records import set_aside
from grabstream.projections.versions import NoReadModel, lost, versions, written_by_us
from grabstream.streams.clients import in_words, started


@click.command()
@json_option
def status(as_json: bool) -> None:
    """Show servers, shards and read models.

    Exit 3: a server does not answer; 1: a shard is fenced or has no relay, a read model has stopped or waits
    for a rebuild, or the verifier found a difference. `grabstream doctor` says what to do. What PostgreSQL
    would tell is unknown while it is away: –, and null in JSON; so is what is not known of a shard whose
    server of a Redis Cluster does not answer, while others do.
    """
    found = asyncio.run(read(load_settings()))
    if as_json:
        print_json(found)
    else:
        _print(found)
    if any(problem for problem in found["servers"].values()):
        sys.exit(3)
    unwell = (
        found["mixed_up"]
        or found["stopped"]
        or found["waiting"]
        or found["findings"]
        or any(shard["fault"] for shard in found["shards"])
    )
    sys.exit(1 if unwell else 0)


#: What PostgreSQL tells; null where it does not answer.
_OF_BOOKS: Final = ("read_models", "stopped", "versions", "waiting", "verified", "findings", "set_aside")


async def read(settings: Settings) -> dict[str, Any]:
    """What is shown, and printed as JSON."""
    mixed_up = await mixed_systems(settings)
    found: dict[str, Any] = {
        "servers": {}, "shards": [], "read_models": [], "stopped": [], "versions": [], "waiting": {},
        "verified": [], "findings": [],
        "set_aside": [], "slow_scripts": [], "script_calls": [],
        "mixed_up": str(mixed_up) if mixed_up else None,
    }  # fmt: skip
    found["servers"] = dict.fromkeys(("redis", "kafka", "postgres"))
    # PostgreSQL before Redis, which goes on meanwhile: a read model that is ahead of it then is so in truth.
    for name, ask in (("kafka", _kafka), ("postgres", _postgres), ("redis", _redis)):
        try:
            await ask(settings, found)
        except (RedisError, KafkaError, OperationalError, OSError) as error:
            found["servers"][name] = in_words(error)
            if name == "postgres":
                found |= dict.fromkeys(_OF_BOOKS)
    return found


async def _redis(settings: Settings, found: dict[str, Any]) -> None:
    redis = open_redis(settings)
    try:
        keys = key_space(settings)
        states = {number: keys.shard(number).state for number in range(settings.shards)}
        rows = await of_each(redis, states, lambda number: _shard(redis, keys.shard(number)))
        found["slow_scripts"] = [one._asdict() for one in await slow_scripts(redis, settings.prefix)]
        found["script_calls"] = [one._asdict() for one in await script_calls(redis)]
    finally:
        await redis.aclose()
    found["shards"] = [rows.get(number) or _unknown(number) for number in states]


async def _shard(redis: Any, keys: ShardKeys) -> dict[str, Any]:
    values = [value and value.decode() for value in await redis.hmget(keys.state, list(SHARD_FIELDS))]
    fields = dict(zip(SHARD_FIELDS, values, strict=True))
    holder = await redis.get(keys.lease)
    seq, journaled = int(fields["seq"] or 0), int(fields["journaled_seq"] or 0)
    [(server, server_epoch)] = (await _lives(redis, keys.state)).items()
    fault = fields["fault"] or _why_fenced(fields["life"], server_epoch)
    if fault is None and holder is None:
        fault = "no relay: start a worker"
    return {
        "shard": keys.shard, "seq": seq, "journaled_seq": journaled, "waiting": seq - journaled,
        "term": int(fields["term"] or 0), "relay": holder and holder.decode(), "fault": fault,
        "server": server,
    }  # fmt: skip


def _unknown(number: int) -> dict[str, Any]:
    """A shard whose server does not answer, while others do."""
    nothing = dict.fromkeys(("seq", "journaled_seq", "waiting", "term", "relay"))
    return {
        "shard": number,
        **nothing,
        "fault": f"its server does not answer within {ANSWER_SECONDS_MAX:.0f} s",
        "server": "",
    }


async def _lives(redis: Any, key: str) -> dict[str, str]:
    """The server that has a key, and the life it is in."""
    servers, replications = (
        await information(redis, "server", key),
        await information(redis, "replication", key),
    )
    return {
        server: said["run_id"] + replications[server]["master_replid"] for server, said in servers.items()
    }


def _why_fenced(reconciled: str | None, server_epoch: str) -> str | None:
    if reconciled is None:
        return "no relay has taken this shard over yet: start a worker"
    return (
        None
        if reconciled == server_epoch
        else "Redis has started anew, and no relay has reconciled the shard since: start a worker"
    )


async def _kafka(settings: Settings, found: dict[str, Any]) -> None:
    async with started(AIOKafkaAdminClient(bootstrap_servers=settings.kafka, request_timeout_ms=5_000)):
        pass


async def _postgres(settings: Settings, found: dict[str, Any]) -> None:
    async with await connect(settings.postgres, settings.schema_) as connection:
        await use_schema(connection, settings.schema_)
        try:
            async with connection.cursor(row_factory=dict_row) as rows:
                await rows.execute(
                    "SELECT projection, shard, seq, next_offset FROM cursors ORDER BY projection, shard"
                )
                found["read_models"] = await rows.fetchall()
            found["stopped"] = [stop._asdict() for stop in await cursors.stops(connection)]
            found["verified"] = [
                {"shard": one.shard, "seq": one.seq, "rounds": one.rounds, "at": one.compared_at}
                for one in (await verified.progress(connection)).values()
            ]
            found["findings"] = [
                one._asdict() | {"where": one.where} for one in await verified.open_findings(connection)
            ]
            found["set_aside"] = [one.in_words() for one in await set_aside.load(connection)]
            await _versions(connection, settings.schema_, found)
        except (UndefinedTable, NoReadModel):
            found["read_models"] = []


async def _versions(connection: AsyncConnection[Any], schema: str, found: dict[str, Any]) -> None:
    """The versions of the read models, each with the events it has; and which projection none of them can
    serve this code.
    """
    known = await versions(connection, schema)
    gone = await lost(connection, known)
    for one in known:
        if one in gone:
            found["versions"].append(one._asdict() | {"state": "gone", "events": 0})
        elif one.projection in PROJECTIONS:
            table = sql.Identifier(one.schema, "projection_cursors")
            rows = await connection.execute(
                sql.SQL("SELECT coalesce(sum(seq), 0)::bigint FROM {}").format(table)
            )
            [events] = await rows.fetchone() or [0]
            found["versions"].append(one._asdict() | {"events": events})
    for projection in PROJECTIONS:
        of_projection = [one for one in known if one.projection == projection]
        if written_by_us(of_projection, projection) is None:
            found["waiting"][projection] = definition_of(projection).number


def _print(found: dict[str, Any]) -> None:
    for name, problem in found["servers"].items():
        console.print(
            f"[green]✓[/] {name}" if problem is None else f"[red]✗[/] {name}: {escape(problem)}",
            highlight=False,
        )
    models = sorted({row["projection"] for row in found["read_models"] or ()})
    seqs = {(row["projection"], row["shard"]): row["seq"] for row in found["read_models"] or ()}
    proved = {row["shard"]: row["seq"] for row in found["verified"] or ()}
    servers = {shard["server"] for shard in found["shards"]} - {""}
    rows = (
        (
            shard["shard"], *([shard["server"] or "–"] if servers else []), _known(shard["seq"]),
            _known(shard["waiting"]),
            *(_lag(shard["seq"], seqs.get((model, shard["shard"]), 0)) for model in models),
            "–" if found["verified"] is None else proved.get(shard["shard"], 0), shard["relay"] or "none",
            shard["fault"] or "",
        )
        for shard in found["shards"]
    )  # fmt: skip
    if found["mixed_up"]:
        console.print(f"[red]{escape(found['mixed_up'])}[/]", highlight=False)
    columns = [
        "shard",
        *(["server"] if servers else []),
        "seq",
        "not journaled",
        *(f"{model} lag" for model in models),
    ]
    columns += ["verified to", "relay", "fault"]
    console.print(table("Shards", columns, rows))
    known = [shard for shard in found["shards"] if shard["seq"] is not None]
    if any(seqs.get((model, shard["shard"]), 0) > shard["seq"] for model in models for shard in known):
        console.print(
            "[red]Read models are ahead of Redis[/]: it has lost events that they have. A worker brings back "
            "what the journal has; "
            "`grabstream doctor` says what to do about the rest.",
            highlight=False,
        )
    _print_slow_scripts(found["slow_scripts"])
    if found["script_calls"]:
        longest = max(one["longest_ms_at_most"] for one in found["script_calls"])
        console.print(
            f"Longest script call since the servers started: at most {longest:,.0f} ms", highlight=False
        )
    if found["servers"]["postgres"] is None:
        _print_books(found)
    if found["stopped"] or found["findings"] or any(shard["fault"] for shard in found["shards"]):
        console.print("`grabstream doctor` says what to do.")


def _print_slow_scripts(slow: list[dict[str, Any]]) -> None:
    """Calls of scripts that kept a server from everything else for longer than it finds usual."""
    if slow:
        said = ", ".join(f"{one['script']} {one['longest_ms']:.0f} ms" for one in slow)
        console.print(
            f"Longest script calls in SLOWLOG: {said} (docs/performance.md says what is usual)",
            highlight=False,
        )


def _known(number: int | None) -> int | str:
    return "–" if number is None else number


def _lag(seq: int | None, read_model_seq: int) -> int | str:
    """How far a read model is behind Redis, in events."""
    if seq is None:
        return "–"
    return seq - read_model_seq if seq >= read_model_seq else f"{read_model_seq - seq:,} ahead"


def _print_books(found: dict[str, Any]) -> None:
    """What is to be said of the read models beside how far they are."""
    _print_versions(found)
    if not found["read_models"]:
        console.print("No read models: `grabstream init` makes them.")
    for projection, number in found["waiting"].items():
        console.print(
            f"[red]{projection}: no version has definition {number}, which this code writes[/]: run "
            f"`grabstream rebuild {projection}`",
            highlight=False,
        )
    for stop in found["stopped"]:
        console.print(
            f"[red]{stop['projection']} has stopped at shard {stop['shard']}, seq {stop['seq']}[/]: "
            f"{stop['reason']}",
            highlight=False,
        )
    for difference in found["findings"]:
        console.print(
            f"[red]difference {difference['id']}[/]: {difference['where']}{escape(difference['what'])}",
            highlight=False,
        )
    for words in found["set_aside"]:
        console.print(f"[cyan]set aside[/]: {escape(words)}", highlight=False)


def _print_versions(found: dict[str, Any]) -> None:
    """Only when there is more to say than that all of them are live."""
    if all(one["state"] == "live" for one in found["versions"]):
        return
    live = {one["projection"]: one["events"] for one in found["versions"] if one["state"] == "live"}
    rows = []
    for one in found["versions"]:
        share = one["events"] / max(live.get(one["projection"], 0), 1)
        state = f"building: {one['phase']}, {share:.0%}" if one["state"] == "building" else one["state"]
        rows.append(
            (one["projection"], one["schema"], one["definition"], state, one["source"], one["events"])
        )
    console.print(
        table(
            "Versions of read models", ("projection", "schema", "definition", "state", "from", "events"), rows
        )
    )
