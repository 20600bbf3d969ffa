"""Balances: what every user has, what every offer has left, and every grab as it stands now."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from psycopg import AsyncConnection
from psycopg.errors import CheckViolation

from models.events import GrabGranted, OfferClosed, OfferOpened, OfferPaused, OfferResumed
from models.transfers import transfers_of
from projections.cursors import Fact

NAME = "balances"

_WALLET, _HOLD = "wallet:", "hold:"


class _OfferChange(msgspec.Struct):
    """What a batch changes of one offer; None is: as it was."""

    grabs: int = 0
    given: int = 0
    refunded: int = 0
    units_left: int | None = None
    state: str | None = None
    closed_at: int | None = None
    reason: str | None = None
    seed: str | None = None


class _Terms(msgspec.Struct):
    """What of the terms has a column of its own."""

    title: str = ""
    parts: int = 0


_GAIN = (
    "INSERT INTO balances_1 AS b (user_id, asset, available, held) "
    "SELECT * FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[]) "
    "ON CONFLICT (user_id, asset) DO UPDATE SET available = b.available + excluded.available, held = b.held + excluded.held"
)
_LOSE = (
    "UPDATE balances_1 AS b SET available = b.available + c.available, held = b.held + c.held "
    "FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[]) AS c (user_id, asset, available, held) "
    "WHERE b.user_id = c.user_id AND b.asset = c.asset"
)

_terms = msgspec.json.Decoder(_Terms).decode


async def apply(connection: AsyncConnection[Any], facts: Sequence[Fact]) -> None:
    """Adds the events to balances, grabs and offers, in the caller's transaction."""
    users: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    offers: defaultdict[str, _OfferChange] = defaultdict(_OfferChange)
    grabs: list[str] = []
    opened: list[OfferOpened] = []
    for _, _, event in facts:
        for asset, debit, credit, amount in transfers_of(event):
            _move(users, debit, asset, -amount)
            _move(users, credit, asset, amount)
        if isinstance(event, GrabGranted):
            grabs.append(
                f"{event.offer}\t{event.grab}\t{event.user}\tgranted\t{event.quantity}\t{event.amount}\t{event.asset}\t"
                f"{event.place}\t{event.shard}\t{event.seq}\t{event.at}\n"
            )
            offer = offers[event.offer]
            offer.grabs += 1
            offer.given += event.amount
            offer.units_left = event.left
        elif isinstance(event, OfferOpened):
            opened.append(event)
        else:
            _steer(offers[event.offer], event)
    if opened:
        await _insert_offers(connection, opened)
    if grabs:
        async with (
            connection.cursor() as cursor,
            cursor.copy("COPY grabs_1 (offer, grab, user_id, state, quantity, amount, asset, place, shard, seq, at) FROM STDIN") as copy,
        ):
            await copy.write("".join(grabs))
    if users:
        await _upsert_users(connection, users)
    if offers:
        await _update_offers(connection, offers)


def _move(users: defaultdict[tuple[str, str], list[int]], account: str, asset: str, amount: int) -> None:
    if account.startswith(_WALLET):
        users[account[7:], asset][0] += amount
    elif account.startswith(_HOLD):
        users[account[5:], asset][1] += amount


def _steer(offer: _OfferChange, event: OfferPaused | OfferResumed | OfferClosed) -> None:
    if isinstance(event, OfferClosed):
        offer.state, offer.closed_at, offer.reason, offer.seed = "closed", event.at, event.reason, event.seed
        offer.refunded += event.amount
        offer.units_left = 0
    else:
        offer.state = "paused" if isinstance(event, OfferPaused) else "open"


async def _insert_offers(connection: AsyncConnection[Any], opened: Sequence[OfferOpened]) -> None:
    for event in opened:
        terms = _terms(event.terms)
        units = terms.parts or event.total
        await connection.execute(
            "INSERT INTO offers_1 (offer, shard, kind, issuer, funding, asset, total, units, title, state, opened_at, opens_at, "
            "closes_at, units_left, seed_sha256, terms) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, 'open', %s, %s, %s, %s, %s, %s)",
            (
                event.offer, event.shard, event.kind, event.issuer, event.funding, event.asset, event.total, units, terms.title,
                event.at, event.opens_at, event.closes_at, units, event.seed_sha256, bytes(event.terms).decode(),
            ),
        )  # fmt: skip


async def _upsert_users(connection: AsyncConnection[Any], users: dict[tuple[str, str], list[int]]) -> None:
    """Adds changes to balances; losses by UPDATE, since an upsert would test them alone against the CHECK (see ledger)."""
    losses = sorted(key for key, (available, held) in users.items() if available < 0 or held < 0)
    for keys, statement in ((sorted(users.keys() - set(losses)), _GAIN), (losses, _LOSE)):
        if not keys:
            continue
        done = await connection.execute(
            statement,
            (
                [key[0] for key in keys],
                [key[1] for key in keys],
                [users[key][0] for key in keys],
                [users[key][1] for key in keys],
            ),
        )
        if done.rowcount != len(keys):
            raise CheckViolation(f"a balance that does not exist would fall below 0, one of {keys[:5]}")


async def _update_offers(connection: AsyncConnection[Any], offers: dict[str, _OfferChange]) -> None:
    names = sorted(offers)
    changes = [offers[name] for name in names]
    await connection.execute(
        "UPDATE offers_1 AS o SET grabs = o.grabs + c.grabs, given = o.given + c.given, refunded = o.refunded + c.refunded, "
        "units_left = coalesce(c.units_left, o.units_left), state = coalesce(c.state, o.state), "
        "closed_at = coalesce(c.closed_at, o.closed_at), reason = coalesce(c.reason, o.reason), seed = coalesce(c.seed, o.seed) "
        "FROM unnest(%s::text[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::text[], %s::bigint[], %s::text[], "
        "%s::text[]) AS c (offer, grabs, given, refunded, units_left, state, closed_at, reason, seed) WHERE o.offer = c.offer",
        (names, *([getattr(change, field) for change in changes] for field in _OfferChange.__struct_fields__)),
    )
