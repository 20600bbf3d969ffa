"""Runs the command line in a separate process, with the settings of a test's system."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from grabstream.settings import Settings, child_environment
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


def in_a_terminal(*words: str, columns: int, stdin: str = "", **settings: str) -> str:
    """The output of a verb in a terminal of this width; it has to end with 0."""
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-m", "grabstream.ops.cli", *words],
        env={**child_environment(**settings), "TERM": "dumb"},
        stdin=subprocess.PIPE,
        stdout=terminal,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(terminal)
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.close()
        printed = b""
        # Reading a terminal whose other end is closed raises an error instead of an end of file.
        try:
            while piece := os.read(reader, 65536):
                printed += piece
        except OSError:
            pass
        os.close(reader)
        assert process.wait(60) == 0
    return printed.decode()


def env_of(settings: Settings) -> dict[str, str]:
    """The settings of a system as arguments of `grabstream()` and `child_environment()`."""
    return {
        "prefix": settings.prefix, "schema": settings.schema_, "redis_url": settings.redis_url,
        "kafka": settings.kafka,
        "postgres": settings.postgres, "seal_keys": settings.seal_keys.get_secret_value(),
    }  # fmt: skip
