"""`why`: the whole story of one user and one offer."""

import asyncio
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import click
import msgspec
from psycopg import AsyncConnection
from redis.exceptions import RedisError
from rich.text import Text

from grabstream.models.events import encode_event
from grabstream.models.identifiers import is_id
from grabstream.models.offers import TIME_MS_MAX
from grabstream.models.transfers import transfers_of
from grabstream.ops.connections.opening import checked_books, key_space, open_redis
from grabstream.ops.console.output import console, counted, json_option, print_json
from grabstream.ops.diagnosis.counters import Counted
from grabstream.ops.diagnosis.evidence import Evidence, read_books, read_redis
from grabstream.ops.diagnosis.story import Moment, tell
from grabstream.ops.settings import Settings, load_settings
from grabstream.projections import cursors
from grabstream.projections.records import set_aside


@click.command()
@click.argument("user")
@click.argument("offer")
@json_option
def why(user: str, offer: str, as_json: bool) -> None:
    """Tell the whole story of USER and OFFER: attempts and answers in order, how late each was, what limits
    had left before and after, the ledger's lines, and what is now. Times are relative to the opening.

    Refusals are told as far as they are kept (GRAB_REFUSALS_…). Exit 1: the read models know no such offer.
    """
    for field, value in (("USER", user), ("OFFER", offer)):
        if not is_id(value):
            raise click.UsageError(f"{field}: must match [A-Za-z0-9._:-]{{1,64}}, got {value!r}")
    evidence, unbooked, redis = asyncio.run(gather(load_settings(), user, offer))
    if evidence is None:
        click.echo(
            f"grabstream: there is no offer {offer!r} in the read models; a new one is there a moment after "
            "it was opened",
            err=True,
        )
        sys.exit(1)
    story = tell(evidence)
    if as_json:
        print_json(as_json_of(evidence, story, unbooked, redis))
        return
    for line in _lines(evidence, story, unbooked, redis):
        # Names and titles may look like markup or emoji.
        console.print(line, soft_wrap=True, emoji=False, highlight=False)


class Unbooked(NamedTuple):
    """An event of the user that moves something, and that the ledger lacks; `because` says why, and the way
    out.
    """

    seq: int
    type: str
    because: str


async def gather(
    settings: Settings, user: str, offer: str
) -> tuple[Evidence | None, list[Unbooked], dict[str, Any]]:
    """What the books have, None when they know no such offer; what the ledger lacks of it; and what Redis
    says now.
    """
    async with checked_books(settings) as connection:
        evidence = await read_books(connection, user, offer)
        unbooked = await _unbooked(connection, evidence) if evidence else []
    redis = open_redis(settings)
    try:
        names = [one["grab"] for one in evidence.grabs] if evidence else []
        return evidence, unbooked, await read_redis(redis, key_space(settings), user, offer, names)
    except (RedisError, OSError) as error:
        # The story is in the books; Redis only adds what is now.
        return evidence, unbooked, {"problem": f"Redis does not answer: {error}"}
    finally:
        await redis.aclose()


async def _unbooked(connection: AsyncConnection[Any], evidence: Evidence) -> list[Unbooked]:
    """Events of the story that are transfers, and of which the ledger has none."""
    booked = {line["seq"] for line in evidence.transfers}
    names = {grab["grab"] for grab in evidence.grabs}
    missing = [
        event
        for event in evidence.events
        if event.offer == evidence.offer["offer"]
        and (getattr(event, "user", None) == evidence.user or getattr(event, "grab", None) in names)
        and event.seq not in booked
        and transfers_of(event)
    ]
    if not missing:
        return []
    shard = evidence.offer["shard"]
    stop = next(
        (one for one in await cursors.stops(connection) if (one.projection, one.shard) == ("ledger", shard)),
        None,
    )
    aside = [one for one in await set_aside.load(connection, "ledger") if one.shard == shard]
    unbooked = []
    for event in missing:
        record = next((one for one in aside if one.first_seq <= event.seq <= one.last_seq), None)
        if record is not None:
            because = f"set aside by {record.operator} on {_time(record.at)}: {record.reason}"
        elif stop is not None:
            because = (
                f"the ledger has stopped at shard {shard} since {_time(stop.stopped_at)}, at seq "
                f"{stop.seq:,}: see `grabstream doctor`"
            )
        else:
            because = "the ledger has not come that far yet"
        unbooked.append(Unbooked(event.seq, str(event.__struct_config__.tag), because))
    return unbooked


def as_json_of(
    evidence: Evidence, story: list[Moment], unbooked: list[Unbooked], redis: dict[str, Any]
) -> dict[str, Any]:
    """The whole of it for programs."""
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
        "not_in_ledger": [one._asdict() for one in unbooked],
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
    evidence: Evidence, story: list[Moment], unbooked: list[Unbooked], redis: dict[str, Any]
) -> Iterator[Text]:
    offer = evidence.offer
    yield Text.assemble(
        (f"{evidence.user} and {offer['offer']}", "bold"),
        f"  {offer['title']}  ",
        (f"{offer['kind']} by {offer['issuer']}", "dim"),
    )
    closes = "" if offer["closes_at"] == TIME_MS_MAX else f", closes {_clock(offer['closes_at'])}"
    yield Text(
        f"{counted(offer['units'], 'parts' if offer['kind'] == 'envelope' else 'units')}, opens "
        f"{_clock(offer['opens_at'])}{closes}"
    )
    yield Text()
    for moment in story:
        yield from _moment(moment, offer)
    if not any(moment.refused or moment.grab for moment in story):
        yield Text(f"Nothing is known of an attempt by {evidence.user}.", "yellow")
    missing = evidence.refusals_of_offer - evidence.refusals_kept
    if missing > 0:
        yield Text(
            f"Of {evidence.refusals_of_offer:,} refusals of this offer {missing:,} are not kept: some of "
            "this user's may be among them.",
            "dim",
        )
    for lost in evidence.lost:
        # It was answered as `decided`, and a recovery of Redis took it back: no event of it is left.
        yield Text(
            f"{lost['outcome']} ({lost['command']}) was decided and is lost: Redis was recovered without it, "
            f"told by the {lost['told_by']}",
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
    for line in _more(moment, offer):
        yield Text(_INDENT + line)


def _headline(moment: Moment) -> str:
    said = moment.details
    if moment.refused:
        many = f" of {said['quantity']:,}" if (said.get("quantity") or 1) > 1 else ""
        return f"{said.get('type', 'grab')}{many} refused: {moment.what}"
    if moment.what == "payment.refund_due":
        return (
            f"payment {said['payment']} of {said['amount']:,} {said['asset']} cannot be served: "
            f"{said['outcome']}; it is to be paid back"
        )
    name = moment.what.partition(".")[2]
    if moment.grab is None:
        return f"the offer is {name}" + (f" ({said['reason']})" if said.get("reason") else "")
    reason = f", {said['reason']}" if said.get("reason") else ""
    return f"{name} {said['amount'] or said['quantity']:,} {said['asset']}{reason}"


def _more(moment: Moment, offer: dict[str, Any]) -> Iterator[str]:
    said = moment.details
    if moment.what in ("grab.granted", "grab.held"):
        rest = "parts" if offer["kind"] == "envelope" else "units"
        yield f"place {said['place']:,}, {counted(said['left'], rest)} left after it"
    if said.get("asked"):
        yield f"asked for {said['asked']:,}"
    if "deadline_at" in said:
        due = f": {said['due']:,} {said['currency']}" if said.get("due") else ""
        yield f"to be confirmed until {_relative(said['deadline_at'] - offer['opens_at']).strip()}{due}"
    if said.get("paid"):
        yield f"paid {said['paid']:,} {said['currency']} by {said['payment']}"
    for payment, amount in said.get("refunds", ()):
        yield f"{amount:,} {said['currency']} go back to {payment}"
    if "limit_name" in said and not moment.limits:
        yield f"limit {said['limit_name']}: {said.get('limit_left', 0):,} left"
    if "units_left" in said:
        yield f"{counted(said['units_left'], 'units')} left"
    if said.get("retry_at") and moment.what != "not_open_yet":
        yield f"again from {_relative(said['retry_at'] - offer['opens_at']).strip()} on"
    if "message" in said:
        yield said["message"]
    for before, after in moment.limits:
        yield _limit(before, after)


def _limit(before: Counted, after: Counted) -> str:
    of = f"limit {before.by}/{before.per}" + (" of the campaign" if before.scope == "campaign" else "")
    changed = f"{before.used:,} before, {after.used:,} after" if before != after else f"{before.used:,} used"
    return f"{of} ({before.value}): {changed}, of {after.max:,}"


def _books(evidence: Evidence, unbooked: list[Unbooked]) -> Iterator[Text]:
    if evidence.transfers or unbooked:
        yield Text()
        yield Text("In the ledger", "bold")
    for line in evidence.transfers:
        when = _relative(line["at"] - evidence.offer["opens_at"])
        yield Text(
            f"{when:>12}  seq {line['seq']:,}: {line['amount']:,} {line['asset']}  {line['debit']} → "
            f"{line['credit']}"
        )
    for missing in unbooked:
        yield Text(
            f"{_INDENT}seq {missing.seq:,}, {missing.type}, is not booked: {missing.because}", "yellow"
        )
    for payment in evidence.payments:
        state = "served" if payment["state"] == "served" else "to be paid back"
        back = f", {payment['refunded']:,} paid back" if payment["refunded"] else ""
        yield Text(
            f"{_INDENT}payment {payment['payment']}: {payment['amount']:,} {payment['currency']} "
            f"{state}{back}"
        )


def _now(evidence: Evidence, redis: dict[str, Any]) -> Iterator[Text]:
    yield Text()
    yield Text("Now", "bold")
    offer = evidence.offer
    yield Text(f"{_INDENT}the offer is {offer['state']}, {offer['units_left']:,} left")
    for grab in evidence.grabs:
        parts = [f"{grab[name]:,} {name}" for name in ("held", "taken", "redeemed", "back") if grab[name]]
        yield Text(f"{_INDENT}{grab['grab']}: {grab['state']}" + (f" ({', '.join(parts)})" if parts else ""))
    for place in evidence.waiting:
        yield Text(f"{_INDENT}{place['grab']} waits at position {place['position']:,}")
    yield Text(f"{_INDENT}{_redis_in_words(redis)}")


def _redis_in_words(redis: dict[str, Any]) -> str:
    if "problem" in redis:
        return str(redis["problem"])
    fenced = (
        "" if redis["decides"] else "; its shard is fenced, nothing is decided there: see `grabstream doctor`"
    )
    if not redis["there"]:
        return f"Redis does not have the offer any more{fenced}"
    said = f"Redis: {redis['state']}, {redis['units_left']:,} left, {redis['held']:,} held"
    if redis.get("part"):
        said += f"; the user has place {redis['part']['place']:,} with {redis['part']['amount']:,}"
    for name, grab in redis.get("grabs", {}).items():
        # How it ended is the books' word: Redis' status tells of the hold alone.
        said += (
            f"; {name} waits"
            if grab["status"] == "waiting"
            else f"; {name} has {grab['held']:,} held and {grab['taken']:,} taken"
        )
    return said + fenced


def _relative(ms: int) -> str:
    """Seconds since the opening; whole days where that reads better."""
    return f"{ms / 1000:+,.3f} s" if abs(ms) < 86_400_000 else f"{ms / 86_400_000:+,.2f} d"


def _apart(late_ms: int) -> str:
    return f"{abs(late_ms):,} ms {'after' if late_ms >= 0 else 'before'}"


def _time(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


def _clock(at_ms: int) -> str:
    return (
        datetime.fromtimestamp(at_ms / 1000, UTC)
        .isoformat(sep=" ", timespec="milliseconds")
        .replace("+00:00", "Z")
    )
