"""`result`: results of the offers of a week, from the views `results_by_week` and `refusals_by_reason`."""

import asyncio
import csv
import html
import io
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

import click
from psycopg import AsyncConnection
from psycopg.rows import dict_row

from grabstream.connections.opening import checked_database
from grabstream.extras import INSTALL_ANALYSTS, installed
from grabstream.models.bounds import counted
from grabstream.models.currencies import DECIMALS, shown_amount, shown_number
from grabstream.models.money import Invalid
from grabstream.ops.console.output import complain, console, json_option, print_json, refuse, table
from grabstream.ops.formats.weekly_plan import monday_of
from grabstream.projections.definitions.dictionary import VIEWS
from grabstream.settings import Settings, load_settings

#: What a formula begins with in a spreadsheet.
_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r")
#: Columns for people that many results have no value for; `given` is the money of envelopes.
_RARE: Final = frozenset({"title", "given", "currency"})
#: What is added up by currency.
_MONEY: Final = ("payments", "paid", "late_payments", "late_served", "late_paid", "refunded", "refund_due",
                 "revenue")  # fmt: skip
_RESULTS: Final = (
    "SELECT * FROM results_by_week WHERE week = %s AND (%s::text IS NULL OR campaign = %s) "
    "ORDER BY campaign, opens_time, offer"
)
_REFUSALS: Final = "SELECT offer, outcome, refusals FROM refusals_by_reason WHERE offer = ANY(%s)"
_NEWEST: Final = (
    "SELECT max(to_char(opens_time AT TIME ZONE known_timezone, 'IYYY-\"W\"IW')) AS week FROM offers "
    "WHERE opens_time <= now() AND (%s::text IS NULL OR campaign = %s)"
)
_WEEKS: Final = (
    "SELECT DISTINCT to_char(opens_time AT TIME ZONE known_timezone, 'IYYY-\"W\"IW') AS week FROM offers "
    "WHERE %s::text IS NULL OR campaign = %s ORDER BY week DESC LIMIT 5"
)
_STOPS: Final = "SELECT projection, shard FROM stopped_shards WHERE projection <> 'events' ORDER BY 1, 2"


class NoOfferInWeek(Exception):
    """No offer opens in the week; the text names weeks with offers."""


@click.command()
@click.option(
    "--week",
    metavar="WEEK",
    help="ISO week in which the offers open, such as 2026-W47.  [default: the newest that has begun: the "
    "last offer that has opened is of it]",
)
@click.option("--campaign", metavar="ID", help="Only the offers of this campaign.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "csv", "json", "parquet", "html"]),
    help="Form of the result. Parquet needs the extra `analysts`, and a file: > week.parquet.  "
    "[default: table]",
)
@json_option
def result(week: str | None, campaign: str | None, form: str | None, as_json: bool) -> None:
    """Show the results of the offers of a week: offered, held, sold, paid, late, refunded, revenue, and the
    time until sold out. Weeks and times are in the time zone of each campaign. Money is in major units where
    ISO 4217 knows the currency (99.00 CNY), else in minor units.

    CSV, JSON and Parquet have all columns of the view `results_by_week`, with money in minor units, and the
    refusals of each offer by reason.

    Exit code 1: no offer opens in that week; 2: wrong usage; 3: a server cannot be reached.
    """
    if as_json and form not in (None, "json"):
        raise click.UsageError(f"--json and --format {form} exclude each other")
    if form == "parquet":
        _require_parquet()
    if week is not None:
        check_week(week)
    try:
        found = asyncio.run(_read(load_settings(), week, campaign))
    except NoOfferInWeek as error:
        refuse(error)
    for stop in found.pop("stopped"):
        complain(
            f"{stop['projection']} has stopped at shard {stop['shard']}, so the result lacks "
            "later events: see `grabstream doctor`"
        )
    _PRINT["json" if as_json else form or "table"](found)


def _require_parquet() -> None:
    """Raises UsageError where Parquet cannot be written."""
    if not installed("pyarrow"):
        raise click.UsageError(f"--format parquet needs the extra `analysts`: {INSTALL_ANALYSTS}")
    if sys.stdout.isatty():
        raise click.UsageError("--format parquet does not write to a terminal: add > week.parquet")


def check_week(text: str) -> None:
    """Raises UsageError unless the text is an ISO week that exists."""
    try:
        monday_of(text)
    except Invalid as error:
        raise click.UsageError(f"--week {error}") from None


async def _read(settings: Settings, week: str | None, campaign: str | None) -> dict[str, Any]:
    async with checked_database(settings, row_factory=dict_row) as connection, connection.transaction():
        # All tables of one moment: the read models advance meanwhile.
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        if week is None:
            [newest] = await _rows(connection, _NEWEST, campaign, campaign)
            week = newest["week"]
        offers = await _rows(connection, _RESULTS, week, campaign, campaign) if week else []
        if not offers:
            raise NoOfferInWeek(await _nothing(connection, week, campaign))
        refused: dict[str, dict[str, int]] = {}
        for row in await _rows(connection, _REFUSALS, [row["offer"] for row in offers]):
            refused.setdefault(row["offer"], {})[row["outcome"]] = row["refusals"]
        return {
            "week": week,
            "offers": [plain(row) | {"refused": refused.get(row["offer"], {})} for row in offers],
            "totals": totals(offers),
            "stopped": await _rows(connection, _STOPS),
        }


async def _rows(
    connection: AsyncConnection[dict[str, Any]], query: str, *arguments: object
) -> list[dict[str, Any]]:
    return await (await connection.execute(query.encode(), arguments)).fetchall()


async def _nothing(
    connection: AsyncConnection[dict[str, Any]], week: str | None, campaign: str | None
) -> str:
    campaign_suffix = f" of campaign {campaign!r}" if campaign is not None else ""
    weeks = [row["week"] for row in await _rows(connection, _WEEKS, campaign, campaign)]
    if not weeks:
        return f"the read models have no offer{campaign_suffix}"
    when = f"opens in {week}" if week else "has opened yet"
    return f"no offer{campaign_suffix} {when}; the newest weeks with offers are {', '.join(weeks)}"


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the view with times as ISO 8601 in the zone of its campaign, the duration in ms, and sums as
    integers.
    """
    zone = ZoneInfo(row["timezone"])

    def of(name: str, value: Any) -> tuple[str, Any]:
        if isinstance(value, datetime):
            return name, value.astimezone(zone).isoformat(timespec="milliseconds")
        if name == "sold_out_after":
            return "sold_out_after_ms", None if value is None else value // timedelta(milliseconds=1)
        # Sums are `numeric`, and always integers.
        return name, value if value is None or isinstance(value, str | int) else int(value)

    return dict(of(name, value) for name, value in row.items())


def totals(offers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The money of all offers, by currency."""
    currencies = sorted({row["currency"] for row in offers if row["currency"] is not None})
    return [
        {"currency": currency}
        | {name: int(sum(row[name] for row in offers if row["currency"] == currency)) for name in _MONEY}
        for currency in currencies
    ]


def _print_table(found: dict[str, Any]) -> None:
    columns, rows = _cells(found)
    console.print(table(_title(found), columns, rows))
    for line in _lines_of_totals(found):
        console.print(line, highlight=False)


def _print_csv(found: dict[str, Any]) -> None:
    outcomes = sorted({outcome for row in found["offers"] for outcome in row["refused"]})
    names = [name for name in found["offers"][0] if name != "refused"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, *(f"refused_{outcome}" for outcome in outcomes)])
    writer.writerows(
        [*(_csv_cell(row[name]) for name in names), *(row["refused"].get(outcome, 0) for outcome in outcomes)]
        for row in found["offers"]
    )
    click.echo(text.getvalue(), nl=False)


def _csv_cell(value: Any) -> Any:
    """A value of a CSV file. Spreadsheets compute a text that begins like a formula, and texts of offers are
    chosen by their sellers: an apostrophe prevents it.
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value


def _print_parquet(found: dict[str, Any]) -> None:
    """Writes a Parquet file: times as timestamps, refusals as a map from reason to number."""
    from pyarrow import Table, int64, map_, parquet, schema, string, timestamp

    kinds = {"text": string(), "timestamptz": timestamp("ms", "UTC")}
    types = {
        name.replace("sold_out_after", "sold_out_after_ms"): kinds.get(column.type, int64())
        for name, column in VIEWS["results_by_week"].columns.items()
    } | {"refused": map_(string(), int64())}
    rows = [{name: _typed(types[name], value) for name, value in row.items()} for row in found["offers"]]
    wanted = schema([(name, types[name]) for name in rows[0]], {"week": found["week"]})
    parquet.write_table(Table.from_pylist(rows, wanted), sys.stdout.buffer, compression="zstd")


def _typed(kind: Any, value: Any) -> Any:
    """A value of a row as Arrow takes it."""
    if isinstance(value, dict):
        return sorted(value.items())
    return datetime.fromisoformat(value) if value is not None and str(kind).startswith("timestamp") else value


def _print_html(found: dict[str, Any]) -> None:
    columns, rows = _cells(found)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "\n".join(
        "<tr>" + "".join(_html_cell(cell) for cell in row) + "</tr>" for row in rows
    )  # fmt: skip
    notes = "".join(f"<p>{html.escape(line)}</p>\n" for line in _lines_of_totals(found))
    title = html.escape(_title(found))
    click.echo(f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 2em; color-scheme: light dark }}
table {{ border-collapse: collapse; margin: 1em 0 }}
th, td {{ padding: .3em .8em; border-bottom: 1px solid #8888; text-align: left; white-space: nowrap }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums }}
</style>
</head>
<body>
<h1>{title}</h1>
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
{notes}</body>
</html>""")


def _html_cell(cell: object) -> str:
    if isinstance(cell, int):
        return f'<td class="number">{cell:,}</td>'
    if isinstance(cell, _Money):
        return f'<td class="number">{html.escape(cell)}</td>'
    return f"<td>{html.escape(str(cell))}</td>"


def _title(found: dict[str, Any]) -> str:
    currencies = {_currency_of(row) for row in found["offers"]} - {""}
    unknown = sorted(currencies - DECIMALS.keys())
    but = f"; that of {', '.join(unknown)} in minor units" if unknown else ""
    return f"Result of {found['week']} (money in major units{but})"


def _currency_of(row: dict[str, Any]) -> str:
    """The currency of the money of an offer, or nothing."""
    return row["currency"] or (row["asset"] if row["kind"] == "envelope" else "")


class _Money(str):
    """An amount for people: a number, although it is a text."""


def _money(row: dict[str, Any], name: str) -> object:
    """A cell that counts money of an offer."""
    currency = _currency_of(row)
    if row[name] is None:
        return ""
    return _Money(shown_number(row[name], currency)) if currency else row[name]


def _lines_of_totals(found: dict[str, Any]) -> list[str]:
    return [
        f"{total['currency']}: {counted(total['payments'], 'payments')} of "
        f"{shown_amount(total['paid'], total['currency'])}; "
        f"{total['late_payments']:,} came late, of which {total['late_served']:,} were served; "
        f"{shown_amount(total['refunded'], total['currency'])} refunded, "
        f"{shown_amount(total['refund_due'], total['currency'])} due for a refund; "
        f"revenue {shown_amount(total['revenue'], total['currency'])}"
        for total in found["totals"]
    ]


def _cells(found: dict[str, Any]) -> tuple[Sequence[str], list[tuple[object, ...]]]:
    """The columns for people, without those of _RARE that are empty in all rows, and a row for each offer."""
    columns = (
        "offer", "title", "opens", "offered", "held", "sold", "returned", "kept", "given", "paid", "late",
        "refunded", "due", "revenue", "currency", "sold out after", "refused",
    )  # fmt: skip
    rows: list[tuple[object, ...]] = [
        (
            row["offer"],
            row["title"],
            f"{datetime.fromisoformat(row['opens_time']):%a %Y-%m-%d %H:%M} {row['timezone']}",
            *(row[name] for name in ("offered", "held", "sold", "returned", "kept")),
            _money(row, "given_amount"),
            _money(row, "paid"),
            row["late_payments"],
            *(_money(row, name) for name in ("refunded", "refund_due", "revenue")),
            _currency_of(row),
            _duration(row["sold_out_after_ms"]),
            sum(row["refused"].values()),
        )
        for row in found["offers"]
    ]
    shown = [at for at, name in enumerate(columns) if name not in _RARE or any(row[at] != "" for row in rows)]
    return [columns[at] for at in shown], [tuple(row[at] for at in shown) for row in rows]


def _duration(ms: int | None) -> str:
    if ms is None:
        return "not sold out"
    if ms < 60_000:
        return f"{ms / 1000:.3f} s"
    return str(timedelta(seconds=ms // 1000))


_PRINT: Final[dict[str, Callable[[dict[str, Any]], None]]] = {
    "table": _print_table,
    "csv": _print_csv,
    "json": print_json,
    "parquet": _print_parquet,
    "html": _print_html,
}
