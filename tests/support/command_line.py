"""Runs the command line in a process of its own, with the settings of a test's system."""

import subprocess
import sys
from pathlib import Path

from grabstream.ops.settings import Settings, child_environment

README = Path(__file__).parent.parent.parent / "README.md"


def grabstream(
    *words: str, folder: Path | None = None, stdin: str = "", **settings: str
) -> "subprocess.CompletedProcess[str]":
    """Runs `grabstream` with arguments and settings; returns its exit code and what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "grabstream.ops.cli", *words],
        env=child_environment(**settings),
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=200,
    )


def env_of(settings: Settings) -> dict[str, str]:
    """The settings of a system as arguments of `grabstream()` and `child_environment()`."""
    return {
        "prefix": settings.prefix, "schema": settings.schema_, "redis_url": settings.redis_url,
        "kafka": settings.kafka,
        "postgres": settings.postgres, "seal_keys": settings.seal_keys.get_secret_value(),
    }  # fmt: skip
