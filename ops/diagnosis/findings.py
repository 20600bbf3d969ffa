"""Findings: one thing that is wrong, in words for whoever has to mend it."""

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from grabstream.ops.connections.identity import NEW_JOURNAL
from grabstream.ops.settings import without_password

#: `stuck`: something does not go on, or is wrong already · `risk`: it will be, or may be · `note`: known and
#: decided by somebody.
Severity = Literal["stuck", "risk", "note"]

#: The way out when Kafka has lost events of the journal.
RESTORE: Final = f"{NEW_JOURNAL}   # stop all workers before, start them afterwards"


class Finding(NamedTuple):
    """What is wrong, since when (ms since 1970 UTC; None: nobody knows), what it means for users, and the
    command that mends it.
    """

    severity: Severity
    what: str
    means: str
    command: str
    since: int | None = None


def spans(numbers: Iterable[int]) -> str:
    """Numbers in words: `0 to 3, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def of_shards(numbers: Iterable[int]) -> str:
    """`shard 3`, or `shards 0 to 3, 5`."""
    found = sorted(numbers)
    return f"shard{'s' if len(found) > 1 else ''} {spans(found)}"


def address(setting: str, url: str) -> str:
    """A server's address for a command to copy; the variable's name where the address holds a password."""
    return url if without_password(url) == url else f'"${setting}"'
