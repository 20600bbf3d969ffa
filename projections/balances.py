"""Balances: what every user has, what every offer has left, and every grab as it stands now."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from psycopg import AsyncConnection
from psycopg.errors import CheckViolation

from models.events import GrabGranted, OfferClosed, OfferOpened, OfferPaused, OfferResumed
from projections.arrays import integer_array, text_array
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
    accounts: defaultdict[tuple[str, str], int] = defaultdict(int)
    offers: defaultdict[str, _OfferChange] = defaultdict(_OfferChange)
    grabs: list[str] = []
    opened: list[OfferOpened] = []
    for _, _, event, transfers in facts:
        for asset, debit, credit, amount in transfers:
            accounts[debit, asset] -= amount
            accounts[credit, asset] += amount
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
    await _upsert_users(connection, accounts)
    if offers:
        await _update_offers(connection, offers)


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


async def _upsert_users(connection: AsyncConnection[Any], accounts: dict[tuple[str, str], int]) -> None:
    """Adds changes to balances; losses by UPDATE, since an upsert would test them alone against the CHECK (see ledger)."""
    available: dict[tuple[str, str], int] = {}
    held: dict[tuple[str, str], int] = {}
    for (account, asset), change in accounts.items():
        if account.startswith(_WALLET):
            available[account[7:], asset] = change
        elif account.startswith(_HOLD):
            held[account[5:], asset] = change
    users = available.keys() | held.keys() if held else available.keys()
    losses = sorted(user for user in users if available.get(user, 0) < 0 or held.get(user, 0) < 0)
    for keys, statement in ((sorted(users - set(losses)) if losses else sorted(users), _GAIN), (losses, _LOSE)):
        if not keys:
            continue
        done = await connection.execute(
            statement,
            (
                text_array([key[0] for key in keys]),
                text_array([key[1] for key in keys]),
                integer_array(available.get(key, 0) for key in keys),
                integer_array(held.get(key, 0) for key in keys),
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
