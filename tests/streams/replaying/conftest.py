"""Fixtures for tests of replays."""

from collections.abc import AsyncIterator

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from grabstream.settings import Settings


@pytest.fixture
async def topic(servers: Settings, prefix: str) -> AsyncIterator[str]:
    name = f"{prefix}.mine"
    yield name
    client = AIOKafkaAdminClient(bootstrap_servers=servers.kafka)
    await client.start()
    await client.delete_topics([name])
    await client.close()
