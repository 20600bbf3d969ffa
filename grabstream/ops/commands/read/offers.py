"""`offers`: lists offers from the view `offers`, page by page, or compares them with a file."""

import asyncio
import time
from pathlib import Path
from typing import Any, Final, get_args

import click
from click.core import ParameterSource
from psycopg.rows import dict_row

from grabstream.connections.opening import checked_database
from grabstream.models.bounds import counted
from grabstream.models.calendar import utc_text
from grabstream.models.events import KINDS
from grabstream.models.identifiers import is_id
from grabstream.models.money import Invalid
from grabstream.models.offers import TIME_MS_MAX
from grabstream.ops.commands.offers.through_a_gate import week_option
from grabstream.ops.commands.read.checking_offers import check_offers
from grabstream.ops.console.output import WholeNumber, json_option, plain_console, print_json, refuse, table
from grabstream.ops.formats.offer_files import Form
from grabstream.ops.formats.written_values import read_duration
from grabstream.settings import Settings, load_settings

#: What --state takes. `upcoming` and `open` are the two parts of the view's state `open`: its opening time
#: is not over, or is. An offer past its closing time is `open` until the sweeper has closed it.
STATES: Final = {
    "open": "state = 'open' AND opens_at <= %(now)s",
    "upcoming": "state = 'open' AND opens_at > %(now)s",
    "paused": "state = 'paused'",
    "closed": "state = 'closed'",
    "retired": "state = 'retired'",
}
#: The options of lists.
_LIST_OPTIONS: Final = {"is_open", "states", "kind", "campaign", "issuer", "closing_ms", "limit", "after"}
#: Rows of one page at most: they are held in memory.
LIMIT_MAX: Final = 10_000
_COLUMNS: Final = (
    "offer, campaign, kind, issuer, title, asset, total, units, state, opened_at, opens_at, closes_at, "
    "closed_at, grabs, given_units, held, waiting, units_left"
)
_SHOWN: Final = ("offer", "kind", "state", "units", "taken", "held", "left", "waiting", "opens", "closes")


class UnknownPageStart(Exception):
    """The offer before the requested page is not in the read models."""


class _Duration(click.ParamType):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return read_duration(str(value))
        except Invalid as error:
            return self.fail(str(error), param, ctx)


@click.command()
@click.option("--open", "is_open", is_flag=True, help="Only open offers; the same as --state open.")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(list(STATES)), help="Only this state. Repeatable."
)
@click.option("--kind", type=click.Choice(KINDS), help="Only this kind.")
@click.option("--campaign", metavar="ID", help="Only the offers of this campaign.")
@click.option("--issuer", metavar="ID", help="Only the offers of this issuer.")
@click.option(
    "--closing-within",
    "closing_ms",
    type=_Duration(),
    metavar="DURATION",
    help="Only offers that close within this time, such as 2h or 3d; the next one first.",
)
@click.option(
    "--limit", type=WholeNumber(min=1, max=LIMIT_MAX), default=20, show_default=True, help="Offers to list."
)
@click.option(
    "--after", metavar="OFFER", help="Continue after this offer, the last one of the previous page."
)
@click.option(
    "--check",
    "file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    metavar="FILE",
    help="Compare the open and planned offers with FILE, instead of listing them.",
)
@click.option("--format", "form", type=click.Choice(get_args(Form)), help="The form of FILE, as for `open`.")
@week_option
@json_option
def offers(
    is_open: bool,
    states: tuple[str, ...],
    kind: str | None,
    campaign: str | None,
    issuer: str | None,
    closing_ms: int | None,
    limit: int,
    after: str | None,
    file: Path | None,
    form: Form | None,
    week: str | None,
    as_json: bool,
) -> None:
    """List offers from the read models, the newest first, and count all that match. With --check, compare
    them with a file: each difference is a line.

    Exit code 1: the offer of --after does not exist, or something differs from the file; 2: wrong usage, or
    the file is wrong; 3: a server cannot be reached.
    """
    context = click.get_current_context()
    given = {
        parameter.name
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    }
    if wrong := given & (_LIST_OPTIONS if file else {"form", "week"}):
        options = ", ".join(
            parameter.opts[0] for parameter in context.command.params if parameter.name in wrong
        )
        raise click.UsageError(f"{options}: not with --check" if file else f"{options}: only with --check")
    if file is not None:
        check_offers(file, form, week, as_json)
    for option, name in (("--campaign", campaign), ("--issuer", issuer), ("--after", after)):
        if name is not None and not is_id(name):
            raise click.UsageError(
                f"{option} {name!r} is not an id: use 1 to 64 of the characters A-Z a-z 0-9 . _ : -"
            )
    chosen = {*states, *(["open"] if is_open else [])}
    wanted = {
        "now": time.time_ns() // 1_000_000, "kind": kind, "campaign": campaign, "issuer": issuer,
        "closing": closing_ms, "after": after, "limit": limit,
    }  # fmt: skip
    try:
        found = asyncio.run(_read(load_settings(), wanted, chosen))
    except UnknownPageStart:
        refuse(f"--after {after}: the read models have no such offer; leave it out for the first page")
    if as_json:
        print_json(found)
    else:
        _print(found)


def _condition(wanted: dict[str, Any], chosen: set[str]) -> str:
    """The SQL condition of all filters."""
    conditions = [f"{name} = %({name})s" for name in ("kind", "campaign", "issuer") if wanted[name]]
    if chosen:
        conditions.append("(" + " OR ".join(STATES[state] for state in sorted(chosen)) + ")")
    if wanted["closing"] is not None:
        conditions.append("closed_at IS NULL AND closes_at >= %(now)s AND closes_at <= %(now)s + %(closing)s")
    return " AND ".join(conditions) or "true"


async def _read(settings: Settings, wanted: dict[str, Any], chosen: set[str]) -> dict[str, Any]:
    condition = _condition(wanted, chosen)
    # Offers that were opened in the same millisecond are ordered by their ids, so a page ends anywhere.
    key, direction, beyond = (
        ("opened_at", "DESC", "<") if wanted["closing"] is None else ("closes_at", "ASC", ">")
    )
    page = condition
    async with (
        checked_database(settings, row_factory=dict_row) as connection,
        connection.transaction(),
    ):
        # Page and count of one moment: the read models continue meanwhile.
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        if wanted["after"] is not None:
            begin = await connection.execute(
                b"SELECT opened_at, closes_at FROM offers WHERE offer = %(after)s", wanted
            )
            row = await begin.fetchone()
            if row is None:
                raise UnknownPageStart
            wanted = wanted | {"after_key": row[key]}
            page += f" AND ({key}, offer) {beyond} (%(after_key)s, %(after)s)"
        # Only texts of this module; values are parameters.
        query = f"SELECT {_COLUMNS} FROM offers WHERE {page} ORDER BY {key} {direction}, offer {direction}"  # noqa: S608
        rows = await connection.execute(f"{query} LIMIT %(limit)s + 1".encode(), wanted)
        listed = await rows.fetchall()
        count = await connection.execute(
            f"SELECT count(*) AS count FROM offers WHERE {condition}".encode(),  # noqa: S608
            wanted,
        )
        [total] = await count.fetchall()
    more = len(listed) > wanted["limit"]
    listed = [_plain(row, wanted["now"]) for row in listed[: wanted["limit"]]]
    return {"offers": listed, "count": total["count"], "next": listed[-1]["offer"] if more else None}


def _plain(row: dict[str, Any], now: int) -> dict[str, Any]:
    """A row for programs: `upcoming` as a state, and null for an offer without a closing time."""
    state = "upcoming" if row["state"] == "open" and row["opens_at"] > now else row["state"]
    closes_at = None if row["closes_at"] == TIME_MS_MAX else row["closes_at"]
    return row | {"state": state, "closes_at": closes_at}


def _print(found: dict[str, Any]) -> None:
    listed = found["offers"]
    if not listed:
        plain_console.print("No offer." if not found["count"] else "No more offers.")
        return
    title = f"{len(listed):,} of {counted(found['count'], 'offers')}"
    plain_console.print(table(title, _SHOWN, [_row(offer) for offer in listed]))
    if found["next"] is not None:
        plain_console.print(f"The next page: the same with --after {found['next']}")


def _row(offer: dict[str, Any]) -> tuple[object, ...]:
    closes = offer["closed_at"] or offer["closes_at"]
    return (
        *(offer[name] for name in ("offer", "kind", "state", "units", "given_units", "held")),
        *(offer[name] for name in ("units_left", "waiting")),
        _second(offer["opens_at"]),
        _second(closes) if closes else "never",
    )


def _second(at_ms: int) -> str:
    """A time for a list: UTC, whole seconds."""
    return utc_text(at_ms, " ")[:19] + "Z"
