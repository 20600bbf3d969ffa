"""`rebuild`: rebuilds read models beside the live versions, compares them row by row, and switches in one
transaction. Also rebuilds the journal and Redis.
"""

import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec

from grabstream.ops.commands.operate.worker import step_of
from grabstream.ops.commands.rebuild.redis_shards import redis_command
from grabstream.ops.connections.opening import check_system, key_space, open_redis
from grabstream.ops.console.output import WholeNumber, console, json_option, print_json, table
from grabstream.ops.console.progress import ProgressLine
from grabstream.ops.console.stopping import run_until_stopped
from grabstream.ops.formats.replay_request import archive_option, require_archive
from grabstream.ops.initialization import (
    copy_in_words,
    keys_that_a_copy_shares,
    require_all_but_the_journal,
    take_new_journal,
)
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
    "--from", "source", type=click.Choice(["journal", "audit", "archive"]), default="journal",
    show_default=True,
    help="What to read the events from: the journal in Kafka, the audit trail if the journal is lost, or an "
    "archive and the journal after it.",
)  # fmt: skip


@click.group()
def rebuild() -> None:
    """Rebuild read models from the events, beside the live versions. Readers are not disturbed.

    The new version is loaded in bulk, follows the journal until it has caught up, is compared with the live
    version row by row at the same cursors, and then replaces it in one transaction. The switch is refused if
    rows differ in a way that the definition does not declare. After Ctrl-C, the same command continues.
    Nothing is published again.
    """


def _options(command: Callable[..., None]) -> Callable[..., None]:
    options = (
        _source_option,
        archive_option,
        click.option(
            "--accept", is_flag=True, help="Switch even if rows differ in a way that is not declared."
        ),
        click.option(
            "--keep-set-aside",
            is_flag=True,
            help="Skip the records that operators have set aside, instead of reading them again.",
        ),
        click.option(
            "--no-switch",
            is_flag=True,
            help="Only build and compare; the same command without this option then switches.",
        ),
        click.option(
            "--keep/--no-keep",
            default=True,
            show_default=True,
            help="Keep the old version, for --undo.",
        ),
        click.option(
            "--undo",
            is_flag=True,
            help="Switch back to the previous version; the live version becomes the previous one.",
        ),
        click.option("--drop-previous", is_flag=True, help="Drop the previous version, and do nothing else."),
        click.option("--discard", is_flag=True, help="Drop an unfinished version, and do nothing else."),
        click.option(
            "--patience",
            type=click.FloatRange(min=0),
            default=60.0,
            show_default=True,
            help="Seconds to wait for readers that use the views.",
        ),
        click.option(
            "--jobs",
            type=WholeNumber(min=1),
            default=os.cpu_count() or 1,
            show_default="one for each core",
            help="How many processes load events.",
        ),
        click.option("--dry-run", is_flag=True, help="Show what would be done, and do nothing."),
        json_option,
    )
    return functools.reduce(lambda made, option: option(made), reversed(options), command)


class Request(msgspec.Struct, kw_only=True):
    """The options of the command line."""

    source: str
    archive: Path | str | None
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
        name, help=f"Rebuild {words}. Exit code 1: refused, or rows differ in a way that is not declared."
    )
    @_options
    def command(**asked: Any) -> None:
        request = Request(**asked)
        require_archive("--from", request.source, request.archive)
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
                "--from audit: the audit trail cannot be rebuilt from itself; rebuild ledger or balances"
            )
        _run_until_stopped(_run(load_settings(), projections, request), "repeat the command to continue")


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
    help="What to read the events from: the audit trail.",
)
@click.option(
    "--replication",
    type=WholeNumber(1),
    help="Copies of each topic that is created.  [default: as for `init`]",
)
@click.option(
    "--new-journal",
    is_flag=True,
    help="Declare that the schema's journal is lost for good, and replace it with a new one.",
)
@click.option(
    "--republish",
    is_flag=True,
    help="Also fill the events topic again from the beginning, if it was lost too.",
)
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Give up events that the audit trail lacks; read models and shards that have them are rebuilt.",
)
@click.option(
    "--dry-run", is_flag=True, help="Check and show what would be restored; create missing topics only."
)
@json_option
def journal_(
    source: str, replication: int | None, new_journal: bool, republish: bool, accept_loss: bool,
    dry_run: bool, as_json: bool
) -> None:  # fmt: skip
    """Restore the journal from the audit trail, if Kafka has lost it.

    The schema belongs to one journal, identified by the id that Kafka gave its topic. If that topic is gone,
    or replaced by another topic of the same name, --new-journal declares that it is lost for good: the topic
    is created if it is missing, and is the journal from then on.

    Stop all workers first. The topic must not have events (markers of workers that have started do not
    matter). The events are written with the same chain, at new offsets; every cursor is moved to its event's
    new offset. Exit code 1: a read model, Redis or a topic has events that the audit trail lacks; they are
    named, and --accept-loss gives them up.
    """
    asked = _restore(load_settings(), replication, new_journal, republish, accept_loss, dry_run, as_json)
    _run_until_stopped(asked, "repeat the command to continue")


async def _restore(
    settings: Settings, replication: int | None, new_journal: bool, republish: bool, accept_loss: bool,
    dry_run: bool, as_json: bool
) -> int:  # fmt: skip
    topics = Topics(settings.prefix)
    redis = open_redis(settings)
    try:
        await (require_all_but_the_journal if new_journal else check_system)(settings, redis)
        created = await create_topics(
            settings.brokers, topics, settings.shards, replication or settings.replication,
            settings.refusals_topic,
        )  # fmt: skip
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
    rebuilt = sorted({version.schema for plan in plans for version in plan.restarted})
    events = sum(plan.end.seq for plan in plans)
    shared = keys_that_a_copy_shares(settings) if new_journal else []
    if as_json:
        print_json(
            {
                "events": events,
                "written": written,
                "topics_created": created,
                "dry_run": dry_run,
                "shards": shards,
                "made_anew": rebuilt,
                "keys_that_a_copy_shares": shared,
            }
        )
    else:
        console.print(f"Topics created: {', '.join(created) or 'none, all exist'}.", highlight=False)
        if shared:
            console.print(copy_in_words(shared), highlight=False)
        for plan in plans:
            if plan.given_up:
                last = plan.end.seq + plan.given_up
                console.print(
                    f"Given up in shard {plan.shard}: seq {plan.end.seq + 1} to {last}.", highlight=False
                )
        if rebuilt:
            console.print(
                f"Rebuilt from the journal's beginning: {', '.join(rebuilt)}.",
                highlight=False,
                soft_wrap=True,
            )
        if dry_run:
            summary = f"Would restore {events:,} events."
        else:
            summary = (
                f"{events:,} events are in the journal, {written:,} written now, in {len(shards)} shards. "
                "Start the workers."
            )
        console.print(summary, highlight=False)
    return 0


def _run_until_stopped(work: Coroutine[Any, Any, int], word: str) -> NoReturn:
    """Runs `work` until it ends or is stopped by a signal; exits with the code that it returns, or with 1
    when it is refused.
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
    """Makes garbage collection rarer: it would search thousands of short-lived events for cycles, which is a
    tenth of the work.
    """
    gc.set_threshold(50_000, 20, 50)


def where_of(settings: Settings) -> Servers:
    """The servers of the settings, in the form that a rebuild uses."""
    return Servers(
        settings.brokers,
        Topics(settings.prefix).journal,
        settings.postgres,
        settings.schema_,
        settings.shards,
        settings.prefix,
    )


# -- doing it ------------------------------------------------------------------------------------------------


async def _run(settings: Settings, projections: tuple[str, ...], request: Request) -> int:
    results: list[dict[str, Any]] = []
    line = ProgressLine()
    await check_system(
        settings, journal=request.source != "audit" and not (request.drop_previous or request.discard)
    )
    if request.undo:
        # All or none: checks that each can be switched back before the first is.
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
            # Read models rebuilt before stay rebuilt, and the JSON output must contain them.
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
            f"the tables in schema {live.schema} are gone: run `grabstream rebuild {projection}` to rebuild "
            "them"
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
    archive = None if request.archive is None else settings.store(request.archive)
    async with open_rebuild_source(request.source, where, past, archive) as source:
        if request.undo:
            was, now = await work.undo(source, request.accept, request.patience)
            return result | {
                "new": now._asdict(),
                "done": f"{now.schema} is live again, {was.schema} is the previous version",
            }
        if lost:
            new = await work.restore(source, request.patience)
            done = (
                f"{new.schema} is live, rebuilt from the {request.source}: the tables in schema "
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
            undeclared = [difference.table for difference in tables if difference.undeclared]
            result["difference"] = [msgspec.to_builtins(difference) for difference in tables]
            if undeclared and not request.accept:
                set_aside = [] if request.keep_set_aside else await work.set_aside()
                lacking = [record.in_words() for record in set_aside]
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
    kept_as = "audit" if request.source == "audit" else "journal"
    begun = await work.begun(kept_as, request.keep_set_aside)
    number = definition_of(projection).number
    declared = ", ".join(sorted(definition_of(projection).declared_since(live.definition))) or "no columns"
    how = f"continue {begun.schema} ({begun.phase})" if begun else "build a new version"
    return (
        f"would {how} of definition {number} from the {request.source}, with the {await work.events():,} "
        f"events of {live.schema} (definition {live.definition}) and newer ones; {declared} may differ; then "
        + ("only compare" if request.no_switch else "compare and switch")
    )


def _print(result: dict[str, Any]) -> None:
    tables = msgspec.convert(result["difference"], list[TableDifference])
    if any(difference.undeclared or difference.declared for difference in tables):
        _print_difference(result["projection"], tables)
    elif tables:
        counts = ", ".join(f"{difference.rows_new:,} of {difference.table}" for difference in tables)
        console.print(
            f"{result['projection']}: old and new version are equal in every row: {counts}.",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    seconds = f" It was built in {result['build_seconds']:,.1f} s." if "build_seconds" in result else ""
    console.print(
        f"{result['projection']}: {result['done']}.{seconds}", highlight=False, markup=False, soft_wrap=True
    )
    if result["refused"]:
        console.print("  --accept switches anyway; --discard drops the new version.", highlight=False)
        for words in result.get("set_aside", ()):
            console.print(
                "  Rows that only the new version has may be from a record that was set aside; then use "
                f"--accept: {words}",
                highlight=False, markup=False, soft_wrap=True,
            )  # fmt: skip


def _print_difference(projection: str, tables: list[TableDifference]) -> None:
    rows = []
    for difference in tables:
        declared = ", ".join(f"{name} {count:,}" for name, count in difference.declared.items())
        changed = ", ".join(f"{name} {count:,}" for name, count in difference.changed.items())
        changed += "".join(f" {name}: {where}" for name, where in difference.columns.items())
        rows.append(
            (
                difference.table,
                difference.rows_old,
                difference.rows_new,
                difference.missing,
                difference.extra,
                difference.rows_changed,
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
    console.print(table(f"{projection}: old and new version compared", columns, rows))
    for difference in tables:
        for example in difference.examples:
            key = ", ".join(f"{name} {value}" for name, value in example["key"].items())
            if "only" in example:
                what = f"only in the {example['only']} version"
            else:
                what = ", ".join(
                    f"{name}: {before!r} → {after!r}" for name, (before, after) in example["changed"].items()
                )
            console.print(
                f"  {difference.table}, {key}: {what}", highlight=False, markup=False, soft_wrap=True
            )
