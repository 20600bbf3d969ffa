"""What tests share of `tests/ops/commands/test_cli.py`."""

import subprocess
import sys
from pathlib import Path

from grabstream.ops.settings import Settings, child_environment

README = Path(__file__).parent.parent.parent / "README.md"


def grabstream(
    *words: str, folder: Path | None = None, stdin: str = "", **settings: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "grabstream.ops.cli", *words],
        env=child_environment(**settings),
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=200,
    )


def of(settings: Settings) -> dict[str, str]:
    return {
        "prefix": settings.prefix, "schema": settings.schema_, "redis_url": settings.redis_url,
        "kafka": settings.kafka,
        "postgres": settings.postgres, "seal_keys": settings.seal_keys.get_secret_value(),
    }  # fmt: skip
