"""`python -m bench.checkout_load PORT`, a plan as JSON on standard input: buys tickets over HTTP, and prints
what came back as one line of JSON. A checkout is two requests: a ticket is reserved, and it is paid. Both
sides of the row `tigerfans` get them from this process, on raw connections.
"""

import asyncio
import base64
import hmac
import json
import resource
import sys
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import uvloop

from grabstream.crypto.signing import Purpose, SigningKeys

#: The classes of tickets, in turn, and what one costs in cents, as TigerFans sells them.
PRICES = {"A": 6_500, "B": 3_500}
CURRENCY = "EUR"

#: A request goes out, its status and body come back.
Steps = Generator[bytes, tuple[int, bytes], None]


class CheckoutPlan(NamedTuple):
    """What is bought: `total` tickets, over that many connections, each with one checkout at a time. `stem`
    begins the ids; `secret` is what the payment side signs with, in hex.
    """

    side: str
    total: int
    connections: int
    stem: str
    secret: str


def request(path: str, body: bytes, kind: str = "application/json", *more: str) -> bytes:
    """A POST request."""
    head = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Type: {kind}", *more]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body


def _checked(wanted: int, answer: tuple[int, bytes]) -> bytes:
    status, body = answer
    if status != wanted:
        raise RuntimeError(f"the answer must be {wanted}, it is {status}: {body[:300]!r}")
    return body


def by_gateway(plan: CheckoutPlan, number: int) -> Steps:
    """A hold, and the receipt of its payment, which this process signs as the payment side."""
    offer, name = f"ticket:{'AB'[number % 2]}", f"{plan.stem}-{number}"
    held = json.loads(
        _checked(
            201,
            (yield request(
                f"/v1/offers/{offer}/grabs", b'{"user":"%s"}' % name.encode(), "application/json",
                f"Idempotency-Key: {name}",
            )),
        )
    )  # fmt: skip
    claims = held["payment_token"].split(".")[1]
    receipt = {
        "aud": json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["aud"],
        "payment": f"p-{name}", "offer": offer, "grab": held["grab"], "user": held["user"], "status": "paid",
        "at": time.time_ns() // 1_000_000, "paid": held["due"], "currency": held["currency"],
    }  # fmt: skip
    signed = SigningKeys({"bench": bytes.fromhex(plan.secret)}).sign(
        Purpose.receipt, json.dumps(receipt).encode()
    )
    paid = _checked(200, (yield request("/v1/payments/callback", b'{"receipt":"%s"}' % signed.encode())))
    if b'"result":"confirmed"' not in paid:
        raise RuntimeError(f"the ticket is not paid: {paid!r}")


def _tigerfans_reserved(
    plan: CheckoutPlan, number: int
) -> Generator[bytes, tuple[int, bytes], dict[str, Any]]:
    asked = {"cls": "AB"[number % 2], "customer_email": f"{plan.stem}{number}@example.com"}
    reserved: dict[str, Any] = json.loads(
        _checked(200, (yield request("/api/checkout", json.dumps(asked).encode())))
    )
    return {**reserved, "session": reserved["redirect_url"].rpartition("/")[2]}


def by_tigerfans(plan: CheckoutPlan, number: int) -> Steps:
    """A reservation, and the button of the payment page, whose webhook the server sends to itself."""
    reserved = yield from _tigerfans_reserved(plan, number)
    paid = request(
        f"/mockpay/{reserved['session']}/emit", b"t=succeeded", "application/x-www-form-urlencoded"
    )
    _checked(303, (yield paid))


def by_tigerfans_webhook(plan: CheckoutPlan, number: int) -> Steps:
    """A reservation, and the webhook of its payment, which this process signs as the payment side."""
    reserved = yield from _tigerfans_reserved(plan, number)
    event = {
        "type": "payment.succeeded", "payment_session_id": reserved["session"],
        "order_id": reserved["order_id"], "amount": reserved["amount"], "currency": reserved["currency"],
        "created_at": int(time.time()), "idempotency_key": f"event-{plan.stem}-{number}",
    }  # fmt: skip
    body = json.dumps(event).encode()
    signature = base64.b64encode(hmac.digest(plan.secret.encode(), body, "sha256")).decode()
    signed = request("/payments/webhook", body, "application/json", f"X-Mockpay-Signature: {signature}")
    if b'"PAID"' not in (paid := _checked(200, (yield signed))):
        raise RuntimeError(f"the ticket is not paid: {paid!r}")


SIDES: dict[str, Callable[[CheckoutPlan, int], Steps]] = {
    "gateway": by_gateway,
    "tigerfans": by_tigerfans,
    "tigerfans_webhook": by_tigerfans_webhook,
}


class CheckoutLoad:
    """All connections, and how long each checkout took."""

    def __init__(self, plan: CheckoutPlan) -> None:
        self.plan = plan
        self.begun = 0
        self.latencies: list[float] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def next(self) -> Steps | None:
        """The next checkout; None when all have begun."""
        if self.begun == self.plan.total:
            return None
        self.begun += 1
        return SIDES[self.plan.side](self.plan, self.begun)

    def took(self, seconds: float) -> None:
        """A checkout has ended."""
        self.latencies.append(seconds)
        if len(self.latencies) == self.plan.total and not self.ended.done():
            self.ended.set_result(None)

    def failed(self, error: Exception) -> None:
        """A checkout cannot end."""
        if not self.ended.done():
            self.ended.set_exception(error)


class CheckoutConnection(asyncio.Protocol):
    """One connection, which has one checkout at a time."""

    def __init__(self, load: CheckoutLoad) -> None:
        self._load = load
        self._received = b""
        self._steps: Steps | None = None
        self._began = 0.0
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        """The connection is open."""
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        """A checkout without an answer is lost."""
        if self._steps is not None:
            self._load.failed(error or ConnectionError("the server has closed a connection"))

    def begin(self) -> None:
        """Begins the next checkout, if there is one."""
        self._steps = self._load.next()
        if self._steps is not None:
            self._began = time.perf_counter()
            self._transport.write(next(self._steps))

    def data_received(self, data: bytes) -> None:
        """A piece of an answer."""
        received = self._received + data
        end = received.find(b"\r\n\r\n")
        if end < 0:
            self._received = received
            return
        head = received[:end].lower() + b"\r"
        start = head.index(b"content-length: ") + 16
        whole = end + 4 + int(head[start : head.index(b"\r", start)])
        if len(received) < whole:
            self._received = received
            return
        self._received = b""
        self._answered(int(head[9:12]), received[end + 4 : whole])

    def _answered(self, status: int, body: bytes) -> None:
        assert self._steps is not None
        try:
            self._transport.write(self._steps.send((status, body)))
        except StopIteration:
            self._load.took(time.perf_counter() - self._began)
            self.begin()
        except Exception as error:
            self._load.failed(error)


async def run(port: int, plan: CheckoutPlan) -> dict[str, Any]:
    """Plays a plan; raises the error of the first checkout that does not end as it must."""
    loop = asyncio.get_running_loop()
    load = CheckoutLoad(plan)
    connections = [
        (await loop.create_connection(lambda: CheckoutConnection(load), "127.0.0.1", port))[1]
        for _ in range(plan.connections)
    ]
    used = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    for connection in connections:
        connection.begin()
    await load.ended
    seconds = time.perf_counter() - began
    now = resource.getrusage(resource.RUSAGE_SELF)
    ordered = sorted(load.latencies)
    return {
        "seconds": seconds,
        "client_cpu_seconds": now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime,
        "p50_ms": ordered[len(ordered) // 2] * 1000,
        "p99_ms": ordered[int(len(ordered) * 0.99)] * 1000,
    }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(int(sys.argv[1]), CheckoutPlan(**json.load(sys.stdin))))))
