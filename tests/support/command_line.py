"""Runs the command line in a process of its own, with the settings of a test's system."""

import subprocess
import tempfile
from pathlib import Path

from grabstream.ops.settings import Settings, child_environment
from tests.support import forks

README = Path(__file__).parent.parent.parent / "README.md"
SECONDS_MAX = 200.0


def grabstream(
    *words: str, folder: Path | None = None, stdin: str = "", **settings: str
) -> "subprocess.CompletedProcess[str]":
    """Runs `grabstream` with arguments and settings; returns its exit code and what it printed."""
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as printed,
        tempfile.TemporaryFile("w+") as said,
    ):
        given.write(stdin)
        given.seek(0)
        process = forks.start(words, child_environment(**settings), given, printed, said, folder)
        try:
            code = process.wait(SECONDS_MAX)
        except BaseException:
            process.kill()
            process.wait()
            raise
        for file in (printed, said):
            file.seek(0)
        return subprocess.CompletedProcess(words, code, printed.read(), said.read())


def env_of(settings: Settings) -> dict[str, str]:
    """The settings of a system as arguments of `grabstream()` and `child_environment()`."""
    return {
        "prefix": settings.prefix, "schema": settings.schema_, "redis_url": settings.redis_url,
        "kafka": settings.kafka,
        "postgres": settings.postgres, "seal_keys": settings.seal_keys.get_secret_value(),
    }  # fmt: skip
