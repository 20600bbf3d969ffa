"""`rebuild`: rebuilds read models next to the live versions, compares them row by row, and switches in one
transaction. Also rebuilds the journal and Redis.
"""

import functools
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import click

from grabstream.connections.opening import check_system, key_space, open_redis, where_of
from grabstream.models.bounds import counted
from grabstream.ops.commands.operate.worker import step_of
from grabstream.ops.commands.rebuild.redis_shards import redis_command
from grabstream.ops.commands.rebuild.results import RebuildResult, print_result
from grabstream.ops.commands.rebuild.steps import STATES, EventSource, ModelRebuild, SwitchOptions
from grabstream.ops.console.output import WholeNumber, console, json_option, print_json, refuse
from grabstream.ops.console.progress import ProgressLine
from grabstream.ops.console.stopping import run_until_stopped
from grabstream.ops.formats.replay_request import archive_option, require_archive
from grabstream.ops.initialization import (
    copy_in_words,
    keys_that_a_copy_shares,
    require_all_but_the_journal,
    take_new_journal,
)
from grabstream.projections.definitions import PROJECTIONS
from grabstream.projections.versions import NoReadModel
from grabstream.runtime.collecting import collect_rarely
from grabstream.settings import Settings, load_settings
from grabstream.streams.rebuilding.rebuild import RebuildProgress, RebuildStopped, open_rebuild
from grabstream.streams.rebuilding.restore import Restore
from grabstream.streams.topics import Topics, create_topics

ALL: Final = "all"

_dry_run = click.option("--dry-run", is_flag=True, help="Show what would be done, and do nothing.")
_patience = click.option(
    "--patience", "patience_seconds", type=click.FloatRange(min=0), default=60.0, show_default=True,
    help="Seconds to wait for readers that use the views.",
)  # fmt: skip
_jobs = click.option(
    "--jobs", type=WholeNumber(min=1), default=os.cpu_count() or 1, show_default="one for each core",
    help="How many processes load events, if there are many.",
)  # fmt: skip
_model = click.argument("model", type=click.Choice((*PROJECTIONS, ALL)))


def _source_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that say what is read; the command takes them as `source`, an EventSource."""

    @click.option(
        "--from", "source", type=click.Choice(["journal", "audit", "archive"]), default="journal",
        show_default=True,
        help="The source of the events: the journal in Kafka, the audit trail if the journal is lost, or "
        "an archive and the journal after it.",
    )  # fmt: skip
    @archive_option
    @click.option(
        "--skip-set-aside",
        is_flag=True,
        help="Skip the records that operators have set aside, instead of reading them again.",
    )
    @functools.wraps(command)
    def with_source(source: str, archive: Path | str | None, skip_set_aside: bool, **rest: Any) -> None:
        require_archive("--from", source, archive)
        command(source=EventSource(source, archive, skip_set_aside), **rest)

    return with_source


def _switch_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of a switch; the command takes them as `how`, a SwitchOptions."""

    @click.option("--accept", is_flag=True, help="Switch even if rows differ in a way that is not declared.")
    @click.option(
        "--keep/--no-keep", default=True, show_default=True, help="Keep the old version, for `rebuild undo`."
    )
    @_patience
    @functools.wraps(command)
    def with_options(accept: bool, keep: bool, patience_seconds: float, **rest: Any) -> None:
        command(how=SwitchOptions(accept, keep, patience_seconds), **rest)

    return with_options


@click.group()
def rebuild() -> None:
    """Rebuild read models from the events, next to the live versions. Readers are not disturbed.

    `rebuild MODEL` does all steps: the new version is loaded in bulk, follows the journal until it has caught
    up, is compared with the live version row by row at the same cursors, and then replaces it in one
    transaction. It stops before the switch if rows differ in a way that the definition does not declare.
    `build`, `compare` and `switch` are its steps. After Ctrl-C, the same command continues. Nothing is
    published again.
    """


def _add_full_rebuild(name: str) -> None:
    words = "every read model, one after the other" if name == ALL else f"the {name}"

    @rebuild.command(
        name,
        help=f"Rebuild {words}: build, compare and switch. Exit code 1: it stopped, or rows differ in a "
        "way that is not declared.",
    )
    @_source_options
    @_switch_options
    @_jobs
    @_dry_run
    @json_option
    def command(source: EventSource, how: SwitchOptions, jobs: int, dry_run: bool, as_json: bool) -> None:
        _require_other_source(name, source)

        async def rebuilt(model: ModelRebuild) -> RebuildResult:
            if dry_run:
                return await model.plan(source)
            return await model.rebuild(source, how)

        _run(VerbCall(name, as_json, source.name != "audit", jobs), rebuilt)


for _name in (*PROJECTIONS, ALL):
    _add_full_rebuild(_name)
rebuild.add_command(redis_command)


@rebuild.command()
@_model
@_source_options
@_jobs
@_dry_run
@json_option
def build(model: str, source: EventSource, jobs: int, dry_run: bool, as_json: bool) -> None:
    """Build a new version of MODEL, or continue an unfinished one, without showing it."""
    _require_other_source(model, source)

    async def built(one: ModelRebuild) -> RebuildResult:
        return await (one.plan_build(source) if dry_run else one.build(source))

    _run(VerbCall(model, as_json, source.name != "audit", jobs), built)


@rebuild.command()
@_model
@json_option
def compare(model: str, as_json: bool) -> None:
    """Compare the new version of MODEL that `rebuild build` has made with the live one, row by row.

    Exit code 1: it stopped, or rows differ in a way that is not declared.
    """
    _run(VerbCall(model, as_json), ModelRebuild.compare)


@rebuild.command()
@_model
@_switch_options
@_dry_run
@json_option
def switch(model: str, how: SwitchOptions, dry_run: bool, as_json: bool) -> None:
    """Compare the new version of MODEL that `rebuild build` has made, and show it in one transaction.

    Exit code 1: it stopped, or rows differ in a way that is not declared.
    """

    async def switched(one: ModelRebuild) -> RebuildResult:
        return await (one.plan_switch() if dry_run else one.switch(how))

    _run(VerbCall(model, as_json), switched)


@rebuild.command()
@_model
@_source_options
@click.option("--accept", is_flag=True, help="Switch back even if readers go back in time.")
@_patience
@_dry_run
@json_option
def undo(
    model: str, source: EventSource, accept: bool, patience_seconds: float, dry_run: bool, as_json: bool
) -> None:
    """Switch back to the previous version of MODEL; the live version becomes the previous one.

    The previous version is first brought up to date. With `all`, nothing is changed unless every read model
    has a previous version. Exit code 1: it stopped.
    """

    async def undone(one: ModelRebuild) -> RebuildResult:
        return await (one.plan_undo() if dry_run else one.undo(source, accept, patience_seconds))

    _run(VerbCall(model, as_json, source.name != "audit", required="previous"), undone)


@rebuild.command()
@_model
@click.argument("which", type=click.Choice(tuple(STATES)), nargs=-1, required=True)
@_dry_run
@json_option
def drop(model: str, which: Sequence[str], dry_run: bool, as_json: bool) -> None:
    """Drop versions of MODEL that are not live: the `previous` one, an `unfinished` one, or both."""

    async def dropped(one: ModelRebuild) -> RebuildResult:
        return await one.drop(which, dry_run)

    _run(VerbCall(model, as_json), dropped)


def _require_other_source(model: str, source: EventSource) -> None:
    if source.name == "audit" and model in ("audit", ALL):
        raise click.UsageError(
            "--from audit: the audit trail cannot be rebuilt from itself; rebuild ledger or balances"
        )


@rebuild.command("journal")
@click.option(
    "--from",
    "source",
    type=click.Choice(["audit"]),
    required=True,
    help="The source of the events: the audit trail.",
)
@click.option(
    "--replication",
    type=WholeNumber(1),
    help="Copies of each topic that is created.  [default: as for `init`]",
)
@click.option(
    "--new-journal",
    is_flag=True,
    help="Declare that the schema's journal is permanently lost, and replace it with a new one.",
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
    or replaced by another topic of the same name, --new-journal declares that it is permanently lost: the
    topic is created if it is missing, and becomes the journal.

    Stop all workers first. The topic must not have events; markers of started workers are allowed. The events
    are written with the same chain, at new offsets; every cursor is moved to its event's new offset. Exit
    code 1: a read model, Redis or a topic has events that the audit trail lacks; they are named, and
    --accept-loss gives them up.
    """
    asked = _restore(load_settings(), replication, new_journal, republish, accept_loss, dry_run, as_json)
    _run_until_stopped(asked)


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
            summary = f"Would restore {counted(events, 'events')}."
        else:
            summary = (
                f"The journal has {counted(events, 'events')}, {written:,} written now, in "
                f"{counted(len(shards), 'shards')}. "
                "Start the workers."
            )
        console.print(summary, highlight=False)
    return 0


def _run_until_stopped(work: Coroutine[Any, Any, int]) -> NoReturn:
    """Runs `work` until it ends or is stopped by a signal; exits with the code that it returns, or with 1
    when it is refused.
    """
    collect_rarely()
    try:
        sys.exit(run_until_stopped(work, "repeat the command to continue"))
    except (RebuildStopped, NoReadModel) as error:
        refuse(error)


def _show(line: ProgressLine, what: str, progress: RebuildProgress) -> None:
    line(what, progress.phase, progress.done, progress.total, progress.rate)


# -- running the steps ---------------------------------------------------------------------------------------


class VerbCall(NamedTuple):
    """A call of a verb: a read model or `all`, whether results are printed as JSON, whether the journal must
    exist, the number of processes that load, and the state in which every read model must have a version.
    """

    model: str
    as_json: bool
    reads_journal: bool = False
    jobs: int = 1
    required: str | None = None

    @property
    def projections(self) -> tuple[str, ...]:
        """The read models, in the order in which they are handled."""
        return PROJECTIONS if self.model == ALL else (self.model,)


def _run(call: VerbCall, work: Callable[[ModelRebuild], Awaitable[RebuildResult]]) -> NoReturn:
    _run_until_stopped(_each(load_settings(), call, work))


async def _each(
    settings: Settings, call: VerbCall, work: Callable[[ModelRebuild], Awaitable[RebuildResult]]
) -> int:
    """Handles one read model after the other, until one is refused; returns the exit code."""
    await check_system(settings, journal=call.reads_journal)
    if call.required is not None:
        # All or none: checked for each before the first is changed.
        for projection in call.projections:
            async with open_rebuild(where_of(settings), projection) as opened:
                await opened.in_state(call.required)
    results: list[RebuildResult] = []
    line = ProgressLine()
    for projection in call.projections:
        report = functools.partial(_show, line, projection)
        try:
            async with open_rebuild(
                where_of(settings), projection, report, step_of(settings), call.jobs
            ) as opened:
                result = await work(await ModelRebuild.of(settings, projection, opened))
        except RebuildStopped as error:
            if not (results and call.as_json):
                raise
            # Read models rebuilt before stay rebuilt, and the JSON output must contain them.
            result = RebuildResult(projection=projection, done=str(error), refused=True)
        results.append(result)
        if not call.as_json:
            print_result(result)
        if result.refused:
            break
    if call.as_json:
        as_json = [result.as_json() for result in results]
        print_json(as_json if call.model == ALL else as_json[0])
    return 1 if results[-1].refused else 0
