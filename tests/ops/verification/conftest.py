"""Fixtures of tests that look at Redis themselves."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from grabstream.connections.opening import open_redis
from grabstream.settings import load_settings


@pytest.fixture
async def redis() -> AsyncIterator[Any]:
    client = open_redis(load_settings())
    yield client
    await client.aclose()
