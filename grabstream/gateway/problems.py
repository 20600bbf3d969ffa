"""Refusals as HTTP: the status of each outcome, and problem details (RFC 9457). Their words are those of
`models/refusal_words.py`.

Refusals that depend on the state of an offer are 409. Clients and proxies repeat 429 and 503 automatically,
so only refusals that a repeat can help have these statuses: 503 for `fenced` and `busy`, 429 for a caller who
asks too often.
"""

import math
import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import msgspec

from grabstream.gateway.bounds import RETRY_SOON_SECONDS
from grabstream.models.answers import Answer, encode_answer
from grabstream.models.bounds import shortened
from grabstream.models.commands import AnyCommand
from grabstream.models.outcomes import Outcome
from grabstream.models.refusal_words import words_of

Header = tuple[bytes, bytes]

#: The path under which the gateway explains the types of problems.
PROBLEMS_PATH: Final = "/problems"
PROBLEM_JSON: Final = b"application/problem+json"
JSON: Final = b"application/json"
#: On every answer. Answers are never shown as a page, and never kept by a proxy unless a handler says so.
SECURE_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
)
NOT_KEPT: Final = (b"cache-control", b"no-store")

#: What HTTP calls the id of a command.
_ID_NAME: Final = "Idempotency-Key"

_encode = msgspec.json.Encoder().encode
_first_word = re.compile(r"([a-z_]+(?:\.[a-z_]+)*): ").match
_place = re.compile(r" - at `\$\.?([^`]*)`$").search
_named = re.compile(r"(?:unknown|required) field `([^`]{1,64})`").search


class Reply(NamedTuple):
    """An answer of the gateway: status, body, and the headers other than content-length."""

    status: int
    body: bytes
    headers: tuple[Header, ...]


class RefusalStatus(NamedTuple):
    """A refusal as HTTP: its status and a title."""

    status: HTTPStatus
    title: str


class Problem(Exception):
    """A request that gets no answer of the gate: `name` is a key of DOOR_PROBLEMS, or a refusal such as
    `invalid`.

    `field` names the field, header, or part of the path that is wrong. `headers` are sent with the problem.
    """

    def __init__(
        self, name: str, detail: str, field: str | None = None, headers: Iterable[Header] = ()
    ) -> None:
        self.name = name
        self.detail = shortened(detail)
        super().__init__(self.detail)
        self.field = field
        self.headers = tuple(headers)

    def reply(self) -> Reply:
        """The problem as an answer."""
        known: dict[str, Any] = {}
        if self.name in Outcome.__members__:
            known = {"outcome": self.name, "code": int(Outcome[self.name])}
        if self.name in DOOR_PROBLEMS:
            status, title = DOOR_PROBLEMS[self.name]
        else:
            status, title = REFUSALS[Outcome[self.name]]
        return problem_reply(self.name, status, title, self.detail, known, self.field, self.headers)


def invalid(detail: str, field: str | None = None) -> Problem:
    """The problem of a request that is malformed or above a bound."""
    return Problem(Outcome.invalid.name, detail, field or field_of(detail))


def field_of(message: str) -> str | None:
    """The field that a message of the checks or of the decoder names, or None."""
    place, named = _place(message), _named(message)
    inside = place[1] if place else ""
    if named:
        return f"{inside}.{named[1]}" if inside else named[1]
    first = _first_word(message)
    return inside or (first[1] if first else None)


def problem_reply(
    name: str,
    status: int,
    title: str,
    detail: str,
    known: Mapping[str, Any],
    field: str | None = None,
    headers: Iterable[Header] = (),
) -> Reply:
    """Problem details; `known` are its additional members."""
    document = {
        "type": f"{PROBLEMS_PATH}/{name}",
        "title": title,
        "status": int(status),
        "detail": detail,
        **known,
    }
    if field is not None:
        document["field"] = field
    return Reply(
        int(status),
        _encode(document),
        ((b"content-type", PROBLEM_JSON), NOT_KEPT, *SECURE_HEADERS, *headers),
    )


# -- refusals of the gate ------------------------------------------------------------------------------------


#: Every refusal of the gate.
REFUSALS: Final[Mapping[Outcome, RefusalStatus]] = {
    Outcome.invalid: RefusalStatus(HTTPStatus.BAD_REQUEST, "The request is malformed, or exceeds a bound"),
    Outcome.fenced: RefusalStatus(HTTPStatus.SERVICE_UNAVAILABLE, "The shard cannot decide now"),
    Outcome.busy: RefusalStatus(HTTPStatus.SERVICE_UNAVAILABLE, "There is no room for more commands now"),
    Outcome.conflict: RefusalStatus(HTTPStatus.CONFLICT, "The id was used for something else"),
    Outcome.no_such_offer: RefusalStatus(HTTPStatus.NOT_FOUND, "There is no such offer"),
    Outcome.no_such_grab: RefusalStatus(HTTPStatus.NOT_FOUND, "There is no such grab"),
    Outcome.already_taken: RefusalStatus(HTTPStatus.CONFLICT, "The user has a part already"),
    Outcome.not_open_yet: RefusalStatus(HTTPStatus.CONFLICT, "The offer is not open yet"),
    Outcome.on_hold: RefusalStatus(HTTPStatus.CONFLICT, "The offer is paused"),
    Outcome.over: RefusalStatus(HTTPStatus.CONFLICT, "The offer is closed"),
    Outcome.not_eligible: RefusalStatus(HTTPStatus.FORBIDDEN, "The user may not grab this offer"),
    Outcome.limit_reached: RefusalStatus(HTTPStatus.CONFLICT, "A limit is reached"),
    Outcome.sold_out: RefusalStatus(HTTPStatus.CONFLICT, "Nothing is left"),
    Outcome.not_enough_left: RefusalStatus(HTTPStatus.CONFLICT, "Fewer units are left"),
    Outcome.expired: RefusalStatus(HTTPStatus.CONFLICT, "The time limit has passed"),
    Outcome.not_held: RefusalStatus(HTTPStatus.CONFLICT, "The grab has no such units"),
    Outcome.not_redeemable: RefusalStatus(HTTPStatus.CONFLICT, "The grab cannot be used"),
}

#: The status of every positive outcome. Before it is journaled (`promise=decided`), it is 202.
POSITIVE: Final[Mapping[int, HTTPStatus]] = {
    outcome: HTTPStatus.CREATED
    if outcome in (Outcome.granted, Outcome.held, Outcome.waiting, Outcome.opened)
    else HTTPStatus.OK
    for outcome in Outcome
    if outcome.positive
}

#: Problems of the door itself: name → status and title. `busy` here means that the gateway has no room.
DOOR_PROBLEMS: Final[Mapping[str, tuple[HTTPStatus, str]]] = {
    "not_signed": (HTTPStatus.UNAUTHORIZED, "The receipt is not signed correctly"),
    "unauthenticated": (HTTPStatus.UNAUTHORIZED, "Valid credentials are required"),
    "insufficient_scope": (HTTPStatus.FORBIDDEN, "The caller may not do this"),
    "other_user": (HTTPStatus.FORBIDDEN, "This belongs to another user"),
    "no_such_webhook": (HTTPStatus.NOT_FOUND, "There is no such webhook"),
    "not_found": (HTTPStatus.NOT_FOUND, "No route matches this path"),
    "method_not_allowed": (HTTPStatus.METHOD_NOT_ALLOWED, "The path does not support this method"),
    "position_not_reached": (HTTPStatus.CONFLICT, "The shard has not reached this position"),
    "request_timeout": (HTTPStatus.REQUEST_TIMEOUT, "The request took too long to arrive"),
    "content_too_large": (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The body is too large"),
    "uri_too_long": (HTTPStatus.REQUEST_URI_TOO_LONG, "The query is too long"),
    "unsupported_media_type": (HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "The body must be JSON"),
    "misdirected_request": (HTTPStatus.MISDIRECTED_REQUEST, "The gateway does not serve this host"),
    "too_many_requests": (HTTPStatus.TOO_MANY_REQUESTS, "The caller sends requests too often"),
    "head_too_large": (HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "The headers are too large"),
    "malformed_request": (HTTPStatus.BAD_REQUEST, "This is not an HTTP request"),
    "internal_error": (HTTPStatus.INTERNAL_SERVER_ERROR, "The gateway had an unknown error"),
    "busy": (HTTPStatus.SERVICE_UNAVAILABLE, "There is no room for more requests now"),
    "unavailable": (HTTPStatus.SERVICE_UNAVAILABLE, "A server that is needed cannot be reached"),
    "read_model_behind": (HTTPStatus.SERVICE_UNAVAILABLE, "The read model has not reached this position yet"),
    "outcome_unknown": (HTTPStatus.GATEWAY_TIMEOUT, "It is unknown whether the command was decided"),
}


def retry_after_seconds(answer: Answer, now_ms: int) -> int | None:
    """Seconds until the command may succeed, at least 1; None when no time is known."""
    at = answer.retry_at or (answer.limit.resets_at if answer.limit else None)
    if at is None:
        return RETRY_SOON_SECONDS if answer.code in (Outcome.fenced, Outcome.busy) else None
    return max(1, math.ceil((at - now_ms) / 1000))


def retry_after(seconds: int) -> Header:
    """The header with the time to retry."""
    return b"retry-after", b"%d" % seconds


def retry_soon(name: str, detail: str, field: str | None = None, *headers: Header) -> Problem:
    """A problem that may soon be over."""
    return Problem(name, detail, field, (retry_after(RETRY_SOON_SECONDS), *headers))


def members_of(answer: Answer) -> dict[str, Any]:
    """The fields of an answer as members of a problem, whose detail has the message."""
    members: dict[str, Any] = msgspec.json.decode(encode_answer(answer))
    members.pop("message", None)
    return members


def refusal_reply(
    answer: Answer, command: AnyCommand, now_ms: int, members: Mapping[str, Any] | None = None
) -> Reply:
    """A refusal of the gate as problem details, with all fields of the answer. `members` are added."""
    outcome = Outcome(answer.code)
    refusal = REFUSALS[outcome]
    seconds = retry_after_seconds(answer, now_ms)
    return problem_reply(
        outcome.name, refusal.status, refusal.title, shortened(_detail(answer, command, outcome)),
        {**members_of(answer), **(members or {})},
        field_of(answer.message or "") if outcome is Outcome.invalid else None,
        () if seconds is None else (retry_after(seconds),),
    )  # fmt: skip


def _detail(answer: Answer, command: AnyCommand, outcome: Outcome) -> str:
    words = words_of(answer, command, _ID_NAME)
    if outcome is Outcome.no_such_offer:
        return f"{words} GET /v1/offers/{command.offer} shows a retired offer."
    return words


def explanation(name: str) -> dict[str, Any] | None:
    """The meaning of a type of problems; None for an unknown name."""
    if name in Outcome.__members__ and not Outcome[name].positive:
        status, title = REFUSALS[Outcome[name]]
        return {"title": title, "status": int(status), "outcome": name, "code": int(Outcome[name])}
    if name in DOOR_PROBLEMS:
        door_status, title = DOOR_PROBLEMS[name]
        return {"title": title, "status": int(door_status)}
    return None
