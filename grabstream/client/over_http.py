"""`Client` and `AsyncClient`: commands and questions over HTTP, through a gateway (docs/http.md).

Both repeat a request that got no answer, under the same id, until their timeout. A refusal is an answer, not
an error.
"""

import asyncio
import ssl
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, Self, TypedDict, TypeVar, Unpack
from urllib.parse import urlencode

import aiohttp
from yarl import URL

from grabstream.client.commands import CommandMethods, given
from grabstream.client.exchange import (
    ATTEMPT_SECONDS_MIN,
    USER_AGENT,
    Asking,
    ClientRequest,
    Deciding,
    Exchange,
    ServedAnswer,
    TakingBasket,
    path_of,
)
from grabstream.client.following import (
    CONNECT_SECONDS_MAX,
    SILENT_SECONDS_MAX,
    EventStreamExchange,
    Positions,
    ServedEvent,
    WaitingPosition,
)
from grabstream.client.in_thread import InThread, result_of
from grabstream.models.vocabulary import Answer, AnyCommand, Grab
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
#: The part of an attempt's time in which it must have a connection; what takes longer is not sent.
_CONNECT_SHARE: Final = 0.25
#: Errors of an attempt that has no reply, and those of them that say that it was not sent.
_ERRORS: Final = (aiohttp.ClientError, OSError)
_NOT_SENT: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)

#: For a stream: each piece, also the heartbeat, arrives within this time.
_STREAM_TIMEOUT: Final = aiohttp.ClientTimeout(
    total=None, connect=CONNECT_SECONDS_MAX, sock_read=SILENT_SECONDS_MAX
)

#: A message of a stream.
Message = ServedEvent | WaitingPosition
T = TypeVar("T")
D = TypeVar("D", bound=Document)
P = TypeVar("P", bound=Page)


class AfterAsked(TypedDict, total=False):
    """`after`: an answer of a command, whose event the read model must have."""

    after: Answer


class PageAsked(AfterAsked, total=False):
    """`limit` rows of a page; `cursor` is the `next` of the previous page."""

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
    """The offer whose grabs of a user are listed; absent: all offers."""

    offer: str


class TakenAsked(PageAsked, total=False):
    """The order of the grabs of an offer."""

    order: Literal["place", "luckiest"]


def _headers(key: str | None) -> dict[str, str]:
    """The headers of all requests."""
    headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _target(request: ClientRequest) -> str:
    """Path and query of a request."""
    return f"{request.path}?{urlencode(request.query)}" if request.query else request.path


class Client(InThread["AsyncClient"], CommandMethods[ServedAnswer, tuple[ServedAnswer, ...]]):
    """A client for threads. It may be used by several at once.

        with Client("http://127.0.0.1:18080") as client:
            answer = client.grab("dinner", "bob")

    `key` is sent as bearer token. Each call ends within `timeout_seconds`, with all its attempts: it raises
    OutcomeUnknown when it is unknown whether a command was decided, and RequestProblem when it was not
    decided, or when a question got no answer. `verify` is an `ssl.SSLContext`, where the gateway has a
    certificate of your own authority, or False, which trusts any certificate. Proxies that the environment
    names are not used.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        connections_max: int = CONNECTIONS_MAX,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        super().__init__(
            partial(
                AsyncClient, url, key=key, timeout_seconds=timeout_seconds, connections_max=connections_max,
                verify=verify,
            )
        )  # fmt: skip

    def decide(self, command: AnyCommand) -> ServedAnswer:
        """Sends a command, and returns its answer, when that is journaled."""
        return self._wait(self._client().decide(command))

    def take_basket(self, grabs: Sequence[Grab], id: str | None = None) -> tuple[ServedAnswer, ...]:
        """Sends the grabs of a basket. The gateway gives them the ids `<id>.1`, `<id>.2` …"""
        return self._wait(self._client().take_basket(grabs, id))

    def offers(self, **asked: Unpack[OffersAsked]) -> OfferPage:
        """A page of offers."""
        return self._wait(self._client().offers(**asked))

    def offer(self, offer: str, **asked: Unpack[AfterAsked]) -> OfferDetail:
        """An offer with its terms."""
        return self._wait(self._client().offer(offer, **asked))

    def offer_grabs(self, offer: str, **asked: Unpack[TakenAsked]) -> TakenPage:
        """Who got what."""
        return self._wait(self._client().offer_grabs(offer, **asked))

    def user_balances(self, user: str, **asked: Unpack[PageAsked]) -> BalancePage:
        """What a user has."""
        return self._wait(self._client().user_balances(user, **asked))

    def user_grabs(self, user: str, **asked: Unpack[UserGrabsAsked]) -> UserGrabPage:
        """The grabs of a user, the newest first."""
        return self._wait(self._client().user_grabs(user, **asked))

    def user_transfers(self, user: str, **asked: Unpack[PageAsked]) -> TransferPage:
        """The transfers of a user, the newest first."""
        return self._wait(self._client().user_transfers(user, **asked))

    def offer_events(
        self, offer: str, after: str | int | Answer | None = None
    ) -> Generator[ServedEvent, None, None]:
        """The events of an offer, as they come, after the position `after`: the `id` of an event, an answer,
        or 0 for all of them. It resumes automatically, with every event once and in order, until it is closed
        or the client is. Raises RequestProblem for what the gateway refuses, and StreamReset.
        """
        return self._follow(EventStreamExchange(path_of("offers", offer, "events"), after), None)

    def user_events(
        self, user: str, after: str | None = None, positions: Positions | None = None
    ) -> Generator[ServedEvent, None, None]:
        """The events that name a user, of all offers, as `offer_events` yields them. `positions` is called
        with the positions of the user's grabs on waiting lists, after each change.
        """
        return self._follow(EventStreamExchange(path_of("users", user, "events"), after), positions)

    def _follow(
        self, following: EventStreamExchange, positions: Positions | None
    ) -> Generator[ServedEvent, None, None]:
        messages = self._client()._messages(following)
        try:
            while (waiting := self._submit(_next_of(messages))) is not None:
                if (found := result_of(waiting)) is None:
                    return
                yield from _events_of(found, positions)
        finally:
            # Not awaited: this may be the end of the process, which has stopped the other thread.
            self._submit(_closed(messages))

    def pages(self, ask: Callable[..., P], *words: str, **asked: Any) -> Iterator[P]:
        """All pages of a question: `client.pages(client.offers, state="open")`."""
        page = ask(*words, **asked)
        while page.next is not None:
            yield page
            page = ask(*words, **{**asked, "cursor": page.next})
        yield page


async def _next_of(messages: AsyncGenerator[T, None]) -> T | None:
    return await anext(messages, None)


async def _closed(messages: AsyncGenerator[Any, None]) -> None:
    await messages.aclose()


def _events_of(messages: Sequence[Message], positions: Positions | None) -> Iterator[ServedEvent]:
    """The events among the messages of a stream; positions are reported in their order."""
    for message in messages:
        if not isinstance(message, WaitingPosition):
            yield message
        elif positions is not None:
            positions(message)


class AsyncClient(
    CommandMethods[Coroutine[Any, Any, ServedAnswer], Coroutine[Any, Any, tuple[ServedAnswer, ...]]]
):
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
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = _headers(key)
        self._connections_max = connections_max
        self._verify = verify
        self._session: aiohttp.ClientSession | None = None
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
        if self._session is not None:
            await self._session.close()

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
        or 0 for all of them. It resumes automatically, with every event once and in order, until it is closed
        or the client is. Raises RequestProblem for what the gateway refuses, and StreamReset.
        """
        return self._events(EventStreamExchange(path_of("offers", offer, "events"), after), None)

    def user_events(
        self, user: str, after: str | None = None, positions: Positions | None = None
    ) -> AsyncGenerator[ServedEvent, None]:
        """The events that name a user, of all offers, as `offer_events` yields them. `positions` is called
        with the positions of the user's grabs on waiting lists, after each change.
        """
        return self._events(EventStreamExchange(path_of("users", user, "events"), after), positions)

    async def _events(
        self, following: EventStreamExchange, positions: Positions | None
    ) -> AsyncGenerator[ServedEvent, None]:
        async with aclosing(self._messages(following)) as messages:
            async for found in messages:
                for event in _events_of(found, positions):
                    yield event

    async def _messages(self, following: EventStreamExchange) -> AsyncGenerator[list[Message], None]:
        """The messages of a stream, as they come."""
        while not self._ended.is_set():
            try:
                async with self._replying(
                    following.next_request(), following.headers(), _STREAM_TIMEOUT
                ) as reply:
                    if following.begins(reply.status, reply.headers):
                        async for piece in reply.content.iter_any():
                            if found := list(following.messages(piece)):
                                yield found
                            if self._ended.is_set():
                                return
                        pause = following.after_end()
                    else:
                        body = await reply.read()
                        pause = following.after_reply(reply.status, reply.headers, body) or 0.0
            except _ERRORS as error:
                pause = following.after_error(error, False)
            await self._rest(pause)

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
            await self._rest(pause)
            if self._ended.is_set():
                raise exchange.given_up(self._timeout_seconds)

    async def _rest(self, seconds: float) -> None:
        """Waits, or until this client ends."""
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            pass

    async def _attempt(self, exchange: Exchange[T], seconds: float) -> float | None:
        request = exchange.request
        seconds = max(seconds, ATTEMPT_SECONDS_MIN)
        timeout = aiohttp.ClientTimeout(total=seconds, connect=_CONNECT_SHARE * seconds)
        try:
            async with self._replying(request, request.headers(), timeout) as reply:
                body = await reply.read()
        except _ERRORS as error:
            return exchange.after_error(error, not isinstance(error, _NOT_SENT))
        return exchange.after_reply(reply.status, reply.headers, body)

    def _replying(
        self, request: ClientRequest, headers: Mapping[str, str], timeout: aiohttp.ClientTimeout
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Sends a request, for a reply whose body is not read yet."""
        if self._session is None:
            # Here, since a session belongs to the event loop in which it is made.
            connector = aiohttp.TCPConnector(limit=self._connections_max, ssl=self._verify)
            self._session = aiohttp.ClientSession(
                connector=connector, headers=self._headers, cookie_jar=aiohttp.DummyCookieJar()
            )
        # Paths and queries are encoded already.
        url = URL(self._url + _target(request), encoded=True)
        return self._session.request(
            request.method, url, data=request.body, headers=headers, timeout=timeout, allow_redirects=False
        )
