"""`python -m tests.explore` (`make explore MINUTES=10`): draws random cases that no run before has drawn,
until the time is up: simulated histories, histories of the takeover protocol, properties, histories of
commands.

What it finds is printed with the line that repeats it. A find becomes a fixed test: an `@example`, or a seed
in the list of its test. Exit 1: something was found.
"""

import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import click

from grabstream.settings import child_environment
from tests.tiers import EXPLORE, PROJECT

#: Larger seeds are those of nightly runs.
SEED_MAX: Final = 10**9


class Search(NamedTuple):
    """A command that draws cases for some seconds, and its share of the time."""

    name: str
    words: Sequence[str]
    share: float


def searches(seconds: float) -> list[Search]:
    """The searches of a run of `seconds`, with new seeds."""
    seed = str(1 + secrets.randbelow(SEED_MAX))
    shares = {"simulation": 0.35, "protocol": 0.1, "tests": 0.55}
    of = {name: f"{share * seconds:.0f}" for name, share in shares.items()}
    words = {
        "simulation": ("-m", "tests.simulation", "--seconds", of["simulation"], "--first", seed),
        "protocol": ("-m", "tests.protocol", "--seconds", of["protocol"], "--seed", seed),
        "tests": ("-m", "pytest", "-n0", "-q", "--stop-after", of["tests"], "tests"),
    }
    return [Search(name, words[name], share) for name, share in shares.items()]


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0.2), default=10.0, show_default=True)
def main(minutes: float) -> None:
    """Draw new random cases for some minutes."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began, found = time.monotonic(), []
    for search in searches(minutes * 60):
        click.echo(f"== {search.name}: {' '.join(search.words)}")
        environment = child_environment() | {"CI": "1", "TIER": EXPLORE}
        code = subprocess.run([sys.executable, *search.words], cwd=PROJECT, env=environment).returncode
        if code:
            found.append(f"{search.name} (exit {code})")
    click.echo(
        f"explored for {(time.monotonic() - began) / 60:.1f} min; found: {', '.join(found) or 'nothing'}"
    )
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
