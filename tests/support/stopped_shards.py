"""Waits for a stopped shard, and calls the command line next to projectors of the same process."""

import asyncio
import json
from typing import Any

from psycopg import AsyncConnection

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


async def as_if_set_aside(connection: AsyncConnection[Any], lines: list[bytes], seq: int) -> None:
    """Removes an event from the audit trail as if an operator had set its record aside."""
    await connection.execute(
        "INSERT INTO set_aside_records (projection, read_model, shard, journal_offset, first_seq, count, "
        "head, term, owner, headers, "
        "value, value_sha256, offers, readable, missing, refused_because, reason, operator) "
        "SELECT 'audit', m.schema, shard, 2, seq, 1, hash, 1, 'a', '[]', %s, '', '{e}', true, '[]', 'x', "
        "'a test', 'olga' "
        "FROM audit, read_models AS m WHERE seq = %s AND m.projection = 'audit' AND m.state = 'live'",
        (lines[seq - 1], seq),
    )
    await connection.execute("DELETE FROM audit_1 WHERE seq = %s", (seq,))
