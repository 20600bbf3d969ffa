"""The application alone: what it does with an unexpected error, and whether it is ready."""

import json
import logging
from typing import Any, cast

import pytest

from grabstream.gateway.app import Application, Bounds
from grabstream.gateway.bounds import COMMAND_SECONDS_TARGET
from grabstream.gateway.caching import Cache
from grabstream.gateway.changing_webhooks import ChangesOfWebhooks
from grabstream.gateway.deciding import CommandHandlers
from grabstream.gateway.event_streams import EventStreams
from grabstream.gateway.measures import NO_OPERATION
from grabstream.gateway.operator_questions import Watching
from grabstream.gateway.problems import Reply
from grabstream.gateway.protocol import WAITED
from grabstream.gateway.questions import QueryHandlers
from grabstream.gateway.receipts import Receipts


class Broken:
    """A gate, and books, with an error that says too much."""

    async def decide(self, *commands: Any, **options: Any) -> Any:
        raise ValueError("password=secret")

    async def rows(self, *words: Any) -> Any:
        raise ValueError("password=secret")


def broken_application(broken: Broken, **options: Any) -> Application:
    return Application(
        CommandHandlers(cast(Any, broken), 1_000), QueryHandlers(cast(Any, broken), Cache()),
        Receipts(cast(Any, broken), 1_000), EventStreams(cast(Any, broken), 1),
        Watching(cast(Any, broken), Cache(), cast(Any, broken)), ChangesOfWebhooks(cast(Any, broken)),
        dict, Bounds(), **options,
    )  # fmt: skip


async def answer(application: Application, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
    """The status and the document of an answer."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"idempotency-key", b"k"), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "method": method, "raw_path": path.encode(), "query_string": b"", "headers": headers,
    }  # fmt: skip
    await application(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/offers/x/grabs", b'{"user": "ann"}'),
        ("GET", "/v1/offers/x", b""),
        ("GET", "/v1/system", b""),
    ],
)
async def test_unknown_error_is_a_problem_with_an_id_that_the_log_has(
    caplog: pytest.LogCaptureFixture, method: str, path: str, body: bytes
) -> None:
    broken = Broken()
    application = broken_application(broken)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            status, document = await answer(application, method, path, body)
    assert (status, document["type"]) == (500, "/problems/internal_error")
    assert "secret" not in json.dumps(document)
    [last] = caplog.records[-1:]
    instance = last.getMessage().split()[1].rstrip(":")
    assert instance in document["detail"]
    assert last.exc_info
    assert application.in_work == 0
    status, document = await answer(application, "GET", "/health")
    assert (status, document) == (200, {"status": "ok"})


async def test_a_request_is_answered_and_counted_once_whatever_fails_afterwards(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = Broken()
    application = broken_application(broken)

    def answers_and_fails(request: Any, body: bytes, then: Any) -> None:
        then(Reply(200, b"{}", ()))
        raise ValueError("afterwards")

    replies: list[Any] = []
    headers = [(b"idempotency-key", b"k"), (b"content-type", b"application/json"), (b"content-length", b"2")]
    scope: Any = {
        "type": "http", "method": "POST", "raw_path": b"/v1/offers/x/grabs", "query_string": b"",
        "headers": headers,
    }  # fmt: skip
    assert application.takes_whole(scope)
    application._soon = dict.fromkeys(application._soon, answers_and_fails)
    with caplog.at_level(logging.ERROR):
        application.answer_soon(scope, b"{}", replies.append)
    assert [reply.status for reply in replies] == [200]
    assert application.in_work == 0
    assert "a second answer: ValueError('afterwards')" in caplog.text


def test_a_grab_that_has_waited_too_long_for_its_turn_is_refused() -> None:
    application = broken_application(Broken())
    headers = [(b"host", b"localhost"), (b"idempotency-key", b"k"), (b"content-type", b"application/json")]
    scope: Any = {"type": "http", "method": "POST", "query_string": b"", "headers": headers}
    grab = {**scope, "raw_path": b"/v1/offers/x/grabs"}
    receipt = {**scope, "raw_path": b"/v1/payments"}
    for waited, refuses in ((COMMAND_SECONDS_TARGET / 2, False), (COMMAND_SECONDS_TARGET * 1.01, True)):
        reply = application.answer_now({**grab, WAITED: waited})
        assert (reply is not None) == refuses
        if reply is not None:
            assert reply.status == 503
            assert b"retry-after" in dict(reply.headers)
        # A user who has paid is served.
        assert application.answer_now({**receipt, WAITED: waited}) is None
    assert application.measures.shed == {**application.measures.shed, "commands": 1, "requests": 0}
    assert application.measures.operations[NO_OPERATION].statuses == {500: 0, 503: 1}
    assert application.measures.operations[NO_OPERATION].seconds.sum >= COMMAND_SECONDS_TARGET


@pytest.mark.parametrize("is_ready", [True, False])
async def test_it_is_ready_while_redis_answers(is_ready: bool) -> None:
    broken = Broken()

    async def answers() -> bool:
        return is_ready

    application = broken_application(broken, is_ready=answers)
    status, document = await answer(application, "GET", "/health/ready")
    if is_ready:
        assert (status, document) == (200, {"status": "ok"})
    else:
        assert (status, document["type"]) == (503, "/problems/unavailable")
    assert (await answer(application, "GET", "/health/live"))[0] == 200
    assert application.measures.operations["health_ready"].statuses == {500: 0, status: 1}
