"""`python -m bench.http_reference`, a plan as JSON on standard input: what the gateway is measured against.
The same server, with the same settings and the same class of connections, and one of these applications in
the place of the gateway's; prints its port.

- `constant`: a document for GET, another one for everything else.
- `items`: a list, with one call of Redis for each item.
- `by_hand`: a grab by the classic script, and one awaited send to Kafka with `acks=all`.

`uvicorn bench.http_reference:bare` is a server without anything of the gateway.
"""

import asyncio
import gc
import json
import sys
from typing import Any

import redis.asyncio
import uvloop
from aiokafka import AIOKafkaProducer

from bench import classic
from grabstream.gateway.addresses import ConnectionsByAddress
from grabstream.gateway.serving import bind, serve
from grabstream.streams import brokers

CONNECTIONS_MAX = 10_000


async def answer(send: Any, status: int, body: bytes) -> None:
    """Sends an answer with as few headers as possible."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """An application for uvicorn with its defaults: reads the body of a request, and answers `{}`."""
    if scope["type"] == "lifespan":
        message = {"type": ""}
        while not message["type"].endswith("shutdown"):
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
        return
    message = await receive()
    while message.get("more_body"):
        message = await receive()
    await answer(send, 200, b"{}")


class Constant:
    """Answers documents that it has, and reads no bodies."""

    def __init__(self, get: str, post: str) -> None:
        self._get = get.encode()
        self._post = post.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers a request."""
        if scope["method"] == "GET":
            await answer(send, 200, self._get)
        else:
            await answer(send, 201, self._post)


class Items:
    """Answers a list of items, each of which is one call of Redis."""

    def __init__(self, redis_url: str, keys: list[str]) -> None:
        self._client = _client(redis_url)
        self._keys = keys

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers a request."""
        items = [await self._client.get(key) for key in self._keys]
        await answer(send, 200, b'{"offers":[' + b",".join(items) + b"]}")


class ByHand:
    """Calls the classic script, sends what it returns to a topic, and answers it."""

    def __init__(self, redis_url: str, kafka: str, topic: str, sha: str) -> None:
        self._client = _client(redis_url)
        self._kafka = kafka
        self._topic = topic
        self._sha = sha
        self._producer: AIOKafkaProducer | None = None
        self._starting = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers a request."""
        if self._producer is None:
            async with self._starting:
                if self._producer is None:
                    producer = AIOKafkaProducer(
                        **brokers.at(self._kafka), acks="all", enable_idempotence=True
                    )
                    await producer.start()
                    self._producer = producer
        body = (await receive())["body"]
        taken = await self._client.evalsha(self._sha, 3, *classic.KEYS, json.loads(body)["user"])
        await self._producer.send_and_wait(self._topic, taken)
        await answer(send, 201, taken)


def _client(redis_url: str) -> Any:
    """A client for more requests than it has connections: they wait for a free one."""
    pool = redis.asyncio.BlockingConnectionPool.from_url(redis_url, max_connections=64, timeout=None)
    return redis.asyncio.Redis(connection_pool=pool)


APPLICATIONS = {"constant": Constant, "items": Items, "by_hand": ByHand}


async def main() -> None:
    """Serves until the process is ended."""
    plan = json.load(sys.stdin)
    gc.set_threshold(50_000, 20, 50)  # as the gateway does
    bound = bind("127.0.0.1", 0)
    application: Any = APPLICATIONS[plan.pop("kind")](**plan)
    await serve(
        application, bound, CONNECTIONS_MAX, ConnectionsByAddress(CONNECTIONS_MAX), asyncio.Event(),
        lambda: print(bound.getsockname()[1], flush=True),
    )  # fmt: skip


if __name__ == "__main__":
    uvloop.run(main())
