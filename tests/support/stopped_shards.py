"""Waits for a stopped shard, and calls the command line next to projectors of the same process."""

import asyncio
import json
from typing import Any

from grabstream.settings import Settings
from tests.conftest import until
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import (
    journal,  # noqa: F401 - a fixture
    rows,
)

WHY = ("--reason", "sent twice by hand, see ticket 17", "--operator", "olga")


async def call_json(settings: Settings, *words: str) -> Any:
    """Runs a command with `--json` in a thread, since the projectors of this process must continue; returns
    the exit code and the JSON, or what it printed to stderr.
    """
    done = await asyncio.to_thread(grabstream, *words, "--json", **env_of(settings))
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


async def until_stopped(settings: Settings, projection: str) -> None:
    """Returns when a projection has a stopped shard."""

    async def stopped() -> bool:
        return bool(await rows(settings, f"SELECT 1 FROM stopped_shards WHERE projection = '{projection}'"))

    await until(stopped, 30, "the stop")
