"""Grabs in the projection `balances`: the held, granted, returned and used units of each grab."""

import json
from collections.abc import Iterable, Iterator
from itertools import count, repeat
from typing import Any

import msgspec
from psycopg import AsyncConnection
from psycopg.errors import CheckViolation

from grabstream.models.events import (
    AnyGrabEvent,
    GrabConfirmed,
    GrabExtended,
    GrabHeld,
    GrabQueued,
    GrabRedeemed,
    GrabReleased,
    GrabReturned,
    GrabUnredeemed,
)
from grabstream.models.runs import AnyRun, GrantedRun, HeldRun, singles
from grabstream.projections.database.arrays import copy_rows, copy_text, update_by


class _GrabChange(msgspec.Struct):
    """What some events change of one grab: sums to add, and the newest value of replaced columns (None:
    unchanged).

    `recounted` is a list of [minute, units] that limits counted again, and [0, -units] that they stopped
    counting after that.
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

    def stop_counting(self, quantity: int) -> None:
        """Records that limits no longer count units."""
        if self.recounted is None:
            self.uncounted += quantity
        elif quantity:
            self.recounted.append((0, -quantity))

    def count_again(self, quantity: int, at: int) -> None:
        """Records that limits count units again at a time. Every window begins at a full minute."""
        self.recounted = [*(self.recounted or ()), (at - at % 60_000, quantity)]

    def values(self) -> Iterator[object]:
        """The values for SQL, in the order of _SUMS and _REPLACED."""
        for name in (*_SUMS, *_REPLACED):
            value = getattr(self, name)
            yield json.dumps(value) if isinstance(value, list) else value


_PLAIN = "grabs_1 (offer, grab, user_id, state, quantity, amount, asset, place, shard, seq, at)"
_FULL = (
    "grabs_1 (offer, grab, user_id, state, quantity, amount, asset, place, shard, seq, at, held, back, "
    "deadline_at, due, currency, "
    "attributes, basket, metadata)"
)
_SUMS = ("held", "back", "redeemed", "uncounted", "paid", "refunded")
_REPLACED = tuple(name for name in _GrabChange.__struct_fields__ if name not in _SUMS)

# The units of a grab that limits count are a stack. Units that are counted again are pushed on top of the
# first units; units that are no longer counted are popped from the top. Of a pushed entry, the part remains
# that lies below the lowest later level of the stack. A level below 0 reduces the first units.
_MOVES = (
    "coalesce(t.recounted, '[]') || jsonb_build_array(jsonb_build_array(0, -c.uncounted)) || "
    "coalesce(c.recounted::jsonb, '[]')"
)
_STACK = (
    "SELECT at, level - units AS below, "  # noqa: S608
    "min(level) OVER (ORDER BY n ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS lowest "
    "FROM (SELECT n, (m->>0)::bigint AS at, (m->>1)::bigint AS units, "
    "sum((m->>1)::bigint) OVER (ORDER BY n) AS level "
    f"FROM jsonb_array_elements({_MOVES}) WITH ORDINALITY AS moved (m, n)) AS levels"
)
_REMAINING = (
    f"SELECT at, sum(lowest - below) AS units FROM ({_STACK}) AS stack "  # noqa: S608
    "WHERE at > 0 AND lowest > below GROUP BY at"
)
_STACK_EXPRESSIONS = {
    "uncounted": f"t.uncounted - least((SELECT min(lowest) FROM ({_STACK}) AS stack), 0)",  # noqa: S608
    "recounted": "(SELECT jsonb_agg(jsonb_build_array(at, units) ORDER BY at) "  # noqa: S608
    f"FROM ({_REMAINING}) AS remaining)",
}
_WITHOUT_STACK = {"uncounted": "t.uncounted + c.uncounted", "recounted": "NULL"}
# Few grabs are paid late, so most need no stack.
_COUNTED = {
    name: f"CASE WHEN t.recounted IS NULL AND c.recounted IS NULL THEN {_WITHOUT_STACK[name]} "
    f"ELSE {stack_expression} END"
    for name, stack_expression in _STACK_EXPRESSIONS.items()
}
_MORE = {"amount": "coalesce(c.quantity, t.amount)", **_COUNTED}
_TEXTS = ("state", "currency", "recounted")
_UPDATE = update_by("grabs_1", ("offer", "grab", "user_id"), _SUMS, _REPLACED, _TEXTS, _MORE)

# All events of a grab are in one shard, so seq gives their order.
_COMBINED = ", ".join(
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
_ASSIGNMENTS = ", ".join(
    f"{name} = {value}"
    for name, value in (
        {name: f"t.{name} + c.{name}" for name in _SUMS}
        | {name: f"coalesce(c.{name}, t.{name})" for name in _REPLACED}
        | _MORE
    ).items()
)
_FINISH = (
    f"UPDATE grabs_1 AS t SET {_ASSIGNMENTS} "  # noqa: S608 - no name comes from input
    f"FROM (SELECT offer, grab, user_id, {_COMBINED} FROM grab_changes GROUP BY offer, grab, user_id) AS c "
    "WHERE t.offer = c.offer AND t.grab = c.grab AND t.user_id = c.user_id"
).encode()


class GrabRows:
    """Collects rows of some events: new grabs, and changes of grabs."""

    def __init__(self) -> None:
        self._plain: list[str] = []
        self._full: list[str] = []
        #: By offer, grab and user.
        self._changes: dict[tuple[str, str, str], _GrabChange] = {}

    def add(self, event: AnyGrabEvent) -> None:
        """Adds an event that is not a run. Events of one grab must be added in order."""
        if isinstance(event, GrabQueued):
            self._full.append(_queued_row(event))
        else:
            self._alter(event)

    def run(self, event: AnyRun) -> None:
        """Adds a run of grants, or of holds."""
        if isinstance(event, GrantedRun) and not (
            event.attributes or event.metadata or event.basket is not None
        ):
            head, asset = f"{event.offer}\t", f"\t{event.asset}\t"
            shard, at = f"\t{event.shard}\t", f"\t{event.at}\n"
            self._plain += [
                f"{head}{grab}\t{user}\tgranted\t{quantity}\t{amount}{asset}{place}{shard}{seq}{at}"
                for grab, user, quantity, amount, place, seq in zip(*_columns(event), strict=False)
            ]
        elif isinstance(event, HeldRun) and event.waited:
            for one in singles(event):
                self._alter(one)  # type: ignore[arg-type]  # a run has grants and holds only
        else:
            self._full += _full_rows(event)

    def _alter(self, event: AnyGrabEvent) -> None:
        _alter(self._changes.setdefault((event.offer, event.grab, event.user), _GrabChange()), event)

    async def write(self, connection: AsyncConnection[Any]) -> None:
        """Writes new rows first, then changes, in the caller's transaction."""
        await copy_rows(connection, _PLAIN, self._plain)
        await copy_rows(connection, _FULL, self._full)
        if not self._changes:
            return
        keys = sorted(self._changes)
        changes = [self._changes[key] for key in keys]
        columns = map(list, zip(*(change.values() for change in changes), strict=True))
        done = await connection.execute(_UPDATE, (*map(list, zip(*keys, strict=True)), *columns))
        if done.rowcount != len(keys):
            raise CheckViolation(f"events of a grab that does not exist, one of {keys[:5]}")


class LoadedGrabRows(GrabRows):
    """Collects rows for a build. Changes of grabs go to a staging table, one row for each event, until
    `finish_grabs`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._staged: list[str] = []

    def _alter(self, event: AnyGrabEvent) -> None:
        change = _GrabChange()
        _alter(change, event)
        columns = "\t".join("\\N" if value is None else str(value) for value in change.values())
        self._staged.append(f"{event.offer}\t{event.grab}\t{event.user}\t{event.seq}\t{columns}\n")

    async def write(self, connection: AsyncConnection[Any]) -> None:
        """Copies the rows, in the caller's transaction."""
        await super().write(connection)
        await copy_rows(
            connection,
            f"grab_changes (offer, grab, user_id, seq, {', '.join((*_SUMS, *_REPLACED))})",
            self._staged,
        )


async def finish_grabs(connection: AsyncConnection[Any]) -> None:
    """Applies the staged changes to grabs; raises CheckViolation if a grab does not exist."""
    [grabs] = await (
        await connection.execute(
            "SELECT count(*) FROM (SELECT DISTINCT offer, grab, user_id FROM grab_changes) AS g"
        )
    ).fetchone() or [0]
    done = await connection.execute(_FINISH)
    if done.rowcount != grabs:
        raise CheckViolation(f"events of grabs that do not exist: {grabs - done.rowcount} grabs")


def _queued_row(event: GrabQueued) -> str:
    values: Iterable[object] = (
        event.offer, event.grab, event.user, "waiting", event.quantity, event.quantity, event.asset,
        event.place, event.shard, event.seq, event.at, 0, event.quantity, "\\N", "\\N", "\\N",
        _json_text(event.attributes), "\\N", _json_text(event.metadata),
    )  # fmt: skip
    return "\t".join(map(str, values)) + "\n"


def _full_rows(event: AnyRun) -> list[str]:
    """The rows of a run whose grabs have not waited."""
    given, at = event.given, f"\t{event.at}\t"
    # By quantity: the columns from `at` to `currency`.
    if isinstance(event, HeldRun):
        state, deadline_at, currency = "\theld\t", event.deadline_at, _or_null(event.currency)
        units = {
            quantity: f"{at}{quantity}\t0\t{deadline_at}\t{_or_null(event.due(quantity))}\t{currency}\t"
            for quantity in set(given)
        }
    else:
        state, units = "\tgranted\t", dict.fromkeys(given, f"{at}0\t0\t\\N\t\\N\t\\N\t")
    attributes = map(_json_text, event.attributes) if event.attributes else repeat("\\N")
    head, asset, shard = f"{event.offer}\t", f"\t{event.asset}\t", f"\t{event.shard}\t"
    basket = f"\t{_or_null(event.basket)}\t"
    ends: Iterable[str] = repeat(f"{basket}\\N\n")
    if event.metadata:
        ends = [f"{basket}{_json_text(metadata)}\n" for metadata in event.metadata]
    columns = (*_columns(event), attributes, ends)
    return [
        f"{head}{grab}\t{user}{state}{quantity}\t{amount}{asset}{place}{shard}{seq}"
        f"{units[quantity]}{grab_attributes}{end}"
        for grab, user, quantity, amount, place, seq, grab_attributes, end in zip(*columns, strict=False)
    ]


def _columns(event: AnyRun) -> tuple[Iterable[Any], ...]:
    """What every row of a run has for itself: grab, user, quantity, amount, place and seq."""
    return event.grabs, event.users, event.given, event.moved, count(event.place), count(event.seq)


def _json_text(texts: dict[str, str] | None) -> str:
    return copy_text(msgspec.json.encode(texts).decode()) if texts else "\\N"


def _or_null(value: object) -> object:
    return "\\N" if value is None else value


def _alter(change: _GrabChange, event: AnyGrabEvent) -> None:
    quantity = event.quantity
    if isinstance(event, GrabHeld):
        # Served from the waiting list. If it got fewer units than asked for, limits stop counting the others.
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
        change.stop_counting(quantity)
    elif isinstance(event, GrabReturned):
        change.state = "returned"
        change.back += quantity
        change.stop_counting(quantity if event.restored else 0)
        change.refunded += sum(amount for _, amount in event.refunds)
    elif isinstance(event, GrabRedeemed):
        change.redeemed += quantity
    elif isinstance(event, GrabUnredeemed):
        change.redeemed -= quantity
