"""`whatif`: past commands decided again under changed terms, with the difference as a report."""

import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import IO, Any, Final

import click
import msgspec
import psycopg
from psycopg import OperationalError

from grabstream.connections.event_sources import NoTrail, open_history
from grabstream.connections.identity import OtherSystem
from grabstream.connections.opening import check_system, checked_database
from grabstream.models.bounds import counted
from grabstream.models.events import AnyEvent, OfferClosed, OfferOpened
from grabstream.models.identifiers import campaign_of, shard_of
from grabstream.models.journal import Corrupt, Gap
from grabstream.models.runs import singles
from grabstream.models.whatif.numbers import Numbers
from grabstream.models.whatif.twins import CannotChange, Differs, Twins, type_of
from grabstream.ops.commands.offers.through_a_gate import read_text, refuse_file
from grabstream.ops.console.output import WholeNumber, json_option, plain_console, print_json, refuse, table
from grabstream.ops.console.progress import ReadingBar
from grabstream.ops.console.stopping import run_until_stopped
from grabstream.ops.formats.moments import show_time
from grabstream.ops.formats.offer_files import BadOfferFile, form_of
from grabstream.ops.formats.replay_request import archive_option, require_archive, source_option
from grabstream.ops.formats.whatif_files import WhatIf, read_whatif
from grabstream.runtime.collecting import collect_rarely
from grabstream.settings import Settings, load_settings
from grabstream.streams.history.chunks import Point, up_to
from grabstream.streams.history.sources import Source
from grabstream.streams.replaying.replay import Stretch, plan

#: The most grabs of both states that are kept in memory, at about 2 KiB each.
GRABS_KEPT_MAX: Final = 2_000_000
#: Offers whose numbers are printed. JSON has all.
OFFERS_SHOWN_MAX: Final = 10
#: Numbers that are printed although they do not differ.
_ALWAYS: Final = ("units", "grabs", "given", "left")
_COLUMNS: Final = ("", "recorded", "changed", "difference")
_TIMES: Final = ("sold_out_at", "closed_at")


class NoResult(Exception):
    """There is no result; the text gives the reason and the fix."""


class _FirstReading:
    """What the first reading finds: the offers with their kinds, the seeds of closed envelopes, and the
    position of the newest event up to the end of the stretch.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self.seeds: dict[str, str] = {}
        self.events = 0

    def add(self, event: AnyEvent) -> None:
        if isinstance(event, OfferOpened):
            self.kinds[event.offer] = event.kind
        elif isinstance(event, OfferClosed) and event.seed is not None:
            self.seeds[event.offer] = event.seed

    @property
    def lacks_seeds(self) -> bool:
        """Whether the seed of an opened envelope has not been found yet."""
        return any(kind == "envelope" and offer not in self.seeds for offer, kind in self.kinds.items())


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["yaml", "json"]),
    help="The form of FILE. Default: by its suffix; YAML without a suffix.",
)
@source_option("The source of the history.", "audit", "archive")
@archive_option
@click.option(
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="PATH",
    help="Also write every command that is decided otherwise to this file, one JSON object in each line.",
)
@click.option(
    "--limit", type=WholeNumber(min=0, max=10_000), default=10, show_default=True,
    help="Examples of commands and users to show.",
)  # fmt: skip
@json_option
def whatif(
    file: Path,
    form: Any,
    source: str,
    archive: Path | str | None,
    output: Path | None,
    limit: int,
    as_json: bool,
) -> None:
    """Decide the past commands of an offer or a campaign again under the changed terms of FILE (YAML or JSON;
    `-` is standard input), and show the difference. Changes nothing in the system.

    The history is also decided under its own terms: if that does not give the recorded events, there is no
    result. Refused commands are not in the journal, so users that other terms would have served are missing:
    docs/whatif.md.

    Exit code 0: there is a result; 1: there is none, because an offer does not exist, cannot have these
    terms, or its history cannot be decided again; 2: FILE is wrong; 3: a server cannot be reached.
    """
    require_archive("--source", source, archive)
    try:
        asked = read_whatif(read_text(file), form_of(file, form))
    except BadOfferFile as error:
        refuse_file(error)
    collect_rarely()
    try:
        report = run_until_stopped(_run(load_settings(), asked, source, archive, output, limit))
    except (NoResult, Differs, CannotChange, NoTrail, Corrupt, Gap) as error:
        refuse(error)
    if as_json:
        print_json(report)
    else:
        _print(report)


async def _run(
    settings: Settings,
    asked: WhatIf,
    source: str,
    archive: Path | str | None,
    output: Path | None,
    limit: int,
) -> dict[str, Any]:
    if asked.until is not None and asked.until > time.time_ns() // 1_000_000:
        # Holds would end in the changed history alone.
        raise NoResult(
            f"until: {show_time(asked.until)} is in the future: give a time in the past, or leave it out"
        )
    await check_system(settings, journal=source != "audit")
    shard = shard_of(asked.campaign, settings.shards)
    last = None if asked.until is None else Point(at=asked.until)
    async with open_history(settings, source, archive=archive) as history:
        found = await _first_reading(history, shard, asked, last)
        missing = [f"offer {offer}" for offer in sorted(asked.change.offers - found.kinds.keys())]
        if not found.kinds:
            missing = missing or [f"campaign {asked.campaign}"]
        if missing:
            when = "by then" if last else "yet"
            raise NoResult(f"{missing[0]} was not opened {when}: `grabstream offers` lists the offers")
        twins = Twins(shard, asked.change, found.seeds)
        tally = _DifferenceCount(limit)
        with _lines_in(output) as lines:
            await _second_reading(history, shard, asked, last, twins, tally, lines)
    report = _report(asked, shard, twins, tally, limit)
    return report | {"refused": await _refusals(settings, asked, list(twins.recorded))}


@contextmanager
def _lines_in(output: Path | None) -> Iterator[IO[str] | None]:
    """The file for the differences, if any, which gets its name when all of them are in it."""
    if output is None:
        yield None
        return
    # A unique name: another run may have the same output.
    part = output.with_name(f".{output.name}.{secrets.token_hex(4)}")
    try:
        with part.open("x") as lines:
            yield lines
        part.replace(output)
    except OSError as error:
        raise NoResult(f"--output: {output} cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


class _DifferenceCount:
    """The differences in numbers, and the first of them."""

    def __init__(self, examples: int) -> None:
        self._examples = examples
        self.outcomes: Counter[tuple[str, str, str]] = Counter()
        self.differ = self.events = self.seq = self.at = 0
        self.examples: list[dict[str, Any]] = []

    def take(self, twins: Twins, lines: IO[str] | None) -> None:
        """Counts the new differences, writes them, and forgets them."""
        for difference in twins.differences:
            self.differ += 1
            outcomes = difference.recorded["outcome"], difference.changed["outcome"]
            self.outcomes[type_of(difference.command), *outcomes] += 1
            if len(self.examples) < self._examples:
                self.examples.append(difference.document())
            if lines is not None:
                lines.write(json.dumps(difference.document(), ensure_ascii=False) + "\n")
        twins.differences.clear()


async def _events(
    history: Source, shard: int, campaign: str, last: Point | None, report: ReadingBar
) -> AsyncGenerator[tuple[list[AnyEvent], int, int], None]:
    """The events of a campaign in lists, with the last seq and time read of the shard."""
    [planned] = await plan(history, [Stretch(shard, None, last)], True)
    report.expect(planned.units)
    async with aclosing(up_to(history.chunks(shard, planned.start), last)) as chunks:
        async for chunk in chunks:
            found = [
                event
                for fact in chunk.facts
                if campaign_of(fact.event.offer) == campaign
                for event in singles(fact.event)
            ]
            yield found, chunk.after.seq, chunk.facts[-1].event.at if chunk.facts else 0
            report(chunk.read, len(found))


async def _first_reading(history: Source, shard: int, asked: WhatIf, last: Point | None) -> _FirstReading:
    """Finds the offers of the stretch, and the seeds of its envelopes, which their close may reveal after
    it.
    """
    found = _FirstReading()
    with ReadingBar("what if: offers") as report:
        async with aclosing(_events(history, shard, asked.campaign, None, report)) as lists:
            async for events, _, at in lists:
                is_over = last is not None and at > last.value
                for event in events:
                    if last is None or event.at <= last.value or isinstance(event, OfferClosed):
                        found.add(event)
                if is_over and not found.lacks_seeds:
                    break
    return found


async def _second_reading(
    history: Source, shard: int, asked: WhatIf, last: Point | None, twins: Twins, tally: _DifferenceCount,
    lines: IO[str] | None,
) -> None:  # fmt: skip
    with ReadingBar("what if") as report:
        async with aclosing(_events(history, shard, asked.campaign, last, report)) as lists:
            async for events, seq, at in lists:
                for event in events:
                    twins.feed(event)
                tally.take(twins, lines)
                tally.events, tally.seq, tally.at = tally.events + len(events), seq, max(tally.at, at)
                if twins.kept > GRABS_KEPT_MAX:
                    raise NoResult(
                        f"more than {GRABS_KEPT_MAX:,} grabs of offers that are not retired: their state "
                        "does not fit in memory; give an earlier `until`"
                    )
    twins.end(max(tally.at, last.value) if last is not None else tally.at)
    tally.take(twins, lines)


def _report(asked: WhatIf, shard: int, twins: Twins, tally: _DifferenceCount, limit: int) -> dict[str, Any]:
    offers = sorted(twins.recorded)
    empty = Numbers()
    results = [
        {
            "offer": offer,
            "recorded": twins.recorded[offer].document(),
            "changed": twins.changed.get(offer, empty).document(),
        }
        for offer in offers
    ]
    return {
        "campaign": asked.campaign,
        "offers": sorted(asked.change.offers) or offers,
        "terms": msgspec.to_builtins(dict(asked.change.terms)),
        "from": asked.change.since,
        "until": asked.until,
        "shard": shard,
        "seq": tally.seq,
        "events": tally.events,
        "commands": twins.commands,
        "differ": tally.differ,
        "not_sent": twins.not_sent,
        "identical": not tally.differ and twins.recorded == twins.changed,
        "outcomes": [
            {"type": type_, "recorded": recorded, "changed": changed, "commands": number}
            for (type_, recorded, changed), number in tally.outcomes.most_common()
        ],
        "results": results,
        "users": twins.users.document(limit),
        "examples": tally.examples,
    }


async def _refusals(settings: Settings, asked: WhatIf, offers: list[str]) -> dict[str, int] | None:
    """Refused commands by outcome, which are counted in PostgreSQL only; None if it cannot be asked."""
    try:
        async with checked_database(settings) as connection:
            rows = await connection.execute(
                "SELECT outcome, sum(refusals)::bigint FROM demand WHERE offer = ANY(%s) "
                "AND (%s::bigint IS NULL OR second <= %s / 1000) GROUP BY outcome ORDER BY 2 DESC, 1",
                (offers, asked.until, asked.until),
            )
            return dict(await rows.fetchall())
    except (
        OperationalError,
        OtherSystem,
        psycopg.errors.UndefinedTable,
        psycopg.errors.InsufficientPrivilege,
    ):
        return None


# -- for people ----------------------------------------------------------------------------------------------


def _print(report: dict[str, Any]) -> None:
    until = f" until {show_time(report['until'])}" if report["until"] is not None else ""
    plain_console.print(
        f"{counted(report['commands'], 'commands')} of campaign {report['campaign']}{until} decided again, "
        f"from {counted(report['events'], 'events')} (up to shard:seq {report['shard']}:{report['seq']}). "
        "Under their own terms, all as recorded."
    )
    if report["identical"]:
        plain_console.print("Under the changed terms: no difference.")
    else:
        _print_difference(report)
    _print_limits(report)


def _print_difference(report: dict[str, Any]) -> None:
    different = [one for one in report["results"] if one["recorded"] != one["changed"]]
    for one in different[:OFFERS_SHOWN_MAX]:
        plain_console.print(table(f"Offer {one['offer']}", _COLUMNS, _rows(one)))
    if len(different) > OFFERS_SHOWN_MAX:
        plain_console.print(
            f"… and {counted(len(different) - OFFERS_SHOWN_MAX, 'offers')} more; --json has all of them"
        )
    if report["outcomes"]:
        rows = [tuple(one.values()) for one in report["outcomes"]]
        title = f"Decided otherwise: {counted(report['differ'], 'commands')}"
        plain_console.print(table(title, ("command", "recorded", "changed", "commands"), rows))
    users = report["users"]
    plain_console.print(f"{counted(users['more'], 'users')} would have more, {users['less']:,} less.")
    if users["largest"]:
        rows = [(one["offer"], one["user"], one["difference"]) for one in users["largest"]]
        plain_console.print(table("Largest differences", ("offer", "user", "difference"), rows))


def _rows(one: dict[str, Any]) -> list[tuple[object, ...]]:
    """The numbers of an offer that differ, and those that are always of interest."""
    rows: list[tuple[object, ...]] = []
    for name, recorded in one["recorded"].items():
        changed = one["changed"][name]
        if name == "kind" or (recorded == changed and name not in _ALWAYS):
            continue
        shown: Callable[[int], object] = show_time if name in _TIMES else _number
        difference = ""
        if recorded is not None and changed is not None:
            difference = f"{changed - recorded:+,}{' ms' if name in _TIMES else ''}"
        rows.append(
            (
                name.removesuffix("_at").replace("_", " "),
                *("–" if value is None else shown(value) for value in (recorded, changed)),
                difference,
            )
        )
    return rows


def _number(value: int) -> str:
    return f"{value:,}"


def _print_limits(report: dict[str, Any]) -> None:
    """Says what the result cannot contain."""
    refused = report["refused"]
    if refused is None:
        counts = "their number is unknown, because PostgreSQL cannot be read"
    elif refused:
        counts = ", ".join(f"{outcome} {number:,}" for outcome, number in refused.items())
    else:
        counts = "none is counted"
    plain_console.print(f"Not decided again, since refused commands are not in the journal: {counts}.")
