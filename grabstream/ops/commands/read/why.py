"""`why`: everything that happened between one user and one offer."""

import asyncio
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import click
import msgspec
from psycopg import AsyncConnection
from redis.exceptions import RedisError, ResponseError
from rich.text import Text

from grabstream.connections.opening import checked_database, key_space, open_redis
from grabstream.models.bounds import counted
from grabstream.models.currencies import shown_amount
from grabstream.models.events import encode_event
from grabstream.models.identifiers import is_id
from grabstream.models.offers import TIME_MS_MAX
from grabstream.models.transfers import transfers_of
from grabstream.ops.commands.read.show import fail_unknown_offer
from grabstream.ops.console.output import complain, console, json_option, print_json
from grabstream.ops.diagnosis.counters import Counted
from grabstream.ops.diagnosis.evidence import BooksEvidence, is_about, read_books, read_redis
from grabstream.ops.diagnosis.story import Moment, describe
from grabstream.ops.formats.moments import show_time
from grabstream.ops.formats.named_users import user_named
from grabstream.projections import cursors
from grabstream.projections.tables import set_aside
from grabstream.settings import Settings, load_settings


@click.command()
@click.argument("user")
@click.argument("offer")
@json_option
def why(user: str, offer: str, as_json: bool) -> None:
    """Show everything that happened between USER and OFFER: attempts and answers in order, how late each was,
    the counts of limits before and after, the lines of the ledger, and the present state. Times are relative
    to the opening. Money is in major units, as in 99.00 CNY; where ISO 4217 does not know a currency, and
    with --json, in minor units.

    USER is an id, or the name in tokens from which GRAB_JWT_USER_KEY makes the id. Only refusals that are
    kept are shown (GRAB_REFUSALS_…). Exit code 1: the read models do not have the offer.
    """
    if not is_id(offer):
        raise click.UsageError(f"OFFER: must match [A-Za-z0-9._:-]{{1,64}}, got {offer!r}")
    settings = load_settings()
    evidence, unbooked, redis = asyncio.run(gather(settings, user_named(settings, user), offer))
    if evidence is None:
        fail_unknown_offer(offer)
        if asyncio.run(gather(settings, offer, user))[0] is not None:
            complain(f"{user} is an offer: `grabstream why {offer} {user}`")
        sys.exit(1)
    story = describe(evidence)
    if as_json:
        print_json(as_json_of(evidence, story, unbooked, redis))
        return
    for line in _lines(evidence, story, unbooked, redis):
        # Names and titles may look like markup or emoji.
        console.print(line, soft_wrap=True, emoji=False, highlight=False)


class Unbooked(NamedTuple):
    """An event of the user with transfers that the ledger lacks. `because` gives the reason and the fix."""

    seq: int
    type: str
    because: str


async def gather(
    settings: Settings, user: str, offer: str
) -> tuple[BooksEvidence | None, list[Unbooked], dict[str, Any]]:
    """The evidence in the books (None when they lack the offer), the events that the ledger lacks, and the
    present state in Redis.
    """
    async with checked_database(settings) as connection:
        evidence = await read_books(connection, user, offer)
        unbooked = await _unbooked(connection, evidence) if evidence else []
    redis = open_redis(settings)
    try:
        names = [grab["grab"] for grab in evidence.grabs] if evidence else []
        return evidence, unbooked, await read_redis(redis, key_space(settings), user, offer, names)
    except (ResponseError, ValueError) as error:
        return (
            evidence,
            unbooked,
            {"problem": f"Redis has a damaged record of this user ({error}): run `grabstream verify`"},
        )
    except (RedisError, OSError) as error:
        # The story is in the books; Redis only adds the present state.
        return evidence, unbooked, {"problem": f"Redis does not answer: {error}"}
    finally:
        await redis.aclose()


async def _unbooked(connection: AsyncConnection[Any], evidence: BooksEvidence) -> list[Unbooked]:
    """The events of the story that have transfers, none of which is in the ledger."""
    booked = {line["seq"] for line in evidence.transfers}
    names = {grab["grab"] for grab in evidence.grabs}
    missing = [
        event
        for event in evidence.events
        if event.offer == evidence.offer["offer"]
        and is_about(event, evidence.user, names)
        and event.seq not in booked
        and transfers_of(event)
    ]
    if not missing:
        return []
    shard = evidence.offer["shard"]
    stop = next(
        (
            stop
            for stop in await cursors.stops(connection)
            if (stop.projection, stop.shard) == ("ledger", shard)
        ),
        None,
    )
    aside = [record for record in await set_aside.load(connection, "ledger") if record.shard == shard]
    unbooked = []
    for event in missing:
        record = next((kept for kept in aside if kept.first_seq <= event.seq <= kept.last_seq), None)
        if record is not None:
            because = f"set aside by {record.operator} on {_time(record.at)}: {record.reason}"
        elif stop is not None:
            because = (
                f"the ledger has stopped at shard {shard} since {_time(stop.stopped_at)}, at seq "
                f"{stop.seq:,}: see `grabstream doctor`"
            )
        else:
            because = "the ledger has not applied this event yet"
        unbooked.append(Unbooked(event.seq, str(event.__struct_config__.tag), because))
    return unbooked


def as_json_of(
    evidence: BooksEvidence, story: list[Moment], unbooked: list[Unbooked], redis: dict[str, Any]
) -> dict[str, Any]:
    """The whole result, for JSON."""
    return {
        "user": evidence.user,
        "offer": evidence.offer,
        "story": [
            moment._asdict()
            | {
                "limits": [
                    {**before._asdict(), "used": {"before": before.used, "after": after.used}}
                    for before, after in moment.limits
                ]
            }
            for moment in story
        ],
        "events": [msgspec.json.decode(encode_event(event)) for event in evidence.events],
        "ledger": evidence.transfers,
        "not_in_ledger": [event._asdict() for event in unbooked],
        "payments": evidence.payments,
        "refusals": {
            "told": evidence.refusals,
            "of_offer": evidence.refusals_of_offer,
            "of_offer_kept": evidence.refusals_kept,
        },
        "lost": evidence.lost,
        "now": {"grabs": evidence.grabs, "waiting": evidence.waiting, "redis": redis},
    }


# -- in words ------------------------------------------------------------------------------------------------

_INDENT: Final = " " * 14


def _lines(
    evidence: BooksEvidence, story: list[Moment], unbooked: list[Unbooked], redis: dict[str, Any]
) -> Iterator[Text]:
    offer = evidence.offer
    yield Text.assemble(
        (f"{evidence.user} and {offer['offer']}", "bold"),
        f"  {offer['title']}  ",
        (f"{offer['kind']} by {offer['issuer']}", "dim"),
    )
    closes = "" if offer["closes_at"] == TIME_MS_MAX else f", closes {show_time(offer['closes_at'])}"
    yield Text(
        f"{counted(offer['units'], 'parts' if offer['kind'] == 'envelope' else 'units')}, opens "
        f"{show_time(offer['opens_at'])}{closes}"
    )
    yield Text()
    for moment in story:
        yield from _moment(moment, offer)
    if not any(moment.refused or moment.grab for moment in story):
        yield Text(f"No attempt of {evidence.user} is known.", "yellow")
    missing = evidence.refusals_of_offer - evidence.refusals_kept
    if missing > 0:
        yield Text(
            f"{missing:,} of the {evidence.refusals_of_offer:,} refusals of this offer are not kept; "
            "refusals of this user may be among them.",
            "dim",
        )
    for lost in evidence.lost:
        # It was answered as `decided`, and a recovery of Redis has undone it: it has no event.
        yield Text(
            f"{lost['outcome']} ({lost['command']}) was decided, but lost when Redis was recovered; reported "
            f"by the {lost['told_by']}",
            "red",
        )
    yield from _books(evidence, unbooked)
    yield from _now(evidence, redis)


def _moment(moment: Moment, offer: dict[str, Any]) -> Iterator[Text]:
    style = "red" if moment.refused else ("green" if moment.grab else "dim")
    words = Text.assemble((f"{_relative(moment.since_opening_ms):>12}  ", "dim"), (_headline(moment), style))
    if moment.late_ms is not None:
        words.append(f", {_apart(moment.late_ms)} {moment.late_behind}", "bold")
    yield words.append(f"  ({moment.command})", "dim")
    for line in _details(moment, offer):
        yield Text(_INDENT + line)


def _headline(moment: Moment) -> str:
    details = moment.details
    if moment.refused:
        many = f" of {details['quantity']:,}" if (details.get("quantity") or 1) > 1 else ""
        return f"{details.get('type', 'grab')}{many} refused: {moment.what}"
    if moment.what == "payment.refund_due":
        return (
            f"payment {details['payment']} of {shown_amount(details['amount'], details['asset'])} cannot be "
            f"served: {details['outcome']}; it is due for a refund"
        )
    name = moment.what.partition(".")[2]
    if moment.grab is None:
        return f"the offer is {name}" + (f" ({details['reason']})" if details.get("reason") else "")
    reason = f", {details['reason']}" if details.get("reason") else ""
    return f"{name} {shown_amount(details['amount'] or details['quantity'], details['asset'])}{reason}"


def _details(moment: Moment, offer: dict[str, Any]) -> Iterator[str]:
    details = moment.details
    if moment.what in ("grab.granted", "grab.held"):
        rest = "parts" if offer["kind"] == "envelope" else "units"
        yield f"place {details['place']:,}, {counted(details['left'], rest)} left after it"
    if details.get("asked"):
        yield f"asked for {details['asked']:,}"
    if "deadline_at" in details:
        due = f": {shown_amount(details['due'], details['currency'])}" if details.get("due") else ""
        yield f"confirm by {_relative(details['deadline_at'] - offer['opens_at']).strip()}{due}"
    if details.get("paid"):
        yield f"paid {shown_amount(details['paid'], details['currency'])} by {details['payment']}"
    for payment, amount in details.get("refunds", ()):
        yield f"{shown_amount(amount, details['currency'])} are refunded to payment {payment}"
    if "codes_voided" in details:
        yield f"codes voided: {details['codes_voided']:,}"
    if "limit_name" in details and not moment.limits:
        yield f"limit {details['limit_name']}: {details.get('limit_left', 0):,} left"
    if "units_left" in details:
        yield f"{counted(details['units_left'], 'units')} left"
    if details.get("retry_at") and moment.what != "not_open_yet":
        yield f"grabs are accepted again from {_relative(details['retry_at'] - offer['opens_at']).strip()}"
    if "message" in details:
        yield details["message"]
    for before, after in moment.limits:
        yield _limit(before, after)


def _limit(before: Counted, after: Counted) -> str:
    name = f"limit {before.by}/{before.per}" + (" of the campaign" if before.scope == "campaign" else "")
    changed = f"{before.used:,} before, {after.used:,} after" if before != after else f"{before.used:,} used"
    return f"{name} ({before.value}): {changed}, of {after.max:,}"


def _books(evidence: BooksEvidence, unbooked: list[Unbooked]) -> Iterator[Text]:
    if evidence.transfers or unbooked:
        yield Text()
        yield Text("In the ledger", "bold")
    for line in evidence.transfers:
        when = _relative(line["at"] - evidence.offer["opens_at"])
        yield Text(
            f"{when:>12}  seq {line['seq']:,}: {shown_amount(line['amount'], line['asset'])}  "
            f"{line['debit']} → {line['credit']}"
        )
    for missing in unbooked:
        yield Text(
            f"{_INDENT}seq {missing.seq:,}, {missing.type}, is not booked: {missing.because}", "yellow"
        )
    for payment in evidence.payments:
        state = "served" if payment["state"] == "served" else "due for a refund"
        amount, refunded = (
            shown_amount(payment[name], payment["currency"]) for name in ("amount", "refunded")
        )
        refund = f", {refunded} refunded" if payment["refunded"] else ""
        yield Text(f"{_INDENT}payment {payment['payment']}: {amount} {state}{refund}")


def _now(evidence: BooksEvidence, redis: dict[str, Any]) -> Iterator[Text]:
    yield Text()
    yield Text("Now", "bold")
    offer = evidence.offer
    yield Text(f"{_INDENT}the offer is {offer['state']}, {offer['units_left']:,} left")
    for grab in evidence.grabs:
        parts = [f"{grab[name]:,} {name}" for name in ("held", "taken", "redeemed", "back") if grab[name]]
        yield Text(f"{_INDENT}{grab['grab']}: {grab['state']}" + (f" ({', '.join(parts)})" if parts else ""))
    for waiting in evidence.waiting:
        yield Text(f"{_INDENT}{waiting['grab']} waits at position {waiting['position']:,}")
    yield Text(f"{_INDENT}{_redis_in_words(redis, offer['asset'])}")


def _redis_in_words(redis: dict[str, Any], asset: str) -> str:
    if "problem" in redis:
        return str(redis["problem"])
    fenced = "" if redis["decides"] else "; its shard is fenced and decides nothing: see `grabstream doctor`"
    if not redis["there"]:
        return f"Redis no longer has the offer{fenced}"
    words = f"Redis: {redis['state']}, {redis['units_left']:,} left, {redis['held']:,} held"
    if redis.get("part"):
        part = redis["part"]
        words += f"; the user has place {part['place']:,} with {shown_amount(part['amount'], asset)}"
    for name, grab in redis.get("grabs", {}).items():
        # Only the books say how a grab ended: the status in Redis covers the hold only.
        words += (
            f"; {name} waits"
            if grab["status"] == "waiting"
            else f"; {name} has {grab['held']:,} held and {grab['taken']:,} taken"
        )
    return words + fenced


def _relative(ms: int) -> str:
    """A time relative to the opening: in seconds, or in days from one day."""
    return f"{ms / 1000:+,.3f} s" if abs(ms) < 86_400_000 else f"{ms / 86_400_000:+,.2f} d"


def _apart(late_ms: int) -> str:
    return f"{abs(late_ms):,} ms {'after' if late_ms >= 0 else 'before'}"


def _time(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"
