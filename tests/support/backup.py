"""What tests share of `tests/ops/test_backup.py`."""

import re
import subprocess
import sys
from pathlib import Path

from grabstream.ops.services.servers import PROJECT
from grabstream.ops.settings import Settings, child_environment
from grabstream.ops.verification.verifying import verify

DECIDING, PROJECTING = "decide,relay,sweep", "project,publish"


def commands(name: str) -> str:
    """The block of the document that is marked with a name."""
    [found] = re.findall(
        rf"^<!-- {name} -->\n```sh\n(.*?)^```",
        (PROJECT / "docs" / "backup.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    return str(found)


def carry_out(name: str, settings: Settings, backup: Path) -> None:
    environment = child_environment(
        prefix=settings.prefix, schema=settings.schema_, redis_url=settings.redis_url, kafka=settings.kafka,
        postgres=settings.postgres,
        shards=str(settings.shards), seal_keys=settings.seal_keys.get_secret_value(),
    )  # fmt: skip
    environment |= {
        "BACKUP": str(backup / "kept"),
        "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
    }
    script = commands("names") + commands(name)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


async def all_is_right(settings: Settings) -> None:
    wrong = {check.name: check.problems for check in await verify(settings) if not check.passed}
    assert not wrong, wrong
