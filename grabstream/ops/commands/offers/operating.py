"""`amend`, `adjust` and `load`, with which operators change an offer; and `ticket`, for tests."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal

import click
import msgspec

from grabstream.connections.opening import open_gate, sealer
from grabstream.crypto.tickets import sign
from grabstream.gate.gate import Gate
from grabstream.models.answers import Answer, encode_answer
from grabstream.models.commands import Load, check, in_chunks
from grabstream.models.digests import Digests
from grabstream.models.identifiers import is_id
from grabstream.models.money import Invalid
from grabstream.models.outcomes import OutcomeUnknown
from grabstream.ops.commands.offers.approving import (
    expiry,
    sign_option,
    signing_key,
    with_approvals,
)
from grabstream.ops.commands.offers.fields import pairs_of
from grabstream.ops.commands.offers.through_a_gate import (
    carry_out,
    make_command,
    offer_argument,
    operator_option,
    operator_options,
    print_answers,
    progress_bar,
    read_text,
    ready_settings,
    refuse_file,
)
from grabstream.ops.console.arguments import require_id_alone
from grabstream.ops.console.output import complain, json_option, plain_console, print_json
from grabstream.ops.formats.offer_files import BadOfferFile, read_changes
from grabstream.settings import Settings

What = Literal["codes", "audience"]

#: The JSON of a round has a few hundred characters.
ROUND_CHARACTERS_MAX: Final = 10_000
#: Chunks in one gate call: few, so that the bar moves often and Ctrl-C takes effect soon.
CHUNKS_A_CALL: Final = 16
#: How many ids to try for a chunk while the ids before have a remembered refusal.
ATTEMPTS_MAX: Final = 100
PROBLEMS_SHOWN_MAX: Final = 20
REASON_LENGTH_MAX: Final = 200

_CONTINUE: Final = "repeat the same call to continue where this one ended"
_WAYS_OUT: Final = {
    "busy": _CONTINUE,
    "fenced": _CONTINUE,
    "conflict": "another file was loaded before; give the same file as the first time",
    "no_such_offer": "open the offer first, with opens_at in the future",
    "over": "the offer is open or closed already; load a list before opens_at",
}

_file = click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)


# -- amend and adjust ----------------------------------------------------------------------------------------


@click.command()
@offer_argument
@click.option(
    "--set", "assignments", multiple=True, metavar="FIELD=VALUE",
    help="A term and its new value, as in a CSV file of offers: closes_at=2026-11-27T10:00:00+08:00, "
         "hold_ms=15m, 'limits=user/day/2; card/offer/1'. Repeatable; `limits=` removes all limits.",
)  # fmt: skip
@click.option(
    "--beacon", metavar="FILE", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="The round of the beacon that the envelope awaits, as JSON with round, randomness and signature, "
         "such as https://api.drand.sh/CHAIN/public/ROUND answers; - reads it from standard input.",
)  # fmt: skip
@operator_options
def amend(
    offer: str, assignments: Sequence[str], beacon: Path | None, operator: str | None,
    command_id: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Change terms of the open OFFER. All changes take effect together, between two grabs."""
    if not assignments and beacon is None:
        raise click.UsageError("give --set FIELD=VALUE, or --beacon FILE")
    words = list(assignments)
    if beacon is not None:
        words.append(f"randomness={_round_in(beacon)}")
    try:
        changes = read_changes(pairs_of("--set", words))
    except BadOfferFile as error:
        refuse_file(error)
    carry_out(make_command("amend", command_id, offer, changes=changes, operator=operator), as_json)


def _round_in(file: Path) -> str:
    """A round of a beacon as `amend` takes it."""
    try:
        with click.open_file(str(file)) as opened:
            text = opened.read(ROUND_CHARACTERS_MAX + 1)
        if len(text) > ROUND_CHARACTERS_MAX:
            raise ValueError("is too long for a round of a beacon")
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("is not a JSON object")
        return "/".join(str(found[name]) for name in ("round", "randomness", "signature"))
    except KeyError as error:
        raise click.BadParameter(f"has no {error.args[0]}", param_hint="--beacon") from None
    except (OSError, ValueError, RecursionError) as error:
        raise click.BadParameter(str(error), param_hint="--beacon") from None


@click.command()
@offer_argument
@click.option(
    "--transfer", "transfers", multiple=True, required=True, metavar='"AMOUNT ASSET DEBIT CREDIT"',
    help='An amount (minor units or pieces) from one account to another, such as "100 CNY issuer:alice '
         'wallet:bob". Repeatable.',
)  # fmt: skip
@click.option("--reason", required=True, help="The reason of the correction, in one line.")
@click.option("--approved-by", required=True, help="The name of the person who approved it.")
@operator_options
def adjust(
    offer: str,
    transfers: Sequence[str],
    reason: str,
    approved_by: str,
    operator: str | None,
    command_id: str | None,
    as_json: bool,
) -> None:
    """Book a correcting entry for OFFER: all of its transfers, or none."""
    entries = list(map(_entry, transfers))
    command = make_command(
        "adjust",
        command_id,
        offer,
        transfers=entries,
        reason=reason,
        approved_by=approved_by,
        operator=operator,
    )
    carry_out(command, as_json)


def _entry(written: str) -> dict[str, object]:
    # Accounts and assets may contain `:`, but never a space.
    fields = written.split()
    if len(fields) != 4 or not (fields[0].isascii() and fields[0].isdigit()):
        wanted = (
            "must be an amount, an asset, the account to debit and the account to credit, such as "
            '"100 CNY issuer:alice wallet:bob"'
        )
        raise click.BadParameter(f"{wanted}; got {written!r}", param_hint="--transfer")
    amount, asset, debit, credit = fields
    return {"asset": asset, "debit": debit, "credit": credit, "amount": int(amount)}


# -- load ----------------------------------------------------------------------------------------------------


@click.command()
@offer_argument
@click.option(
    "--codes",
    type=_file,
    metavar="FILE",
    help="Coupon codes, one in each line, as many as the offer has units; `-` is standard input.",
)
@click.option(
    "--audience", type=_file, metavar="FILE", help="The ids of the users who may grab, one in each line."
)
@click.option("--dry-run", is_flag=True, help="Check the file and load nothing.")
@operator_option
@sign_option
@json_option
def load(
    offer: str, codes: Path | None, audience: Path | None, dry_run: bool, operator: str | None, as_json: bool
) -> None:
    """Load the lines of FILE into OFFER before it opens: its coupon codes, or the users who may grab. Empty
    lines are skipped.

    Repeat the same call, with the same file, to continue where a call stopped: chunks that are already loaded
    are answered `repeated` and not loaded again.
    """
    if (codes is None) == (audience is None):
        raise click.UsageError("give either --codes FILE or --audience FILE")
    what: What = "codes" if codes else "audience"
    try:
        check(Load(id="load", offer=offer, operator=operator, what=what, chunk=1, chunks=1, items=("x",)))
    except Invalid as error:
        raise click.UsageError(str(error)) from None
    try:
        chunks = _chunks(offer, operator, what, read_text(codes or audience or Path("-")))
    except BadOfferFile as error:
        refuse_file(error)
    summary = {
        "offer": offer,
        "what": what,
        "items": sum(len(chunk.items) for chunk in chunks),
        "chunks": len(chunks),
    }
    if not dry_run:
        _load(chunks, summary, as_json)
    elif as_json:
        print_json(summary)
    else:
        plain_console.print(
            f"Would load {summary['items']:,} {what} of {offer} in {summary['chunks']:,} chunks"
        )


def _chunks(offer: str, operator: str | None, what: What, text: str) -> list[Load]:
    """The commands for a file; raises BadOfferFile with the lines that are wrong."""
    # Lines end with \n only: `splitlines` would also cut at control characters, which must be reported.
    lines = [line.strip(" \t\r") for line in text.removeprefix("\ufeff").split("\n")]
    items = [line for line in lines if line]
    if not items:
        raise BadOfferFile([("file", f"has no {what}; give one in each line")])
    parts = in_chunks(what, items)
    chunks = [
        Load(
            id="load", offer=offer, operator=operator, what=what, chunk=number, chunks=len(parts), items=part
        )
        for number, part in enumerate(parts, 1)
    ]
    if what == "codes" and (twice := [item for item, times in Counter(items).items() if times > 1]):
        shown = ", ".join(map(repr, twice[:3]))
        raise BadOfferFile(
            [
                (
                    "file",
                    f"{len(twice):,} codes occur more than once, such as {shown}; keep each code once",
                )
            ]
        )
    try:
        for chunk in chunks:
            check(chunk)
    except Invalid as error:
        # Checking each line takes longer, so it is done only for a wrong file.
        raise BadOfferFile(_problems(what, lines) or [("file", str(error))]) from None
    return chunks


def _problems(what: What, lines: Sequence[str]) -> list[tuple[str, str]]:
    problems: list[tuple[str, str]] = []
    more = 0
    for number, line in enumerate(lines, 1):
        try:
            if line:
                check(Load(id="load", offer="load", what=what, chunk=1, chunks=1, items=(line,)))
        except Invalid as error:
            if len(problems) < PROBLEMS_SHOWN_MAX:
                problems.append((f"line {number}", str(error).removeprefix("items: ")[:REASON_LENGTH_MAX]))
            else:
                more += 1
    return [*problems, ("file", f"{more:,} more lines are wrong")] if more else problems


def _ids(chunk: Load, digests: Digests) -> list[str]:
    """The ids under which a chunk may have been loaded; the first is the id for a new chunk.

    An id follows from the content of the chunk, so the same file gets the same answers again, and another
    file gets its own. The id is a keyed hash, because codes could be guessed from a plain hash; so chunks
    that were loaded before a key rotation have an id of the former key.
    """
    text = "\n".join((chunk.offer, str(chunk.chunks), *chunk.items))
    return [f"load-{chunk.what}-{chunk.chunk}-{name}" for name in digests.names(text)]


def _load(chunks: Sequence[Load], summary: dict[str, object], as_json: bool) -> None:
    settings = ready_settings()
    answers: list[Answer] = []
    trouble, code = "", 0
    try:
        with progress_bar(quiet=as_json) as progress:
            bar = progress.add_task(f"{summary['what']}", total=sum(len(chunk.items) for chunk in chunks))

            def show(answered: Sequence[Answer]) -> None:
                done = chunks[len(answers) : len(answers) + len(answered)]
                answers.extend(answered)
                items = sum(
                    len(chunk.items) for chunk, answer in zip(done, answered, strict=True) if answer.positive
                )
                progress.advance(bar, items)

            asyncio.run(_load_all(settings, chunks, show))
    except KeyboardInterrupt:
        trouble, code = "stopped", 1
    except OutcomeUnknown as error:
        trouble, code = str(error), 3
    refused = [answer for answer in answers if not answer.positive]
    repeated = sum(answer.positive and answer.repeated for answer in answers)
    loaded = len(answers) - len(refused) - repeated
    if as_json:
        refusals = [msgspec.json.decode(encode_answer(answer)) for answer in refused]
        print_json({**summary, "loaded": loaded, "repeated": repeated, "refused": refusals})
    else:
        print_answers(refused[:PROBLEMS_SHOWN_MAX], as_json=False)
        before = f", {repeated:,} were loaded before" if repeated else ""
        plain_console.print(f"{loaded:,} of {len(chunks):,} chunks loaded{before}")
    if trouble:
        complain(f"{trouble}; {_CONTINUE}")
    elif refused:
        code = 1
        complain(
            f"{refused[0].outcome}: "
            f"{refused[0].message or _WAYS_OUT.get(refused[0].outcome, 'the other chunks were not sent')}"
        )
    sys.exit(code)


async def _load_all(
    settings: Settings, chunks: Sequence[Load], show: Callable[[Sequence[Answer]], None]
) -> None:
    """Sends the chunks in order until one is refused."""
    async with open_gate(settings) as gate:
        for start in range(0, len(chunks), CHUNKS_A_CALL):
            answers = await _load_piece(gate, settings, chunks[start : start + CHUNKS_A_CALL])
            show(answers)
            if not all(answer.positive for answer in answers):
                return


async def _load_piece(gate: Gate, settings: Settings, chunks: Sequence[Load]) -> list[Answer]:
    digests = sealer(settings).digests
    ids = {chunk.chunk: _ids(chunk, digests) for chunk in chunks}
    answers: dict[int, Answer] = {}

    async def decide_under(index: int, unanswered: Sequence[Load]) -> None:
        """Decides chunks, each under its id at this index."""
        for attempt in range(1, ATTEMPTS_MAX + 1):
            # A refusal is remembered under its id, although its reason (no such offer) may have gone: then
            # the next id is tried.
            ending = f"-{attempt}" if attempt > 1 else ""
            commands = [
                msgspec.structs.replace(chunk, id=ids[chunk.chunk][index] + ending) for chunk in unanswered
            ]
            answered = await gate.decide(
                with_approvals(commands), patience_ms=settings.patience_ms, timeout_ms=settings.patience_ms
            )
            answers.update((chunk.chunk, answer) for chunk, answer in zip(unanswered, answered, strict=True))
            unanswered = [
                chunk
                for chunk in unanswered
                if answers[chunk.chunk].repeated and not answers[chunk.chunk].positive
            ]
            if not unanswered:
                return

    await decide_under(0, chunks)
    for index in range(1, max(map(len, ids.values()))):
        # A chunk that was loaded under another id gets its first answer only under that id.
        if conflicting := [chunk for chunk in chunks if answers[chunk.chunk].outcome == "conflict"]:
            await decide_under(index, conflicting)
    return [answers[chunk.chunk] for chunk in chunks]


# -- ticket --------------------------------------------------------------------------------------------------


@click.command()
@offer_argument
@click.argument("user")
@click.option("--key-id", required=True, help="The key's id in GRAB_TICKET_KEYS.")
@click.option(
    "--key-file",
    type=_file,
    required=True,
    help="The secret for HS256 in base64, or the Ed25519 private key as PEM; `-` is standard input.",
)
@click.option(
    "--expires",
    default="15m",
    show_default=True,
    help="A duration from now, or a time as in a file of offers.",
)
@click.option("--once", "once_id", metavar="ID", default="", help="Makes the ticket valid for one grab only.")
@json_option
def ticket(
    offer: str, user: str, key_id: str, key_file: Path, expires: str, once_id: str, as_json: bool
) -> None:
    """Sign a ticket that allows USER to grab OFFER (or any offer of a campaign). For tests: in production,
    the eligibility service signs tickets.
    """
    require_id_alone(key_id, "--key-id")
    for field, value in (("offer", offer), ("user", user), ("--once", once_id or "x")):
        if not is_id(value):
            raise click.UsageError(f"{field}: must match [A-Za-z0-9._:-]{{1,64}}, got {value!r}")
    expires_at_ms = expiry(expires)
    raw = click.get_binary_stream("stdin").read() if str(key_file) == "-" else key_file.read_bytes()
    try:
        token = sign(
            key_id, signing_key(raw), user=user, offer=offer, expires_at_ms=expires_at_ms, once_id=once_id
        )
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--key-file") from None
    if as_json:
        print_json({"ticket": token, "expires_at": expires_at_ms})
    else:
        click.echo(token)
