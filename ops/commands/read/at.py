"""`at`: the time machine. A bounded replay into a schema that is dropped again, and what stands in it."""

import gc
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, nullcontext
from typing import Any

import click
from psycopg import AsyncConnection
from psycopg.rows import dict_row

from grabstream.models.journal import Corrupt, Gap
from grabstream.ops.commands.read.show import print_offer, read_offer
from grabstream.ops.connections.event_sources import NoTrail, open_history
from grabstream.ops.connections.opening import check_system
from grabstream.ops.console.output import WholeNumber, console, json_option, print_json, table
from grabstream.ops.console.progress import Reading
from grabstream.ops.console.stopping import run_until_stopped
from grabstream.ops.formats.moments import BadMoment, parse_time, show_time
from grabstream.ops.formats.replay_request import Request, request
from grabstream.ops.settings import Settings, load_settings
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import connect
from grabstream.streams.history.sources import Source
from grabstream.streams.replaying import replay as replaying
from grabstream.streams.replaying.replay import Done
from grabstream.streams.replaying.replay_schema import is_schema, open_schema, temporary_schema
from grabstream.streams.replaying.selection import Selection
from grabstream.streams.replaying.sinks import ReplayRefused

_HOLDS = (
    "SELECT offer, grab, user_id, held, deadline_at, due, currency FROM grabs WHERE held > 0 ORDER BY "
    "deadline_at, offer, grab LIMIT %s"
)
_BALANCES = (
    "SELECT user_id, asset, available, held FROM balances WHERE available > 0 OR held > 0 ORDER BY "
    "available + held DESC, user_id LIMIT %s"
)
_GRABS = "SELECT * FROM grabs WHERE user_id = ANY(%s) ORDER BY at DESC, offer, grab LIMIT %s"
_OFFERS = "SELECT * FROM offers ORDER BY opened_at, offer LIMIT %s"


class NothingThen(Exception):
    """There was nothing of the kind at that time; the text says since when there is."""


@click.command()
@click.argument("moment", metavar="TIME")
@click.option("--offer", "offers", multiple=True, metavar="ID", help="Only this offer; may be repeated.")
@click.option("--user", "users", multiple=True, metavar="ID", help="What this user had; may be repeated.")
@click.option(
    "--source",
    type=click.Choice(["journal", "audit"]),
    default="journal",
    show_default=True,
    help="Where events are read from.",
)
@click.option(
    "--limit", type=WholeNumber(min=0), help="Rows of a list; 20 for people, all in JSON, if not given."
)
@click.option("--keep", metavar="SCHEMA", help="Build in this schema, and leave it there.")
@json_option
def at(
    moment: str,
    offers: Sequence[str],
    users: Sequence[str],
    source: str,
    limit: int | None,
    keep: str | None,
    as_json: bool,
) -> None:
    """Show offers, holds and balances as they were at TIME, everything of that millisecond included.

    TIME is ISO 8601 (UTC where it names no zone) or ms since 1970. It is counted by the shards' own clocks,
    those of the events; what was decided then but is not journaled yet is not there. A hold that was over but
    not yet swept still stands.

    Exit 1: there was nothing then; 2: used wrongly (a time in the future, too); 3: a server cannot be
    reached.
    """
    settings = load_settings()
    try:
        at_ms = parse_time(moment)
    except BadMoment as error:
        raise click.UsageError(str(error)) from None
    if at_ms > time.time() * 1000:
        raise click.UsageError(f"TIME {show_time(at_ms)} is in the future: nothing is known of it")
    if keep is not None and not is_schema(keep):
        raise click.UsageError(f"--keep {keep!r} is no name of a schema (a-z 0-9 _, at most 48)")
    gc.set_threshold(50_000, 20, 50)
    asked = request(settings, source, (), (str(at_ms),), (), offers, users)
    shown = 20 if limit is None else limit
    try:
        found = run_until_stopped(
            _run(settings, asked, at_ms, keep, None if as_json and limit is None else shown)
        )
    except (NothingThen, ReplayRefused, NoTrail, Corrupt, Gap) as error:
        click.echo(f"grabstream: {error}", err=True)
        sys.exit(1)
    if as_json:
        print_json(found)
    else:
        _print(found, shown)
    if keep is not None:
        click.echo(
            f"grabstream: it all stands in schema {keep}; `DROP SCHEMA {keep} CASCADE` removes it", err=True
        )


async def _run(
    settings: Settings, asked: Request, at_ms: int, keep: str | None, limit: int | None
) -> dict[str, Any]:
    await check_system(settings, journal=asked.source == "journal")
    done: dict[int, Done] = {}
    definition = asked.definition(settings)
    async with (
        open_history(settings, asked.source) as source,
        temporary_schema(settings.postgres, settings.schema_)
        if keep is None
        else nullcontext(keep) as schema,
        # Until all of it is read: another `at` would go on with a schema that is kept, to another time.
        open_schema(
            settings.postgres, schema, settings.schema_, settings.shards, definition, temporary=keep is None
        ) as sink,
    ):
        planned = await replaying.plan(source, asked.stretches, True, sink.positions)
        selection = Selection(asked.wanted, True, await sink.grabs(asked.wanted.users))
        with Reading(f"to {show_time(at_ms)}", sum(one.units for one in planned)) as report:
            await replaying.replay(source, planned, selection, sink, report, done)
        if not asked.wanted.offers and not any(one.cursor.seq for one in done.values()):
            raise NothingThen(await _since_when(source, asked, at_ms))
        return {
            "at": show_time(at_ms),
            "at_ms": at_ms,
            "shards": [{"shard": one.shard, "seq": one.cursor.seq} for one in done.values()],
            **await _read(settings, schema, asked, at_ms, limit),
        }


async def _since_when(source: Source, asked: Request, at_ms: int) -> str:
    """Words for a time before everything."""
    first = [at for one in asked.stretches if (at := await _first_at(source, one.shard)) is not None]
    where = "" if len(asked.stretches) > 1 else f" in shard {asked.stretches[0].shard}"
    if not first:
        return f"there are no events yet{where}"
    return f"nothing had happened{where} at {show_time(at_ms)}: the first event is of {show_time(min(first))}"


async def _first_at(source: Source, shard: int) -> int | None:
    async with aclosing(source.chunks(shard, await source.start(shard, None))) as chunks:
        async for chunk in chunks:
            if chunk.facts:
                return chunk.facts[0].event.at
    return None


async def _read(
    settings: Settings, schema: str, asked: Request, at_ms: int, limit: int | None
) -> dict[str, Any]:
    """What stands in the schema. Balances are whole only where no offer is left out, an offer's counts where
    no user is.
    """
    wanted = asked.wanted
    async with await connect(settings.postgres, settings.schema_, row_factory=dict_row) as connection:
        await use_schema(connection, schema)

        async def rows(query: str, *arguments: object) -> list[dict[str, Any]]:
            return await (await connection.execute(query.encode(), (*arguments, limit))).fetchall()

        found: dict[str, Any] = {}
        if wanted.users:
            found["grabs"] = await rows(_GRABS, list(wanted.users))
        elif wanted.offers:
            found["details"] = [await _offer(connection, offer, at_ms, limit) for offer in wanted.offers]
        else:
            found["offers"] = await rows(_OFFERS)
        if not wanted.users:
            found["holds"] = await rows(_HOLDS)
        if not wanted.offers:
            found["balances"] = await rows(_BALANCES)
    return found


async def _offer(
    connection: AsyncConnection[dict[str, Any]], offer: str, at_ms: int, limit: int | None
) -> dict[str, Any]:
    found = await read_offer(connection, offer, limit)
    if found is None:
        raise NothingThen(f"there was no offer {offer!r} at {show_time(at_ms)}")
    return found


def _print(found: dict[str, Any], limit: int) -> None:
    places = ", ".join(f"{one['shard']}:{one['seq']}" for one in found["shards"] if one["seq"])
    console.print(f"[bold]As it was at {found['at']}[/] [dim](shard:seq {places})[/]", highlight=False)
    for offer in found.get("details", ()):
        print_offer(offer, limit, found["at_ms"])
    for name, (columns, row_of) in _TABLES.items():
        if found.get(name):
            console.print(table(f"{name.capitalize()} (at most {limit})", columns, map(row_of, found[name])))
        elif name in found:
            console.print(f"No {name}.")


def _offer_row(offer: dict[str, Any]) -> tuple[object, ...]:
    left = offer["amount_left"] if offer["kind"] == "envelope" else offer["units_left"]
    said = (offer[name] for name in ("offer", "kind", "state", "total", "given", "held"))
    return (*said, left, offer["waiting"])


def _grab_row(grab: dict[str, Any]) -> tuple[object, ...]:
    until = show_time(grab["deadline_at"]) if grab["held"] else ""
    said = (grab[name] for name in ("offer", "place", "user_id", "state", "amount", "held", "taken"))
    return (*said, until, grab["grab"])


_TABLES: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], tuple[object, ...]]]] = {
    "offers": (("offer", "kind", "state", "total", "taken", "held", "left", "waiting"), _offer_row),
    "grabs": (("offer", "place", "user", "state", "amount", "held", "taken", "until", "grab"), _grab_row),
    "holds": (
        ("offer", "user", "held", "until", "grab"),
        lambda hold: (
            hold["offer"],
            hold["user_id"],
            hold["held"],
            show_time(hold["deadline_at"]),
            hold["grab"],
        ),
    ),
    "balances": (
        ("user", "asset", "available", "held"),
        lambda one: (one["user_id"], one["asset"], one["available"], one["held"]),
    ),
}
