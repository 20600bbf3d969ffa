"""The verdict of a rehearsal over HTTP: checks in addition to those of every rehearsal."""

from collections import defaultdict
from typing import Any

from psycopg import AsyncConnection

from grabstream.models.answers import Answer
from grabstream.ops.verification.checks import Problems, VerificationCheck
from grabstream.workshop.rehearsal.over_http.crowd import Kind
from grabstream.workshop.rehearsal.over_http.measured import Measured
from grabstream.workshop.rehearsal.over_http.run import ShapedRehearsal

Booked = dict[tuple[str, str], tuple[Any, ...]]


async def http_verdict(
    connection: AsyncConnection[Any], rehearsal: ShapedRehearsal
) -> list[VerificationCheck]:
    """Compares the answers that the crowd got with each other, and with the books."""
    rows = await connection.execute("SELECT offer, grab, user_id, amount, place, shard, seq FROM grabs")
    booked: Booked = {(offer, grab): tuple(rest) async for offer, grab, *rest in rows}
    measured = rehearsal.measured
    return [
        every_grant_booked(measured, booked),
        same_answer("a request that got no answer, repeated, has one", measured, "vanishing"),
        same_answer("a double click is one grab", measured, "double_clicks"),
        one_part(measured, booked),
    ]


def every_grant_booked(measured: Measured, booked: Booked) -> VerificationCheck:
    """Checks that the grab of every 2xx answer is in the books, with its user, amount, place and event."""
    problems, count = Problems(), 0
    for _, _, _, answer in measured.answered:
        if answer.positive:
            count += 1
            promised = (answer.user, answer.amount, answer.place, answer.shard, answer.seq)
            in_books = booked.get((answer.offer or "", answer.grab or ""))
            if in_books != promised:
                problems.add(f"{answer.id} was answered {promised}, the books have {in_books or 'nothing'}")
    return VerificationCheck("every 2xx answer is in the books", count, "answers", problems.lines)


def same_answer(name: str, measured: Measured, kind: Kind) -> VerificationCheck:
    """Checks that all answers to a request of a kind of users are the same."""
    count = sum(one.kind == kind for one in measured.answered)
    return VerificationCheck(name, count, "answers", measured.contradictions.get(kind, []))


def one_part(measured: Measured, booked: Booked) -> VerificationCheck:
    """Checks that a user who tried often got one part at most, and the same whenever an answer names it."""
    user_answers: dict[tuple[str | None, str | None], list[Answer]] = defaultdict(list)
    for one in measured.answered:
        if one.kind == "bots":
            user_answers[one.answer.offer, one.answer.user].append(one.answer)
    parts: dict[tuple[str | None, str | None], list[str]] = defaultdict(list)
    for (offer, grab), (user, *_) in booked.items():
        parts[offer, user].append(grab)
    problems = Problems()
    for key, answers in user_answers.items():
        granted = {answer.grab for answer in answers if answer.positive}
        if granted != set(parts[key]) or len(granted) > 1:
            problems.add(f"{key[1]} was granted {sorted(map(str, granted))}, has {parts[key]}")
    return VerificationCheck(
        "a user who tries often gets one part", len(user_answers), "users", problems.lines
    )
