"""The longest script calls, as the Redis servers record them: SLOWLOG has the calls of each script above its
threshold, the latency histogram has the longest call of all scripts. Both measure only the time that a call
took in Redis' thread.

A gate can only measure how long it waited, which includes the calls of others. A script that measured itself
would make every call slower.
"""

from typing import Any, Final, NamedTuple

from grabstream.connections.redis_servers import masters, within
from grabstream.lua.library import library
from grabstream.lua.loader import load, script_names
from grabstream.runtime.trouble import suppressed_trouble

#: How many entries of a server's SLOWLOG are read. By default it keeps 128 entries of calls above
#: `slowlog-log-slower-than`, 10 ms.
ENTRIES_MAX: Final = 1_024


class SlowScript(NamedTuple):
    """A script in a server's SLOWLOG: how many calls it has there, the longest one (ms), and when that was
    (seconds since 1970 UTC).
    """

    server: str
    script: str
    calls: int
    longest_ms: float
    at: int


class ScriptCalls(NamedTuple):
    """All script calls on a server, also those of other systems, since it started or its statistics were
    reset: how many, and an upper bound of the longest (ms; Redis counts in powers of two).
    """

    server: str
    calls: int
    longest_ms_at_most: float


async def script_calls(redis: Any) -> list[ScriptCalls]:
    """The script calls of each server. Leaves out servers that do not answer or do not let this user ask."""
    calls = []
    for server, client in await masters(redis):
        histograms: dict[bytes, Any] = {}
        with suppressed_trouble():
            histograms = await within(client.execute_command("LATENCY", "HISTOGRAM", "fcall", "evalsha"))
        if histograms:
            longest = max(max(histogram[b"histogram_usec"]) for histogram in histograms.values())
            count = sum(histogram[b"calls"] for histogram in histograms.values())
            calls.append(ScriptCalls(server, count, longest / 1_000))
    return calls


async def slow_scripts(redis: Any, prefix: str) -> list[SlowScript]:
    """The scripts of this system that are in SLOWLOG, the longest first. Leaves out servers that do not
    answer or do not let this user ask.
    """
    names = {load(name).sha.encode(): name for name in script_names()}
    names |= {function.encode(): name for name, function in library().functions.items()}
    # In an entry the first key of a script follows soon after the name of its function, or its SHA-1.
    first_key = f" {prefix}:{{{prefix}-s".encode()
    scripts: dict[tuple[str, str], SlowScript] = {}
    for server, client in await masters(redis):
        entries: list[dict[str, Any]] = []
        with suppressed_trouble():
            entries = await within(client.slowlog_get(ENTRIES_MAX))
        for entry in entries:
            words = bytes(entry["command"])
            name = names.get(words.split(b" ", 2)[1]) if words.startswith((b"FCALL ", b"EVALSHA ")) else None
            if name is None or first_key not in words[:400]:
                continue
            so_far = scripts.get((server, name), SlowScript(server, name, 0, 0.0, 0))
            took_ms = int(entry["duration"]) / 1_000
            longest = (
                (took_ms, int(entry["start_time"]))
                if took_ms > so_far.longest_ms
                else (so_far.longest_ms, so_far.at)
            )
            scripts[server, name] = SlowScript(server, name, so_far.calls + 1, *longest)
    return sorted(scripts.values(), key=lambda script: -script.longest_ms)
