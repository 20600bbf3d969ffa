"""Systems of tests. `make_system` makes what that of the program makes, but copies the tables of a new schema
from a dump, in half of the time that `migrate` takes; a test compares both.
"""

import re
import subprocess
from typing import Any
from unittest import mock

from psycopg import AsyncConnection

from grabstream.ops import initialization
from grabstream.ops.initialization import Initialized
from grabstream.projections.database.migrate import migrate, use_schema
from grabstream.projections.database.sessions import connect
from grabstream.projections.versions import drop_all
from grabstream.settings import Settings

#: The schema that is dumped; each process of a parallel run has its own.
_NAME = "template_of_tests"
#: Names that need no quotes, in a dump either.
_PLAIN = re.compile(r"[a-z][a-z0-9_]*")
_DUMPS: dict[tuple[str, int], tuple[str, list[str]]] = {}


async def make_system(settings: Settings, *arguments: Any, **options: Any) -> Initialized:
    """`grabstream.ops.initialization.make_system`, faster for a new schema."""

    async def copied(connection: AsyncConnection[Any], schema: str, shards: int) -> list[str]:
        return await make_tables(
            connection, settings.model_copy(update={"schema_": schema, "shards": shards})
        )

    with mock.patch.object(initialization, "migrate", copied):
        return await initialization.make_system(settings, *arguments, **options)


async def make_tables(connection: AsyncConnection[Any], settings: Settings) -> list[str]:
    """What `migrate` makes in the schema of the settings; returns the names of the migrations."""
    schema, shards = settings.schema_, settings.shards
    if not _PLAIN.fullmatch(schema) or await _exists(connection, schema):
        return await migrate(connection, schema, shards)
    if (settings.postgres, shards) not in _DUMPS:
        _DUMPS[settings.postgres, shards] = await _dump(settings)
    text, migrations = _DUMPS[settings.postgres, shards]
    async with connection.transaction():
        await connection.execute(text.replace(_NAME, schema).encode())
    await use_schema(connection, schema)
    return migrations


async def _exists(connection: AsyncConnection[Any], schema: str) -> bool:
    found = await connection.execute("SELECT FROM pg_namespace WHERE nspname = %s", (schema,))
    return await found.fetchone() is not None


async def _dump(settings: Settings) -> tuple[str, list[str]]:
    """The statements that make the schemas of a new system, with _NAME for its name, and its migrations."""
    name = f"{_NAME}_{settings.prefix}"
    async with await connect(settings.postgres, name) as connection:
        migrations = await migrate(connection, name, settings.shards)
    words = ("pg_dump", "-d", settings.postgres, "-n", f"{name}*", "--inserts", "--no-owner")
    text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    async with await connect(settings.postgres, name) as connection:
        await drop_all(connection, name)
    # Without psql's own commands; settings are those of the transaction.
    lines = [line for line in text.splitlines() if not line.startswith("\\")]
    text = re.sub(r"^SET ", "SET LOCAL ", "\n".join(lines), flags=re.MULTILINE)
    text = text.replace("set_config('search_path', '', false)", "set_config('search_path', '', true)")
    return text.replace(name, _NAME), migrations
