"""Helpers of `tests/ops/test_neighbours.py` that other tests use."""

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from grabstream.ops.initialization import make_system
from grabstream.settings import Settings
from grabstream.workshop.rehearsal.stage import take_down

#: What prefixes and schemas begin with, and how they continue: like a pattern of the other, a topic, a
#: version of a read model, a moment.
NAMES = (("", ""), ("_b", "_b"), (".journal", "_balances"), ("-b", "__at_"))


@asynccontextmanager
async def systems(servers: Settings, count: int) -> AsyncIterator[list[Settings]]:
    """Several systems with few shards."""
    start = f"test{secrets.token_hex(4)}"
    async with AsyncExitStack() as stack:
        made = []
        for prefix, schema in NAMES[:count]:
            settings = servers.model_copy(
                update={"prefix": start + prefix, "schema_": start + schema, "shards": 2}
            )
            await make_system(settings)
            stack.push_async_callback(take_down, settings)
            made.append(settings)
        yield made
