"""`set-aside` and `retry`: make a projection that has stopped at a shard continue, without or with the record
that stopped it.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import click
from psycopg import AsyncConnection

from grabstream.connections.opening import checked_database
from grabstream.models.bounds import counted
from grabstream.models.currencies import shown_amount
from grabstream.models.journal import Cursor, named
from grabstream.models.transfers import transfers_of
from grabstream.ops.console.output import WholeNumber, console, json_option, print_json, refuse, say
from grabstream.projections import cursors
from grabstream.projections.cursors import CursorMoved, Stop
from grabstream.projections.database.migrate import PROJECTIONS
from grabstream.projections.tables import set_aside as set_aside_table
from grabstream.projections.versions import use_read_model
from grabstream.settings import Settings, load_settings
from grabstream.streams.journal import open_reader
from grabstream.streams.projecting.publisher import event_source, newest_cursor
from grabstream.streams.projecting.stopped_record import CannotSetAside, StoppedRecord, find_stopped_record
from grabstream.streams.topics import Topics

LINES_SHOWN_MAX: Final = 20
POLL_SECONDS: Final = 0.1
#: The publisher, whose cursor is in the topic that it writes.
EVENTS: Final = "events"

_projection = click.argument("projection", type=click.Choice((*PROJECTIONS, EVENTS)))
_shard = click.argument("shard", type=WholeNumber(min=0))
_wait = click.option(
    "--wait", default=15.0, show_default=True, help="Seconds to wait until a worker continues."
)


@click.group(name="set-aside")
def set_aside() -> None:
    """Let a projection that has stopped continue after the journal record that it cannot apply. `grabstream
    status` shows what has stopped, and at which shard.
    """


@set_aside.command(name="list")
@json_option
def list_(as_json: bool) -> None:
    """List the records that are set aside."""
    _print_list(asyncio.run(_list(load_settings())), as_json)


def _verb(projection: str) -> None:
    @set_aside.command(
        projection,
        short_help=f"Let {projection} continue after a record.",
        help=f"""Let {projection}, which has stopped at SHARD, continue after the journal record that it
        cannot apply.

        The record is shown first, and then kept in the books with its bytes, the reason and the operator.
        After that, the read model lacks the record's events; `status`, `verify` and `doctor` show that. To
        undo it, remove the cause and rebuild the read model: `grabstream rebuild PROJECTION --accept` reads
        the record again. Exit code 1: there is nothing to set aside.
        """,
    )
    @_shard
    @click.option("--reason", help="Why the books may lack the record, in one line; kept in the books.")
    @click.option("--operator", help="The name of the operator who decides it; kept in the books.")
    @click.option(
        "--dry-run", is_flag=True, help="Show the record and what the books will lack, and change nothing."
    )
    @click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
    @_wait
    @json_option
    def command(
        shard: int, reason: str | None, operator: str | None, dry_run: bool, yes: bool, wait: float,
        as_json: bool,
    ) -> None:  # fmt: skip
        _run(projection, shard, reason, operator, dry_run, yes, wait, as_json)


for _name in (*PROJECTIONS, EVENTS):
    _verb(_name)


def _run(
    projection: str, shard: int, reason: str | None, operator: str | None, dry_run: bool, yes: bool,
    wait: float, as_json: bool,
) -> None:  # fmt: skip
    settings = load_settings()
    if not dry_run and not (reason and reason.strip() and operator and operator.strip()):
        raise click.UsageError(
            "--reason and --operator are required: they are kept in the books. Use --dry-run to see the "
            "record first"
        )
    try:
        stop, stopped = asyncio.run(_look(settings, projection, shard))
    except CannotSetAside as error:
        refuse(str(error))
    if as_json:
        shown = _as_json(stop, stopped)
    else:
        _print_stopped_record(stop, stopped)
    if dry_run:
        if as_json:
            print_json({**shown, "done": False})
        return
    if not yes and not (sys.stdin.isatty() and not as_json):
        raise click.UsageError(
            "--yes is required without a terminal to ask for confirmation; --dry-run shows the record first"
        )
    if not yes:
        click.confirm(
            f"Set this record aside for {projection}? Its events will be missing from it", abort=True
        )
    try:
        asyncio.run(_set_aside(settings, stop, stopped, str(reason).strip(), str(operator).strip()))
    except CursorMoved as error:
        refuse(f"{error}; see the present state with --dry-run")
    outcome = asyncio.run(_await_progress(settings, projection, shard, stopped.after, wait))
    if as_json:
        print_json({**shown, "done": True, "reason": reason, "operator": operator, **outcome})
    else:
        console.print(
            f"Set aside. {_resumed_text(projection, shard, outcome)}", highlight=False, markup=False
        )


@click.command()
@_projection
@_shard
@_wait
@json_option
def retry(projection: str, shard: int, wait: float, as_json: bool) -> None:
    """Let PROJECTION, which has stopped at SHARD, try the same record again, once the cause is removed. Exit
    code 1: it has stopped again.

    If a projection stopped because its cursor no longer matches its rows (`doctor` shows that), it reads the
    shard's journal from the beginning, without changing existing rows, checks their hash against the journal,
    and continues after them.
    """
    settings = load_settings()
    try:
        before = asyncio.run(_let_go_on(settings, projection, shard))
    except CannotSetAside as error:
        refuse(str(error))
    outcome = asyncio.run(_await_progress(settings, projection, shard, before, wait))
    if as_json:
        print_json({"projection": projection, "shard": shard, **outcome})
    else:
        console.print(_resumed_text(projection, shard, outcome), highlight=False, markup=False)
    sys.exit(1 if outcome["stopped"] else 0)


# -- reading -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _open_to_write(settings: Settings, projection: str) -> AsyncIterator[AsyncConnection[Any]]:
    """A connection to the schema that has the projection's cursors and stops."""
    async with checked_database(settings) as connection:
        await use_read_model(connection, settings.schema_, projection)
        yield connection


async def _list(settings: Settings) -> list[set_aside_table.SetAsideRecord]:
    async with checked_database(settings) as connection:
        return await set_aside_table.load(connection)


async def _stop_of(connection: AsyncConnection[Any], projection: str, shard: int) -> Stop:
    for stop in await cursors.stops(connection):
        if (stop.projection, stop.shard) == (projection, shard):
            return stop
    raise CannotSetAside(
        f"{projection} has not stopped at shard {shard}; `grabstream status` shows what has stopped"
    )


async def _cursor_of(
    settings: Settings, connection: AsyncConnection[Any], projection: str, shard: int
) -> Cursor:
    if projection != EVENTS:
        return (await cursors.load(connection, projection))[shard]
    topics = Topics(settings.prefix)
    async with (
        open_reader(settings.brokers, topics.events) as reader,
        open_reader(settings.brokers, topics.journal) as journal,
    ):
        newest = await newest_cursor(reader, shard, event_source(settings.prefix), journal)
    return set_aside_table.past(await set_aside_table.load(connection, projection), shard, newest)


async def _look(settings: Settings, projection: str, shard: int) -> tuple[Stop, StoppedRecord]:
    async with checked_database(settings) as connection:
        stop = await _stop_of(connection, projection, shard)
        cursor = await _cursor_of(settings, connection, projection, shard)
    async with open_reader(settings.brokers, Topics(settings.prefix).journal) as reader:
        return stop, await find_stopped_record(reader, shard, cursor)


# -- changing ------------------------------------------------------------------------------------------------


async def _set_aside(
    settings: Settings, stop: Stop, stopped: StoppedRecord, reason: str, operator: str
) -> None:
    record = stopped.record
    missing = [(account, asset, amount) for (account, asset), amount in _missing(stopped).items()]
    async with _open_to_write(settings, stop.projection) as connection:
        await set_aside_table.set_aside(
            connection, stop.projection, stop.shard, stopped.before, stopped.after, record.headers,
            record.value, stopped.offers,
            stopped.readable, missing, stop.reason, reason, operator,
            cursor_in_postgres=stop.projection != EVENTS,
        )  # fmt: skip


async def _let_go_on(settings: Settings, projection: str, shard: int) -> Cursor:
    async with _open_to_write(settings, projection) as connection:
        before = await _cursor_of(settings, connection, projection, shard)
        if projection != EVENTS and await _cursor_is_misplaced(settings, shard, before):
            await cursors.read_from_beginning(connection, projection, shard, before)
        else:
            await _stop_of(connection, projection, shard)
        await cursors.resume(connection, projection, shard)
    return before


async def _cursor_is_misplaced(settings: Settings, shard: int, cursor: Cursor) -> bool:
    """Whether a cursor was moved to a position without anything to read, although the journal has more events
    than the rows.
    """
    async with open_reader(settings.brokers, Topics(settings.prefix).journal) as reader:
        passed = await reader.seq_before(shard, cursor) if cursor.owner else 0
    return passed is None or passed > cursor.seq


async def _await_progress(
    settings: Settings, projection: str, shard: int, before: Cursor, wait_seconds: float
) -> dict[str, Any]:
    """Waits until a worker has continued the projection: returns `seq`, whether it has `moved`, and the
    reason why it has `stopped` again, if it has.
    """
    deadline = time.monotonic() + wait_seconds
    async with (
        checked_database(settings) as connection,
        open_reader(settings.brokers, Topics(settings.prefix).journal) as reader,
    ):
        end = await reader.end(shard)
        while True:
            again = [
                stop
                for stop in await cursors.stops(connection)
                if (stop.projection, stop.shard) == (projection, shard)
            ]
            cursor = await _cursor_of(settings, connection, projection, shard)
            # Only events move a publisher's cursor: it may never reach the journal's end.
            moved = cursor.seq > before.seq or cursor.next_offset >= end
            if again or moved or time.monotonic() > deadline:
                return {"seq": cursor.seq, "moved": moved, "stopped": again[0].reason if again else None}
            await asyncio.sleep(POLL_SECONDS)


# -- showing -------------------------------------------------------------------------------------------------


def _resumed_text(projection: str, shard: int, outcome: dict[str, Any]) -> str:
    if outcome["stopped"]:
        return f"{projection} has stopped again at shard {shard}, seq {outcome['seq']}: {outcome['stopped']}"
    if outcome["moved"]:
        return f"{projection} continues at shard {shard}, seq {outcome['seq']}."
    return (
        f"{projection} may continue at shard {shard}, but no worker has continued it yet: start one with "
        "`grabstream worker`."
    )


def _missing(stopped: StoppedRecord) -> dict[tuple[str, str], int]:
    """The amounts that accounts will lack, by account and asset, for the events that can be read."""
    missing: Counter[tuple[str, str]] = Counter()
    for event in stopped.events if stopped.event_count else ():
        for asset, debit, credit, amount in transfers_of(event) if event is not None else ():
            missing[debit, asset] -= amount
            missing[credit, asset] += amount
    return dict(missing)


def _as_json(stop: Stop, stopped: StoppedRecord) -> dict[str, Any]:
    return {
        "projection": stop.projection, "shard": stop.shard, "stopped_at": stop.stopped_at.isoformat(),
        "refused_because": stop.reason,
        "journal_offset": stopped.record.offset, "first_seq": stopped.before.seq + 1,
        "event_count": stopped.event_count, "readable": stopped.readable,
        "headers": {
            name: value.decode(errors="replace") for name, value in named(stopped.record.headers).items()
        },
        "lines": [line.decode(errors="replace") for line in stopped.lines],
        "offers": stopped.offers,
        "missing": [{"account": account, "asset": asset, "amount": amount} for (account, asset),
        amount in _missing(stopped).items()],
    }  # fmt: skip


def _print_stopped_record(stop: Stop, stopped: StoppedRecord) -> None:
    say(
        f"{stop.projection} stopped at shard {stop.shard} on {stop.stopped_at:%Y-%m-%d %H:%M:%S %Z}: "
        f"{stop.reason}"
    )
    seqs = (
        f"seq {stopped.before.seq + 1} to {stopped.after.seq}"
        if stopped.event_count
        else "no event of the history"
    )
    say(
        f"The record at journal offset {stopped.record.offset}: {seqs}, "
        f"{counted(len(stopped.record.value), 'bytes')}"
    )
    for name, value in named(stopped.record.headers).items():
        say(f"    {name}: {value.decode(errors='replace')}")
    for line in stopped.lines[:LINES_SHOWN_MAX]:
        say(f"    {line.decode(errors='replace')}")
    if len(stopped.lines) > LINES_SHOWN_MAX:
        say(f"    … and {counted(len(stopped.lines) - LINES_SHOWN_MAX, 'more lines')}; --json shows all")
    if stopped.event_count and not stopped.readable:
        say("Some events cannot be read: the books may lack more than is listed here.")
    for (account, asset), amount in _missing(stopped).items():
        # In minor units first, as `adjust` takes amounts.
        money = f" minor units of {asset} ({shown_amount(amount, asset)})"
        say(f"{stop.projection} will lack {amount:+,}{f' {asset}' if ':' in asset else money} on {account}")


def _print_list(rows: list[set_aside_table.SetAsideRecord], as_json: bool) -> None:
    if as_json:
        hidden = ("after", "value")
        print_json(
            [{name: value for name, value in row._asdict().items() if name not in hidden} for row in rows]
        )
    elif not rows:
        console.print("Nothing is set aside.")
    for row in () if as_json else rows:
        say(f"{row.at:%Y-%m-%d %H:%M:%S}  {row.in_words()}")
