"""An issuer of tokens for end users, with keys of several types, and a server of its JWK set."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from tests.support.web_servers import serving

ISSUER: Final = "https://login.example.com"
AUDIENCE: Final = "grabs"
_RSA: Final = rsa.generate_private_key(65_537, 2_048)
_OTHER_RSA: Final = rsa.generate_private_key(65_537, 2_048)
#: The private keys by their ids, with the algorithm of each.
KEYS: Final[dict[str, tuple[str, Any]]] = {
    "rsa": ("RS256", _RSA),
    "other": ("RS256", _OTHER_RSA),
    "pss": ("PS256", _RSA),
    "p256": ("ES256", ec.generate_private_key(ec.SECP256R1())),
    "ed": ("EdDSA", ed25519.Ed25519PrivateKey.generate()),
}


def public(key_id: str) -> dict[str, Any]:
    """The public half of a key, as a JWK."""
    algorithm, key = KEYS[key_id]
    document = jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key(), as_dict=True)
    return {**document, "kid": key_id, "use": "sig", "alg": algorithm}


def key_set(*key_ids: str) -> bytes:
    """A JWK set."""
    return json.dumps({"keys": [public(key_id) for key_id in key_ids or KEYS]}).encode()


def token(user: Any, key_id: str = "rsa", header: dict[str, Any] | None = None, **claims: Any) -> str:
    """A token for a user; a claim that is None is left out."""
    now = int(time.time())
    given = {"sub": user, "iss": ISSUER, "aud": AUDIENCE, "iat": now, "exp": now + 600, **claims}
    algorithm, key = KEYS[key_id]
    # Also claims that the library would refuse to sign.
    claimed = {name: value for name, value in given.items() if value is not None}
    return jwt.PyJWS().encode(
        json.dumps(claimed).encode(), key, algorithm, {"typ": "JWT", "kid": key_id, **(header or {})}
    )


class KeyServer:
    """Serves a JWK set. `answer` makes the answer to each request; `requests` counts them."""

    def __init__(self) -> None:
        self.port = 0
        self.requests = 0
        self.answer: Callable[[web.Request], Awaitable[web.StreamResponse]] = self.good
        self.released = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/keys"

    async def good(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=key_set(), content_type="application/json")

    async def hanging(self, request: web.Request) -> web.StreamResponse:
        await self.released.wait()
        return web.Response(body=key_set())

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        return await self.answer(request)


@asynccontextmanager
async def serving_keys() -> AsyncIterator[KeyServer]:
    """A running server of a JWK set."""
    server = KeyServer()
    application = web.Application()
    application.router.add_get("/keys", server._handle)
    async with serving(application, shutdown_timeout=0.1) as server.port:
        try:
            yield server
        finally:
            server.released.set()
