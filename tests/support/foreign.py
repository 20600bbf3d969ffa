"""What tests share of `tests/streams/test_foreign.py`."""

import subprocess

from grabstream.ops.settings import Settings


def consume(settings: Settings, topic: str, form: str = "%s\n") -> list[str]:
    command = ["kcat", "-C", "-b", settings.kafka, "-t", topic, "-e", "-q", "-f", form]
    done = subprocess.run(command, check=True, capture_output=True, timeout=30)
    return done.stdout.decode(errors="backslashreplace").splitlines()
