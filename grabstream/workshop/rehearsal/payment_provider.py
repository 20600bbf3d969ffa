"""A fake payment provider, for demonstrations and tests: it takes payment tokens, "pays", and notifies the
gateway by signed receipts. No money moves, and it keeps everything in memory.

What becomes of a payment is an instruction of the request (`HOW`): so everything that a payment side may do
can be shown and tested. A receipt is repeated, with growing pauses, until the gateway answers 2xx, as a real
payment side has to.
"""

import asyncio
import contextlib
import json
import logging
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from grabstream.crypto.encryption import DecryptionKey, NotEncrypted
from grabstream.crypto.signing import NotSigned, Purpose, SigningKeys
from grabstream.gate.calls import now_ms
from grabstream.models.identifiers import PAYMENT_WORDS, is_payment_id
from grabstream.models.money import Invalid
from grabstream.models.payments import (
    QUERY_LENGTH_MAX,
    TOKEN_LENGTH_MAX,
    PaymentAnswer,
    PaymentQuery,
    PaymentState,
    PaymentToken,
    Receipt,
    decode_query,
    decode_token,
    encode_claims,
)
from grabstream.runtime.ending import end

log = logging.getLogger(__name__)

#: What becomes of a payment.
HOW: Final = {
    "pays": "it is paid at once",
    "fails": "it fails at once",
    "abandons": "it fails, and the buyer gives up: no payment is taken for the grab any more",
    "late": "it is paid after the deadline of the hold",
    "twice": "it is paid, and its receipt comes twice at the same time",
    "altered": "it is paid; its receipt first comes with another amount, changed on the way",
    "lost": "it is paid, and no receipt comes",
}
PAYMENTS_MAX: Final = 10_000
PAY_BODY_BYTES_MAX: Final = 16 * 1024
QUERY_BODY_BYTES_MAX: Final = QUERY_LENGTH_MAX + 1_024
ATTEMPTS_MAX: Final = 12
PAUSE_SECONDS: Final = 0.1
PAUSE_SECONDS_MAX: Final = 5.0
CALLBACK_SECONDS_MAX: Final = 10.0
#: A late payment is made this long after the deadline.
LATE_SECONDS: Final = 0.3
#: Pages that may read answers, as a pattern of their origins.
_LOCAL_ORIGIN: Final = r"http://(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?"
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


class _Pay(msgspec.Struct, forbid_unknown_fields=True):
    token: str
    how: str = "pays"
    payment: str | None = None
    #: The sum paid instead of the sum due.
    paid: int | None = None
    currency: str | None = None


class _Query(msgspec.Struct, forbid_unknown_fields=True):
    query: str


_decode_pay = msgspec.json.Decoder(_Pay).decode
_decode_query = msgspec.json.Decoder(_Query).decode


class ProviderPayment:
    """A payment for a grab: its receipt once it is paid or has failed, and the answers to its receipts. With
    `is_last`, no other is taken for its grab.
    """

    def __init__(self, payment: str, token: PaymentToken, is_last: bool) -> None:
        self.payment = payment
        self.token = token
        self.is_last = is_last
        self.receipt: Receipt | None = None
        self.answers: list[dict[str, Any]] = []
        self.is_done = False

    def document(self) -> dict[str, Any]:
        """What the provider says about the payment. `done`: its receipt is answered, or given up."""
        return {
            "payment": self.payment, "offer": self.token.offer, "grab": self.token.grab,
            "user": self.token.user, "status": self.receipt.status if self.receipt else "pending",
            "answers": self.answers, "done": self.is_done,
        }  # fmt: skip


def _host_of(url: str) -> str | None:
    """The host of a URL; None if it has none, or is not a URL."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


class RequestRefused(Exception):
    """A request that the provider refuses, with a status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class PaymentProvider:
    """The provider. Use `open_provider`."""

    def __init__(
        self, keys: SigningKeys, session: aiohttp.ClientSession, decryption: DecryptionKey | None = None
    ) -> None:
        self._keys = keys
        self._decryption = decryption
        self._session = session
        #: By id; several for the grabs of a basket.
        self._payments: dict[str, list[ProviderPayment]] = {}
        #: By system, offer and grab.
        self._payments_by_grab: dict[tuple[str, str, str], list[ProviderPayment]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.application = Starlette(
            routes=[
                Route("/pay", _answering(self._pay), methods=["POST"]),
                Route("/query", _answering(self._query), methods=["POST"]),
                Route("/payments/{payment:path}", _answering(self._payment), methods=["GET"]),
            ],
            # The page of an offer pays from a browser on this machine.
            middleware=[
                Middleware(
                    CORSMiddleware,
                    allow_origin_regex=_LOCAL_ORIGIN,
                    allow_methods=["POST"],
                    allow_headers=["content-type"],
                )
            ],
        )

    async def close(self) -> None:
        """Ends payments that wait, and repeats of receipts."""
        await end(self._tasks)

    # -- requests --------------------------------------------------------------------------------------------

    async def _pay(self, request: Request) -> tuple[int, dict[str, Any]]:
        """Takes a payment token, and pays as the request says."""
        try:
            asked = _decode_pay(await _body_of(request, PAY_BODY_BYTES_MAX))
            signed = asked.token
            if self._decryption is not None:
                signed = self._decryption.decrypt(signed, TOKEN_LENGTH_MAX)
            token = decode_token(self._keys.read(Purpose.payment_token, signed, TOKEN_LENGTH_MAX))
        except NotEncrypted:
            raise RequestRefused(401, "token: is not encrypted with the key of this provider") from None
        except NotSigned:
            raise RequestRefused(
                401, "token: is not a payment token that is signed with a known key"
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError, Invalid) as error:
            raise RequestRefused(400, str(error)) from None
        payment = asked.payment or f"pay-{secrets.token_hex(8)}"
        if asked.how not in HOW:
            raise RequestRefused(400, f"how: must be {', '.join(HOW)}")
        if not is_payment_id(payment):
            raise RequestRefused(400, f"payment: {PAYMENT_WORDS}")
        if token.callback is None or _host_of(token.callback) not in _LOOPBACK:
            raise RequestRefused(400, "token: its callback must be an address of this machine")
        grab = token.aud, token.offer, token.grab
        for known in self._payments.get(payment, ()):
            if (known.token.aud, known.token.offer, known.token.grab) == grab:
                raise RequestRefused(
                    409, "payment: the id is known for this grab; another payment needs another id"
                )
            if (known.token.aud, known.token.user) != (token.aud, token.user):
                raise RequestRefused(409, "payment: the id is that of a payment of another user or system")
        if any(known.is_last for known in self._payments_by_grab.get(grab, ())):
            raise RequestRefused(
                409, "token: the buyer gave up this grab, so nothing can be paid for it any more"
            )
        if sum(map(len, self._payments_by_grab.values())) >= PAYMENTS_MAX:
            raise RequestRefused(503, f"the provider keeps {PAYMENTS_MAX} payments; start it again")
        made = ProviderPayment(payment, token, asked.how == "abandons")
        self._payments.setdefault(payment, []).append(made)
        self._payments_by_grab.setdefault(grab, []).append(made)
        if asked.how != "late":
            self._settle(made, asked)
        task = asyncio.create_task(self._execute(made, asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return 202, made.document()

    async def _query(self, request: Request) -> tuple[int, dict[str, Any]]:
        """Answers which holds were paid."""
        try:
            text = _decode_query(await _body_of(request, QUERY_BODY_BYTES_MAX)).query
            query = decode_query(self._keys.read(Purpose.payment_query, text, QUERY_LENGTH_MAX))
        except NotSigned:
            raise RequestRefused(401, "query: is not signed with a known key") from None
        except (msgspec.DecodeError, UnicodeDecodeError, Invalid) as error:
            raise RequestRefused(400, str(error)) from None
        answer = PaymentAnswer(aud=query.aud, query=query.id, payments=tuple(self._states(query)))
        return 200, {"answer": self._keys.sign(Purpose.payment_answer, encode_claims(answer))}

    def _states(self, query: PaymentQuery) -> list[PaymentState]:
        states = []
        for hold in query.holds:
            grab = query.aud, hold.offer, hold.grab
            payments = self._payments_by_grab.get(grab, [])
            receipts = [payment.receipt for payment in payments]
            paid = next((receipt for receipt in receipts if receipt and receipt.status == "paid"), None)
            if paid is not None:
                states.append(
                    PaymentState(
                        offer=paid.offer,
                        grab=paid.grab,
                        status="paid",
                        user=paid.user,
                        payment=paid.payment,
                        paid=paid.paid,
                        currency=paid.currency,
                        at=paid.at,
                    )
                )
            elif None in receipts or not receipts:
                # A payment is under way, or the grab may be paid in another way: its token was never shown.
                states.append(PaymentState(offer=hold.offer, grab=hold.grab, status="unknown"))
            else:
                # Each attempt has failed. Another may come, unless the buyer gave up.
                final = any(payment.is_last for payment in payments)
                states.append(PaymentState(offer=hold.offer, grab=hold.grab, status="unpaid", final=final))
        return states

    async def _payment(self, request: Request) -> tuple[int, dict[str, Any]]:
        """What is known about a payment: for the `offer` and `grab` that the query names, else for its first
        grab.
        """
        offer, grab = (request.query_params.get(name) for name in ("offer", "grab"))
        for payment in self._payments.get(request.path_params["payment"], ()):
            if offer in (None, payment.token.offer) and grab in (None, payment.token.grab):
                return 200, payment.document()
        raise RequestRefused(404, "there is no such payment")

    # -- payments --------------------------------------------------------------------------------------------

    def _settle(self, payment: ProviderPayment, asked: _Pay) -> None:
        """Decides what became of a payment."""
        token = payment.token
        named: dict[str, Any] = {
            "aud": token.aud,
            "payment": payment.payment,
            "offer": token.offer,
            "grab": token.grab,
            "user": token.user,
        }
        if asked.how in ("fails", "abandons"):
            payment.receipt = Receipt(**named, status="failed", at=now_ms())
            return
        paid = token.due if asked.paid is None else asked.paid
        currency = token.currency if asked.currency is None else asked.currency
        payment.receipt = Receipt(**named, status="paid", at=now_ms(), paid=paid, currency=currency)

    async def _execute(self, payment: ProviderPayment, asked: _Pay) -> None:
        if asked.how == "late":
            seconds = max(0.0, (payment.token.deadline_at - now_ms()) / 1000) + LATE_SECONDS
            await asyncio.sleep(seconds)
            self._settle(payment, asked)
        assert payment.receipt is not None
        text = self._keys.sign(Purpose.receipt, encode_claims(payment.receipt))
        if asked.how == "altered":
            await self._send(payment, altered(text))
        if asked.how == "twice":
            await asyncio.gather(self._repeat(payment, text), self._repeat(payment, text))
        elif asked.how != "lost":
            await self._repeat(payment, text)
        payment.is_done = True

    async def _repeat(self, payment: ProviderPayment, text: str) -> None:
        """Sends a receipt until it is answered with 2xx."""
        pause_seconds = PAUSE_SECONDS
        for _ in range(ATTEMPTS_MAX):
            if 200 <= await self._send(payment, text) < 300:
                return
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(pause_seconds * 2, PAUSE_SECONDS_MAX)
        log.error("payment %s: its receipt got no usable answer", payment.payment)

    async def _send(self, payment: ProviderPayment, text: str) -> int:
        """Sends a receipt once; returns the status of the answer, 0 without one."""
        answer: dict[str, Any] = {"status": 0}
        try:
            async with self._session.post(
                str(payment.token.callback), json={"receipt": text}, allow_redirects=False
            ) as response:
                answer["status"] = response.status
                document = json.loads(await response.read())
                answer |= {name: document[name] for name in ("result", "type") if name in document}
        except (aiohttp.ClientError, OSError, ValueError) as error:
            answer["error"] = type(error).__name__
        payment.answers.append(answer)
        return int(answer["status"])


def altered(text: str) -> str:
    """A signed text whose amount was changed without a key."""
    header, payload, signature = text.split(".")
    claims = json.loads(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    claims["paid"] = claims.get("paid", 0) + 1
    changed = urlsafe_b64encode(encode_claims(claims)).decode().rstrip("=")
    return f"{header}.{changed}.{signature}"


def _answering(handler: Any) -> Any:
    """An endpoint that answers with what a handler returns, or with the reason why it refuses."""

    async def endpoint(request: Request) -> Response:
        try:
            status, document = await handler(request)
        except RequestRefused as refused:
            status, document = refused.status, {"reason": str(refused)}
        return JSONResponse(document, status)

    return endpoint


async def _body_of(request: Request, bytes_max: int) -> bytes:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > bytes_max:
            raise RequestRefused(413, f"a body has at most {bytes_max} bytes")
    return body


@contextlib.asynccontextmanager
async def open_provider(
    keys: SigningKeys, decryption: DecryptionKey | None = None
) -> AsyncIterator[PaymentProvider]:
    """A provider; its ASGI application is `application`. With a key for decryption, it takes no payment token
    that is not encrypted.
    """
    timeout = aiohttp.ClientTimeout(total=CALLBACK_SECONDS_MAX)
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout) as session:
        provider = PaymentProvider(keys, session, decryption)
        try:
            yield provider
        finally:
            await provider.close()
