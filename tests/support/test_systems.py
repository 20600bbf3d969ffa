"""The systems of tests have the tables, rows and comments of those that `grabstream init` makes."""

import re
import subprocess

from grabstream.ops import initialization
from grabstream.settings import Settings
from grabstream.workshop.rehearsal.stage import take_down
from tests.support.systems import make_system


def dump_of(settings: Settings) -> str:
    """What a system is in PostgreSQL, without what differs between two systems: names, times, the journal."""
    words = ("pg_dump", "-d", settings.postgres, "-n", f"{settings.schema_}*", "--inserts")
    text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    text = re.sub(r"'\d{4}-\d\d-\d\d [^']*'", "TIME", text.replace(settings.schema_, "NAME"))
    lines = re.sub(r"of the journal [0-9a-f]{32}", "of the journal", text).splitlines()
    return "\n".join(line for line in lines if not line.startswith(("\\", "INSERT INTO NAME.system ")))


async def test_a_system_of_tests_is_that_of_init(system: Settings) -> None:
    other = system.model_copy(update={"prefix": f"b{system.prefix}", "schema_": f"b{system.schema_}"})
    made = await initialization.make_system(other)
    try:
        assert made.migrations
        assert dump_of(other) == dump_of(system)
    finally:
        await take_down(other)
    again = system.model_copy(update={"prefix": f"c{system.prefix}", "schema_": f"c{system.schema_}"})
    try:
        assert (await make_system(again)).migrations == made.migrations
        assert (await make_system(again)).migrations == []
    finally:
        await take_down(again)
