"""Servers are killed while a crowd sends requests: what was answered is in the books, once; what was not is
repeated with the same key, and is decided once.
"""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from grabstream.connections.opening import checked_database
from grabstream.gateway.api_keys import digest_of, new_secret
from grabstream.models.outcomes import Outcome
from grabstream.ops.initialization import make_system
from grabstream.projections.tables import api_keys
from grabstream.settings import Settings
from grabstream.workshop.services import LocalServices
from tests.conftest import Worker, until
from tests.gateway.conftest import until_all_decide, until_open
from tests.support.gateways import Caller, GatewayProcess, calling
from tests.support.projecting import rows

USERS, GRABS_OF_USER = 12, 60


@pytest.fixture
async def private(private_services: LocalServices, settings: Settings) -> Settings:
    """A system on servers that may be killed."""
    on_private_servers = settings.model_copy(update={**private_services.environment(), "shards": 2})
    await make_system(on_private_servers)
    return on_private_servers


class Crowd:
    """Users who grab one after the other, each with the same key until there is an answer."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.answers: dict[str, dict[str, Any]] = {}
        self.troubles: list[str] = []

    async def grab(self, user: str) -> None:
        for number in range(GRABS_OF_USER):
            key = f"{user}-{number}"
            while key not in self.answers:
                got = await self.caller.post("/v1/offers/x/grabs", {"user": user}, key)
                if got.status == 201:
                    self.answers[key] = got.body
                else:
                    assert got.status in (503, 504), got
                    assert int(got.headers["retry-after"]) >= 1
                    self.troubles.append(got.body["type"])
                    await asyncio.sleep(0.05)

    async def ask(self) -> None:
        """Questions, which PostgreSQL may not answer."""
        while True:
            try:
                got = await self.caller.send("GET", "/v1/offers/x/grabs?limit=1")
            except aiohttp.ClientError as error:
                raise AssertionError("the gateway has ended") from error
            assert got.status in (200, 404, 503), got
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("server", ["redis", "kafka", "postgres"])
@pytest.mark.every_change("one crash of each server under traffic over HTTP")
async def test_what_is_answered_is_in_the_books_when_a_server_is_killed(
    private: Settings,
    private_services: LocalServices,
    worker: Callable[..., Worker],
    tmp_path: Path,
    server: str,
) -> None:
    """Callers have an API key, which the gateway knows while PostgreSQL is away."""
    running = worker(private, "decide,relay,sweep,project")
    secret = new_secret()
    async with checked_database(private) as connection:
        await api_keys.create(
            connection, server, ["grab", "operate", "read"], digest_of(secret.encode()), None
        )
    with GatewayProcess(private, tmp_path / "log", gateway_authentication="required") as gateway:
        await until_all_decide(gateway.port, private.shards, secret)
        async with calling(gateway.port) as anyone:
            caller = anyone.having(secret)
            await until_open(caller, "x", 10_000)
            crowd = Crowd(caller)
            asking = asyncio.create_task(crowd.ask())
            grabbing = [asyncio.create_task(crowd.grab(f"u{number}")) for number in range(USERS)]
            await until(lambda: len(crowd.answers) > USERS, 60, "the first answers")
            process = getattr(private_services, server)
            await asyncio.to_thread(process.kill)
            assert len(crowd.answers) < USERS * GRABS_OF_USER, "the server died too late"
            await asyncio.to_thread(process.start)
            async with asyncio.timeout(200):
                await asyncio.gather(*grabbing)
            assert not asking.done()
            asking.cancel()
            known = {*(f"/problems/{outcome.name}" for outcome in Outcome), "/problems/outcome_unknown"}
            assert set(crowd.troubles) <= known
            assert len({answer["place"] for answer in crowd.answers.values()}) == USERS * GRABS_OF_USER

            async def are_booked() -> bool:
                found = await rows(private, "SELECT grab, user_id, place, seq FROM grabs WHERE offer = 'x'")
                return sorted(found) == sorted(
                    (answer["grab"], answer["user"], answer["place"], answer["seq"])
                    for answer in crowd.answers.values()
                )

            await until(are_booked, 90, "exactly the answers in the books")
        assert gateway.stop() == 0
        assert "Traceback" not in gateway.text()
    running.stop()


@pytest.mark.long
async def test_a_gateway_logs_each_outage_of_a_server_once(
    private: Settings, private_services: LocalServices, tmp_path: Path
) -> None:
    with GatewayProcess(private, tmp_path / "log") as gateway:
        for number, (name, server) in enumerate(
            (("Redis", private_services.redis), ("PostgreSQL", private_services.postgres)), 1
        ):
            await asyncio.to_thread(server.kill)
            await until(lambda: gateway.text().count("does not answer") == number, 60, name)  # noqa: B023
            await asyncio.to_thread(server.start)
            await until(lambda: gateway.text().count("answers again") == number, 60, name)  # noqa: B023
            assert len(re.findall(rf" {name} \(.*\) (does not answer|answers again)", gateway.text())) == 2
        assert gateway.stop() == 0
        assert "Traceback" not in gateway.text()
