"""`status`: which servers answer, the progress of every shard, and what has stopped."""

import asyncio
import sys
from collections import Counter
from typing import Any, Final

import click
import msgspec
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from psycopg import AsyncConnection, OperationalError, sql
from psycopg.errors import InsufficientPrivilege, UndefinedTable
from psycopg.rows import dict_row
from redis.exceptions import RedisError
from rich.markup import escape

from grabstream.connections.opening import key_space, mixed_systems, open_redis
from grabstream.connections.preconditions import ConditionNotMet, require_postgres
from grabstream.connections.worker_reports import read_reports
from grabstream.gate.calls import now_ms
from grabstream.ops.console.output import console, json_option, print_json, table
from grabstream.ops.diagnosis.shards import read_shards
from grabstream.ops.diagnosis.slow_scripts import script_calls, slow_scripts
from grabstream.projections import cursors
from grabstream.projections.checking import verified
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import connect
from grabstream.projections.definitions import PROJECTIONS, definition_of
from grabstream.projections.tables import set_aside, webhooks
from grabstream.projections.versions import NoReadModel, lost, versions, writable_version
from grabstream.settings import Settings, load_settings
from grabstream.streams import brokers
from grabstream.streams.clients import error_text, started


@click.command()
@json_option
def status(as_json: bool) -> None:
    """Show servers, shards and read models.

    Exit code 3: a server does not answer; 1: a shard is fenced or has no relay, a read model has stopped or
    waits for a rebuild, or the verifier found a difference. `grabstream doctor` shows what to do.

    While PostgreSQL does not answer, its values are unknown, shown as – (null in JSON). The same applies to
    shards on a server of a Redis Cluster that does not answer while others do.
    """
    readings = asyncio.run(read(load_settings()))
    if as_json:
        print_json(readings)
    else:
        _print(readings)
    if any(problem for problem in readings["servers"].values()):
        sys.exit(3)
    needs_attention = (
        readings["mixed_up"]
        or readings["stopped"]
        or readings["waiting"]
        or readings["findings"]
        or any(shard["fault"] for shard in readings["shards"])
    )
    sys.exit(1 if needs_attention else 0)


#: Values that PostgreSQL has; null while it does not answer.
_BOOK_READINGS: Final = (
    "read_models",
    "stopped",
    "versions",
    "waiting",
    "verified",
    "findings",
    "set_aside",
    "webhooks",
)


async def read(settings: Settings) -> dict[str, Any]:
    """The readings of all servers, in the form of the JSON output."""
    mixed_up = await mixed_systems(settings)
    readings: dict[str, Any] = {
        "servers": {}, "shards": [], "read_models": [], "stopped": [], "versions": [], "waiting": {},
        "verified": [], "findings": [],
        "set_aside": [], "webhooks": {}, "slow_scripts": [], "script_calls": [], "workers": {},
        "mixed_up": str(mixed_up) if mixed_up else None,
    }  # fmt: skip
    readings["servers"] = dict.fromkeys(("redis", "kafka", "postgres"))
    # PostgreSQL is read before Redis, which continues meanwhile: a read model that is then ahead of Redis is
    # really ahead.
    for name, ask in (("kafka", _kafka), ("postgres", _postgres), ("redis", _redis)):
        try:
            await ask(settings, readings)
        except (
            RedisError, KafkaError, OperationalError, InsufficientPrivilege, OSError, ConditionNotMet,
        ) as error:  # fmt: skip
            readings["servers"][name] = error_text(error)
            if name == "postgres":
                readings |= dict.fromkeys(_BOOK_READINGS)
    return readings


async def _redis(settings: Settings, readings: dict[str, Any]) -> None:
    redis = open_redis(settings)
    try:
        rows = await read_shards(redis, key_space(settings), settings.shards)
        reports = await read_reports(redis, key_space(settings).workers, now_ms())
        readings["workers"] = msgspec.to_builtins(reports)
        readings["slow_scripts"] = [script._asdict() for script in await slow_scripts(redis, settings.prefix)]
        readings["script_calls"] = [call._asdict() for call in await script_calls(redis)]
    finally:
        await redis.aclose()
    readings["shards"] = rows


async def _kafka(settings: Settings, readings: dict[str, Any]) -> None:
    async with started(AIOKafkaAdminClient(**brokers.at(settings.brokers, timeout_ms_max=5_000))):
        pass


async def _postgres(settings: Settings, readings: dict[str, Any]) -> None:
    async with await connect(settings.postgres, settings.schema_) as connection:
        await require_postgres(connection, settings)
        await use_schema(connection, settings.schema_)
        try:
            async with connection.cursor(row_factory=dict_row) as rows:
                await rows.execute(
                    "SELECT projection, shard, seq, next_offset FROM cursors ORDER BY projection, shard"
                )
                readings["read_models"] = await rows.fetchall()
            readings["stopped"] = [stop._asdict() for stop in await cursors.stops(connection)]
            readings["verified"] = [
                {"shard": part.shard, "seq": part.seq, "rounds": part.rounds, "at": part.compared_at}
                for part in (await verified.progress(connection)).values()
            ]
            readings["findings"] = [
                finding._asdict() | {"where": finding.where}
                for finding in await verified.open_findings(connection)
            ]
            readings["set_aside"] = [record.in_words() for record in await set_aside.load(connection)]
            await _versions(connection, settings.schema_, readings)
            readings["webhooks"] = await _webhooks(connection)
        except (UndefinedTable, NoReadModel):
            readings["read_models"] = []


async def _webhooks(connection: AsyncConnection[Any]) -> dict[str, int]:
    """How many webhooks are active and paused, and how many deliveries of all wait and are parked."""
    states = Counter(webhook.state for webhook in await webhooks.find_all(connection))
    waiting, parked = [
        sum((await webhooks.backlogs(connection, state)).values()) for state in ("waiting", "parked")
    ]
    return {
        "active": states["active"], "paused": states["paused"], "waiting": waiting, "parked": parked
    }  # fmt: skip


async def _versions(connection: AsyncConnection[Any], schema: str, readings: dict[str, Any]) -> None:
    """Adds the versions of the read models, each with its number of events, and the projections for which no
    version has the definition of this code.
    """
    known = await versions(connection, schema)
    gone = await lost(connection, known)
    for version in known:
        if version in gone:
            readings["versions"].append(version._asdict() | {"state": "gone", "events": 0})
        elif version.projection in PROJECTIONS:
            table = sql.Identifier(version.schema, "projection_cursors")
            rows = await connection.execute(
                sql.SQL("SELECT coalesce(sum(seq), 0)::bigint FROM {}").format(table)
            )
            [events] = await rows.fetchone() or [0]
            readings["versions"].append(version._asdict() | {"events": events})
    for projection in PROJECTIONS:
        projection_versions = [version for version in known if version.projection == projection]
        if writable_version(projection_versions, projection) is None:
            readings["waiting"][projection] = definition_of(projection).number


def _print(readings: dict[str, Any]) -> None:
    for name, problem in readings["servers"].items():
        console.print(
            f"[green]✓[/] {name}" if problem is None else f"[red]✗[/] {name}: {escape(problem)}",
            highlight=False,
        )
    models = sorted({row["projection"] for row in readings["read_models"] or ()})
    seqs = {(row["projection"], row["shard"]): row["seq"] for row in readings["read_models"] or ()}
    proved = {row["shard"]: row["seq"] for row in readings["verified"] or ()}
    servers = {shard["server"] for shard in readings["shards"]} - {""}
    rows = (
        (
            shard["shard"], *([shard["server"] or "–"] if servers else []), _known(shard["seq"]),
            _known(shard["waiting"]),
            *(_lag(shard["seq"], seqs.get((model, shard["shard"]), 0)) for model in models),
            "–" if readings["verified"] is None else proved.get(shard["shard"], 0), shard["relay"] or "none",
            shard["fault"] or "",
        )
        for shard in readings["shards"]
    )  # fmt: skip
    if readings["mixed_up"]:
        console.print(f"[red]{escape(readings['mixed_up'])}[/]", highlight=False)
    columns = [
        "shard",
        *(["server"] if servers else []),
        "seq",
        "not journaled",
        *(f"{model} lag" for model in models),
    ]
    columns += ["verified to", "relay", "fault"]
    console.print(table("Shards", columns, rows))
    known = [shard for shard in readings["shards"] if shard["seq"] is not None]
    if any(seqs.get((model, shard["shard"]), 0) > shard["seq"] for model in models for shard in known):
        console.print(
            "[red]Read models are ahead of Redis[/]: it has lost events that they have. A worker restores "
            "those that are in the journal; `grabstream doctor` shows what to do about the rest.",
            highlight=False,
        )
    for worker, report in readings["workers"].items():
        for trouble in report["troubles"][:1]:
            console.print(
                f"[red]worker {escape(worker)}[/]: {escape(trouble['where'])}: {escape(trouble['words'])}",
                highlight=False,
            )
    _print_slow_scripts(readings["slow_scripts"])
    if readings["script_calls"]:
        longest = max(call["longest_ms_at_most"] for call in readings["script_calls"])
        console.print(
            f"Longest script call since the servers started: at most {longest:,.0f} ms", highlight=False
        )
    if readings["servers"]["postgres"] is None:
        _print_books(readings)
    if readings["stopped"] or readings["findings"] or any(shard["fault"] for shard in readings["shards"]):
        console.print("`grabstream doctor` shows what to do.")


def _print_slow_scripts(slow: list[dict[str, Any]]) -> None:
    """Prints the script calls that are in a server's SLOWLOG: the server did nothing else meanwhile."""
    if slow:
        calls = ", ".join(f"{script['script']} {script['longest_ms']:.0f} ms" for script in slow)
        console.print(
            f"Longest script calls in SLOWLOG: {calls} (docs/performance.md lists usual values)",
            highlight=False,
        )


def _known(number: int | None) -> int | str:
    return "–" if number is None else number


def _lag(seq: int | None, read_model_seq: int) -> int | str:
    """How many events a read model lags, or is ahead, compared with Redis."""
    if seq is None:
        return "–"
    return seq - read_model_seq if seq >= read_model_seq else f"{read_model_seq - seq:,} ahead"


def _print_books(readings: dict[str, Any]) -> None:
    """Prints the state of the read models, except their progress."""
    _print_versions(readings)
    if not readings["read_models"]:
        console.print("No read models: run `grabstream init` to create them.")
    for projection, number in readings["waiting"].items():
        console.print(
            f"[red]{projection}: no version has definition {number}, which this release writes[/]: run "
            f"`grabstream rebuild {projection}`",
            highlight=False,
        )
    for stop in readings["stopped"]:
        console.print(
            f"[red]{stop['projection']} has stopped at shard {stop['shard']}, seq {stop['seq']}[/]: "
            f"{escape(stop['reason'])}",
            highlight=False,
        )
    for difference in readings["findings"]:
        console.print(
            f"[red]difference {difference['id']}[/]: {difference['where']}{escape(difference['what'])}",
            highlight=False,
        )
    if any(readings["webhooks"].values()):
        counts = readings["webhooks"]
        console.print(
            f"Webhooks: {counts['active']:,} active, {counts['paused']:,} paused; {counts['waiting']:,} "
            f"deliveries wait, {counts['parked']:,} are parked",
            highlight=False,
        )
    for words in readings["set_aside"]:
        console.print(f"[cyan]set aside[/]: {escape(words)}", highlight=False)


def _print_versions(readings: dict[str, Any]) -> None:
    """Prints the versions of the read models, unless all of them are live."""
    if all(version["state"] == "live" for version in readings["versions"]):
        return
    live = {row["projection"]: row["events"] for row in readings["versions"] if row["state"] == "live"}
    rows = []
    for version in readings["versions"]:
        share = version["events"] / max(live.get(version["projection"], 0), 1)
        state = (
            f"building: {version['phase']}, {share:.0%}"
            if version["state"] == "building"
            else version["state"]
        )
        rows.append(
            (
                version["projection"],
                version["schema"],
                version["definition"],
                state,
                version["source"],
                version["events"],
            )
        )
    console.print(
        table(
            "Versions of read models", ("projection", "schema", "definition", "state", "from", "events"), rows
        )
    )
