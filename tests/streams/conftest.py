"""A system with a history, which many tests read."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator

import pytest

from grabstream.ops.rehearsal.stage import take_down
from grabstream.ops.settings import Settings
from tests.conftest import make_system
from tests.streams.replaying.histories import System, drop, schemas, told_system


@pytest.fixture(scope="session")
def shared(servers: Settings) -> Iterator[System]:
    """Both shards are carried to one moment, looked at, and then to their ends. Tests read it, and leave it
    as it is.
    """
    name = f"test{secrets.token_hex(5)}"
    settings = servers.model_copy(update={"prefix": name, "schema_": name})
    asyncio.run(make_system(settings))
    yield asyncio.run(told_system(settings))
    asyncio.run(take_down(settings))


@pytest.fixture
async def told(shared: System) -> AsyncIterator[System]:
    """The system; the schemas that a test made are taken away."""
    yield shared
    await drop(
        shared.settings,
        *(
            name
            for name in await schemas(shared.settings, shared.settings.schema_)
            if name != shared.settings.schema_
        ),
    )
