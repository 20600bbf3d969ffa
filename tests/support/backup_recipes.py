"""Runs the commands of docs/backup.md on a system of a test, and verifies a system."""

import re
import subprocess
import sys
from pathlib import Path

from grabstream.ops.services.servers import PROJECT
from grabstream.ops.settings import Settings, child_environment
from grabstream.ops.verification.verifying import verify

DECIDING, PROJECTING = "decide,relay,sweep", "project,publish"


def recipe(name: str) -> str:
    """The shell commands of the block that has this name in docs/backup.md."""
    [block] = re.findall(
        rf"^<!-- {name} -->\n```sh\n(.*?)^```",
        (PROJECT / "docs" / "backup.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    return str(block)


def run_recipe(name: str, settings: Settings, backup: Path) -> None:
    """Runs a block of docs/backup.md on a system; the copy is in `backup / "kept"`."""
    environment = child_environment(
        prefix=settings.prefix, schema=settings.schema_, redis_url=settings.redis_url, kafka=settings.kafka,
        postgres=settings.postgres,
        shards=str(settings.shards), seal_keys=settings.seal_keys.get_secret_value(),
    )  # fmt: skip
    environment |= {
        "BACKUP": str(backup / "kept"),
        "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
    }
    script = recipe("names") + recipe(name)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


async def assert_verified(settings: Settings) -> None:
    """Raises AssertionError with the problems that `verify` finds."""
    wrong = {check.name: check.problems for check in await verify(settings, share=1) if not check.passed}
    assert not wrong, wrong
