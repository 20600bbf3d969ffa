"""The table of refusals against the list of outcomes, and the words of each refusal."""

import re
from itertools import product

import msgspec
import pytest

from grabstream.gateway.problems import (
    DOOR_PROBLEMS,
    POSITIVE,
    REFUSALS,
    Problem,
    field_of,
    refusal_reply,
    retry_after_seconds,
)
from grabstream.models.answers import Answer, LimitState
from grabstream.models.bounds import REASON_BYTES_MAX
from grabstream.models.commands import (
    AnyCommand,
    Confirm,
    Extend,
    Grab,
    Pause,
    Redeem,
    Release,
    Return,
    Unredeem,
)
from grabstream.models.outcomes import Outcome

NOW = 1_795_000_000_000
GRAB = {"id": "c", "offer": "o", "grab": "g"}
COMMANDS: list[AnyCommand] = [
    Grab(id="g", offer="o", user="ann"),
    Grab(id="g", offer="o", user="ann", ticket="t", quantity=3),
    Confirm(**GRAB, user="ann"),
    Release(**GRAB),
    Extend(**GRAB, user="ann"),
    Return(**GRAB, user="ann", quantity=2),
    Redeem(**GRAB, user="ann", order="x"),
    Unredeem(**GRAB, order="x"),
    Pause(id="c", offer="o"),
]
LIMITS = (
    None, LimitState("user", "day", 2, 0, NOW + 5_000), LimitState("card", "offer", 2, 1),
    LimitState("user", "week", 2, 0, NOW + 5_000, "campaign"), LimitState("grab", "offer", 2, 0),
)  # fmt: skip


def test_table_has_every_outcome_once() -> None:
    assert set(REFUSALS) | set(POSITIVE) == set(Outcome)
    assert set(REFUSALS) & set(POSITIVE) == set()
    assert all(400 <= refusal.status <= 599 for refusal in REFUSALS.values())
    assert all(200 <= status <= 299 for status in POSITIVE.values())
    # Clients and proxies repeat these automatically.
    repeated = {outcome for outcome, refusal in REFUSALS.items() if refusal.status in (429, 502, 503, 504)}
    assert repeated == {Outcome.fenced, Outcome.busy}


@pytest.mark.parametrize("outcome", REFUSALS)
def test_every_refusal_has_words_for_every_command(outcome: Outcome) -> None:
    for command, limit, retry_at, message in product(
        COMMANDS, LIMITS, (None, NOW + 90_000), (None, "because of it", "x" * 5_000)
    ):
        answer = Answer(
            command.id, outcome.name, int(outcome), command.offer, retry_at=retry_at, limit=limit,
            message=message, left=1,
        )  # fmt: skip
        reply = refusal_reply(answer, command, NOW)
        document = msgspec.json.decode(reply.body)
        assert (document["status"], document["outcome"], document["code"]) == (
            reply.status,
            outcome.name,
            outcome,
        )
        assert document["detail"].strip()
        assert len(document["detail"].encode()) <= REASON_BYTES_MAX
        if message is None and outcome is not Outcome.invalid:
            assert re.search(r"\bo\b|room|id [gc]\b|grab [gc]\b", document["detail"], re.I), document
            assert document["detail"].endswith(".")
        if message == "because of it" and outcome in (Outcome.fenced, Outcome.busy, Outcome.invalid):
            assert message in document["detail"]
        seconds = dict(reply.headers).get(b"retry-after")
        if outcome in (Outcome.fenced, Outcome.busy) or retry_at or (limit and limit.resets_at):
            assert seconds is not None
            assert int(seconds) >= 1
        if retry_at:
            assert seconds == b"90"
            if outcome in (Outcome.fenced, Outcome.busy, Outcome.not_open_yet):
                assert "2026-11-18T11:08:10.000Z" in document["detail"]


def test_time_to_retry_is_never_in_the_past() -> None:
    answer = Answer("g", "busy", 22, "o", retry_at=NOW - 5_000)
    assert retry_after_seconds(answer, NOW) == 1


@pytest.mark.parametrize("name", DOOR_PROBLEMS)
def test_problem_of_the_door_has_its_status(name: str) -> None:
    reply = Problem(name, "Because of it.", "x-field").reply()
    document = msgspec.json.decode(reply.body)
    assert reply.status == document["status"] == DOOR_PROBLEMS[name][0]
    assert (document["type"], document["field"]) == (f"/problems/{name}", "x-field")
    assert (b"content-type", b"application/problem+json") in reply.headers
    assert document.get("outcome") == ("busy" if name == "busy" else None)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("terms.total: must be positive", "terms.total"),
        ("Object contains unknown field `foo`", "foo"),
        ("Object contains unknown field `foo` - at `$.terms`", "terms.foo"),
        ("Object missing required field `user`", "user"),
        ("Expected `int`, got `str` - at `$.quantity`", "quantity"),
        ("Expected `int`, got `str` - at `$.limits[0].max`", "limits[0].max"),
        ("Input data was truncated", None),
        ("JSON is malformed: invalid character (byte 3)", None),
        ("", None),
    ],
)
def test_field_that_a_message_names(message: str, field: str | None) -> None:
    assert field_of(message) == field
