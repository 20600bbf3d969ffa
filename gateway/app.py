"""The ASGI application, and the composition root of the gateway: admission, checks of paths, routes, and
answers to all that goes wrong.

Grabs, of which a crowd sends most, reach their handler without the router.
"""

import keyword
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from grabstream.gateway import requests
from grabstream.gateway.admission import Admission
from grabstream.gateway.asking import Questions
from grabstream.gateway.bounds import QUESTIONS_MAX, RETRY_SOON_SECONDS
from grabstream.gateway.deciding import Commands
from grabstream.gateway.operations import OPERATIONS, Operation
from grabstream.gateway.origins import Origins
from grabstream.gateway.problems import (
    JSON,
    NOT_KEPT,
    SECURE_HEADERS,
    Problem,
    Reply,
    explanation,
    retry_soon,
)
from grabstream.gateway.receipts import Receipts
from grabstream.gateway.requests import Gone, Request, body_of, offer_of_grab, query_of, segments_of

log = logging.getLogger(__name__)

Handler = Callable[[Request, bytes], Awaitable[Reply]]
_GRABS: Final = "/v1/offers/{offer}/grabs"


class Bounds(NamedTuple):
    """Bounds of a gateway that are settings: requests in work, and connections."""

    requests_max: int = 1_000
    connections_max: int = 10_000


class Application:
    """The ASGI application. `hosts` are the names that a request may be for (absent: any name): a gateway
    without authentication serves only this machine, also when a page makes a browser send its requests under
    another name (DNS rebinding). Without `admission`, callers are not asked who they are; without `origins`,
    pages of other origins cannot read answers.
    """

    def __init__(
        self,
        commands: Commands,
        questions: Questions,
        receipts: Receipts,
        document: Callable[[], Mapping[str, Any]],
        bounds: Bounds,
        hosts: frozenset[str] | None = None,
        admission: Admission | None = None,
        origins: Origins | None = None,
    ) -> None:
        self.in_work = 0
        self._questions_in_work = 0
        self._bounds = bounds
        self._hosts = hosts
        self._admission = admission
        self._origins = origins
        self._document = document
        self._text = b""
        self._handlers: dict[str, Handler] = {
            "openapi": self._openapi,
            "problem": self._problem,
            "health": self._health,
            **{
                operation.name: getattr(of_kind, _method_of(operation))
                for kind, of_kind in (("command", commands), ("read", questions), ("receipt", receipts))
                for operation in OPERATIONS
                if operation.kind == kind
            },
        }
        by_path: dict[str, dict[str, Operation]] = {}
        for operation in OPERATIONS:
            by_path.setdefault(operation.path, {})[operation.method] = operation
        self._grab = by_path[_GRABS]["POST"]
        self._router = Router(
            [Route(path, _Place(self, methods)) for path, methods in by_path.items()],
            redirect_slashes=False,
            default=_nowhere,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; whatever goes wrong becomes a problem."""
        try:
            reply = await self._reply(scope, receive)
        except Problem as problem:
            reply = problem.reply()
        except Gone:
            return
        except Exception:
            reply = _internal_error(scope)
        await send_reply(send, self._for_caches_and_pages(scope, reply))

    def _for_caches_and_pages(self, scope: Scope, reply: Reply) -> Reply:
        """The reply with the headers that tell a cache for whom it is, and a browser which pages may read
        it.
        """
        headers = reply.headers
        if self._admission is not None:
            headers = (*headers, (b"vary", b"Authorization"))
        if self._origins is not None:
            headers = (*headers, *self._origins.headers(scope, reply))
        return reply if headers is reply.headers else reply._replace(headers=headers)

    async def _reply(self, scope: Scope, receive: Receive) -> Reply:
        if self.in_work >= self._bounds.requests_max:
            raise self._no_room()
        if self._hosts is not None:
            _check_host(scope, self._hosts)
        if scope["method"] == "POST" and (offer := offer_of_grab(scope["raw_path"])) is not None:
            return await self.serve(self._grab, Request(scope, receive, {"offer": offer}))
        segments = segments_of(scope["raw_path"])
        scope["path"] = "/" + "/".join(segments)
        found: list[Reply] = []
        scope["grabstream.found"] = found
        await self._router(scope, receive, _unused)
        return found[0]

    async def serve(self, operation: Operation, request: Request) -> Reply:
        """Reads the body, and has the handler of an operation answer. A request counts as in work when it is
        complete, so slow clients take no room from others. Who sends it is checked before its body is read.
        """
        if self._admission is not None:
            await self._admission.admit(operation, request)
        body = b""
        if operation.body_bytes_max:
            body = await body_of(request, operation.body_bytes_max)
            if self.in_work >= self._bounds.requests_max:
                raise self._no_room()
        is_question = operation.kind == "read"
        if is_question and self._questions_in_work >= QUESTIONS_MAX:
            raise retry_soon(
                "busy",
                f"The gateway has {QUESTIONS_MAX} questions in work, as many as it takes; ask again after "
                f"{RETRY_SOON_SECONDS} s.",
            )
        self.in_work += 1
        self._questions_in_work += is_question
        try:
            return await self._handlers[operation.name](request, body)
        finally:
            self.in_work -= 1
            self._questions_in_work -= is_question

    def _no_room(self) -> Problem:
        return retry_soon(
            "busy",
            f"The gateway has {self._bounds.requests_max} requests in work, as many as it takes. This one "
            f"decided nothing: send the same again after {RETRY_SOON_SECONDS} s, with the same "
            "Idempotency-Key.",
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
            raise Problem("not_found", f"There is no type of problems {request.path['problem']}.")
        return document_reply(msgspec.json.encode(explained))

    async def _health(self, request: Request, body: bytes) -> Reply:
        """GET /health"""
        query_of(request, ())
        return document_reply(b'{"status":"ok"}')


class _Place:
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
                f"This path has the methods {self._allow.decode()}.",
                headers=[(b"allow", self._allow)],
            )


def _method_of(operation: Operation) -> str:
    """The name of the method that handles an operation; a keyword cannot name one."""
    return f"{operation.name}_" if keyword.iskeyword(operation.name) else operation.name


async def _nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    raise Problem("not_found", "No route has this path. GET /openapi.json lists the routes.")


async def _unused(message: Any) -> None:
    raise AssertionError("an endpoint sends nothing itself")


def document_reply(body: bytes, headers: Sequence[tuple[bytes, bytes]] = (NOT_KEPT,)) -> Reply:
    """A JSON document."""
    return Reply(200, body, ((b"content-type", JSON), *headers, *SECURE_HEADERS))


async def send_reply(send: Send, reply: Reply) -> None:
    """Sends a reply by ASGI."""
    headers = reply.headers
    if reply.status not in (204, 304):
        headers = (*headers, (b"content-length", b"%d" % len(reply.body)))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


def _internal_error(scope: Scope) -> Reply:
    """The answer to an unknown error: an id that the log has too, and nothing else."""
    instance = requests.new_id()
    log.exception("request %s: %s %r", instance, scope["method"], scope["raw_path"][:200])
    problem = Problem(
        "internal_error",
        f"The log of the gateway has the error as {instance}. If a command was sent, it may be carried out "
        "or not: send the same request again with the same Idempotency-Key.",
    )
    return problem.reply()


def _check_host(scope: Scope, hosts: frozenset[str]) -> None:
    """Raises Problem when a request is for a name that this gateway does not have."""
    found = [value for name, value in scope["headers"] if name == b"host"]
    name = found[0].decode("latin-1").lower() if len(found) == 1 else ""
    host = name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() else name
    if host not in hosts:
        raise Problem(
            "misdirected_request",
            f"The header Host must be {' or '.join(sorted(hosts))}: the gateway serves no other name.",
            "Host",
        )
