"""The verdict: what must be true after the crowd has gone home, each as a check."""

from collections.abc import Sequence
from typing import Any

from psycopg import AsyncConnection

from grabstream.ops.rehearsal.crowd import Envelope
from grabstream.ops.rehearsal.run import Doors
from grabstream.ops.verification.checks import Check


async def verdict(connection: AsyncConnection[Any], chosen: Sequence[Envelope], doors: Doors) -> list[Check]:
    """Checks of the rehearsal itself; `verify` adds those that hold for every system."""
    offers = {
        row[0]: row[1:]
        for row in await _rows(connection, "SELECT offer, state, grabs, given, refunded, total FROM offers")
    }
    return [
        all_answered(doors),
        _granted_equals_parts(chosen, offers, doors),
        _sums(chosen, offers),
        await _nobody_twice(connection),
        await _promises_kept(connection, doors),
    ]


async def _rows(connection: AsyncConnection[Any], query: str) -> list[Any]:
    return await (await connection.execute(query.encode())).fetchall()


def all_answered(doors: Doors) -> Check:
    """Every attempt has its answer, and a second answer says the same as the first."""
    problems = (
        []
        if sum(doors.answered.values()) >= doors.total
        else [f"{doors.total - sum(doors.answered.values())} without an answer"]
    )
    return Check(
        "everybody was answered, always the same",
        sum(doors.answered.values()),
        "answers",
        problems + doors.contradictions,
    )


def _granted_equals_parts(chosen: Sequence[Envelope], offers: dict[str, Any], doors: Doors) -> Check:
    """Every part is granted; of an envelope with a deadline, to everybody who was not told that it is
    over.
    """
    problems, parts = [], 0
    for one in chosen:
        late = 0 if one.deadline_ms is None else len(doors.late[one.offer])
        wanted = min(one.people - late, one.terms.parts)
        parts += wanted
        state, grabs, *_ = offers.get(one.offer, ("missing", 0))
        if (state, grabs) != ("closed", wanted):
            came = f", {late} of {one.people} people came too late" if late else ""
            problems.append(f"{one.offer}: {state} with {grabs} parts granted, {wanted} were wanted{came}")
    return Check("granted = parts", parts, "parts", problems)


def _sums(chosen: Sequence[Envelope], offers: dict[str, Any]) -> Check:
    problems = []
    for one in chosen:
        _, _, given, refunded, total = offers.get(one.offer, ("", 0, 0, 0, 0))
        if not given + refunded == total == one.terms.total:
            problems.append(
                f"{one.offer}: {given} paid and {refunded} given back of {one.terms.total} put in"
            )
    return Check(
        "sum paid + given back = sum put in", sum(one.terms.total for one in chosen), "minor units", problems
    )


async def _nobody_twice(connection: AsyncConnection[Any]) -> Check:
    twice = await _rows(
        connection,
        "SELECT offer, user_id, count(*) FROM grabs GROUP BY offer, user_id HAVING count(*) > 1 LIMIT 100",
    )
    [(people,)] = await _rows(connection, "SELECT count(*) FROM grabs")
    return Check(
        "nobody twice",
        people,
        "grabs",
        [f"{user} has {count} parts of {offer}" for offer, user, count in twice],
    )


async def _promises_kept(connection: AsyncConnection[Any], doors: Doors) -> Check:
    """Every grant that was told to somebody is in the books, with the same amount."""
    booked = {
        (offer, grab): amount
        for offer, grab, amount in await _rows(connection, "SELECT offer, grab, amount FROM grabs")
    }
    problems = []
    told = 0
    for offer, grabs in doors.granted.items():
        for grab, amount in grabs.items():
            told += 1
            if booked.get((offer, grab)) != amount:
                problems.append(f"{grab} was told {amount}, the books have {booked.get((offer, grab))}")
    return Check("every acknowledged grant is in the books", told, "grants", problems)
