"""Findings: what is wrong, in words for the operator who repairs it."""

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from grabstream.connections.identity import NEW_JOURNAL
from grabstream.settings import without_password

#: `stuck`: something has stopped or is wrong now · `risk`: it may stop or be wrong later · `note`: an
#: operator or a recovery caused it, and nothing is stuck.
Severity = Literal["stuck", "risk", "note"]

#: The command that repairs a journal whose events Kafka has lost.
RESTORE: Final = f"{NEW_JOURNAL}   # first stop all workers; start them again afterwards"


class Finding(NamedTuple):
    """What is wrong, what it means for users, the command that repairs it, and since when (ms since 1970 UTC;
    None when unknown).
    """

    severity: Severity
    what: str
    means: str
    command: str
    since: int | None = None


def spans(numbers: Iterable[int]) -> str:
    """Numbers as ranges: `0 to 3, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def shard_list(numbers: Iterable[int]) -> str:
    """`shard 3`, or `shards 0 to 3, 5`."""
    ordered = sorted(numbers)
    return f"shard{'s' if len(ordered) > 1 else ''} {spans(ordered)}"


def address(setting: str, url: str) -> str:
    """A server's address in a command to copy: the name of its variable when the address holds a password."""
    return url if without_password(url) == url else f'"${setting}"'
