"""Runs the commands of docs/backup.md on a system of a test, and verifies a system."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from psycopg.conninfo import conninfo_to_dict

from grabstream.ops.verification.verifying import verify
from grabstream.settings import Settings, child_environment
from grabstream.workshop.services.servers import PROJECT

DECIDING, PROJECTING = "decide,relay,sweep", "project,publish"


def recipe(name: str) -> str:
    """The shell commands of the block that has this name in docs/backup.md."""
    [block] = re.findall(
        rf"^<!-- {name} -->\n```sh\n(.*?)^```",
        (PROJECT / "docs" / "backup.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    return str(block)


def run_recipe(name: str, settings: Settings, backup: Path, **more: str) -> None:
    """Runs a block of docs/backup.md on a system; the copy is in `backup / "kept"`. The password of
    PostgreSQL is in a file, as the page wants it. `more` are further variables of the environment.
    """
    address = conninfo_to_dict(settings.postgres)
    if "password" in address:
        file = backup / "pgpass"
        file.touch(mode=0o600)
        file.write_text(f"*:*:*:*:{address['password']}\n")
        settings = settings.model_copy(update={"postgres": without_password(settings.postgres)})
        more = {"PGPASSFILE": str(file), **more}
    done = execute(name, settings, backup, **more)
    assert done.returncode == 0, done.stderr


def without_password(address: str) -> str:
    """A URL of PostgreSQL without its password."""
    parts = urlsplit(address)
    user, at, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=user.partition(":")[0] + at + host).geturl()


def execute(name: str, settings: Settings, backup: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs a block with these settings as they are; without a name, only the lines with which all begin."""
    environment = child_environment(
        prefix=settings.prefix, schema=settings.schema_, redis_url=settings.redis_url, kafka=settings.kafka,
        postgres=settings.postgres,
        shards=str(settings.shards), seal_keys=settings.seal_keys.get_secret_value(),
    )  # fmt: skip
    environment["BACKUP"] = str(backup / "kept")
    environment |= {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", **more}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", recipe("names") + (recipe(name) if name else "")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


async def assert_verified(settings: Settings) -> None:
    """Raises AssertionError with the problems that `verify` finds."""
    wrong = {check.name: check.problems for check in await verify(settings, share=1) if not check.passed}
    assert not wrong, wrong
