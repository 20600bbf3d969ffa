"""Everything recorded about one user and one offer: rows of the read models, events of the audit trail, kept
refusals, and the state in Redis.
"""

import re
from collections.abc import Container
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection
from psycopg.rows import dict_row

from grabstream.lua.keys import KeySpace
from grabstream.lua.packed_values import read_grab, read_part
from grabstream.lua.server import has_server_epoch
from grabstream.models.events import AnyEvent, GrabGranted, GrabHeld, PaymentRefundDue, encode_event
from grabstream.models.identifiers import campaign_of
from grabstream.models.runs import decode_line, singles
from grabstream.projections.ledger import in_lines

#: How many refusals of the user are read at most, the newest ones.
REFUSALS_MAX: Final = 1_000

#: Matches the body of an event that took the last unit.
_took_the_last = '"left":0[,}]'


class BooksEvidence(NamedTuple):
    """The records in PostgreSQL. `events` are those of the user, of the offer itself, and of other users that
    share a counter with the user, by seq. `sold_out_at`: time of a refusal → time of the grab that took the
    last unit before it, ms since 1970 UTC.
    """

    user: str
    offer: dict[str, Any]
    grabs: list[dict[str, Any]]
    events: list[AnyEvent]
    refusals: list[dict[str, Any]]
    refusals_of_offer: int
    refusals_kept: int
    transfers: list[dict[str, Any]]
    payments: list[dict[str, Any]]
    waiting: list[dict[str, Any]]
    sold_out_at: dict[int, int]
    lost: list[dict[str, Any]]


async def read_books(connection: AsyncConnection[Any], user: str, offer: str) -> BooksEvidence | None:
    """The evidence in PostgreSQL; None when the read models have no such offer. The connection's search path
    must be the system's schema.
    """
    offers = await _rows(connection, "SELECT * FROM offers WHERE offer = %s", offer)
    if not offers:
        return None
    offer_row = offers[0]
    shard = offer_row["shard"]
    grabs = await _rows(
        connection, "SELECT * FROM grabs WHERE offer = %s AND user_id = %s ORDER BY seq", offer, user
    )
    names = [grab["grab"] for grab in grabs]
    events = await _events(connection, shard, offer_row, user, grabs)
    events_of_user = [event for event in events if event.offer == offer and is_about(event, user, names)]
    # The rows of payments name no user: where their events do, these decide.
    due = [event for event in events if event.offer == offer and isinstance(event, PaymentRefundDue)]
    due_to_user = [event.seq for event in due if is_about(event, user, names)]
    due_to_others = [event.seq for event in due if not is_about(event, user, names)]
    refusals = await _rows(
        connection,
        "SELECT * FROM (SELECT * FROM refusals WHERE offer = %s AND (user_id = %s OR grab = ANY(%s)) ORDER "
        "BY at DESC LIMIT %s) AS newest "
        "ORDER BY at",
        offer, user, names, REFUSALS_MAX,
    )  # fmt: skip
    [counted] = await _rows(
        connection,
        "SELECT (SELECT coalesce(sum(refusals), 0)::bigint FROM demand WHERE offer = %s) AS refused, "
        "(SELECT count(*) FROM refusals WHERE offer = %s) AS kept", offer, offer,
    )  # fmt: skip
    return BooksEvidence(
        user, offer_row, grabs, events, refusals, counted["refused"], counted["kept"],
        await transfers_of_seqs(connection, shard, [event.seq for event in events_of_user]),
        await _rows(
            connection,
            "SELECT * FROM payments WHERE offer = %s AND (grab = ANY(%s) OR seq = ANY(%s)) AND "
            "seq <> ALL(%s) ORDER BY seq",
            offer, names, due_to_user, due_to_others,
        ),
        await _rows(connection, "SELECT * FROM waiting WHERE offer = %s AND user_id = %s", offer, user),
        {refusal["at"]: at for refusal in refusals if (at := await _sold_out_at(connection, shard, offer,
        refusal)) is not None},
        await _rows(
            connection,
            "SELECT seq, told_by, command, outcome, amount, (extract(epoch FROM at) * 1000)::bigint AS "
            "told_at FROM lost_decisions "
            "WHERE offer = %s AND user_id = %s ORDER BY at", offer, user,
        ),
    )  # fmt: skip


def is_about(event: AnyEvent, user: str, grabs: Container[str]) -> bool:
    """Whether an event is about a user who has these grabs. Another user's grab of an envelope may have the
    same id, so the grab counts only where no user is named, as in some refunds due.
    """
    named = getattr(event, "user", None)
    return named == user if named is not None else getattr(event, "grab", None) in grabs


async def transfers_of_seqs(
    connection: AsyncConnection[Any], shard: int, seqs: list[int]
) -> list[dict[str, Any]]:
    """The transfers of some events of a shard, in order."""
    lines = in_lines("wanted.seq", "wanted.seq")
    transfers = (
        "SELECT t.seq, leg, asset, debit, credit, amount, at FROM unnest(%s::bigint[]) AS wanted(seq), "  # noqa: S608
        # With OFFSET 0, each seq is looked up by the index; without it, all transfers are joined.
        f"LATERAL (SELECT * FROM transfers WHERE shard = %s AND {lines} AND transfers.seq = wanted.seq "
        "OFFSET 0) AS t ORDER BY t.seq, leg"
    )
    return await _rows(connection, transfers, seqs, shard)


async def _rows(connection: AsyncConnection[Any], query: str, *values: Any) -> list[dict[str, Any]]:
    async with connection.cursor(row_factory=dict_row) as cursor:
        return await (await cursor.execute(query.encode(), values)).fetchall()


async def _events(
    connection: AsyncConnection[Any], shard: int, offer: dict[str, Any], user: str,
    grabs: list[dict[str, Any]]
) -> list[AnyEvent]:  # fmt: skip
    """Events of the user and of the offer; where counters are shared, also the events of other users that
    count under the user's counters.
    """
    limits = offer["terms"].get("limits", ())
    search_texts = {f'"user":"{user}"'} | {f'"grab":"{grab["grab"]}"' for grab in grabs}
    for limit in limits:
        if limit["by"] != "user":
            search_texts |= {
                f'"{limit["by"]}":"{grab["attributes"][limit["by"]]}"' for grab in grabs if grab["attributes"]
            }
    offers = [offer["offer"]]
    if any(limit.get("scope") == "campaign" for limit in limits):
        # Such a limit counts the grabs of all offers of the campaign.
        campaign_offers = "SELECT offer FROM offers WHERE shard = %s AND split_part(offer, ':', 1) = %s"
        offers = [
            row["offer"]
            for row in await _rows(connection, campaign_offers, shard, campaign_of(offer["offer"]))
        ]
    events = await _find(connection, shard, offers, search_texts)
    # Later events of another user's grab that shares a counter name only the grab, not the attribute.
    with_attributes = (event for event in events if getattr(event, "attributes", None))
    shared = {f'"grab":"{event.grab}"' for event in with_attributes} - search_texts  # type: ignore[union-attr]
    if shared:
        events = await _find(connection, shard, offers, search_texts | shared)
    return events


async def _find(
    connection: AsyncConnection[Any], shard: int, offers: list[str], search_texts: set[str]
) -> list[AnyEvent]:
    rows = await _rows(
        connection,
        "SELECT body FROM audit WHERE shard = %s AND offer = ANY(%s) "
        "AND (type NOT LIKE 'grab.%%' AND type <> 'payment.refund_due' OR body ~ %s "
        "OR type IN ('grab.granted', 'grab.held') AND body ~ %s) ORDER BY seq",
        # A run has its users in a list: some of these have such a text elsewhere.
        shard, offers, _any_of(search_texts), _any_of({text.partition(":")[2] for text in search_texts}),
    )  # fmt: skip
    found = (one for row in rows for one in singles(decode_line(row["body"].encode())))
    has_search_text = re.compile(_any_of(search_texts)).search
    return [
        event
        for event in found
        if not isinstance(event, GrabGranted | GrabHeld) or has_search_text(encode_event(event).decode())
    ]


def _any_of(texts: set[str]) -> str:
    """A regular expression, for Python and PostgreSQL, that finds any of these texts."""
    return "|".join(map(re.escape, sorted(texts)))


async def _sold_out_at(
    connection: AsyncConnection[Any], shard: int, offer: str, refusal: dict[str, Any]
) -> int | None:
    """When the last unit was taken before a refusal with outcome `sold_out`, ms since 1970 UTC; else None."""
    if refusal["outcome"] != "sold_out":
        return None
    rows = await _rows(
        connection,
        "SELECT at FROM audit WHERE shard = %s AND offer = %s AND at <= %s AND type IN ('grab.granted', "
        "'grab.held') AND body ~ %s "
        "ORDER BY seq DESC LIMIT 1", shard, offer, refusal["at"], _took_the_last,
    )  # fmt: skip
    return int(rows[0]["at"]) if rows else None


async def read_redis(redis: Any, keys: KeySpace, user: str, offer: str, grabs: list[str]) -> dict[str, Any]:
    """The state in Redis: whether the shard decides, the rest of the offer, and the user's part of it."""
    shard_keys = keys.shard(keys.shard_of_offer(offer))
    state_key, users_key, _, grabs_key, *_ = shard_keys.offer_keys(offer)
    epoch = await redis.hget(shard_keys.state, "server_epoch")
    decides = await has_server_epoch(redis, shard_keys.state, epoch)
    values = await redis.hmget(state_key, ["state", "paused", "kind", "amount_left", "units_left", "held"])
    if values[0] is None:
        return {"decides": decides, "there": False}
    state, paused, kind, *numbers = (value.decode() if value is not None else "0" for value in values)
    now: dict[str, Any] = {"decides": decides, "there": True, "state": "paused" if paused == "1" else state}
    now |= dict(zip(("amount_left", "units_left", "held"), map(int, numbers), strict=True))
    if kind == "envelope":
        part = await redis.hget(users_key, user)
        now["part"] = read_part(part) if part else None
    elif grabs:
        records = await redis.hmget(grabs_key, grabs)
        now["grabs"] = {
            grab: read_grab(record) for grab, record in zip(grabs, records, strict=True) if record
        }
    return now
