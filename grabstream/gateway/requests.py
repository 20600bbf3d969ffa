"""Requests: what is checked before anything is decoded, and how a request becomes a command.

A body has the fields of its command that neither the path nor a header gives. It is joined with these to the
JSON of the command, undecoded, and checked by the same functions as a command from a topic.
"""

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from starlette.types import Receive, Scope

from grabstream.gate.batches import PlainBatch, plain_batch
from grabstream.gate.journaled import set_result
from grabstream.gate.single import Promise
from grabstream.gateway.bounds import (
    BASKET_KEY_LENGTH_MAX,
    PARSED_BYTES_MAX,
    PARSED_MAX,
    QUERY_BYTES_MAX,
    QUERY_PARAMETERS_MAX,
)
from grabstream.gateway.problems import JSON, Header, Problem, Reply, invalid
from grabstream.gateway.slots import Room
from grabstream.models.bounds import BASKET_GRABS_MAX, quoted
from grabstream.models.commands import (
    AnyCommand,
    Grab,
    GrabCommand,
    OfferCommand,
    Undecodable,
    decode_command,
    named_in_basket,
)
from grabstream.models.identifiers import ID_PATTERN, id_of_end_user, is_id
from grabstream.models.money import Invalid
from grabstream.models.unique_names import check_outer_names_once

IDEMPOTENCY_KEY: Final = "Idempotency-Key"
_JSON_SPACE: Final = b" \t\r\n"
#: The key of the scope that has the headers of a request by name, the last one of each name.
FIELDS: Final = "grabstream.fields"
#: Ids that clients and proxies remove from a path.
NOT_IN_PATHS: Final = (".", "..")
_ID_WORDS: Final = f"must match {ID_PATTERN.strip('^$')}"
_is_json_type = re.compile(
    rb'application/json(?:[ \t]*;[ \t]*charset="?utf-8"?)?[ \t]*\Z', re.IGNORECASE
).match
#: Where a field comes from that a body must not have.
_GIVEN: Final = {
    "type": "the path and the method set it",
    "id": f"the header {IDEMPOTENCY_KEY} sets it",
    "offer": "the path sets it",
    "grab": "the path sets it",
    "basket": f"the header {IDEMPOTENCY_KEY} sets it; POST /v1/baskets takes baskets",
    "user": "the token sets it",
}
#: Commands whose operator is always the caller.
_OPERATOR_COMMANDS: Final = frozenset({"load", "adjust"})
_named_twice = re.compile(r"'(\w+)': is named twice").match


class Request:
    """A request whose path was found: its scope, the function that receives its body, and the ids of its
    path. `user` is the end user who sends it; None for a service, and without authentication. `service` is
    the name of the API key of a service; None for an end user, and without authentication. `is_admitted`
    tells a stream whether its credentials are still valid; None without authentication. `caller` says whose
    question it is, and `read_since` from when on its answer must have been read (monotonic, s; None: any).
    `room` is the room of a question.
    """

    __slots__ = (
        "_headers", "caller", "is_admitted", "path", "read_since", "receive", "room", "scope", "service",
        "user",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, path: Mapping[str, str]) -> None:
        self.user: str | None = None
        self.service: str | None = None
        self.is_admitted: Callable[[], Awaitable[bool]] | None = None
        self.caller = ""
        self.read_since: float | None = None
        self.room: Room | None = None
        self.scope = scope
        self.receive = receive
        self.path = path
        self._headers: dict[bytes, bytes] = fields_of(scope)

    def header(self, name: bytes) -> bytes | None:
        """The value of a header; None without it. Raises Problem when it occurs more than once."""
        count = count_of(name, self._headers, self.scope["headers"])
        if count > 1:
            raise invalid(f"{name.decode()}: the header occurs {count} times; keep one")
        return self._headers.get(name)

    def has(self, name: bytes) -> bool:
        """Whether a header occurs, once or more."""
        return name in self._headers


def fields_of(scope: Scope) -> dict[bytes, bytes]:
    """The headers of a request by name, the last one of each name."""
    return scope[FIELDS] if FIELDS in scope else dict(scope["headers"])


def count_of(name: bytes, fields: Mapping[bytes, bytes], headers: Sequence[Header]) -> int:
    """How many times a header occurs among these; `fields` has them by name."""
    if len(fields) == len(headers) or name not in fields:
        # Most requests have no header twice.
        return int(name in fields)
    return sum(known == name for known, _ in headers)


#: Takes the reply to a request, or the error in place of it.
Then = Callable[[Reply | BaseException], None]


async def awaited(begin: Callable[[Request, bytes, Then], None], request: Request, body: bytes) -> Reply:
    """The reply that a handler without a task gives; raises its error."""
    reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
    begin(request, body, partial(set_result, reply))
    return await reply


#: The path of a grab, without any encoding: most requests have it.
_grab_path = re.compile(rb"/v1/offers/([A-Za-z0-9._:-]{1,64})/grabs").fullmatch


def offer_of_grab(raw_path: bytes) -> str | None:
    """The offer in the path of a grab; None for any other path, and for ids that `segments_of` refuses."""
    found = _grab_path(raw_path)
    offer = found[1].decode() if found else None
    return None if offer in NOT_IN_PATHS else offer


def segments_of(raw_path: bytes) -> list[str]:
    """The decoded parts of a path. Raises Problem when a part is not an id: no route has such a part, and a
    proxy might read it in another way.
    """
    parts = raw_path.split(b"/")
    if parts[0] or not 1 < len(parts) <= 16:
        raise Problem("not_found", "A path starts with / and has at most 15 parts.")
    decoded = []
    for part in parts[1:]:
        text = (unquote_to_bytes(part) if b"%" in part else part).decode("latin-1")
        if text and not is_id(text):
            raise invalid(f"path: each part {_ID_WORDS}, got {quoted(text)}", "path")
        if text in NOT_IN_PATHS:
            raise invalid(f"path: clients and proxies change a path with {text}", "path")
        decoded.append(text)
    return decoded


def query_of(request: Request, known: Sequence[str]) -> dict[str, str]:
    """The parameters of the query; raises Problem for one that is unknown, or given twice."""
    raw: bytes = request.scope["query_string"]
    if not raw:
        return {}
    if len(raw) <= PARSED_BYTES_MAX:
        # A crowd sends the same. The caller gets its own dict.
        return dict(_parsed(raw, tuple(known)))
    return _parameters_of(raw, known)


def _parameters_of(raw: bytes, known: Sequence[str]) -> dict[str, str]:
    if len(raw) > QUERY_BYTES_MAX:
        raise Problem("uri_too_long", f"A query has at most {QUERY_BYTES_MAX} bytes, this has {len(raw)}.")
    try:
        pairs = parse_qsl(
            raw.decode("ascii"), keep_blank_values=True, strict_parsing=True, errors="strict",
            max_num_fields=QUERY_PARAMETERS_MAX,
        )  # fmt: skip
    except ValueError as error:
        raise invalid(f"query: cannot be read: {error}", "query") from None
    parameters: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            words = f"this path has {', '.join(known)}" if known else "this path has no parameters"
            raise invalid(f"query: {quoted(name)} is not a parameter; {words}", "query")
        if name in parameters:
            raise invalid(f"{name}: the parameter occurs twice; keep one")
        parameters[name] = value
    return parameters


#: The same for queries and parameters that came a moment ago. What is refused is not remembered.
_parsed = lru_cache(PARSED_MAX)(_parameters_of)


def chosen(parameters: Mapping[str, str], name: str, choices: Sequence[str], default: str) -> str:
    """The value of a parameter that has some choices; raises Problem for another value."""
    value = parameters.get(name, default)
    if value not in choices:
        raise invalid(f"{name}: must be {' or '.join(choices)}, got {quoted(value)}")
    return value


def promise_of(request: Request) -> Promise:
    """`journaled`, or `decided` when the query or the header Prefer asks for it. The query wins."""
    if not request.scope["query_string"] and not request.has(b"prefer"):
        return "journaled"
    parameters = query_of(request, ("promise",))
    if "promise" not in parameters:
        return "decided" if prefers_async(request) else "journaled"
    is_decided = chosen(parameters, "promise", ("journaled", "decided"), "journaled") == "decided"
    return "decided" if is_decided else "journaled"


def prefers_async(request: Request) -> bool:
    """Whether the header Prefer has respond-async. Other preferences are ignored, as RFC 7240 requires."""
    if not request.has(b"prefer"):
        return False
    for name, value in request.scope["headers"]:
        if name == b"prefer" and any(
            word.strip().lower() == b"respond-async" for word in value.replace(b";", b",").split(b",")
        ):
            return True
    return False


async def body_of(request: Request, bytes_max: int) -> bytes:
    """The body; raises Problem before it is read when its headers do not say JSON, or it is above the
    bound.
    """
    check_body_headers(request, bytes_max)
    event = await request.receive()
    pieces = [event.get("body", b"")]
    size = len(pieces[0])
    while event["type"] == "http.request" and event.get("more_body") and size <= bytes_max:
        event = await request.receive()
        pieces.append(event.get("body", b""))
        size += len(pieces[-1])
    if event["type"] != "http.request":
        raise Gone
    if size > bytes_max:
        raise too_large(bytes_max)
    if size and request.header(b"content-type") is None:
        raise _not_json(None)
    return b"".join(pieces)


class Gone(Exception):
    """The client has closed the connection before its request was complete: no answer is needed."""


def is_json(kind: bytes) -> bool:
    """Whether a Content-Type is that of JSON in UTF-8."""
    return kind == JSON or _is_json_type(kind) is not None


def check_body_headers(request: Request, bytes_max: int) -> None:
    """Raises Problem when by its headers the body is too large, or not JSON."""
    length = request.header(b"content-length")
    if length is not None and int(length) > bytes_max:
        raise too_large(bytes_max)
    kind = request.header(b"content-type")
    if kind is not None and not is_json(kind):
        raise _not_json(kind)
    coding = request.header(b"content-encoding")
    if coding is not None and coding.lower() != b"identity":
        raise Problem("unsupported_media_type", "Send the body without Content-Encoding.", "Content-Encoding")


def check_body_names(body: bytes) -> None:
    """Raises Problem when a body names a field twice."""
    try:
        check_outer_names_once(body)
    except Invalid as error:
        twice = _named_twice(str(error))
        raise invalid(str(error), twice[1] if twice else "body") from None


def too_large(bytes_max: int) -> Problem:
    """The problem of a body above its bound."""
    return Problem("content_too_large", f"A body has at most {bytes_max} bytes on this path.")


def _not_json(kind: bytes | None) -> Problem:
    got = "none" if kind is None else quoted(kind.decode("latin-1"))
    return Problem(
        "unsupported_media_type",
        f"The Content-Type of a body must be application/json (UTF-8), got {got}.",
        "Content-Type",
    )


# -- ids -----------------------------------------------------------------------------------------------------


def new_id() -> str:
    """A UUID of version 7 (RFC 9562): 48 bits of time in ms, 74 random bits."""
    number = time.time_ns() // 1_000_000 << 80 | secrets.randbits(80)
    number = number & ~(0xF << 76 | 0x3 << 62) | 7 << 76 | 2 << 62
    text = f"{number:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def key_of(request: Request) -> str | None:
    """The id of the command: the header Idempotency-Key, with or without the quotes of its draft standard;
    None without it.
    """
    raw = request.header(b"idempotency-key")
    if raw is None:
        return None
    text = raw.decode("latin-1")
    if len(text) > 1 and text[0] == text[-1] == '"':
        text = text[1:-1]
    if not is_id(text):
        raise invalid(f"{IDEMPOTENCY_KEY}: {_ID_WORDS}, got {quoted(text)}", IDEMPOTENCY_KEY)
    _check_in_paths(text, IDEMPOTENCY_KEY)
    return text


def _check_in_paths(id_: str, field: str) -> None:
    """Raises Problem for an id of a grab, user or offer that no path can name."""
    if id_ in NOT_IN_PATHS:
        raise invalid(f"{field}: clients and proxies change a path with {id_}; choose another id", field)


def required_key_of(request: Request) -> str:
    """The id of the command; raises Problem without one: after a lost answer, only the same id can show
    whether the command was executed.
    """
    key = key_of(request)
    if key is None:
        raise invalid(
            f"{IDEMPOTENCY_KEY}: is required; it is the id of the command, and a repeat with the same one "
            "gets the first answer",
            IDEMPOTENCY_KEY,
        )
    return key


# -- commands ------------------------------------------------------------------------------------------------


def command_of(type_: str, given: Mapping[str, str], body: bytes) -> AnyCommand:
    """The command of a body and of the fields in the path and the headers; raises Problem that names the
    field. The fields that are given must be ids, so they need no escaping.
    """
    head = f'{{"type":"{type_}"' + "".join(f',"{name}":"{value}"' for name, value in given.items())
    rest = (body or b"{}").lstrip(_JSON_SPACE)
    if rest[:1] != b"{":
        raise invalid("body: must be a JSON object", "body")
    rest = rest[1:].lstrip(_JSON_SPACE)
    raw = head.encode() + (rest if rest[:1] == b"}" else b"," + rest)
    try:
        return decode_command(raw)
    except Undecodable as error:
        twice = _named_twice(error.reason)
        if twice and twice[1] in {"type", *given}:
            raise invalid(f"{twice[1]}: must not be in the body, {_GIVEN[twice[1]]}") from None
        raise invalid(error.reason) from None


#: The body of most grabs: a user, who needs no decoding, and nothing else.
_only_user = re.compile(
    rb'[ \t\r\n]*\{[ \t\r\n]*"user"[ \t\r\n]*:[ \t\r\n]*"([A-Za-z0-9._:-]{1,64})"[ \t\r\n]*\}[ \t\r\n]*'
).fullmatch


def plain_grab_of(request: Request, body: bytes) -> PlainBatch | None:
    """The grab of a service whose body has a user and nothing else, and with which nothing is wrong, as of
    most; None for any other.
    """
    found = _only_user(body)
    if found is None or request.user is not None:
        return None
    key = (request.header(b"idempotency-key") or b"").decode("latin-1")
    grab = Grab(id=key, offer=request.path["offer"], user=found[1].decode())
    return None if key in NOT_IN_PATHS or grab.user in NOT_IN_PATHS else plain_batch((grab,))


def grab_of(request: Request, body: bytes) -> Grab:
    """The grab of a request."""
    given = {"id": required_key_of(request), "offer": request.path["offer"]}
    command = command_of("grab", _with_user(request, given, body), body)
    assert isinstance(command, Grab)
    if command.basket is not None:
        raise invalid("basket: POST /v1/baskets takes baskets")
    _check_in_paths(command.user, "user")
    _check_own(request, command)
    return command


def settling_of(request: Request, type_: str, body: bytes) -> AnyCommand:
    """A command about one grab. It always names the user, so guessing an id does not settle the grab of
    another user.
    """
    key = required_key_of(request)
    if request.user is not None:
        key = id_of_end_user(request.user, key)
    given = {"id": key, "offer": request.path["offer"], "grab": request.path["grab"]}
    command = command_of(type_, _with_user(request, given, body), body)
    if isinstance(command, GrabCommand):
        if command.user is None:
            raise invalid("user: is required; it must be the user of the grab")
        check_user(request, command.user)
    return command


class _Operating(msgspec.Struct):
    operator: Any = None
    approved_by: Any = msgspec.UNSET


_decode_operating = msgspec.json.Decoder(_Operating).decode


def operating_of(request: Request, type_: str, body: bytes) -> AnyCommand:
    """The command of an operator about the offer of the path."""
    given = {"id": required_key_of(request), "offer": request.path["offer"]}
    return _operated(request, type_, given, body)


def _operated(request: Request, type_: str, given: Mapping[str, str], body: bytes) -> AnyCommand:
    """The command of an operator. With authentication, the operator is the API key, unless the body names
    one: the event records the operator.
    """
    command = command_of(type_, _with_approval(request, type_, given, body), body)
    if request.service is not None and isinstance(command, OfferCommand) and command.operator is None:
        return msgspec.structs.replace(command, operator=request.service)
    return command


def _with_approval(request: Request, type_: str, given: Mapping[str, str], body: bytes) -> Mapping[str, str]:
    """The fields that are given, and who has approved a correction. A list and a correction are always those
    of the API key, which has approved it, too. Raises Problem when the body names another one.
    """
    if type_ not in _OPERATOR_COMMANDS:
        return given
    try:
        named = _decode_operating(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return given  # the body is refused as a whole, in words
    lacks_approval = type_ == "adjust" and named.approved_by is msgspec.UNSET
    if request.service is None:
        if lacks_approval:
            raise invalid("approved_by: is required; no API key says who approved the correction")
        return given
    if named.operator is not None:
        _check_of_the_key("operator", named.operator, request.service)
    if lacks_approval:
        return {**given, "approved_by": request.service}
    if type_ == "adjust":
        _check_of_the_key("approved_by", named.approved_by, request.service)
    return given


def _check_of_the_key(field: str, value: Any, service: str) -> None:
    if value != service:
        got = "null" if value is None else quoted(str(value))
        raise invalid(f"{field}: must be {service}, the name of the API key, or absent, got {got}", field)


# -- end users -----------------------------------------------------------------------------------------------


class _UserField(msgspec.Struct):
    user: Any = msgspec.UNSET


_decode_named = msgspec.json.Decoder(_UserField).decode


def _with_user(request: Request, given: Mapping[str, str], body: bytes) -> Mapping[str, str]:
    """The fields that are given; for an end user whose body names no user, with this user."""
    if request.user is None:
        return given
    try:
        named = _decode_named(body or b"{}").user
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return given  # the body is refused as a whole, in words
    return {**given, "user": request.user} if named is msgspec.UNSET else given


def check_user(request: Request, user: str) -> None:
    """Raises Problem when an end user names another one."""
    if request.user is not None and user != request.user:
        raise Problem(
            "other_user",
            f"user: must be {request.user}, the user of the token, got {quoted(user)}",
            "user",
        )


def _check_own(request: Request, grab: Grab) -> None:
    """Raises Problem when an end user grabs for another one, or states attributes: limits count by them, so
    only a service may state them.
    """
    check_user(request, grab.user)
    if request.user is not None and grab.attributes:
        raise Problem(
            "insufficient_scope",
            "attributes: limits count by them, so only a service may state them, with the scope grab",
            "attributes",
        )


class _OfferField(msgspec.Struct):
    offer: Any = msgspec.UNSET


_decode_addressed = msgspec.json.Decoder(_OfferField).decode


def opening_of(request: Request, body: bytes) -> AnyCommand:
    """The command that opens an offer. Without an id in the body, the offer's id is the Idempotency-Key; and
    without that too, a new UUID. So a repeat with the same key opens the same offer.
    """
    try:
        offer = _decode_addressed(body or b"{}").offer
    except RecursionError:
        raise invalid("body: nested too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(str(error)) from None
    key = key_of(request) or (offer if isinstance(offer, str) and is_id(offer) else new_id())
    given = {"id": key} if offer is not msgspec.UNSET else {"id": key, "offer": key}
    command = _operated(request, "open", given, body)
    _check_in_paths(command.offer, "offer")
    return command


class _Basket(msgspec.Struct, forbid_unknown_fields=True):
    grabs: list[msgspec.Raw]


_decode_basket = msgspec.json.Decoder(_Basket).decode


def basket_of(request: Request, body: bytes) -> list[Grab]:
    """The grabs of a basket, in the order of the request. The Idempotency-Key names it."""
    key = required_key_of(request)
    if len(key) > BASKET_KEY_LENGTH_MAX:
        raise invalid(
            f"{IDEMPOTENCY_KEY}: has at most {BASKET_KEY_LENGTH_MAX} characters here, since the ids of the "
            "grabs are made from it",
            IDEMPOTENCY_KEY,
        )
    try:
        raws = _decode_basket(body).grabs
    except RecursionError:
        raise invalid("body: nested too deep") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise invalid(str(error)) from None
    if body.count(b'"grabs"') > 1 or b"\\" in body:
        check_body_names(body)
    if not 1 <= len(raws) <= BASKET_GRABS_MAX:
        raise invalid(f"grabs: a basket has 1 to {BASKET_GRABS_MAX} grabs, got {len(raws)}")
    grabs: list[Grab] = []
    for number, raw in enumerate(raws, 1):
        try:
            given = {"id": key, "basket": key}
            grab = command_of("grab", _with_user(request, given, bytes(raw)), bytes(raw))
            assert isinstance(grab, Grab)
            _check_in_paths(grab.user, "user")
            _check_own(request, grab)
        except Problem as problem:
            raise Problem(
                problem.name,
                f"grab {number}: {problem.detail}",
                f"grabs[{number - 1}].{problem.field or ''}".rstrip("."),
            ) from None
        grabs.append(grab)
    return named_in_basket(grabs, key)
