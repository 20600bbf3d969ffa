"""The application alone: what it does with an error that nobody expects."""

import json
import logging
from typing import Any, cast

import pytest

from grabstream.gateway.app import Application, Bounds
from grabstream.gateway.asking import Questions
from grabstream.gateway.caching import Cache
from grabstream.gateway.deciding import Commands
from grabstream.gateway.receipts import Receipts


class Broken:
    """A gate, and books, with an error that says too much."""

    async def decide(self, *commands: Any, **options: Any) -> Any:
        raise ValueError("password=secret")

    async def rows(self, *words: Any) -> Any:
        raise ValueError("password=secret")


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
        ("GET", "/v1/offers", b""),
    ],
)
async def test_unknown_error_is_a_problem_with_an_id_that_the_log_has(
    caplog: pytest.LogCaptureFixture, method: str, path: str, body: bytes
) -> None:
    broken = Broken()
    application = Application(
        Commands(cast(Any, broken), 1_000), Questions(cast(Any, broken), Cache()),
        Receipts(cast(Any, broken), 1_000), dict, Bounds(),
    )  # fmt: skip
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
