"""Runs scripts: as functions of the library or, where functions cannot be used, as plain scripts."""

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

from redis.exceptions import NoScriptError, ResponseError

from grabstream.lua import loader
from grabstream.lua.keys import shard_key_from
from grabstream.lua.library import LibraryMissing, is_missing, library, why_unusable
from grabstream.runtime.measures import FUNCTION_SECONDS

#: Scripts that run before or at the first step of a takeover, so they run without the library too.
_BEFORE_TAKEOVER: Final = frozenset({"lease", "pass_lease", "raise_term", "server_epoch", "time"})
#: After this time a client tries again whether a shard has functions, after it ran plain scripts there.
PLAIN_SECONDS: Final = 10.0
#: Until when (time of the event loop, s) a client runs plain scripts, by the shard's key.
_plain_until: WeakKeyDictionary[Any, dict[str, float]] = WeakKeyDictionary()
#: The beginning of a script's error when a write failed after another had succeeded: the shard is fenced
#: until it is rebuilt (includes/decide.lua).
BROKEN_OFF: Final = "BROKEN OFF "
#: The beginnings of errors after which nothing was written: Redis refuses a script before it begins, because
#: of too few replicas, a disk that cannot be written, or another script that has run for seconds; or the
#: first write of a script fails (UNWRITTEN).
_NOT_WRITTEN: Final = ("NOREPLICAS", "MISCONF", "BUSY ", "UNWRITTEN ")
#: The position in the script, at the end of an error that a script raises. An error without it comes from the
#: server itself.
_in_script = re.compile(r"\bon @user_(script|function)\b|\buser_(script|function):\d+:").search


def is_raised_by_script(error: ResponseError) -> bool:
    """Whether a script raised an error before its first write: then its commands caused the error, not the
    server.
    """
    text = str(error)
    return _in_script(text) is not None and not text.startswith((*_NOT_WRITTEN, BROKEN_OFF))


async def run_script(redis: Any, name: str, keys: Sequence[str], arguments: Sequence[object]) -> Any:
    """Runs a script as a function of the library; where functions cannot be used, as a plain script. Both do
    the same, so callers of one shard may use both at a time.

    Raises LibraryMissing if the server does not have the library now, and the client's errors.
    """
    began = time.perf_counter()
    try:
        return await _run(redis, name, keys, arguments)
    finally:
        FUNCTION_SECONDS[name].observe(time.perf_counter() - began)


async def _run(redis: Any, name: str, keys: Sequence[str], arguments: Sequence[object]) -> Any:
    state = shard_key_from(keys[0])
    if is_plain(redis, state):
        return await _run_plain(redis, name, keys, arguments)
    function = library().functions[name]
    try:
        return await redis.execute_command("FCALL", function, len(keys), *keys, *arguments)
    except ResponseError as error:
        if is_missing(error):
            if name in _BEFORE_TAKEOVER:
                return await _run_plain(redis, name, keys, arguments)
            if not await redis.hexists(state, "plain"):
                raise LibraryMissing(
                    "run `grabstream init`: the server of the shard does not have the library "
                    f"{library().name} (a worker that takes the shard over loads it, too)"
                ) from None
        elif not why_unusable(error):
            raise
    _plain_until.setdefault(redis, {})[state] = _loop_seconds() + PLAIN_SECONDS
    return await _run_plain(redis, name, keys, arguments)


def is_plain(redis: Any, state: str) -> bool:
    """Whether a client runs plain scripts now for the shard that has this key."""
    until = _plain_until.get(redis)
    return until is not None and until.get(state, 0.0) > _loop_seconds()


def _loop_seconds() -> float:
    return asyncio.get_running_loop().time()


async def _run_plain(redis: Any, name: str, keys: Sequence[str], arguments: Sequence[object]) -> Any:
    """Runs a script by its SHA-1; sends its text to a server that does not have it (new, restarted, failed
    over).
    """
    script = loader.load(name)
    try:
        return await redis.execute_command("EVALSHA", script.sha, len(keys), *keys, *arguments)
    except NoScriptError:
        return await redis.execute_command("EVAL", script.text, len(keys), *keys, *arguments)
