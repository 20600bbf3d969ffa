"""The ASGI application, and the composition root of the gateway: admission, checks of paths, routes, and
answers to all errors.

Grabs and receipts, the bulk of a crowd's requests, reach their handler without the router and, if their
sender is known at once, without a task (`answer_soon`). What needs nothing but memory is answered at once
(`answer_now`), without a task, too: a document that is kept, and a grab for which there is no room.
"""

import asyncio
import keyword
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, TypeVar, cast

import msgspec
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from grabstream.gateway import requests
from grabstream.gateway.addresses import Network, address_of
from grabstream.gateway.admission import Admission
from grabstream.gateway.bounds import (
    COMMAND_SECONDS_TARGET,
    HOSTS_KEPT_MAX,
    JOINED_CALLER_MAX,
    JOINED_MAX,
    QUESTIONS_CALLER_MAX,
    QUESTIONS_MAX,
    QUESTIONS_USER_MAX,
    RETRY_SOON_SECONDS,
)
from grabstream.gateway.caching import tag_of
from grabstream.gateway.changing_webhooks import ChangesOfWebhooks
from grabstream.gateway.command_bound import Pressure
from grabstream.gateway.deciding import CommandHandlers
from grabstream.gateway.event_streams import EventStreams, Streamed
from grabstream.gateway.measures import NO_OPERATION, GatewayMeasures
from grabstream.gateway.operations import OPERATIONS, PAGES, Operation
from grabstream.gateway.operator_questions import Watching
from grabstream.gateway.origins import Origins
from grabstream.gateway.pages import Pages
from grabstream.gateway.problems import (
    JSON,
    NOT_KEPT,
    SECURE_HEADERS,
    Problem,
    Reply,
    explanation,
    retry_soon,
)
from grabstream.gateway.protocol import ABORT, REPLY, STREAMS, WAITED
from grabstream.gateway.questions import QueryHandlers, tagged_reply
from grabstream.gateway.receipts import Receipts
from grabstream.gateway.requests import (
    Gone,
    Request,
    body_of,
    count_of,
    fields_of,
    is_json,
    offer_of_grab,
    query_of,
    segments_of,
)
from grabstream.gateway.slots import Room, Slots

log = logging.getLogger(__name__)

Answer = Reply | Streamed
AnswerT = TypeVar("AnswerT", bound=Reply | Streamed)
Handler = Callable[[Request, bytes], Awaitable[Answer]]
_GRABS: Final = "/v1/offers/{offer}/grabs"
_RECEIPTS: Final = b"/v1/payments/callback"
_HEALTH_PATHS: Final = frozenset({b"/health", b"/health/live", b"/health/ready"})
#: A schema of a version changes only where a release adds a field to it.
_KEEP_SCHEMA: Final = (b"cache-control", b"public, max-age=3600")
#: Headers of requests whose body does not simply follow, or is not simply JSON.
_NOT_WHOLE: Final = frozenset({b"expect", b"transfer-encoding", b"content-encoding"})


class Bounds(NamedTuple):
    """Bounds of a gateway that are settings: concurrent requests, and connections."""

    requests_max: int = 1_000
    connections_max: int = 10_000


class Application:
    """The ASGI application. `hosts` are the names that a request may be for (absent: any name): a gateway
    without authentication serves only this machine, also when a page makes a browser send its requests under
    another name (DNS rebinding). Without `admission`, callers are not authenticated; without `origins`, pages
    of other origins cannot read answers. `is_ready` returns whether Redis answers. The page of an offer pays
    at `pay_url`. `schemas` makes the JSON Schemas of events, by name (`grab.granted.v1`). `proxies` are the
    networks of proxies that are believed when they name the address of their client.
    """

    def __init__(
        self,
        commands: CommandHandlers,
        questions: QueryHandlers,
        receipts: Receipts,
        streams: EventStreams,
        watching: Watching,
        changes: ChangesOfWebhooks,
        document: Callable[[], Mapping[str, Any]],
        bounds: Bounds,
        hosts: frozenset[str] | None = None,
        admission: Admission | None = None,
        origins: Origins | None = None,
        is_ready: Callable[[], Awaitable[bool]] | None = None,
        pay_url: str | None = None,
        schemas: Callable[[], Mapping[str, Mapping[str, Any]]] = dict,
        proxies: Sequence[Network] = (),
    ) -> None:
        self._proxies = proxies
        self._is_ready = is_ready
        self.measures = GatewayMeasures()
        self.in_work = 0
        self._questions_in_work = Slots(QUESTIONS_MAX, "queries being answered")
        self._joined = Slots(JOINED_MAX, "queries that wait for an answer being made")
        self._pressure = Pressure(bounds.requests_max)
        self._bounds = bounds
        self._hosts = hosts
        self._admission = admission
        self._origins = origins
        self._document = document
        self._text = b""
        self._make_schemas = schemas
        self._schemas: dict[str, bytes] = {}
        handlers_by_kind = (
            ("command", commands), ("read", questions), ("watch", watching), ("receipt", receipts),
            ("stream", streams), ("change", changes), ("page", Pages(admission is not None, pay_url)),
        )  # fmt: skip
        operations = (*OPERATIONS, *PAGES)
        self._questions = questions
        #: The refusal for lack of room, which is the same for all.
        self._full = _no_room().reply()
        streams.shed = self.measures.shed
        self.streams = streams
        self._handlers: dict[str, Handler] = {
            "openapi": self._openapi,
            "problem": self._problem,
            "event_schema": self._event_schema,
            "health": self._health,
            "health_live": self._health,
            "health_ready": self._ready,
            **{
                operation.name: getattr(handlers, _method_of(operation))
                for kind, handlers in handlers_by_kind
                for operation in operations
                if operation.kind == kind
            },
        }
        by_path = _by_path(operations)
        self._grab = by_path[_GRABS]["POST"]
        self._receipt = by_path[_RECEIPTS.decode()]["POST"]
        #: The handlers that need no task.
        self._soon = {"grab": commands.grab_soon, "payment_callback": receipts.payment_callback_soon}
        for name in (NO_OPERATION, *(operation.name for operation in operations)):
            _ = self.measures.operations[name]
        self._router = Router(
            [Route(path, _Route(self, methods)) for path, methods in by_path.items()],
            redirect_slashes=False,
            default=_nowhere,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; every error becomes a problem."""
        reply: Answer
        began = _began(scope)
        try:
            reply = await self._reply(scope, receive)
        except Problem as problem:
            reply = problem.reply()
        except Gone:
            return
        except Exception as error:
            reply = _internal_error(scope, error)
        reply = self._for_caches_and_pages(scope, reply)
        self._count(scope.get("grabstream.operation", NO_OPERATION), reply, began)
        if isinstance(reply, Streamed):
            await send_stream(scope, send, reply)
        else:
            await send_reply(scope, send, reply)

    def answer_now(self, scope: Scope) -> Reply | None:
        """The reply to a request whose head has come, if it needs nothing but memory; None for any other,
        which `__call__` answers. It refuses as `__call__` does.
        """
        is_full = self.in_work >= self._bounds.requests_max
        if scope["method"] == "POST":
            is_late = scope.get(WAITED, 0.0) > COMMAND_SECONDS_TARGET
            if not (is_full or is_late or self._pressure.is_full):
                return None
            if offer_of_grab(scope["raw_path"]) is None or not self._is_host(scope):
                return None
            name, plain = NO_OPERATION, self._refused()
        elif scope["method"] == "GET" and self._admission is None and not is_full:
            found = self._questions.kept(scope)
            if found is None or not self._is_host(scope):
                return None
            name, plain = found
        else:
            return None
        reply = self._for_caches_and_pages(scope, plain)
        self._count(name, reply, _began(scope))
        return reply

    def takes_whole(self, scope: Scope) -> bool:
        """Whether `answer_soon` answers a request whose head has come, as soon as its body has: a grab or a
        receipt, by its path, with a body that is JSON and within its bound by its headers, each of which is
        there once, of a caller who is known at once.
        """
        if scope["method"] != "POST":
            return False
        raw_path = scope["raw_path"]
        offer = offer_of_grab(raw_path)
        if offer is not None:
            operation, path = self._grab, {"offer": offer}
        elif raw_path == _RECEIPTS:
            operation, path = self._receipt, {}
        else:
            return False
        fields = fields_of(scope)
        if len(fields) < len(scope["headers"]) or not _NOT_WHOLE.isdisjoint(fields):
            return False
        if not 0 < int(fields.get(b"content-length", 0)) <= operation.body_bytes_max:
            return False
        if not is_json(fields.get(b"content-type", b"")):
            return False
        request = Request(scope, _received, path)
        if self._admission is not None and not self._admission.admits_now(operation, request):
            return False
        scope["grabstream.whole"] = operation, request
        return True

    def answer_soon(self, scope: Scope, body: bytes, respond: Callable[[Reply], None]) -> None:
        """Answers a request that `takes_whole` has taken: calls `respond` with the reply, now or later. It
        refuses as `__call__` does.
        """
        began = _began(scope)
        # The request has its scope: left there, only the collector would free them.
        operation, request = scope.pop("grabstream.whole")
        is_command = operation.kind == "command"
        is_answered = False

        def then(found: Reply | BaseException) -> None:
            nonlocal is_answered
            if is_answered:
                # Counted once, and there is one response: what fails after it can only be logged.
                log.error("%s: a second answer: %r", operation.name, found)
                return
            is_answered = True
            self.in_work -= 1
            if is_command:
                self._pressure.end(command_began)
            respond(self._finished(operation, scope, began, found))

        refused: Reply | Problem | None = None
        if self.in_work >= self._bounds.requests_max:
            refused = self._refused()
        elif not self._is_host(scope):
            refused = self._misdirected()
        elif is_command and self._pressure.is_full:
            refused = self._refused()
        if refused is not None:
            respond(self._finished(operation, scope, began, refused))
            return
        self.in_work += 1
        command_began = self._pressure.begin() if is_command else 0.0
        try:
            self._soon[operation.name](request, body, then)
        except Exception as error:
            then(error)

    def _finished(
        self, operation: Operation, scope: Scope, began: float, found: Reply | BaseException
    ) -> Reply:
        """The reply to a request that is answered without a task, which is counted."""
        if isinstance(found, Problem):
            found = found.reply()
        elif not isinstance(found, Reply):
            found = _internal_error(scope, found)
        reply = self._for_caches_and_pages(scope, found)
        self._count(operation.name, reply, began)
        return reply

    def _count(self, operation: str, reply: Answer, began: float) -> None:
        operation_measures = self.measures.operations[operation]
        operation_measures.statuses[reply.status] += 1
        operation_measures.seconds.observe(time.perf_counter() - began)

    def _refused(self) -> Reply:
        """The refusal for lack of room. It is made once: under overload, most requests get it."""
        self._count_no_room()
        return self._full

    def _count_no_room(self) -> None:
        is_full = self.in_work >= self._bounds.requests_max
        self.measures.shed["requests" if is_full else "commands"] += 1

    @property
    def commands_in_work(self) -> int:
        """Commands that are not answered."""
        return self._pressure.in_work

    @property
    def commands_bound(self) -> float:
        """How many commands may be in progress now."""
        return self._pressure.bound

    def _for_caches_and_pages(self, scope: Scope, reply: AnswerT) -> AnswerT:
        """The reply with the headers for caches and for browsers (which pages may read it)."""
        if self._admission is None and self._origins is None:
            return reply
        headers = reply.headers
        if self._admission is not None:
            headers = (*headers, (b"vary", b"Authorization"))
        if self._origins is not None:
            headers = (*headers, *self._origins.headers(scope, reply))
        return cast(AnswerT, reply._replace(headers=headers))

    async def _reply(self, scope: Scope, receive: Receive) -> Answer:
        if self.in_work >= self._bounds.requests_max:
            raise self._no_room()
        if not self._is_host(scope):
            raise self._misdirected()
        if scope["method"] == "POST" and (offer := offer_of_grab(scope["raw_path"])) is not None:
            if self._pressure.is_full:
                raise self._no_room()
            return await self.serve(self._grab, Request(scope, receive, {"offer": offer}))
        segments = segments_of(scope["raw_path"])
        scope["path"] = "/" + "/".join(segments)
        found: list[Answer] = []
        scope["grabstream.found"] = found
        await self._router(scope, receive, _unused)
        return found[0]

    async def serve(self, operation: Operation, request: Request) -> Answer:
        """Reads the body, and has the handler of an operation answer. A request counts as in progress once it
        is complete, so slow clients take no room from others. Its sender is checked before its body is read.
        """
        request.scope["grabstream.operation"] = operation.name
        if self._admission is not None:
            await self._admission.admit(operation, request)
        body = b""
        if operation.body_bytes_max:
            body = await body_of(request, operation.body_bytes_max)
            if self.in_work >= self._bounds.requests_max:
                raise self._no_room()
        if operation.kind == "command":
            return await self._serve_command(operation, request, body)
        if operation.kind == "stream":
            # It may wait for seconds before it starts. So it does not count as a command: streams have their
            # own bound.
            return await self._handlers[operation.name](request, body)
        with ExitStack() as stack:
            if operation.kind in ("read", "watch", "change"):
                request.caller = self._caller_of(request)
                request.room = Room(partial(self._ask, request, stack), partial(self._join, request, stack))
                request.room.ask()
            else:
                self._enter(stack)
            return await self._handlers[operation.name](request, body)

    def _take_room(self, request: Request, stack: ExitStack, slots: Slots, caller_max: int) -> None:
        """Takes a slot until the end of `stack`, in place of what that holds; raises Problem."""
        stack.close()
        questions_max = caller_max if request.user is None else QUESTIONS_USER_MAX
        try:
            stack.enter_context(slots.taken(request.caller, questions_max))
        except Problem:
            self.measures.shed["questions"] += 1
            raise

    def _ask(self, request: Request, stack: ExitStack) -> None:
        """A question asks PostgreSQL, perhaps after it has waited for another one."""
        self._take_room(request, stack, self._questions_in_work, QUESTIONS_CALLER_MAX)
        self._enter(stack)

    def _join(self, request: Request, stack: ExitStack) -> None:
        """A question only waits: it gives its room back, for room to wait."""
        self._take_room(request, stack, self._joined, JOINED_CALLER_MAX)

    def _enter(self, stack: ExitStack) -> None:
        """Counts a request as in progress until the end of `stack`."""
        self.in_work += 1
        stack.callback(self._leave)

    def _leave(self) -> None:
        self.in_work -= 1

    def _caller_of(self, request: Request) -> str:
        """The caller, in words: an end user, an API key or, without authentication, an address."""
        if request.user is not None:
            return request.user
        if request.service is not None:
            return f"The API key {request.service}"
        return f"The address {address_of(request.scope, self._proxies)}"

    async def _serve_command(self, operation: Operation, request: Request, body: bytes) -> Answer:
        """Has a command answered, unless those in progress already take too long."""
        if self._pressure.is_full:
            raise self._no_room()
        began = self._pressure.begin()
        self.in_work += 1
        try:
            return await self._handlers[operation.name](request, body)
        finally:
            self.in_work -= 1
            self._pressure.end(began)

    def _no_room(self) -> Problem:
        self._count_no_room()
        return _no_room()

    def _is_host(self, scope: Scope) -> bool:
        """Whether a request is for a name that this gateway has. Load balancers ask for its health by its
        address, or by HTTP/1.0 without a name; the answer tells a page in a browser nothing.
        """
        if self._hosts is None or scope["raw_path"] in _HEALTH_PATHS:
            return True
        fields = fields_of(scope)
        return count_of(b"host", fields, scope["headers"]) == 1 and _name_of(fields[b"host"]) in self._hosts

    def _misdirected(self) -> Problem:
        return Problem(
            "misdirected_request",
            f"The header Host must be {' or '.join(sorted(self._hosts or ()))}: the gateway serves no other "
            "name.",
            "Host",
        )

    # -- documents -------------------------------------------------------------------------------------------

    async def _openapi(self, request: Request, body: bytes) -> Reply:
        """GET /openapi.json"""
        query_of(request, ())
        self._text = self._text or msgspec.json.encode(self._document())
        return document_reply(self._text)

    async def _problem(self, request: Request, body: bytes) -> Reply:
        """GET /problems/{problem}"""
        query_of(request, ())
        explained = explanation(request.path["problem"])
        if explained is None:
            raise Problem("not_found", f"Unknown problem type {request.path['problem']}.")
        return document_reply(msgspec.json.encode(explained))

    async def _event_schema(self, request: Request, body: bytes) -> Reply:
        """GET /v1/schemas/events/{event}"""
        query_of(request, ())
        if not self._schemas:
            # Outside the event loop: commands do not wait for it.
            made = await asyncio.to_thread(self._make_schemas)
            self._schemas = {name: msgspec.json.encode(schema) for name, schema in made.items()}
        text = self._schemas.get(request.path["event"])
        if text is None:
            raise Problem("not_found", f"This release has no schema for the event {request.path['event']}.")
        return tagged_reply(request, text, tag_of(text), _KEEP_SCHEMA)

    async def _health(self, request: Request, body: bytes) -> Reply:
        """GET /health, GET /health/live"""
        query_of(request, ())
        return document_reply(b'{"status":"ok"}')

    async def _ready(self, request: Request, body: bytes) -> Reply:
        """GET /health/ready"""
        query_of(request, ())
        if self._is_ready is not None and not await self._is_ready():
            raise retry_soon("unavailable", "Redis does not answer this gateway, so it cannot decide.")
        return document_reply(b'{"status":"ok"}')


class _Route:
    """All methods of one path, as an ASGI application for the router; the reply goes into the scope."""

    def __init__(self, application: Application, methods: Mapping[str, Operation]) -> None:
        self._application = application
        self._methods = {**methods, **({"HEAD": methods["GET"]} if "GET" in methods else {})}
        self._allow = b", ".join(method.encode() for method in sorted([*self._methods, "OPTIONS"]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        operation = self._methods.get(method)
        if operation is not None:
            request = Request(scope, receive, scope["path_params"])
            scope["grabstream.found"].append(await self._application.serve(operation, request))
        elif method == "OPTIONS":
            scope["grabstream.found"].append(Reply(204, b"", ((b"allow", self._allow), *SECURE_HEADERS)))
        else:
            raise Problem(
                "method_not_allowed",
                f"This path supports the methods {self._allow.decode()}.",
                headers=[(b"allow", self._allow)],
            )


def _by_path(operations: Iterable[Operation]) -> dict[str, dict[str, Operation]]:
    """The operations of each path, by their method."""
    found: dict[str, dict[str, Operation]] = {}
    for operation in operations:
        found.setdefault(operation.path, {})[operation.method] = operation
    return found


def _no_room() -> Problem:
    return retry_soon(
        "busy",
        "The gateway is processing as many requests as it can now. This request was not processed: send it "
        f"again after {RETRY_SOON_SECONDS} s, with the same Idempotency-Key.",
    )


def _method_of(operation: Operation) -> str:
    """The name of the method that handles an operation; a keyword cannot name one."""
    return f"{operation.name}_" if keyword.iskeyword(operation.name) else operation.name


async def _nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    raise Problem("not_found", "No route matches this path. GET /openapi.json lists the routes.")


async def _received() -> Any:
    raise AssertionError("the body has been received")


async def _unused(message: Any) -> None:
    raise AssertionError("an endpoint sends nothing itself")


def document_reply(body: bytes) -> Reply:
    """A JSON document."""
    return Reply(200, body, ((b"content-type", JSON), NOT_KEPT, *SECURE_HEADERS))


async def send_reply(scope: Scope, send: Send, reply: Reply) -> None:
    """Sends a reply: in one piece where the server can, otherwise by ASGI."""
    at_once = scope.get(REPLY)
    if at_once is not None and at_once(reply):
        return
    headers = reply.headers
    if reply.status not in (204, 304):
        headers = (*headers, (b"content-length", b"%d" % len(reply.body)))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


async def send_stream(scope: Scope, send: Send, reply: Streamed) -> None:
    """Sends a stream by ASGI, until it ends."""
    scope[STREAMS] = True
    try:
        await send({"type": "http.response.start", "status": reply.status, "headers": reply.headers})
    finally:
        await reply.stream.send(send, scope[ABORT])


def _began(scope: Scope) -> float:
    """When the request arrived: before it waited for a turn of the event loop."""
    now = time.perf_counter()
    return now - scope[WAITED] if WAITED in scope else now


def _internal_error(scope: Scope, error: BaseException) -> Reply:
    """The answer to an unknown error: an id that the log has too, and nothing else."""
    instance = requests.new_id()
    log.error("request %s: %s %r", instance, scope["method"], scope["raw_path"][:200], exc_info=error)
    problem = Problem(
        "internal_error",
        f"The log of the gateway has the error as {instance}. If the request was a command, it is unknown "
        "whether it was decided: send the same request again with the same Idempotency-Key.",
    )
    return problem.reply()


@lru_cache(HOSTS_KEPT_MAX)
def _name_of(host: bytes) -> str:
    """The name in a header Host, without the port, and without the dot that may end a name of the DNS."""
    text = host.decode("latin-1").lower()
    name, _, port = text.rpartition(":")
    return (name if port.isascii() and port.isdigit() else text).removesuffix(".")
