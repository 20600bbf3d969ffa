"""Changes of webhooks by operators: pause, resume, resend failed events, discard an event. They are not
commands: a webhook is not part of the books (`streams/webhooks/`). Each may be repeated. Each needs a JSON
body, which no page of another origin can make a browser send without permission.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, TypeVar

import msgspec
from psycopg import AsyncConnection

from grabstream.gateway.problems import JSON, NOT_KEPT, SECURE_HEADERS, Problem, Reply, field_of, invalid
from grabstream.gateway.requests import Request, check_body_names, query_of
from grabstream.gateway.view_reader import ViewReader
from grabstream.models.bounds import quoted
from grabstream.models.identifiers import ID_PATTERN, is_id
from grabstream.projections.tables import webhooks as stored

T = TypeVar("T")

_HEADERS: Final = ((b"content-type", JSON), NOT_KEPT, *SECURE_HEADERS)
_encode = msgspec.json.Encoder().encode


class _WebhookState(msgspec.Struct, forbid_unknown_fields=True):
    """Whether events are sent."""

    state: Literal["active", "paused"]


class _Resend(msgspec.Struct, forbid_unknown_fields=True):
    """What is sent again: all that is parked or has failed, or that of one offer."""

    offer: str | None = None


class _Discard(msgspec.Struct, forbid_unknown_fields=True):
    """An event that is given up, as SHARD-SEQ."""

    event: str


_decode_state = msgspec.json.Decoder(_WebhookState).decode
_decode_resend = msgspec.json.Decoder(_Resend).decode
_decode_discard = msgspec.json.Decoder(_Discard).decode


class ChangesOfWebhooks:
    """The handlers of changes of webhooks."""

    def __init__(self, books: ViewReader) -> None:
        self._books = books

    async def webhook_amend(self, request: Request, body: bytes) -> Reply:
        """PATCH /v1/webhooks/{webhook}"""
        query_of(request, ())
        state = _decoded(_decode_state, body).state
        webhook = request.path["webhook"]
        if not await self._books.change(lambda session: stored.set_state(session, webhook, state)):
            raise no_such_webhook(webhook)
        return Reply(200, _encode({"webhook": webhook, "state": state}), _HEADERS)

    async def webhook_resend(self, request: Request, body: bytes) -> Reply:
        """POST /v1/webhooks/{webhook}/resend"""
        query_of(request, ())
        offer = _decoded(_decode_resend, body).offer
        if offer is not None and not is_id(offer):
            raise invalid(f"offer: must match {ID_PATTERN.strip('^$')}, got {quoted(offer)}")
        webhook = request.path["webhook"]

        count = await self._change(webhook, lambda session: stored.resend(session, webhook, offer))
        return Reply(200, _encode({"webhook": webhook, "resent": count}), _HEADERS)

    async def webhook_discard(self, request: Request, body: bytes) -> Reply:
        """POST /v1/webhooks/{webhook}/discard"""
        query_of(request, ())
        event = _decoded(_decode_discard, body).event
        named = stored.event_of(event)
        if named is None:
            raise invalid(f"event: must be written as SHARD-SEQ, got {quoted(event)}")
        webhook = request.path["webhook"]
        is_discarded = await self._change(webhook, lambda session: stored.discard(session, webhook, *named))
        return Reply(200, _encode({"webhook": webhook, "event": event, "discarded": is_discarded}), _HEADERS)

    async def _change(self, webhook: str, change: Callable[[AsyncConnection[Any]], Awaitable[T]]) -> T:
        """Changes what is to be sent to a webhook that exists."""

        async def checked(session: AsyncConnection[Any]) -> T | None:
            known = await session.execute("SELECT 1 FROM webhooks WHERE webhook = %s", (webhook,))
            return None if await known.fetchone() is None else await change(session)

        changed = await self._books.change(checked)
        if changed is None:
            raise no_such_webhook(webhook)
        return changed


def no_such_webhook(webhook: str) -> Problem:
    """The problem of a webhook that does not exist."""
    return Problem("no_such_webhook", f"There is no webhook {webhook}: GET /v1/webhooks lists them.")


def _decoded(decode: Any, body: bytes) -> Any:
    try:
        decoded = decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(str(error), field_of(str(error)) or "body") from None
    check_body_names(body)
    return decoded
