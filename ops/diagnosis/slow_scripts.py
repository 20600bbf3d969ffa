"""The longest calls of our scripts, as the servers themselves have them: their SLOWLOG each script's, above
its threshold, their latency histogram the longest of all since they started. Both count nothing but the time
from a call's begin to its end in Redis' thread.

A gate could only say how long it waited, with what others did meanwhile; and a script that told how long it
took would cost each call.
"""

from typing import Any, Final, NamedTuple

from grabstream.lua.loader import load, script_names
from grabstream.lua.trouble import suppressed_trouble
from grabstream.ops.connections.redis_servers import masters, within

#: Entries of a server's SLOWLOG that are looked through; it keeps 128 unless told otherwise, those above
#: `slowlog-log-slower-than` (10 ms).
ENTRIES_MAX: Final = 1_024


class SlowScript(NamedTuple):
    """Of a script on a server: how often it is in SLOWLOG, its longest call (ms), and when that was (seconds
    since 1970 UTC).
    """

    server: str
    script: str
    calls: int
    longest_ms: float
    at: int


class ScriptCalls(NamedTuple):
    """Of all scripts on a server, also those of other systems, since it started or its statistics were reset:
    how many calls there were, and how long the longest was at most, ms (Redis counts in powers of two).
    """

    server: str
    calls: int
    longest_ms_at_most: float


async def script_calls(redis: Any) -> list[ScriptCalls]:
    """How long calls were on each server; nothing of one that does not answer, or not this user."""
    found = []
    for server, client in await masters(redis):
        said: dict[bytes, Any] = {}
        with suppressed_trouble():
            said = await within(client.execute_command("LATENCY", "HISTOGRAM", "evalsha"))
        if counted := said.get(b"evalsha"):
            found.append(ScriptCalls(server, counted[b"calls"], max(counted[b"histogram_usec"]) / 1_000))
    return found


async def slow_scripts(redis: Any, prefix: str) -> list[SlowScript]:
    """What SLOWLOG has of the scripts of a system, the longest first; nothing of one that does not answer, or
    not this user.
    """
    names = {load(name).sha.encode(): name for name in script_names()}
    # The first key of every script stands next to the SHA-1.
    ours = f" {prefix}:{{{prefix}-s".encode()
    found: dict[tuple[str, str], SlowScript] = {}
    for server, client in await masters(redis):
        entries: list[dict[str, Any]] = []
        with suppressed_trouble():
            entries = await within(client.slowlog_get(ENTRIES_MAX))
        for entry in entries:
            words = bytes(entry["command"])
            name = names.get(words.split(b" ", 2)[1]) if words.startswith(b"EVALSHA ") else None
            if name is None or ours not in words[:400]:
                continue
            known = found.get((server, name), SlowScript(server, name, 0, 0.0, 0))
            took = int(entry["duration"]) / 1_000
            longest = (
                (took, int(entry["start_time"])) if took > known.longest_ms else (known.longest_ms, known.at)
            )
            found[server, name] = SlowScript(server, name, known.calls + 1, *longest)
    return sorted(found.values(), key=lambda one: -one.longest_ms)
