"""Refusals as HTTP: the status of each outcome, what a refusal says in words, and problem details (RFC 9457).

Refusals that depend on the state of an offer are 409. Clients and proxies repeat 429 and 503 by themselves,
so only refusals that a repeat can help have these statuses: 503 for `fenced` and `busy`, 429 for a caller who
asks too often.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import msgspec

from grabstream.gateway.bounds import RETRY_SOON_SECONDS
from grabstream.models.answers import Answer, encode_answer
from grabstream.models.bounds import shortened
from grabstream.models.calendar import utc_text
from grabstream.models.commands import AnyCommand, Grab, GrabCommand, Redeem, Return, Unredeem
from grabstream.models.outcomes import Outcome

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

#: How much of a message of the scripts the words of a refusal quote.
QUOTED_BYTES_MAX: Final = 600

_encode = msgspec.json.Encoder().encode
_first_word = re.compile(r"([a-z_]+(?:\.[a-z_]+)*): ").match
_place = re.compile(r" - at `\$\.?([^`]*)`$").search
_named = re.compile(r"(?:unknown|required) field `([^`]{1,64})`").search


class Reply(NamedTuple):
    """An answer of the gateway: status, body, and the headers beside content-length."""

    status: int
    body: bytes
    headers: tuple[Header, ...]


class Refusal(NamedTuple):
    """How a refusal looks: its status, a title, and its words for one answer and command."""

    status: HTTPStatus
    title: str
    words: Callable[[Answer, AnyCommand], str]


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
            status, title, _ = REFUSALS[Outcome[self.name]]
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


def _again(answer: Answer) -> str:
    at = f" after {utc_text(answer.retry_at)}" if answer.retry_at else ""
    return f"This request decided nothing: send the same again{at}, with the same Idempotency-Key."


def _because(answer: Answer) -> str:
    return f" ({shortened(answer.message, QUOTED_BYTES_MAX)})" if answer.message else ""


def _invalid(answer: Answer, command: AnyCommand) -> str:
    return answer.message or "The command is malformed, or above a bound."


def _fenced(answer: Answer, command: AnyCommand) -> str:
    return (
        f"The shard of offer {command.offer} decides nothing now{_because(answer)}, for some seconds as a "
        f"rule. {_again(answer)}"
    )


def _busy(answer: Answer, command: AnyCommand) -> str:
    return f"There is no room for more commands now{_because(answer)}. {_again(answer)}"


def _conflict(answer: Answer, command: AnyCommand) -> str:
    return (
        f"The id {command.id} was used before, with another body, or for the grab of another "
        f"user{_because(answer)}. Nothing was changed. Another command needs another Idempotency-Key; this "
        "does not change with time."
    )


def _no_such_offer(answer: Answer, command: AnyCommand) -> str:
    return (
        f"There is no offer {command.offer}: it was never opened, or it has retired{_because(answer)}. This "
        f"does not change with time, unless it is opened. GET /v1/offers/{command.offer} shows a retired "
        "offer."
    )


def _no_such_grab(answer: Answer, command: AnyCommand) -> str:
    whose = f" of user {command.user}" if isinstance(command, GrabCommand) and command.user else ""
    return (
        f"Offer {command.offer} has no grab {_grab_of(command)}{whose} that could be settled"
        f"{_because(answer)}."
    )


def _already_taken(answer: Answer, command: AnyCommand) -> str:
    amount = "" if answer.amount is None else f": {answer.amount}, at place {answer.place}"
    return f"{_user_of(command)} already has a part of {command.offer}{amount}. A user gets one part."


def _not_open_yet(answer: Answer, command: AnyCommand) -> str:
    if answer.retry_at:
        from_then = utc_text(answer.retry_at)
        return f"Offer {command.offer} takes no grabs now; it takes grabs from {from_then} on."
    return (
        f"Offer {command.offer} takes no grabs yet: a list that it needs (codes, audience) is not loaded "
        "completely. It is not known when it will be."
    )


def _on_hold(answer: Answer, command: AnyCommand) -> str:
    return f"Offer {command.offer} is paused until an operator resumes it; it is not known when that will be."


def _over(answer: Answer, command: AnyCommand) -> str:
    return f"Offer {command.offer} is closed, for ever{_because(answer)}."


def _not_eligible(answer: Answer, command: AnyCommand) -> str:
    user = _user_of(command)
    if isinstance(command, Grab) and command.ticket is not None:
        return (
            f"The ticket does not let {user} grab offer {command.offer}: its signature is wrong, it is for "
            "another user or another offer, it has ended, or it was used before. Another ticket may do."
        )
    return (
        f"{user} may not grab offer {command.offer}: it is for the users of a list, or for those with a "
        "ticket. Without a ticket, this does not change with time."
    )


def _limit_reached(answer: Answer, command: AnyCommand) -> str:
    limit = answer.limit
    if limit is None:
        return f"A limit of offer {command.offer} is reached{_because(answer)}."
    if limit.by == "grab":
        return (
            f"The hold of grab {_grab_of(command)} was extended {limit.max} times, as often as offer "
            f"{command.offer} allows. This does not change with time."
        )
    until = f" until {utc_text(limit.resets_at)}" if limit.resets_at else ", for as long as it is open"
    whole = "in the whole offer" if limit.per == "offer" else f"in each {limit.per}"
    of = "the campaign of " if limit.scope == "campaign" else ""
    whose = _user_of(command) if limit.by == "user" else f"this {limit.by}"
    return (
        f"{whose} may get {limit.max} units of {of}offer {command.offer} {whole}; {limit.left} of them are "
        f"left{until}."
    )


def _sold_out(answer: Answer, command: AnyCommand) -> str:
    return (
        f"Nothing is left of offer {command.offer}{_because(answer)}. It is not known whether units will "
        "come back."
    )


def _not_enough_left(answer: Answer, command: AnyCommand) -> str:
    asked = getattr(command, "quantity", None) or 1
    if isinstance(command, Grab):
        left = "fewer" if answer.left is None else f"only {answer.left}"
        return f"{asked} units of offer {command.offer} were asked for, {left} are left; ask for fewer."
    return (
        f"{asked} units were named, which is more than grab {_grab_of(command)} has{_because(answer)}; name "
        "fewer."
    )


def _expired(answer: Answer, command: AnyCommand) -> str:
    if isinstance(command, Redeem):
        return f"The units of grab {command.grab} can no longer be used: the offer's valid_until is over."
    return f"The hold of grab {_grab_of(command)} has ended{_because(answer)}. It does not come back."


def _not_held(answer: Answer, command: AnyCommand) -> str:
    what = "units that could be returned" if isinstance(command, Return) else "units on hold"
    return f"Grab {_grab_of(command)} has no {what}{_because(answer)}."


def _not_redeemable(answer: Answer, command: AnyCommand) -> str:
    if isinstance(command, Unredeem):
        return f"Grab {command.grab} was never used for order {command.order}, or that was undone already."
    needed = command.quantity if isinstance(command, Redeem) else 1
    return (
        f"Grab {_grab_of(command)} cannot be used: its offer is not a coupon, or it has fewer than {needed} "
        f"unused units that are the user's for good{_because(answer)}. A hold is confirmed first."
    )


def _grab_of(command: AnyCommand) -> str:
    return command.grab if isinstance(command, GrabCommand) else command.id


def _user_of(command: AnyCommand) -> str:
    user = command.user if isinstance(command, Grab | GrabCommand) else None
    return f"User {user}" if user else "This user"


#: Every refusal of the gate.
REFUSALS: Final[Mapping[Outcome, Refusal]] = {
    Outcome.invalid: Refusal(HTTPStatus.BAD_REQUEST, "The request is malformed, or above a bound", _invalid),
    Outcome.fenced: Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "The shard decides nothing now", _fenced),
    Outcome.busy: Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "There is no room for more commands now", _busy),
    Outcome.conflict: Refusal(HTTPStatus.CONFLICT, "The id was used for something else", _conflict),
    Outcome.no_such_offer: Refusal(HTTPStatus.NOT_FOUND, "There is no such offer", _no_such_offer),
    Outcome.no_such_grab: Refusal(HTTPStatus.NOT_FOUND, "There is no such grab", _no_such_grab),
    Outcome.already_taken: Refusal(HTTPStatus.CONFLICT, "The user has a part already", _already_taken),
    Outcome.not_open_yet: Refusal(HTTPStatus.CONFLICT, "The offer is not open yet", _not_open_yet),
    Outcome.on_hold: Refusal(HTTPStatus.CONFLICT, "The offer is paused", _on_hold),
    Outcome.over: Refusal(HTTPStatus.CONFLICT, "The offer is closed", _over),
    Outcome.not_eligible: Refusal(HTTPStatus.FORBIDDEN, "The user may not grab this offer", _not_eligible),
    Outcome.limit_reached: Refusal(HTTPStatus.CONFLICT, "A limit is reached", _limit_reached),
    Outcome.sold_out: Refusal(HTTPStatus.CONFLICT, "Nothing is left", _sold_out),
    Outcome.not_enough_left: Refusal(HTTPStatus.CONFLICT, "Fewer units are left", _not_enough_left),
    Outcome.expired: Refusal(HTTPStatus.CONFLICT, "The time is over", _expired),
    Outcome.not_held: Refusal(HTTPStatus.CONFLICT, "The grab has no such units", _not_held),
    Outcome.not_redeemable: Refusal(HTTPStatus.CONFLICT, "The grab cannot be used", _not_redeemable),
}

#: The status of every positive outcome. Before it is journaled (`promise=decided`), it is 202.
POSITIVE: Final[Mapping[Outcome, HTTPStatus]] = {
    outcome: HTTPStatus.CREATED
    if outcome in (Outcome.granted, Outcome.held, Outcome.waiting, Outcome.opened)
    else HTTPStatus.OK
    for outcome in Outcome
    if outcome.positive
}

#: Problems of the door itself: name → status and title. `busy` here means that the gateway has no room.
DOOR_PROBLEMS: Final[Mapping[str, tuple[HTTPStatus, str]]] = {
    "not_signed": (HTTPStatus.UNAUTHORIZED, "The receipt is not signed as it must be"),
    "unauthenticated": (HTTPStatus.UNAUTHORIZED, "Valid credentials are required"),
    "insufficient_scope": (HTTPStatus.FORBIDDEN, "The caller may not do this"),
    "other_user": (HTTPStatus.FORBIDDEN, "This belongs to another user"),
    "no_such_webhook": (HTTPStatus.NOT_FOUND, "There is no such webhook"),
    "not_found": (HTTPStatus.NOT_FOUND, "There is nothing at this path"),
    "method_not_allowed": (HTTPStatus.METHOD_NOT_ALLOWED, "The path does not have this method"),
    "request_timeout": (HTTPStatus.REQUEST_TIMEOUT, "The request took too long to arrive"),
    "content_too_large": (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The body is above its bound"),
    "uri_too_long": (HTTPStatus.REQUEST_URI_TOO_LONG, "The query is above its bound"),
    "unsupported_media_type": (HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "The body must be JSON"),
    "misdirected_request": (HTTPStatus.MISDIRECTED_REQUEST, "The gateway does not serve this host"),
    "too_many_requests": (HTTPStatus.TOO_MANY_REQUESTS, "The caller asks too often"),
    "head_too_large": (HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "The headers are above their bound"),
    "malformed_request": (HTTPStatus.BAD_REQUEST, "This is not an HTTP request"),
    "internal_error": (HTTPStatus.INTERNAL_SERVER_ERROR, "The gateway met an unknown error"),
    "busy": (HTTPStatus.SERVICE_UNAVAILABLE, "There is no room for more requests now"),
    "unavailable": (HTTPStatus.SERVICE_UNAVAILABLE, "A server that is needed cannot be reached"),
    "read_model_behind": (HTTPStatus.SERVICE_UNAVAILABLE, "The read model has not come that far yet"),
    "outcome_unknown": (HTTPStatus.GATEWAY_TIMEOUT, "It is unknown whether the command was decided"),
}


def retry_after_seconds(answer: Answer, now_ms: int) -> int | None:
    """Seconds until the command may succeed, at least 1; None when no time is known."""
    at = answer.retry_at or (answer.limit.resets_at if answer.limit else None)
    if at is None:
        return RETRY_SOON_SECONDS if answer.code in (Outcome.fenced, Outcome.busy) else None
    return max(1, math.ceil((at - now_ms) / 1000))


def retry_after(seconds: int) -> Header:
    """The header that says when to try again."""
    return b"retry-after", b"%d" % seconds


def retry_soon(name: str, detail: str, field: str | None = None, *headers: Header) -> Problem:
    """A problem that may be over in a moment."""
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
        outcome.name, refusal.status, refusal.title, shortened(refusal.words(answer, command)),
        {**members_of(answer), **(members or {})},
        field_of(answer.message or "") if outcome is Outcome.invalid else None,
        () if seconds is None else (retry_after(seconds),),
    )  # fmt: skip


def explanation(name: str) -> dict[str, Any] | None:
    """What a type of problems means; None for an unknown name."""
    if name in Outcome.__members__ and not Outcome[name].positive:
        status, title, _ = REFUSALS[Outcome[name]]
        return {"title": title, "status": int(status), "outcome": name, "code": int(Outcome[name])}
    if name in DOOR_PROBLEMS:
        of_door, title = DOOR_PROBLEMS[name]
        return {"title": title, "status": int(of_door)}
    return None
