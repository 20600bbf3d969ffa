"""`rebuild`: read models made anew beside the live ones, compared row by row, and shown in one transaction;
journal and Redis too.
"""

import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import click
import msgspec

from grabstream.ops.commands.operate.worker import step_of
from grabstream.ops.commands.rebuild.redis_shards import redis_command
from grabstream.ops.connections.opening import check_system, key_space, open_redis
from grabstream.ops.console.output import WholeNumber, console, json_option, print_json, table
from grabstream.ops.console.progress import ProgressLine
from grabstream.ops.console.stopping import run_until_stopped
from grabstream.ops.initialization import require_all_but_the_journal, take_new_journal
from grabstream.ops.settings import Settings, load_settings
from grabstream.projections.checking.difference import TableDifference
from grabstream.projections.definitions import PROJECTIONS, definition_of
from grabstream.projections.versions import NoReadModel, Version
from grabstream.streams.rebuilding.reading import open_rebuild_source
from grabstream.streams.rebuilding.rebuild import (
    Rebuild,
    RebuildProgress,
    RebuildRefused,
    Servers,
    open_rebuild,
)
from grabstream.streams.rebuilding.restore import Restore
from grabstream.streams.topics import Topics, create_topics

_source_option = click.option(
    "--from", "source", type=click.Choice(["journal", "audit"]), default="journal", show_default=True,
    help="Where events are read: Kafka's journal, or the audit trail when that is gone.",
)  # fmt: skip


@click.group()
def rebuild() -> None:
    """Rebuild read models from the events, beside the live ones; readers notice nothing.

    The new version is loaded at bulk speed, follows until it has caught up, is compared with the live one row
    by row at the same cursors, and is then shown in one transaction. A difference that its definition does
    not declare makes the switch refuse. Ctrl-C and the same command again goes on. Nothing is published
    again.
    """


def _options(command: Callable[..., None]) -> Callable[..., None]:
    options = (
        _source_option,
        click.option(
            "--accept", is_flag=True, help="Switch although rows differ that the definition does not declare."
        ),
        click.option(
            "--keep-set-aside",
            is_flag=True,
            help="Go past what operators have set aside for the live version, instead of reading it again.",
        ),
        click.option(
            "--no-switch",
            is_flag=True,
            help="Build and compare only; the same command without it goes on from there.",
        ),
        click.option(
            "--keep/--no-keep",
            default=True,
            show_default=True,
            help="Whether the old version is kept for --undo.",
        ),
        click.option(
            "--undo",
            is_flag=True,
            help="Show the previous version again; what is live now becomes the previous one.",
        ),
        click.option("--drop-previous", is_flag=True, help="Drop the previous version, and do nothing else."),
        click.option("--discard", is_flag=True, help="Drop a version that was begun, and do nothing else."),
        click.option(
            "--patience",
            type=click.FloatRange(min=0),
            default=60.0,
            show_default=True,
            help="Seconds to wait for readers that hold the views.",
        ),
        click.option(
            "--jobs",
            type=WholeNumber(min=1),
            default=os.cpu_count() or 1,
            show_default="one a core",
            help="Processes that load.",
        ),
        click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing."),
        json_option,
    )
    return functools.reduce(lambda made, option: option(made), reversed(options), command)


class Request(msgspec.Struct, kw_only=True):
    """What was asked on the command line."""

    source: str
    accept: bool
    keep_set_aside: bool
    no_switch: bool
    keep: bool
    undo: bool
    drop_previous: bool
    discard: bool
    patience: float
    jobs: int
    dry_run: bool
    as_json: bool


def _verb(name: str, projections: tuple[str, ...]) -> None:
    words = "every read model, one after the other" if len(projections) > 1 else f"the {name}"

    @rebuild.command(
        name, help=f"Rebuild {words}. Exit 1: refused, or rows differ that were not declared to."
    )
    @_options
    def command(**asked: Any) -> None:
        request = Request(**asked)
        if sum((request.undo, request.drop_previous, request.discard, request.no_switch)) > 1:
            raise click.UsageError(
                "--undo, --drop-previous, --discard and --no-switch exclude each other: choose one"
            )
        if (
            request.source == "audit"
            and "audit" in projections
            and not (request.undo or request.drop_previous or request.discard)
        ):
            raise click.UsageError(
                "--from audit: the audit trail cannot be rebuilt from itself; name ledger or balances"
            )
        _run_until_stopped(_run(load_settings(), projections, request), "the same command goes on from there")


for _name in PROJECTIONS:
    _verb(_name, (_name,))
_verb("all", PROJECTIONS)
rebuild.add_command(redis_command)


@rebuild.command("journal")
@click.option(
    "--from",
    "source",
    type=click.Choice(["audit"]),
    required=True,
    help="Where the events are: the audit trail.",
)
@click.option(
    "--replication",
    type=WholeNumber(1),
    help="Copies of topics that have to be created.  [default: as `init`]",
)
@click.option(
    "--new-journal",
    is_flag=True,
    help="The journal that the schema belongs to is lost for good: a new one takes its place.",
)
@click.option(
    "--republish",
    is_flag=True,
    help="The events topic was lost too: fill it again from the beginning, for its readers.",
)
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Give up events that the audit trail has not; who had them is made anew without them.",
)
@click.option(
    "--dry-run", is_flag=True, help="Check and say what would be restored; only missing topics are created."
)
@json_option
def journal_(
    source: str, replication: int | None, new_journal: bool, republish: bool, accept_loss: bool,
    dry_run: bool, as_json: bool
) -> None:  # fmt: skip
    """Restore the journal from the audit trail, when Kafka has lost it.

    The schema belongs to one journal, by the id that Kafka gave its topic. Where that topic is gone, or
    another one of its name is there, --new-journal says that it is lost for good: the topic is created if it
    is missing, and is the journal from then on.

    The topic must have no events (markers of workers that tried do not matter), and the workers have to be
    stopped. The events come back under the same chain, at new offsets; every cursor is anchored again by its
    seq and hash. Exit 1: something knows more than the audit trail has; it is named, and --accept-loss is the
    way out.
    """
    asked = _restore(load_settings(), replication, new_journal, republish, accept_loss, dry_run, as_json)
    _run_until_stopped(asked, "the same command goes on from there")


async def _restore(
    settings: Settings, replication: int | None, new_journal: bool, republish: bool, accept_loss: bool,
    dry_run: bool, as_json: bool
) -> int:  # fmt: skip
    topics = Topics(settings.prefix)
    redis = open_redis(settings)
    try:
        await (require_all_but_the_journal if new_journal else check_system)(settings, redis)
        created = await create_topics(
            settings.kafka, topics, settings.shards, replication or settings.replication
        )
        source = f"grabstream/{settings.prefix}"
        work = Restore(
            where_of(settings), redis, key_space(settings), topics.events, source, republish, accept_loss
        )
        plans = await work.plan()
        written = 0 if dry_run else await work.run(plans, functools.partial(_show, ProgressLine(), "journal"))
        if new_journal and not dry_run:
            await take_new_journal(settings, redis)
    finally:
        await redis.aclose()
    shards = [
        {"shard": plan.shard, "events": plan.end.seq, "had": plan.restored.seq, "given_up": plan.given_up}
        for plan in plans
    ]
    anew = sorted({version.schema for plan in plans for version in plan.anew})
    events = sum(plan.end.seq for plan in plans)
    if as_json:
        print_json(
            {
                "events": events,
                "written": written,
                "topics_created": created,
                "dry_run": dry_run,
                "shards": shards,
                "made_anew": anew,
            }
        )
    else:
        console.print(f"Topics created: {', '.join(created) or 'none, all exist'}.", highlight=False)
        for plan in plans:
            if plan.given_up:
                last = plan.end.seq + plan.given_up
                console.print(
                    f"Given up in shard {plan.shard}: seq {plan.end.seq + 1} to {last}.", highlight=False
                )
        if anew:
            console.print(
                f"Made anew from the journal's beginning: {', '.join(anew)}.", highlight=False, soft_wrap=True
            )
        did = (
            f"would restore {events:,} events"
            if dry_run
            else f"{events:,} events are in the journal, {written:,} written now"
        )
        console.print(
            f"{did}, in {len(shards)} shards. Start the workers." if not dry_run else f"{did}.",
            highlight=False,
        )
    return 0


def _run_until_stopped(work: Coroutine[Any, Any, int], word: str) -> NoReturn:
    """Runs to the end, or until it is told to stop; exits with the code that `work` returns, 1 when it is
    refused.
    """
    few_collections()
    try:
        sys.exit(run_until_stopped(work, word))
    except (RebuildRefused, NoReadModel) as error:
        click.echo(f"grabstream: {error}", err=True)
        sys.exit(1)


def _show(line: ProgressLine, what: str, progress: RebuildProgress) -> None:
    line(what, progress.step, progress.done, progress.total, progress.rate)


def few_collections() -> None:
    """Events live for a moment and by the thousand; looking through all of them for cycles is a tenth of the
    work.
    """
    gc.set_threshold(50_000, 20, 50)


def where_of(settings: Settings) -> Servers:
    """The system of the settings, as a rebuild wants it."""
    return Servers(
        settings.kafka, Topics(settings.prefix).journal, settings.postgres, settings.schema_, settings.shards
    )


# -- doing it ------------------------------------------------------------------------------------------------


async def _run(settings: Settings, projections: tuple[str, ...], request: Request) -> int:
    results: list[dict[str, Any]] = []
    line = ProgressLine()
    await check_system(
        settings, journal=request.source == "journal" and not (request.drop_previous or request.discard)
    )
    if request.undo:
        # All of them or none: a switch back of some would be half of what was asked.
        for projection in projections:
            async with open_rebuild(where_of(settings), projection) as work:
                await work.in_state("previous")
    for projection in projections:
        report = functools.partial(_show, line, projection)
        try:
            async with open_rebuild(
                where_of(settings), projection, report, step_of(settings), request.jobs
            ) as work:
                result = await _one(settings, work, projection, request)
        except RebuildRefused as error:
            if not (results and request.as_json):
                raise
            # What was done before stands, and has to be told.
            result = {"projection": projection, "done": str(error), "refused": True}
        results.append(result)
        if not request.as_json:
            _print(result)
        if result["refused"]:
            break
    if request.as_json:
        print_json(results if len(projections) > 1 else results[0])
    return 1 if results[-1]["refused"] else 0


async def _one(settings: Settings, work: Rebuild, projection: str, request: Request) -> dict[str, Any]:
    live = await work.live()
    result: dict[str, Any] = {
        "projection": projection, "before": live._asdict(), "new": None, "done": "nothing", "refused": False,
        "difference": [],
    }  # fmt: skip
    lost = await work.is_lost(live) and not (request.drop_previous or request.discard)
    if lost and (request.undo or request.no_switch):
        raise RebuildRefused(
            f"the tables in schema {live.schema} are gone: `grabstream rebuild {projection}` makes them "
            "anew, and shows them"
        )
    if lost and request.dry_run:
        return result | {
            "done": f"would build a new version from the {request.source} and show it: the tables in schema "
            f"{live.schema} are gone"
        }
    if request.dry_run:
        return result | {"done": await _plan(work, projection, live, request)}
    if request.drop_previous or request.discard:
        dropped = await work.drop("previous" if request.drop_previous else "building")
        return result | {
            "done": f"dropped {dropped.schema}" if dropped else "nothing: there was no such version"
        }
    where = where_of(settings)
    began = time.monotonic()
    past = projection if request.keep_set_aside else None
    async with open_rebuild_source(request.source, where, past) as source:
        if request.undo:
            was, now = await work.undo(source, request.accept, request.patience)
            return result | {
                "new": now._asdict(),
                "done": f"{now.schema} is live again, {was.schema} is the previous version",
            }
        if lost:
            new = await work.restore(source, request.patience)
            done = (
                f"{new.schema} is live, made anew from the {request.source}: the tables in schema "
                f"{live.schema} were gone"
            )
            return result | {
                "new": new._asdict(),
                "build_seconds": round(time.monotonic() - began, 2),
                "done": done,
            }
        new = await work.build(source)
        result |= {"new": new._asdict(), "build_seconds": round(time.monotonic() - began, 2)}
        if new.phase != "agreed":
            tables = await work.difference(source, new)
            undeclared = [one.table for one in tables if one.undeclared]
            result["difference"] = [msgspec.to_builtins(one) for one in tables]
            if undeclared and not request.accept:
                lacking = [] if request.keep_set_aside else [one.in_words() for one in await work.set_aside()]
                done = f"refused: rows of {', '.join(undeclared)} differ, see above"
                return result | {"refused": True, "done": done, "set_aside": lacking}
            if request.no_switch:
                return result | {"done": f"{new.schema} is complete and compared, and not shown"}
            new = await work.agree(new)
        elif request.no_switch:
            return result | {"done": f"{new.schema} is complete and was compared before, and not shown"}
        old = await work.switch(source, new, request.keep, request.patience)
    kept = f"{old.schema} is kept: --undo shows it again" if request.keep else f"{old.schema} was dropped"
    return result | {"new": new._replace(state="live")._asdict(), "done": f"{new.schema} is live; {kept}"}


async def _plan(work: Rebuild, projection: str, live: Version, request: Request) -> str:
    if request.undo:
        previous = await work.in_state("previous")
        return (
            f"would show {previous.schema} (definition {previous.definition}) again; {live.schema} would "
            "be the previous version"
        )
    if request.drop_previous or request.discard:
        try:
            return (
                "would drop "
                f"{(await work.in_state('previous' if request.drop_previous else 'building')).schema}"
            )
        except RebuildRefused as error:
            return f"nothing: {error}"
    begun = await work.begun(request.source, request.keep_set_aside)
    number = definition_of(projection).number
    declared = ", ".join(sorted(definition_of(projection).declared_since(live.definition))) or "no columns"
    how = f"go on with {begun.schema} ({begun.phase})" if begun else "build a new version"
    return (
        f"would {how} of definition {number} from the {request.source}, the {await work.events():,} events "
        f"that {live.schema} has and what "
        f"came since, beside it (definition {live.definition}); {declared} may differ; then "
        + ("compare only" if request.no_switch else "switch")
    )


def _print(result: dict[str, Any]) -> None:
    tables = msgspec.convert(result["difference"], list[TableDifference])
    if any(one.undeclared or one.declared for one in tables):
        _print_difference(result["projection"], tables)
    elif tables:
        counts = ", ".join(f"{one.rows_new:,} of {one.table}" for one in tables)
        console.print(
            f"{result['projection']}: old and new are the same in every row: {counts}.",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    seconds = f" It was built in {result['build_seconds']:,.1f} s." if "build_seconds" in result else ""
    console.print(
        f"{result['projection']}: {result['done']}.{seconds}", highlight=False, markup=False, soft_wrap=True
    )
    if result["refused"]:
        console.print("  --accept switches all the same; --discard drops the new version.", highlight=False)
        for words in result.get("set_aside", ()):
            console.print(
                "  What the new version has and the live one lacks may be what was set aside, and --accept "
                f"is right then: {words}",
                highlight=False, markup=False, soft_wrap=True,
            )  # fmt: skip


def _print_difference(projection: str, tables: list[TableDifference]) -> None:
    rows = []
    for one in tables:
        declared = ", ".join(f"{name} {count:,}" for name, count in one.declared.items())
        changed = ", ".join(f"{name} {count:,}" for name, count in one.changed.items())
        changed += "".join(f" {name}: {where}" for name, where in one.columns.items())
        rows.append(
            (
                one.table,
                one.rows_old,
                one.rows_new,
                one.missing,
                one.extra,
                one.rows_changed,
                changed,
                declared,
            )
        )
    columns = (
        "table",
        "rows old",
        "rows new",
        "missing",
        "extra",
        "changed",
        "columns changed",
        "as declared",
    )
    console.print(table(f"{projection}: old against new", columns, rows))
    for one in tables:
        for example in one.examples:
            key = ", ".join(f"{name} {value}" for name, value in example["key"].items())
            if "only" in example:
                what = f"only in the {example['only']} version"
            else:
                what = ", ".join(
                    f"{name}: {before!r} → {after!r}" for name, (before, after) in example["changed"].items()
                )
            console.print(f"  {one.table}, {key}: {what}", highlight=False, markup=False, soft_wrap=True)
