"""`python -m tests.repeat`, the end of `.ci/run` when `make test` has failed: repeats the failed tests once,
alone, with servers that were started again, and says what decides.

Exit 0: each of them passed now. They are listed under `passed only when repeated`; the next change fixes them
or moves them to the long tier. Exit 1: more than five failed, or one failed twice.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Final

from tests.tiers import FAILED, IDS, PROJECT, Failure, read_failures

#: With more failed tests than this, something is wrong, whatever a repetition says.
REPEATED_MAX: Final = 5


def play_failed() -> int:
    """Plays the failed tests of the last run, one after the other; returns the exit code."""
    ids = FAILED.with_name(IDS).relative_to(PROJECT)
    return subprocess.run(
        ["make", "test", "PROCESSES=0", f"ARGS=@{ids}"], cwd=PROJECT, check=False
    ).returncode


def names_of(failures: Sequence[Failure]) -> list[str]:
    """A line for each failed test: its name and its assertion."""
    return [f"FAILED {failure.nodeid} - {failure.assertion}" for failure in failures]


def verdict(
    first: Sequence[Failure], play: Callable[[], int], read: Callable[[], Sequence[Failure]]
) -> tuple[int, list[str]]:
    """The exit code, and the last lines of the output."""
    if not first:
        return 1, ["The run failed, and no test did: its output says why."]
    if len(first) > REPEATED_MAX:
        return 1, [f"{len(first)} tests failed; up to {REPEATED_MAX} would be repeated.", *names_of(first)]
    code = play()
    again = read()
    if again:
        return 1, ["failed twice:", *names_of(again)]
    if code:
        return 1, [f"The repetition ended with {code}, and no test failed.", *names_of(first)]
    lines = ["passed only when repeated: fix these tests, or move them to the long tier, in the next change"]
    for failure in first:
        lines += [
            f"REPEATED {failure.nodeid} - {failure.assertion}",
            *(f"    {line}" for line in failure.lines),
        ]
    return 0, lines


def main() -> int:
    """Repeats, prints, and returns the exit code."""
    code, lines = verdict(read_failures(), play_failed, read_failures)
    print(*lines, sep="\n", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
