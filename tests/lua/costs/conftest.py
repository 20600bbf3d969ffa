"""A shard in its own Redis, whose calls are measured."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.lua.costs.measured_shard import MeasuredShard


@pytest.fixture
async def system(private_server: Any) -> AsyncIterator[MeasuredShard]:
    system = MeasuredShard(private_server[1])
    await system.begin()
    yield system
    await system.end()
