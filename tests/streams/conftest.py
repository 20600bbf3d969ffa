"""A system with a recorded history, which many tests read; and one on its own servers."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator

import pytest

from grabstream.settings import Settings
from grabstream.workshop.rehearsal.stage import take_down
from grabstream.workshop.services import LocalServices
from tests.conftest import make_system
from tests.streams.replaying.histories import RecordedSystem, drop, recorded_system, schemas


@pytest.fixture
async def private(private_services: LocalServices, settings: Settings) -> Settings:
    """A system on servers that the test may kill, and whose data it may change."""
    on_private_servers = settings.model_copy(update=private_services.environment())
    await make_system(on_private_servers)
    return on_private_servers


@pytest.fixture(scope="session")
def shared(servers: Settings) -> Iterator[RecordedSystem]:
    """A recorded system for the whole run: tests read it and change nothing of it."""
    name = f"test{secrets.token_hex(5)}"
    settings = servers.model_copy(update={"prefix": name, "schema_": name})
    asyncio.run(make_system(settings))
    yield asyncio.run(recorded_system(settings))
    asyncio.run(take_down(settings))


@pytest.fixture
async def recorded(shared: RecordedSystem) -> AsyncIterator[RecordedSystem]:
    """The recorded system; schemas that a test made are dropped after the test."""
    yield shared
    await drop(
        shared.settings,
        *(
            name
            for name in await schemas(shared.settings, shared.settings.schema_)
            if name != shared.settings.schema_
        ),
    )
