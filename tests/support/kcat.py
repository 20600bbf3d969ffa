"""Reads topics with kcat, a Kafka client that shares no code with this project."""

import subprocess

from grabstream.settings import Settings


def consume(settings: Settings, topic: str, form: str = "%s\n") -> list[str]:
    """All records of a topic, one line each, printed in kcat's format string."""
    command = ["kcat", "-C", "-b", settings.kafka, "-t", topic, "-e", "-q", "-f", form]
    done = subprocess.run(command, check=True, capture_output=True, timeout=30)
    return done.stdout.decode(errors="backslashreplace").splitlines()
