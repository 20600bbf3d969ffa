"""Fixtures for tests of read models."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from psycopg import AsyncConnection

from grabstream.projections import versions
from grabstream.settings import Settings
from tests.support.systems import make_tables


@pytest.fixture
async def connection(settings: Settings) -> AsyncIterator[AsyncConnection[Any]]:
    """A session in the tables of a system without events."""
    async with await AsyncConnection.connect(settings.postgres, autocommit=True) as opened:
        await make_tables(opened, settings)
        yield opened
        await versions.drop_all(opened, settings.schema_)
