"""`open`, `pause`, `resume`, `close`, `grab`, which decide through a gate of this process; and functions that
other verbs with commands share.
"""

import asyncio
import getpass
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, get_args

import click
import msgspec
from psycopg import OperationalError
from rich.progress import (
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from grabstream.connections.identity import IdentityNotRecorded
from grabstream.connections.opening import checked_database, open_gate
from grabstream.gate.calls import now_ms
from grabstream.gate.gate import Gate
from grabstream.models.answers import Answer, encode_answer
from grabstream.models.bounds import FILE_BYTES_MAX, counted
from grabstream.models.calendar import utc_text
from grabstream.models.commands import AnyCommand, Grab, Open, Undecodable, decode_command, encode_command
from grabstream.models.identifiers import is_id
from grabstream.models.money import Invalid
from grabstream.models.offers import EnvelopeTerms
from grabstream.models.outcomes import OutcomeUnknown
from grabstream.models.refusal_words import words_of
from grabstream.ops.commands.offers.approving import approval_option, sign_option, with_approvals
from grabstream.ops.commands.offers.fields import field_options
from grabstream.ops.console.output import Output, complain, json_option, plain_console, print_json, say, table
from grabstream.ops.console.progress import bar
from grabstream.ops.formats.offer_files import BadOfferFile, Form, form_of, read_offers
from grabstream.ops.formats.offer_plan import PLAN_COLUMNS, plan_rows
from grabstream.ops.formats.weekly_plan import WeeklyPlan
from grabstream.projections.database.zones import unknown_zones
from grabstream.settings import Settings, load_settings

#: Offers opened in one gate call. When a file has more, a bar shows the progress, and only refusals are
#: printed one by one.
OPENED_AT_ONCE_MAX: Final = 500
#: Offers that a dry run shows.
OFFERS_SHOWN_MAX: Final = 20
#: How many envelope parts a gate draws and writes per millisecond at least, next to other work.
PARTS_A_MILLISECOND: Final = 50

_errors = Output(stderr=True, markup=False, emoji=False, highlight=False)

id_option = click.option(
    "--id",
    "command_id",
    help="The command's id; a repeat with the same id gets the first answer. Default: a random id.",
)
offer_argument = click.argument("offer")


def _operating_user() -> str | None:
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return None
    return name if is_id(name) else None


operator_option = click.option(
    "--operator",
    default=_operating_user,
    help="The operator's name, recorded in the event. Default: the user name of this system.",
)


def operator_options(verb: Callable[..., None]) -> Callable[..., None]:
    """The options of a verb that sends one command of an operator."""
    for option in (json_option, id_option, sign_option, approval_option, operator_option):
        verb = option(verb)
    return verb


def new_id() -> str:
    """A random command id."""
    return f"cli-{secrets.token_hex(8)}"


def make_command(type: str, command_id: str | None, offer: str, **fields: Any) -> AnyCommand:
    """The command that was typed, checked. Fields that are None are absent. Raises UsageError when the
    command is wrong.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return decode_command(
            msgspec.json.encode({"type": type, "id": command_id or new_id(), "offer": offer, **given})
        )
    except Undecodable as error:
        raise click.UsageError(error.reason) from None
    except (OverflowError, ValueError) as error:  # a number of 30 digits, a text that is not UTF-8
        raise click.UsageError(f"cannot be written as JSON: {error}") from None


class _ItemRate(ProgressColumn):
    """Items per second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:,.0f}/s")


def progress_bar(quiet: bool) -> Progress:
    """A bar with rate and remaining time on standard error; invisible when `quiet`, or without a terminal."""
    return Progress(
        TextColumn("{task.description}", markup=False), bar(), MofNCompleteColumn(), _ItemRate(),
        TimeRemainingColumn(),
        console=_errors, disable=quiet or not _errors.is_terminal,
    )  # fmt: skip


def refuse_file(error: BadOfferFile) -> NoReturn:
    """Prints all problems of a file, one in each line, on standard error, and ends the process with 2."""
    for place, reason in error.problems:
        complain(f"{place}: {reason}")
    sys.exit(2)


def ready_settings() -> Settings:
    """The settings; raises BadSettings when they are not enough to open a gate."""
    settings = load_settings()
    settings.require_seal_keys()
    return settings


def carry_out(command: AnyCommand, as_json: bool) -> None:
    """Decides one command, prints the answer and ends the process: with 0 when executed, 1 when refused, 3
    when the outcome is unknown.
    """
    settings = ready_settings()
    [command] = with_approvals([command])

    async def decide() -> list[Answer]:
        async with open_gate(settings) as gate:
            return await gate.decide(
                [command], patience_ms=settings.patience_ms, timeout_ms=settings.patience_ms
            )

    try:
        answers = asyncio.run(decide())
    except OutcomeUnknown as error:
        complain(f"{error} (--id {command.id})")
        sys.exit(3)
    print_answers(answers, as_json, [command])
    sys.exit(exit_code(answers))


def exit_code(answers: Sequence[Answer]) -> int:
    """0 when all were executed, else 1."""
    return 0 if all(answer.positive for answer in answers) else 1


def _shown(name: str, value: Any) -> str:
    """A field of an answer for people: times as times, limits in words."""
    if name in ("at", "retry_at", "deadline_at", "resets_at"):
        return utc_text(value)
    if name == "limits":
        return "; ".join(_shown("limit", limit) for limit in value)
    if name == "limit":
        until = f" until {_shown('resets_at', value['resets_at'])}" if "resets_at" in value else ""
        return f"{value['by']}/{value['per']}: {value['left']} of {value['max']} left{until}"
    return str(value)


def print_answers(
    answers: Sequence[Answer], as_json: bool, commands: Sequence[AnyCommand] | None = None
) -> None:
    """Prints the answers, one in each line, or as JSON. With their commands, a line says in words why a
    command was refused, as HTTP does in `detail`.
    """
    if as_json:
        print_json([msgspec.json.decode(encode_answer(answer)) for answer in answers])
        return
    about: Sequence[AnyCommand | None] = commands or [None] * len(answers)
    for answer, command in zip(answers, about, strict=True):
        fields = msgspec.json.decode(encode_answer(answer))
        why = ""
        if command is not None and not answer.positive:
            fields.pop("message", None)
            why = f"  {words_of(answer, command)}"
        rest = "  ".join(
            f"{name}={_shown(name, value)}"
            for name, value in fields.items()
            if name not in ("outcome", "code")
        )
        words = Text.assemble((answer.outcome, "green" if answer.positive else "red"), why, "  ", rest)
        # Not wrapped at the terminal's width, so that grep finds whole lines.
        say(words)


week_option = click.option(
    "--week",
    metavar="WEEK",
    help="ISO week for which FILE, a plan of weeks, is read, such as 2026-W49.  [default: next week]",
)


def plan_of(week: str | None) -> WeeklyPlan:
    """The plan of a chosen week, or of the next one; raises UsageError when there is no such week."""
    try:
        return WeeklyPlan(week, now_ms())
    except Invalid as error:
        raise click.UsageError(f"--week {error}") from None


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(get_args(Form)),
    help="The form of FILE. Default: by its suffix; YAML without a suffix.",
)
@week_option
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check all offers, show a summary and the first offers (with --json, all offers), and open none.",
)
@operator_option
@approval_option
@sign_option
@json_option
def open(  # noqa: A001 - the verb's name
    file: Path, form: Form | None, week: str | None, dry_run: bool, operator: str | None, as_json: bool
) -> None:
    """Open the offers of FILE (YAML, JSON or CSV; `-` is standard input). From a plan of weeks, whose ids
    contain {week}, open the offers of one week.

    All offers are checked before the first is opened. An offer without an id in the file gets the command id
    open-<offer>, so the same call may be repeated: an offer that is already open gets its first answer again.
    Exit code 1: an offer was refused; 2: the file is wrong.
    """
    plan = plan_of(week)
    try:
        opens = read_offers(read_text(file), form_of(file, form), plan)
        if past := [
            command.offer
            for command in opens
            if command.terms.closes_at is not None and command.terms.closes_at <= now_ms()
        ]:
            raise BadOfferFile([(name, "terms.closes_at: is in the past") for name in past])
    except BadOfferFile as error:
        refuse_file(error)
    opens = [msgspec.structs.replace(command, operator=command.operator or operator) for command in opens]
    if not dry_run:
        _open_all(with_approvals(opens), as_json, plan.week)
    elif as_json:
        print_json([msgspec.json.decode(encode_command(command)) for command in opens])
    else:
        _print_plan(opens, plan.week)


def _print_plan(opens: Sequence[Open], week: str | None) -> None:
    """Prints a summary and the first offers: a table of a large file would take minutes to draw."""
    kinds = Counter(str(command.terms.__struct_config__.tag) for command in opens)
    kind_counts = ", ".join(f"{number:,} {kind}" for kind, number in kinds.most_common())
    week_suffix = f" of {week}" if week else ""
    title = f"Would open {counted(len(opens), 'offers')}{week_suffix}: {kind_counts}"
    plain_console.print(table(title, PLAN_COLUMNS, plan_rows(opens[:OFFERS_SHOWN_MAX])))
    if len(opens) > OFFERS_SHOWN_MAX:
        plain_console.print(f"… and {len(opens) - OFFERS_SHOWN_MAX:,} more; --json prints all of them")


def read_text(file: Path) -> str:
    """The text of a file, or of standard input for `-`; raises BadOfferFile when it is not UTF-8 or too
    large.
    """
    with click.get_binary_stream("stdin") if str(file) == "-" else file.open("rb") as stream:
        raw = stream.read(FILE_BYTES_MAX + 1)
    if len(raw) > FILE_BYTES_MAX:
        raise BadOfferFile([("file", f"has more than {FILE_BYTES_MAX:,} bytes; split it into several files")])
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadOfferFile([(f"line {line}", "is not UTF-8; save the file as UTF-8")]) from None


def _open_all(opens: Sequence[Open], as_json: bool, week: str | None) -> None:
    settings = ready_settings()
    answers: list[Answer] = []
    trouble = None
    for zone in asyncio.run(_zones_without_views(settings, opens)):
        complain(
            f"PostgreSQL does not know the time zone {zone}: the views `limits` and "
            "`results_by_week` will use UTC for it until PostgreSQL is updated. Decisions are not affected"
        )
    try:
        with progress_bar(quiet=as_json or len(opens) <= OPENED_AT_ONCE_MAX) as progress:
            bar = progress.add_task("offers", total=len(opens))
            asyncio.run(
                _open_in_pieces(settings, opens, answers, lambda done: progress.update(bar, completed=done))
            )
    except OutcomeUnknown as error:
        trouble = str(error)
    except KeyboardInterrupt:
        trouble = "stopped"
    many = len(opens) > OPENED_AT_ONCE_MAX
    shown = [
        (answer, command)
        for answer, command in zip(answers, opens, strict=False)
        if not (many and answer.positive) or as_json
    ]
    print_answers([answer for answer, _ in shown], as_json, [command for _, command in shown])
    if many and not as_json:
        outcomes = Counter(answer.outcome for answer in answers)
        plain_console.print(", ".join(f"{number:,} {outcome}" for outcome, number in outcomes.most_common()))
    if week is not None and trouble is None and not as_json:
        plain_console.print(_week_summary(week, answers))
    if trouble is not None:
        complain(
            f"{trouble}: {len(answers):,} of {counted(len(opens), 'offers')} answered; repeat the "
            "same call to open the rest"
        )
        sys.exit(1 if trouble == "stopped" else 3)
    sys.exit(exit_code(answers))


def _week_summary(week: str, answers: Sequence[Answer]) -> str:
    """What one call has done for a week: a second one does nothing, and says so."""
    before = sum(answer.positive and answer.repeated for answer in answers)
    refused = sum(not answer.positive for answer in answers)
    if before == len(answers):
        return f"{week}: nothing changed, all {counted(before, 'offers')} were opened before"
    opened = counted(len(answers) - before - refused, "offers")
    return f"{week}: {opened} opened, {before:,} opened before, {refused:,} refused"


async def _zones_without_views(settings: Settings, opens: Sequence[Open]) -> list[str]:
    """Time zones of the offers that PostgreSQL does not know; none when it does not answer."""
    zones = {command.terms.timezone for command in opens} - {"UTC"}
    if not zones:
        return []
    try:
        async with checked_database(settings) as connection:
            return await unknown_zones(connection, zones)
    except (OperationalError, IdentityNotRecorded):
        return []


async def _open_in_pieces(
    settings: Settings, opens: Sequence[Open], answers: list[Answer], show: Callable[[int], object]
) -> None:
    async with open_gate(settings) as gate:
        for start in range(0, len(opens), OPENED_AT_ONCE_MAX):
            answers += await _open_piece(gate, settings, opens[start : start + OPENED_AT_ONCE_MAX])
            show(len(answers))


async def _open_piece(gate: Gate, settings: Settings, opens: Sequence[Open]) -> list[Answer]:
    parts = sum(command.terms.parts for command in opens if isinstance(command.terms, EnvelopeTerms))
    return await gate.decide(
        opens,
        patience_ms=settings.patience_ms,
        timeout_ms=settings.patience_ms + parts // PARTS_A_MILLISECOND,
    )


@click.command()
@offer_argument
@operator_options
def pause(offer: str, operator: str | None, command_id: str | None, as_json: bool) -> None:
    """Refuse grabs of OFFER with `on_hold` until it is resumed."""
    carry_out(make_command("pause", command_id, offer, operator=operator), as_json)


@click.command()
@offer_argument
@operator_options
def resume(offer: str, operator: str | None, command_id: str | None, as_json: bool) -> None:
    """Accept grabs of the paused OFFER again."""
    carry_out(make_command("resume", command_id, offer, operator=operator), as_json)


@click.command()
@offer_argument
@operator_options
def close(offer: str, operator: str | None, command_id: str | None, as_json: bool) -> None:
    """Close OFFER now. Units not taken go back to its issuer, and its seed is published."""
    carry_out(make_command("close", command_id, offer, operator=operator), as_json)


@click.command()
@offer_argument
@click.argument("user")
@field_options(Grab, "user", "basket")
@id_option
@json_option
def grab(offer: str, user: str, command_id: str | None, as_json: bool, **fields: Any) -> None:
    """Grab a part of the envelope OFFER, or units of OFFER, for USER. `grabstream ticket` makes tickets."""
    carry_out(make_command("grab", command_id, offer, user=user, **fields), as_json)
