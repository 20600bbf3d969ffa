"""Grabs as they stand: who has what, what is held until when, what went back, what was used. A part of the
balances projection.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from psycopg import AsyncConnection
from psycopg.errors import CheckViolation

from grabstream.models.events import (
    AnyGrabEvent,
    GrabConfirmed,
    GrabExtended,
    GrabGranted,
    GrabHeld,
    GrabQueued,
    GrabRedeemed,
    GrabReleased,
    GrabReturned,
    GrabUnredeemed,
)
from grabstream.projections.database.arrays import copy_rows, copy_text, update_by


class _Change(msgspec.Struct):
    """What a batch changes of one grab: sums, and the newest of what is replaced (None: as it was).

    `recounted` are [minute, units] that limits counted again, and [0, -units] that they counted no more after
    that.
    """

    held: int = 0
    back: int = 0
    redeemed: int = 0
    uncounted: int = 0
    paid: int = 0
    refunded: int = 0
    state: str | None = None
    quantity: int | None = None
    place: int | None = None
    recounted: list[tuple[int, int]] | None = None
    deadline_at: int | None = None
    due: int | None = None
    currency: str | None = None

    def count_no_more(self, quantity: int) -> None:
        """Takes units off the limits."""
        if self.recounted is None:
            self.uncounted += quantity
        elif quantity:
            self.recounted.append((0, -quantity))

    def count_again(self, quantity: int, at: int) -> None:
        """Counts units in the windows of a time; every window begins with a minute."""
        self.recounted = [*(self.recounted or ()), (at - at % 60_000, quantity)]

    def values(self) -> Iterator[object]:
        """What SQL gets of it, in the order of _SUMS and _REPLACED."""
        for name in (*_SUMS, *_REPLACED):
            value = getattr(self, name)
            yield json.dumps(value) if isinstance(value, list) else value


_PLAIN = "grabs_1 (offer, grab, user_id, state, quantity, amount, asset, place, shard, seq, at)"
_FULL = (
    "grabs_1 (offer, grab, user_id, state, quantity, amount, asset, place, shard, seq, at, held, back, "
    "deadline_at, due, currency, "
    "attributes, basket)"
)
_SUMS = ("held", "back", "redeemed", "uncounted", "paid", "refunded")
_REPLACED = tuple(name for name in _Change.__struct_fields__ if name not in _SUMS)

# What limits count of a grab is a pile: units that are taken anew are put on top of those it was made with,
# and what goes back is taken off the top. Of what was put on it, as much is left as the pile is never lower
# afterwards; below 0 it goes at the first units.
_MOVED = (
    "coalesce(t.recounted, '[]') || jsonb_build_array(jsonb_build_array(0, -c.uncounted)) || "
    "coalesce(c.recounted::jsonb, '[]')"
)
_PILE = (
    "SELECT at, level - units AS below, "  # noqa: S608
    "min(level) OVER (ORDER BY n ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS lowest "
    "FROM (SELECT n, (m->>0)::bigint AS at, (m->>1)::bigint AS units, "
    "sum((m->>1)::bigint) OVER (ORDER BY n) AS level "
    f"FROM jsonb_array_elements({_MOVED}) WITH ORDINALITY AS moved (m, n)) AS levels"
)
_BATCHES = (
    f"SELECT at, sum(lowest - below) AS units FROM ({_PILE}) AS pile "  # noqa: S608
    "WHERE at > 0 AND lowest > below GROUP BY at"
)
_OF_PILE = {
    "uncounted": f"t.uncounted - least((SELECT min(lowest) FROM ({_PILE}) AS pile), 0)",  # noqa: S608
    "recounted": "(SELECT jsonb_agg(jsonb_build_array(at, units) ORDER BY at) "  # noqa: S608
    f"FROM ({_BATCHES}) AS batches)",
}
_PLAINLY = {"uncounted": "t.uncounted + c.uncounted", "recounted": "NULL"}
# Few grabs are paid late.
_COUNTED = {
    name: f"CASE WHEN t.recounted IS NULL AND c.recounted IS NULL THEN {_PLAINLY[name]} ELSE {of_pile} END"
    for name, of_pile in _OF_PILE.items()
}
_MORE = {"amount": "coalesce(c.quantity, t.amount)", **_COUNTED}
_UPDATE = update_by("grabs_1", ("offer", "grab"), _SUMS, _REPLACED, ("state", "currency", "recounted"), _MORE)

# All events of a grab are of one shard, so that seq is their order.
_LAID = ", ".join(
    [f"sum({name}) AS {name}" for name in _SUMS if name != "uncounted"]
    + [
        f"(array_agg({name} ORDER BY seq DESC) FILTER (WHERE {name} IS NOT NULL))[1] AS {name}"
        for name in _REPLACED
        if name != "recounted"
    ]
    + [
        "CASE WHEN count(recounted) > 0 THEN 0 ELSE sum(uncounted) END AS uncounted",
        "CASE WHEN count(recounted) > 0 THEN jsonb_agg(coalesce(recounted->0, jsonb_build_array(0, "
        "-uncounted)) ORDER BY seq) "
        "FILTER (WHERE recounted IS NOT NULL OR uncounted > 0) END AS recounted",
    ]
)
_ADDED_UP = ", ".join(
    f"{name} = {value}"
    for name, value in (
        {name: f"t.{name} + c.{name}" for name in _SUMS}
        | {name: f"coalesce(c.{name}, t.{name})" for name in _REPLACED}
        | _MORE
    ).items()
)
_FINISH = (
    f"UPDATE grabs_1 AS t SET {_ADDED_UP} "  # noqa: S608 - names of our own columns
    f"FROM (SELECT offer, grab, {_LAID} FROM grab_changes GROUP BY offer, grab) AS c WHERE t.offer = c.offer "
    "AND t.grab = c.grab"
).encode()


class GrabRows:
    """The rows of a batch: new ones, and changes of older ones or of these."""

    def __init__(self) -> None:
        self._plain: list[str] = []
        self._full: list[str] = []
        self._changes: dict[tuple[str, str], _Change] = {}

    def add(self, event: AnyGrabEvent) -> None:
        """Takes an event in; events of one grab come in their order."""
        if isinstance(event, GrabGranted) and not event.attributes and event.basket is None:
            self._plain.append(
                f"{event.offer}\t{event.grab}\t{event.user}\tgranted\t{event.quantity}\t{event.amount}\t{event.asset}\t"
                f"{event.place}\t{event.shard}\t{event.seq}\t{event.at}\n"
            )
        elif isinstance(event, GrabGranted | GrabQueued) or (
            isinstance(event, GrabHeld) and not event.waited
        ):
            self._full.append(_full_row(event))
        else:
            self._alter(event)

    def _alter(self, event: AnyGrabEvent) -> None:
        _alter(self._changes.setdefault((event.offer, event.grab), _Change()), event)

    async def write(self, connection: AsyncConnection[Any]) -> None:
        """Writes new rows first, then changes, in the caller's transaction."""
        await copy_rows(connection, _PLAIN, self._plain)
        await copy_rows(connection, _FULL, self._full)
        if not self._changes:
            return
        keys = sorted(self._changes)
        changes = [self._changes[key] for key in keys]
        columns = map(list, zip(*(change.values() for change in changes), strict=True))
        done = await connection.execute(
            _UPDATE, ([key[0] for key in keys], [key[1] for key in keys], *columns)
        )
        if done.rowcount != len(keys):
            raise CheckViolation(f"events of a grab that was never made, one of {keys[:5]}")


class LoadedGrabRows(GrabRows):
    """The rows of a build: what changes older ones is laid beside them, an event a row, until
    `finish_grabs`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._laid: list[str] = []

    def _alter(self, event: AnyGrabEvent) -> None:
        change = _Change()
        _alter(change, event)
        columns = "\t".join("\\N" if value is None else str(value) for value in change.values())
        self._laid.append(f"{event.offer}\t{event.grab}\t{event.seq}\t{columns}\n")

    async def write(self, connection: AsyncConnection[Any]) -> None:
        """Copies the rows, in the caller's transaction."""
        await super().write(connection)
        await copy_rows(
            connection, f"grab_changes (offer, grab, seq, {', '.join((*_SUMS, *_REPLACED))})", self._laid
        )


async def finish_grabs(connection: AsyncConnection[Any]) -> None:
    """Carries what was laid beside the grabs into them; raises CheckViolation when one was never made."""
    [grabs] = await (
        await connection.execute("SELECT count(*) FROM (SELECT DISTINCT offer, grab FROM grab_changes) AS g")
    ).fetchone() or [0]
    done = await connection.execute(_FINISH)
    if done.rowcount != grabs:
        raise CheckViolation(f"events of grabs that were never made: {grabs - done.rowcount} grabs")


def _full_row(event: GrabGranted | GrabHeld | GrabQueued) -> str:
    waiting = event.quantity if isinstance(event, GrabQueued) else 0
    held, deadline_at, due, currency = 0, None, None, None
    if isinstance(event, GrabHeld):
        held, deadline_at, due, currency = event.quantity, event.deadline_at, event.due, event.currency
    attributes = copy_text(msgspec.json.encode(event.attributes).decode()) if event.attributes else "\\N"
    basket = None if isinstance(event, GrabQueued) else event.basket
    state = "held" if held else ("waiting" if waiting else "granted")
    values: Iterable[object] = (
        event.offer, event.grab, event.user, state, event.quantity,
        event.quantity if waiting else event.amount, event.asset, event.place,
        event.shard, event.seq, event.at, held, waiting, deadline_at, due, currency, attributes, basket,
    )  # fmt: skip
    return "\t".join("\\N" if value is None else str(value) for value in values) + "\n"


def _alter(change: _Change, event: AnyGrabEvent) -> None:
    quantity = event.quantity
    if isinstance(event, GrabHeld):
        # Served from the waiting list: with fewer units than asked for, the others are not counted any more.
        asked = event.asked or quantity
        change.back -= asked
        change.held += quantity
        change.state, change.quantity, change.place = "held", quantity, event.place
        change.deadline_at, change.due, change.currency = event.deadline_at, event.due, event.currency
    elif isinstance(event, GrabExtended):
        change.deadline_at = event.deadline_at
    elif isinstance(event, GrabConfirmed):
        change.paid += event.paid
        if event.retaken:
            change.back -= quantity
            change.count_again(quantity, event.at)
        else:
            change.held -= quantity
    elif isinstance(event, GrabReleased):
        change.state = "expired" if event.reason == "expired" else "released"
        change.held -= quantity
        change.back += quantity
        change.count_no_more(quantity)
    elif isinstance(event, GrabReturned):
        change.state = "returned"
        change.back += quantity
        change.count_no_more(quantity if event.restored else 0)
        change.refunded += sum(amount for _, amount in event.refunds)
    elif isinstance(event, GrabRedeemed):
        change.redeemed += quantity
    elif isinstance(event, GrabUnredeemed):
        change.redeemed -= quantity
