"""`Client` and `AsyncClient`: commands and questions over HTTP, through a gateway (docs/http.md).

Both repeat a request that got no answer, under the same id, until their time-out. A refusal is an answer, not
an error.
"""

import asyncio
import threading
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Sequence,
)
from types import TracebackType
from typing import Any, Final, Literal, Self, TypedDict, TypeVar, Unpack

import httpx2

from grabstream.client.commands import Commands, given
from grabstream.client.exchange import (
    ATTEMPT_SECONDS_MIN,
    USER_AGENT,
    Asking,
    Deciding,
    Exchange,
    ServedAnswer,
    TakingBasket,
    path_of,
)
from grabstream.client.following import (
    CONNECT_SECONDS_MAX,
    SILENT_SECONDS_MAX,
    Following,
    Positions,
    ServedEvent,
)
from grabstream.models.vocabulary.answers import Answer
from grabstream.models.vocabulary.commands import AnyCommand, Grab
from grabstream.models.vocabulary.documents import (
    BalancePage,
    Document,
    OfferDetail,
    OfferPage,
    Page,
    TakenPage,
    TransferPage,
    UserGrabPage,
)

TIMEOUT_SECONDS: Final = 30.0
CONNECTIONS_MAX: Final = 100
#: Errors of a request that was not sent.
_NOT_SENT: Final = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)

#: Of a stream: each piece, also the heartbeat, comes within this time.
_STREAM_TIMEOUT: Final = httpx2.Timeout(CONNECT_SECONDS_MAX, read=SILENT_SECONDS_MAX)

T = TypeVar("T")
D = TypeVar("D", bound=Document)
P = TypeVar("P", bound=Page)


class AfterAsked(TypedDict, total=False):
    """`after`: an answer of a command, whose event the read model must have."""

    after: Answer


class PageAsked(AfterAsked, total=False):
    """`limit` rows of a page; `cursor` is the `next` of the page before."""

    limit: int
    cursor: str


class OffersAsked(PageAsked, total=False):
    """Which offers, in which order; `visitor` is needed with the order `random`."""

    state: Literal["open", "paused", "closed", "retired"]
    kind: Literal["envelope", "coupon", "stock"]
    issuer: str
    order: Literal["newest", "random"]
    visitor: str


class UserGrabsAsked(PageAsked, total=False):
    """Of which offer the grabs of a user are; absent: of all."""

    offer: str


class TakenAsked(PageAsked, total=False):
    """In which order the grabs of an offer come."""

    order: Literal["place", "luckiest"]


def _options(url: str, key: str | None, connections_max: int, verify: Any) -> dict[str, Any]:
    limits = httpx2.Limits(max_connections=connections_max, max_keepalive_connections=connections_max)
    headers = {"User-Agent": USER_AGENT}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    return {"base_url": url, "headers": headers, "limits": limits, "verify": verify}


class Client(Commands[ServedAnswer, tuple[ServedAnswer, ...]]):
    """A client for threads. It may be used by several at once.

        with Client("http://127.0.0.1:18080") as client:
            answer = client.grab("dinner", "bob")

    `key` is sent as bearer token. Each call ends within `timeout_seconds`, with all its attempts: it raises
    OutcomeUnknown when a command may be decided or not, and RequestProblem when it was not decided, or when a
    question got no answer. `verify` is an `ssl.SSLContext`, where the gateway has a certificate of your own
    authority.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        connections_max: int = CONNECTIONS_MAX,
        verify: Any = True,
    ) -> None:
        self._http = httpx2.Client(**_options(url, key, connections_max, verify))
        self._ended = threading.Event()
        self._timeout_seconds = timeout_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Closes the connections. A stream of events ends with what comes next, at the latest after 45 s."""
        self._ended.set()
        self._http.close()

    def decide(self, command: AnyCommand) -> ServedAnswer:
        """Sends a command, and returns its answer, when that is journaled."""
        return self._run(Deciding(command))

    def take_basket(self, grabs: Sequence[Grab], id: str | None = None) -> tuple[ServedAnswer, ...]:
        """Sends the grabs of a basket. The gateway gives them the ids `<id>.1`, `<id>.2` …"""
        return self._run(TakingBasket(grabs, given(id)))

    def offers(self, **asked: Unpack[OffersAsked]) -> OfferPage:
        """A page of offers."""
        return self._run(Asking(path_of("offers"), OfferPage, asked))

    def offer(self, offer: str, **asked: Unpack[AfterAsked]) -> OfferDetail:
        """An offer with its terms."""
        return self._run(Asking(path_of("offers", offer), OfferDetail, asked))

    def offer_grabs(self, offer: str, **asked: Unpack[TakenAsked]) -> TakenPage:
        """Who got what."""
        return self._run(Asking(path_of("offers", offer, "grabs"), TakenPage, asked))

    def user_balances(self, user: str, **asked: Unpack[PageAsked]) -> BalancePage:
        """What a user has."""
        return self._run(Asking(path_of("users", user, "balances"), BalancePage, asked))

    def user_grabs(self, user: str, **asked: Unpack[UserGrabsAsked]) -> UserGrabPage:
        """The grabs of a user, the newest first."""
        return self._run(Asking(path_of("users", user, "grabs"), UserGrabPage, asked))

    def user_transfers(self, user: str, **asked: Unpack[PageAsked]) -> TransferPage:
        """The transfers of a user, the newest first."""
        return self._run(Asking(path_of("users", user, "transfers"), TransferPage, asked))

    def offer_events(
        self, offer: str, after: str | int | Answer | None = None
    ) -> Generator[ServedEvent, None, None]:
        """The events of an offer, as they come, after the position `after`: the `id` of an event, an answer,
        or 0 for all of them. It resumes by itself, with every event once and in order, until it is closed or
        the client is. Raises RequestProblem for what the gateway refuses, and StreamReset.
        """
        return self._follow(Following(path_of("offers", offer, "events"), after))

    def user_events(
        self, user: str, after: str | None = None, positions: Positions | None = None
    ) -> Generator[ServedEvent, None, None]:
        """The events that name a user, of all offers, as `offer_events` yields them. `positions` is called
        with where the grabs of the user stand on waiting lists, whenever that has changed.
        """
        return self._follow(Following(path_of("users", user, "events"), after, positions))

    def _follow(self, following: Following) -> Generator[ServedEvent, None, None]:
        while not self._ended.is_set():
            try:
                with self._http.stream(
                    "GET", following.request.path, params=following.query(), headers=following.headers(),
                    timeout=_STREAM_TIMEOUT,
                ) as reply:  # fmt: skip
                    if following.begins(reply.status_code, reply.headers):
                        for piece in reply.iter_bytes():
                            yield from following.events(piece)
                            if self._ended.is_set():
                                return
                        pause = following.after_end()
                    else:
                        pause = following.after_reply(reply.status_code, reply.headers, reply.read()) or 0.0
            except httpx2.TransportError as error:
                if error is following.raised:
                    raise
                pause = following.after_error(error, False)
            except RuntimeError as error:
                # That is how httpx2 says that the client was ended.
                if error is following.raised or not self._ended.is_set():
                    raise
                return
            self._ended.wait(pause)

    def pages(self, ask: Callable[..., P], *words: str, **asked: Any) -> Iterator[P]:
        """All pages of a question: `client.pages(client.offers, state="open")`."""
        page = ask(*words, **asked)
        while page.next is not None:
            yield page
            page = ask(*words, **{**asked, "cursor": page.next})
        yield page

    def _run(self, exchange: Exchange[T]) -> T:
        until = time.monotonic() + self._timeout_seconds
        while True:
            pause = self._attempt(exchange, until - time.monotonic())
            if pause is None:
                return exchange.result
            if time.monotonic() + pause + ATTEMPT_SECONDS_MIN > until:
                raise exchange.given_up(self._timeout_seconds)
            time.sleep(pause)

    def _attempt(self, exchange: Exchange[T], seconds: float) -> float | None:
        request = exchange.request
        seconds = max(seconds, ATTEMPT_SECONDS_MIN)
        until = time.monotonic() + seconds
        # The time-out of httpx2 is that of each step: to get a connection, to connect, to get each piece. The
        # body is read in pieces, so that a slow one ends too.
        timeout = httpx2.Timeout(0.8 * seconds, pool=0.1 * seconds, connect=0.1 * seconds)
        body = bytearray()
        try:
            with self._http.stream(
                request.method, request.path, params=dict(request.query), content=request.body,
                headers=request.headers(), timeout=timeout,
            ) as reply:  # fmt: skip
                for piece in reply.iter_bytes():
                    body += piece
                    if time.monotonic() > until:
                        raise httpx2.ReadTimeout("the reply is too slow")
        except httpx2.TransportError as error:
            return exchange.after_error(error, not isinstance(error, _NOT_SENT))
        return exchange.after_reply(reply.status_code, reply.headers, bytes(body))


class AsyncClient(Commands[Coroutine[Any, Any, ServedAnswer], Coroutine[Any, Any, tuple[ServedAnswer, ...]]]):
    """A client for asyncio, with the methods of `Client` to be awaited.

    async with AsyncClient("http://127.0.0.1:18080") as client:
        answer = await client.grab("dinner", "bob")
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        connections_max: int = CONNECTIONS_MAX,
        verify: Any = True,
    ) -> None:
        self._http = httpx2.AsyncClient(**_options(url, key, connections_max, verify))
        self._ended = asyncio.Event()
        self._timeout_seconds = timeout_seconds

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()

    async def end(self) -> None:
        """Closes the connections, and ends the streams of events."""
        self._ended.set()
        await self._http.aclose()

    def decide(self, command: AnyCommand) -> Coroutine[Any, Any, ServedAnswer]:
        """Sends a command, and returns its answer, when that is journaled."""
        return self._run(Deciding(command))

    def take_basket(
        self, grabs: Sequence[Grab], id: str | None = None
    ) -> Coroutine[Any, Any, tuple[ServedAnswer, ...]]:
        """Sends the grabs of a basket. The gateway gives them the ids `<id>.1`, `<id>.2` …"""
        return self._run(TakingBasket(grabs, given(id)))

    async def offers(self, **asked: Unpack[OffersAsked]) -> OfferPage:
        """A page of offers."""
        return await self._run(Asking(path_of("offers"), OfferPage, asked))

    async def offer(self, offer: str, **asked: Unpack[AfterAsked]) -> OfferDetail:
        """An offer with its terms."""
        return await self._run(Asking(path_of("offers", offer), OfferDetail, asked))

    async def offer_grabs(self, offer: str, **asked: Unpack[TakenAsked]) -> TakenPage:
        """Who got what."""
        return await self._run(Asking(path_of("offers", offer, "grabs"), TakenPage, asked))

    async def user_balances(self, user: str, **asked: Unpack[PageAsked]) -> BalancePage:
        """What a user has."""
        return await self._run(Asking(path_of("users", user, "balances"), BalancePage, asked))

    async def user_grabs(self, user: str, **asked: Unpack[UserGrabsAsked]) -> UserGrabPage:
        """The grabs of a user, the newest first."""
        return await self._run(Asking(path_of("users", user, "grabs"), UserGrabPage, asked))

    async def user_transfers(self, user: str, **asked: Unpack[PageAsked]) -> TransferPage:
        """The transfers of a user, the newest first."""
        return await self._run(Asking(path_of("users", user, "transfers"), TransferPage, asked))

    def offer_events(
        self, offer: str, after: str | int | Answer | None = None
    ) -> AsyncGenerator[ServedEvent, None]:
        """The events of an offer, as they come, after the position `after`: the `id` of an event, an answer,
        or 0 for all of them. It resumes by itself, with every event once and in order, until it is closed or
        the client is. Raises RequestProblem for what the gateway refuses, and StreamReset.
        """
        return self._follow(Following(path_of("offers", offer, "events"), after))

    def user_events(
        self, user: str, after: str | None = None, positions: Positions | None = None
    ) -> AsyncGenerator[ServedEvent, None]:
        """The events that name a user, of all offers, as `offer_events` yields them. `positions` is called
        with where the grabs of the user stand on waiting lists, whenever that has changed.
        """
        return self._follow(Following(path_of("users", user, "events"), after, positions))

    async def _follow(self, following: Following) -> AsyncGenerator[ServedEvent, None]:
        while not self._ended.is_set():
            try:
                async with self._http.stream(
                    "GET", following.request.path, params=following.query(), headers=following.headers(),
                    timeout=_STREAM_TIMEOUT,
                ) as reply:  # fmt: skip
                    if following.begins(reply.status_code, reply.headers):
                        async for piece in reply.aiter_bytes():
                            for event in following.events(piece):
                                yield event
                            if self._ended.is_set():
                                return
                        pause = following.after_end()
                    else:
                        body = await reply.aread()
                        pause = following.after_reply(reply.status_code, reply.headers, body) or 0.0
            except httpx2.TransportError as error:
                if error is following.raised:
                    raise
                pause = following.after_error(error, False)
            except RuntimeError as error:
                # That is how httpx2 says that the client was ended.
                if error is following.raised or not self._ended.is_set():
                    raise
                return
            try:
                async with asyncio.timeout(pause):
                    await self._ended.wait()
            except TimeoutError:
                pass

    async def pages(self, ask: Callable[..., Awaitable[P]], *words: str, **asked: Any) -> AsyncIterator[P]:
        """All pages of a question: `async for page in client.pages(client.offers, state="open")`."""
        page = await ask(*words, **asked)
        while page.next is not None:
            yield page
            page = await ask(*words, **{**asked, "cursor": page.next})
        yield page

    async def _run(self, exchange: Exchange[T]) -> T:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._timeout_seconds
        while True:
            pause = await self._attempt(exchange, until - loop.time())
            if pause is None:
                return exchange.result
            if loop.time() + pause + ATTEMPT_SECONDS_MIN > until:
                raise exchange.given_up(self._timeout_seconds)
            await asyncio.sleep(pause)

    async def _attempt(self, exchange: Exchange[T], seconds: float) -> float | None:
        request = exchange.request
        seconds = max(seconds, ATTEMPT_SECONDS_MIN)
        try:
            # The time-out of httpx2 is that of each step; the other one is that of the whole attempt.
            async with asyncio.timeout(seconds):
                reply = await self._http.request(
                    request.method, request.path, params=dict(request.query), content=request.body,
                    headers=request.headers(), timeout=seconds,
                )  # fmt: skip
        except (httpx2.TransportError, TimeoutError) as error:
            return exchange.after_error(error, not isinstance(error, _NOT_SENT))
        return exchange.after_reply(reply.status_code, reply.headers, reply.content)
