"""How fast the journal is exported to Parquet, against a replay of the same events into lines: both read it
and verify the chain.
"""

import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.replaying import fill_journal
from grabstream.ops.initialization import make_system
from grabstream.settings import child_environment, load_settings
from grabstream.workshop.rehearsal.stage import take_down

#: Runs a command, and says on standard error the processor time of the main thread since its start.
TIMED: Final = """
import sys, time
from grabstream.ops.cli import grabstream
try:
    grabstream(sys.argv[1:])
finally:
    print("main thread:", time.thread_time(), file=sys.stderr)
"""


class Used(NamedTuple):
    """The seconds of a command: by the clock, of its main thread on a processor, and of all its threads and
    processes.
    """

    clock: float
    main: float
    all: float


async def export(runs: int, count: int, run_grabs: int) -> dict[str, Any]:
    """In events per second by the clock: `export` into a new archive, against `replay --into -` to
    /dev/null, each with its start. The journal has `count` events, with `run_grabs` grabs in a line.

    An export encodes in a second process, so it needs a second core that is free: on a busy machine the ratio
    goes down to that of the processor times, which are in the profile.
    """
    name = f"bench{secrets.token_hex(4)}"
    settings = load_settings().model_copy(update={"prefix": name, "schema_": name})
    environment = child_environment(
        prefix=name, schema=name, redis_url=settings.redis_url, kafka=settings.kafka,
        postgres=settings.postgres, seal_keys=settings.seal_keys.get_secret_value(),
        shards=str(settings.shards),
    )  # fmt: skip
    used: dict[str, list[Used]] = {"export": [], "replay": []}
    await make_system(settings)
    try:
        events = sum(end.seq for end in (await fill_journal(settings, count, run_grabs)).values())
        for run in range(runs):
            with tempfile.TemporaryDirectory(prefix="grabstream-bench-") as folder:
                archive = str(Path(folder) / "archive")
                # In turn, so that neither side always comes first.
                sides = [("export", archive), ("replay", "--into", "-")]
                for words in sides if run % 2 else reversed(sides):
                    used[words[0]].append(await asyncio.to_thread(_run, words, environment))
    finally:
        await take_down(settings)
    ours, theirs = ([events / one.clock for one in used[side]] for side in ("export", "replay"))
    profile = {
        side: {
            f"{name}:": f"{1e6 * sum(getattr(one, name) for one in ones) / events / runs:.1f} µs an event"
            for name in Used._fields
        }
        for side, ones in used.items()
    }
    return {"ours": ours, "theirs": theirs, "unit": "events/s", "profile": profile}


def _run(words: tuple[str, ...], environment: dict[str, str]) -> Used:
    """Runs a command of grabstream; raises RuntimeError if it fails."""
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", TIMED, *words], env=environment, stdout=subprocess.DEVNULL, stderr=said
        )
        _, status, used = os.wait4(process.pid, 0)
        clock = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        text = said.read()
    if process.returncode:
        raise RuntimeError(f"grabstream {' '.join(words)} ended with {process.returncode}: {text}")
    return Used(clock, float(text.rpartition("main thread: ")[2]), used.ru_utime + used.ru_stime)
