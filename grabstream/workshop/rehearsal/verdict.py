"""The verdict: checks of what must hold after the rehearsal of the crowd."""

from collections.abc import Sequence
from typing import Any

from psycopg import AsyncConnection

from grabstream.models.bounds import counted
from grabstream.ops.verification.checks import VerificationCheck
from grabstream.workshop.rehearsal.crowd import Envelope
from grabstream.workshop.rehearsal.run import Doors


async def verdict(
    connection: AsyncConnection[Any], chosen: Sequence[Envelope], doors: Doors
) -> list[VerificationCheck]:
    """The checks of the rehearsal itself. `verify` has those that apply to every system."""
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


def all_answered(doors: Doors) -> VerificationCheck:
    """Checks that every attempt has an answer, and that a second answer equals the first."""
    missing = doors.total - sum(doors.answered.values())
    problems = [f"{counted(missing, 'attempts')} without an answer"] if missing > 0 else []
    return VerificationCheck(
        "every command was answered, repeats identically",
        sum(doors.answered.values()),
        "answers",
        problems + doors.contradictions,
    )


def _granted_equals_parts(
    chosen: Sequence[Envelope], offers: dict[str, Any], doors: Doors
) -> VerificationCheck:
    """Checks that every wanted part is granted: of an envelope with a deadline, one to each user who was not
    answered `over`.
    """
    problems, parts = [], 0
    for envelope in chosen:
        late = 0 if envelope.deadline_ms is None else len(doors.late[envelope.offer])
        wanted = min(envelope.people - late, envelope.terms.parts)
        parts += wanted
        state, grabs, *_ = offers.get(envelope.offer, ("missing", 0))
        if (state, grabs) != ("closed", wanted):
            late_users = f", {late} of {envelope.people} users were too late" if late else ""
            problems.append(
                f"{envelope.offer}: {state} with {grabs} parts granted, expected closed with {wanted}"
                f"{late_users}"
            )
    return VerificationCheck("granted = parts", parts, "parts", problems)


def _sums(chosen: Sequence[Envelope], offers: dict[str, Any]) -> VerificationCheck:
    problems = []
    for envelope in chosen:
        _, _, given, refunded, total = offers.get(envelope.offer, ("", 0, 0, 0, 0))
        if not given + refunded == total == envelope.terms.total:
            problems.append(
                f"{envelope.offer}: {given} paid and {refunded} returned to the issuer of "
                f"{envelope.terms.total} put in"
            )
    total = sum(envelope.terms.total for envelope in chosen)
    return VerificationCheck("sum paid + given back = sum put in", total, "minor units", problems)


async def _nobody_twice(connection: AsyncConnection[Any]) -> VerificationCheck:
    duplicates = await _rows(
        connection,
        "SELECT offer, user_id, count(*) FROM grabs GROUP BY offer, user_id HAVING count(*) > 1 LIMIT 100",
    )
    [(people,)] = await _rows(connection, "SELECT count(*) FROM grabs")
    return VerificationCheck(
        "no user twice",
        people,
        "grabs",
        [f"{user} has {count} parts of {offer}" for offer, user, count in duplicates],
    )


async def _promises_kept(connection: AsyncConnection[Any], doors: Doors) -> VerificationCheck:
    """Checks that every grant that was answered is in the read models, with the same amount."""
    booked = {
        (offer, grab): amount
        for offer, grab, amount in await _rows(connection, "SELECT offer, grab, amount FROM grabs")
    }
    problems = []
    answered = 0
    for offer, grabs in doors.granted.items():
        for grab, amount in grabs.items():
            answered += 1
            if booked.get((offer, grab)) != amount:
                in_books = booked.get((offer, grab), "nothing")
                problems.append(f"{grab} was answered {amount}, the read models have {in_books}")
    return VerificationCheck("every acknowledged grant is in the books", answered, "grants", problems)
