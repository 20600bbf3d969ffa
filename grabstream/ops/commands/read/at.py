"""`at`: shows the past. A bounded replay fills a schema, which is read and dropped again."""

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, nullcontext
from typing import Any

import click
from psycopg import AsyncConnection
from psycopg.rows import dict_row

from grabstream.connections.event_sources import NoTrail, open_history
from grabstream.connections.opening import check_system
from grabstream.models.currencies import shown_amount, shown_number
from grabstream.models.journal import Corrupt, Gap
from grabstream.ops.commands.read.show import print_offer, read_offer
from grabstream.ops.console.output import (
    WholeNumber,
    complain,
    console,
    json_option,
    print_json,
    refuse,
    table,
)
from grabstream.ops.console.progress import ReadingBar
from grabstream.ops.console.stopping import run_until_stopped
from grabstream.ops.formats.moments import BadMoment, parse_time, show_time
from grabstream.ops.formats.replay_request import ReplayRequest, request, source_option
from grabstream.projections.database.migrate import drop_statement, use_schema
from grabstream.projections.database.sessions import connect
from grabstream.runtime.collecting import collect_rarely
from grabstream.settings import Settings, load_settings
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
    """Nothing existed at that time; the text names the time of the first event."""


@click.command()
@click.argument("moment", metavar="TIME")
@click.option("--offer", "offers", multiple=True, metavar="ID", help="Show only this offer. Repeatable.")
@click.option("--user", "users", multiple=True, metavar="ID", help="Show what this user had. Repeatable.")
@source_option("The source of the events.", "audit")
@click.option("--limit", type=WholeNumber(min=0), help="Rows of each list. Default: 20, with --json all.")
@click.option("--keep", metavar="SCHEMA", help="Build the result in this schema, and keep it.")
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
    """Show offers, holds and balances as they were at the end of the millisecond TIME.

    TIME is ISO 8601 (UTC when it has no zone) or milliseconds since 1970. It is compared with the times of
    the events, by the clocks of their shards. Decisions that are not journaled yet are not shown. A hold
    after its deadline that the sweeper had not ended yet is shown as held. Money is in major units, as in
    99.00 CNY; where ISO 4217 does not know a currency, and with --json, in minor units.

    Exit code 1: nothing existed at that time; 2: wrong usage, such as a time in the future; 3: a server
    cannot be reached.
    """
    settings = load_settings()
    try:
        at_ms = parse_time(moment)
    except BadMoment as error:
        raise click.UsageError(str(error)) from None
    if at_ms > time.time() * 1000:
        raise click.UsageError(f"TIME {show_time(at_ms)} is in the future: give a time in the past")
    if keep is not None and not is_schema(keep):
        raise click.UsageError(
            f"--keep {keep!r} cannot name a schema: use at most 48 of the characters a-z 0-9 _"
        )
    collect_rarely()
    asked = request(settings, source, (), (str(at_ms),), (), offers, users)
    rows_max = 20 if limit is None else limit
    try:
        shown = run_until_stopped(
            _run(settings, asked, at_ms, keep, None if as_json and limit is None else rows_max)
        )
    except (NothingThen, ReplayRefused, NoTrail, Corrupt, Gap) as error:
        refuse(error)
    if as_json:
        print_json(shown)
    else:
        _print(shown, rows_max)
    if keep is not None:
        complain(f"the result is kept in schema {keep}; `{drop_statement(keep)}` removes it")


async def _run(
    settings: Settings, asked: ReplayRequest, at_ms: int, keep: str | None, limit: int | None
) -> dict[str, Any]:
    await check_system(settings, journal=asked.source == "journal")
    done: dict[int, Done] = {}
    definition = asked.definition(settings)
    async with (
        open_history(settings, asked.source) as source,
        temporary_schema(settings.postgres, settings.schema_)
        if keep is None
        else nullcontext(keep) as schema,
        # Stays open until everything is read: another `at` could continue a kept schema to another time.
        open_schema(
            settings.postgres, schema, settings.schema_, settings.shards, definition, temporary=keep is None
        ) as sink,
    ):
        planned = await replaying.plan(source, asked.stretches, True, sink.positions)
        selection = Selection(asked.wanted, True, await sink.grabs(asked.wanted.users))
        with ReadingBar(f"to {show_time(at_ms)}", sum(stretch.units for stretch in planned)) as report:
            await replaying.replay(source, planned, selection, sink, report, done)
        if not asked.wanted.offers and not any(shard.cursor.seq for shard in done.values()):
            raise NothingThen(await _since_when(source, asked, at_ms))
        return {
            "at": show_time(at_ms),
            "at_ms": at_ms,
            "shards": [{"shard": shard.shard, "seq": shard.cursor.seq} for shard in done.values()],
            **await _read(settings, schema, asked, at_ms, limit),
        }


async def _since_when(source: Source, asked: ReplayRequest, at_ms: int) -> str:
    """The error for a time before the first event."""
    first = [at for stretch in asked.stretches if (at := await _first_at(source, stretch.shard)) is not None]
    where = "" if len(asked.stretches) > 1 else f" in shard {asked.stretches[0].shard}"
    if not first:
        return f"there are no events yet{where}"
    return f"there was no event{where} at {show_time(at_ms)}: the first event is of {show_time(min(first))}"


async def _first_at(source: Source, shard: int) -> int | None:
    async with aclosing(source.chunks(shard, await source.start(shard, None))) as chunks:
        async for chunk in chunks:
            if chunk.facts:
                return chunk.facts[0].event.at
    return None


async def _read(
    settings: Settings, schema: str, asked: ReplayRequest, at_ms: int, limit: int | None
) -> dict[str, Any]:
    """The content of the schema. Balances are complete only if no offer is left out, the counts of an offer
    only if no user is left out.
    """
    wanted = asked.wanted
    async with await connect(settings.postgres, settings.schema_, row_factory=dict_row) as connection:
        await use_schema(connection, schema)

        async def rows(query: str, *arguments: object) -> list[dict[str, Any]]:
            return await (await connection.execute(query.encode(), (*arguments, limit))).fetchall()

        content: dict[str, Any] = {}
        if wanted.users:
            content["grabs"] = await rows(_GRABS, list(wanted.users))
        elif wanted.offers:
            content["details"] = [await _offer(connection, offer, at_ms, limit) for offer in wanted.offers]
        else:
            content["offers"] = await rows(_OFFERS)
        if not wanted.users:
            content["holds"] = await rows(_HOLDS)
        if not wanted.offers:
            content["balances"] = await rows(_BALANCES)
    return content


async def _offer(
    connection: AsyncConnection[dict[str, Any]], offer: str, at_ms: int, limit: int | None
) -> dict[str, Any]:
    details = await read_offer(connection, offer, limit)
    if details is None:
        raise NothingThen(f"there was no offer {offer!r} at {show_time(at_ms)}")
    return details


def _print(shown: dict[str, Any], limit: int) -> None:
    events = ", ".join(f"{shard['shard']}:{shard['seq']}" for shard in shown["shards"] if shard["seq"])
    console.print(f"[bold]As it was at {shown['at']}[/] [dim](shard:seq {events})[/]", highlight=False)
    for offer in shown.get("details", ()):
        print_offer(offer, limit, shown["at_ms"])
    for name, (columns, row_of) in _TABLES.items():
        if shown.get(name):
            console.print(table(f"{name.capitalize()} (at most {limit})", columns, map(row_of, shown[name])))
        elif name in shown:
            console.print(f"No {name}.")


def _offer_row(offer: dict[str, Any]) -> tuple[object, ...]:
    columns = (offer[name] for name in ("offer", "kind", "state"))
    # For an envelope, these are amounts of money.
    if offer["kind"] == "envelope":
        names = ("total", "given", "held", "amount_left")
        amounts: list[object] = [shown_amount(offer[name], offer["asset"]) for name in names]
    else:
        amounts = [offer[name] for name in ("total", "given", "held", "units_left")]
    return (*columns, *amounts, offer["waiting"])


def _grab_row(grab: dict[str, Any]) -> tuple[object, ...]:
    until = show_time(grab["deadline_at"]) if grab["held"] else ""
    columns = (grab[name] for name in ("offer", "place", "user_id", "state"))
    is_money = grab["part_amount"] is not None
    amount = shown_amount(grab["amount"], grab["asset"]) if is_money else grab["amount"]
    return (*columns, amount, grab["held"], grab["taken"], until, grab["grab"])


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
        lambda balance: (
            balance["user_id"],
            balance["asset"],
            *(shown_number(balance[name], balance["asset"]) for name in ("available", "held")),
        ),
    ),
}
