"""A system with a worker and a gateway, which all tests of this folder share; each test has offers of its
own.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import pytest

from grabstream.models.identifiers import shard_of
from grabstream.ops.rehearsal.stage import take_down
from grabstream.ops.settings import Settings
from tests.conftest import Worker, make_system, until
from tests.support.gateways import Caller, GatewayProcess, calling
from tests.support.receipts import CALLBACK, KEYS_TEXT


class Door(NamedTuple):
    """A system that a gateway serves."""

    settings: Settings
    gateway: GatewayProcess


async def until_all_decide(port: int, shards: int) -> None:
    """Returns when every shard decides."""
    names = {shard_of(f"x{number}", shards): f"x{number}" for number in range(64)}
    assert len(names) == shards

    async def all_decide() -> bool:
        got = [await one.post(f"/v1/offers/{name}/grabs", {"user": "u"}) for name in names.values()]
        return {answer.body["outcome"] for answer in got} == {"no_such_offer"}

    async with calling(port) as one:
        await until(all_decide, 60, "all shards decide")


async def until_open(caller: Caller, offer: str, total: int) -> None:
    """Opens an offer of so many coupons, as soon as its shard decides."""

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
        with GatewayProcess(settings, folder / "gateway.log", gate_timeout_ms="20000", **payments) as gateway:
            asyncio.run(until_all_decide(gateway.port, settings.shards))
            yield Door(settings, gateway)
            assert gateway.text().count("\n") == 1, f"only that it listens: {gateway.text()[-4000:]}"
    finally:
        worker.stop()
        asyncio.run(take_down(settings))


@pytest.fixture
async def caller(door: Door) -> AsyncIterator[Caller]:
    """A client of the shared gateway. Its system decides."""
    async with calling(door.gateway.port) as one:
        yield one


@pytest.fixture
def offer() -> str:
    """The name of an offer that no other test has."""
    return f"o{secrets.token_hex(5)}"
