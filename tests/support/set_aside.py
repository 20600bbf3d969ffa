"""What tests share of `tests/streams/projecting/test_set_aside.py`."""

import asyncio
import json
from typing import Any

from grabstream.ops.settings import Settings
from tests.conftest import until
from tests.support.cli import grabstream, of
from tests.support.projections import (
    journal,  # noqa: F401 - a fixture
    rows,
)

WHY = ("--reason", "sent twice by hand, see ticket 17", "--operator", "olga")


async def call(settings: Settings, *words: str) -> Any:
    """In a thread, since the projectors run in this process and have to go on meanwhile."""
    done = await asyncio.to_thread(grabstream, *words, "--json", **of(settings))
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


async def stopped_at(settings: Settings, projection: str) -> None:
    async def there() -> bool:
        return bool(await rows(settings, f"SELECT 1 FROM stopped_shards WHERE projection = '{projection}'"))

    await until(there, 30, "the stop")
