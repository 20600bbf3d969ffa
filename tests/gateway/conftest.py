"""A system with a worker and a gateway, shared by all tests of this folder; each test has its own offers."""

import asyncio
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from playwright.async_api import Browser

from grabstream.connections.opening import checked_database
from grabstream.gateway.api_keys import digest_of, new_secret
from grabstream.gateway.callers import SCOPES
from grabstream.gateway.view_reader import ViewReader, open_view_reader
from grabstream.models.identifiers import shard_of
from grabstream.projections.tables import api_keys
from grabstream.settings import Settings
from grabstream.workshop.rehearsal.stage import take_down
from tests.conftest import Worker, make_system, until
from tests.support.browsers import CHROMIUM, chromium
from tests.support.gateways import Caller, GatewayProcess, calling
from tests.support.issuer import AUDIENCE, ISSUER, key_set
from tests.support.receipts import CALLBACK, KEYS_TEXT


class Door(NamedTuple):
    """A system that a gateway serves."""

    settings: Settings
    gateway: GatewayProcess


async def until_all_decide(port: int, shards: int, secret: str | None = None) -> None:
    """Returns when every shard decides. `secret` is that of an API key, if the gateway asks for one."""
    names = {shard_of(f"x{number}", shards): f"x{number}" for number in range(64)}
    assert len(names) == shards

    async def all_decide() -> bool:
        got = [await one.post(f"/v1/offers/{name}/grabs", {"user": "u"}) for name in names.values()]
        return {answer.body["outcome"] for answer in got} == {"no_such_offer"}

    async with calling(port) as anyone:
        one = anyone.having(secret)
        await until(all_decide, 60, "all shards decide")


async def until_open(caller: Caller, offer: str, total: int) -> None:
    """Opens an offer of `total` coupons, as soon as its shard decides."""

    async def is_open() -> bool:
        terms = {"kind": "coupon", "issuer": "shop", "total": total}
        got = await caller.post("/v1/offers", {"offer": offer, "terms": terms}, "open")
        return got.status == 201

    await until(is_open, 30, "an offer")


@pytest.fixture(scope="session")
def door(servers: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """A running gateway with all that it needs."""
    name = f"test{secrets.token_hex(5)}"
    settings = servers.model_copy(update={"prefix": name, "schema_": name, "shards": 2})
    folder = tmp_path_factory.mktemp("door")
    asyncio.run(make_system(settings))
    worker = Worker(settings, "decide,relay,sweep,project", folder / "worker.log")
    try:
        payments = {"payment_keys": KEYS_TEXT, "payment_callback_url": CALLBACK}
        # All tests send their forged receipts from one address.
        payments["gateway_failures_rate"] = ""
        with GatewayProcess(settings, folder / "gateway.log", gate_timeout_ms="20000", **payments) as gateway:
            asyncio.run(until_all_decide(gateway.port, settings.shards))
            yield Door(settings, gateway)
            assert gateway.text().count("\n") == 1, f"only that it listens: {gateway.text()[-4000:]}"
    finally:
        worker.stop()
        asyncio.run(take_down(settings))


@pytest.fixture
def plain_door(door: Door, tmp_path: Path) -> Iterator[Door]:
    """Another gateway of the same system, without keys of a payment side: a service confirms without
    receipts.
    """
    with GatewayProcess(door.settings, tmp_path / "plain.log", gate_timeout_ms="20000") as gateway:
        yield Door(door.settings, gateway)


class Guarded(NamedTuple):
    """A gateway of the same system that asks who is asking, and the secrets of keys: one for each scope, by
    its name, and `all` with all of them.
    """

    settings: Settings
    gateway: GatewayProcess
    secrets: dict[str, str]


@pytest.fixture(scope="session")
def guarded(door: Door, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A gateway with authentication, on all addresses, behind a proxy on this machine."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys.json").write_bytes(key_set())
    found = {name: new_secret() for name in (*SCOPES, "all")}
    scopes = {name: sorted(SCOPES) if name == "all" else [name] for name in found}

    async def create() -> None:
        async with checked_database(door.settings) as connection:
            for name, secret in found.items():
                await api_keys.create(connection, name, scopes[name], digest_of(secret.encode()), None)

    asyncio.run(create())
    with GatewayProcess(
        door.settings, folder / "gateway.log", "--host", "0.0.0.0", gate_timeout_ms="20000",
        gateway_authentication="required", gateway_hosts="api.example.com", gateway_proxies="127.0.0.1",
        gateway_origins="https://shop.example.com", gateway_failures_rate="40/hour",
        jwt_issuer=ISSUER, jwt_audience=AUDIENCE, jwt_jwks=str(folder / "keys.json"),
    ) as gateway:  # fmt: skip
        yield Guarded(door.settings, gateway, found)
        assert gateway.text().count("\n") == 1, f"only that it listens: {gateway.text()[-4000:]}"


@pytest.fixture
async def caller(door: Door) -> AsyncIterator[Caller]:
    """A client of the shared gateway. Its system decides."""
    async with calling(door.gateway.port) as one:
        yield one


@pytest.fixture
async def books(door: Door) -> AsyncIterator[ViewReader]:
    """The books, asked in this process."""

    async def check(connection: Any) -> None:
        pass

    async with open_view_reader(door.settings.postgres, door.settings.schema_, 2, check) as books:
        yield books


@pytest.fixture
def offer() -> str:
    """The name of an offer that no other test has."""
    return f"o{secrets.token_hex(5)}"


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """A Chromium without a past."""
    if shutil.which(CHROMIUM) is None:
        if os.environ.get("CI"):
            pytest.fail("no Chromium, which the pages need", pytrace=False)
        pytest.skip("no Chromium")
    async with chromium() as one:
        yield one
