"""Scripts whose calls of Redis fail where a test wants it: every assembled script with `redis.call` wrapped.

A script that was interrupted before it had written anything is run again with the failure one call later,
until it has gone past its first write; so every script of a history is interrupted at every call up to, and
at, its first write. From then on a call that reads is an error of its own.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha1
from typing import Any, Final

from redis.exceptions import NoScriptError, ResponseError

from grabstream.lua.loader import Script, load, script_names

#: What the scripts write by. Whoever uses another command adds it here.
WRITES: Final = (
    "XADD", "XTRIM", "HSET", "HDEL", "HINCRBY", "RPUSH", "LPOP", "LTRIM", "ZADD", "ZREM", "SADD", "SREM",
    "SET", "DEL", "UNLINK", "PUBLISH",
    "PERSIST", "PEXPIRE", "RENAME", "SETRANGE",
)  # fmt: skip
#: Scripts that read after they have written: what they write is nothing before they have come to their end.
READS_LATER: Final = ("apply",)

# Redis has its first line for itself; everything else stands on the line after it, so that line numbers stay
# near.
_WRAPPER: Final = """
local redis = (function(real)
  local IS_WRITE, may_read = {%s}, %s
  local fail_at, of_writes = string.match(ARGV[#ARGV], '^(%%d+)/(%%a+)$')
  fail_at, of_writes = tonumber(fail_at), of_writes == 'writes'
  local calls, writes = 0, 0
  return setmetatable({call = function(name, ...)
    local is_write = IS_WRITE[name]
    calls = calls + 1
    if is_write then writes = writes + 1 end
    if of_writes and is_write and writes == fail_at then
      may_read = true -- what is done about it may look around
      error('interrupted at write ' .. writes .. ', ' .. name)
    end
    if not of_writes and calls == fail_at and writes <= (is_write and 1 or 0) then
      error('interrupted before the first write: ' .. (is_write and 'write' or 'read') .. ' ' .. name)
    end
    if writes > 0 and not is_write and not may_read then error('read after a write: ' .. name) end
    return real.call(name, ...)
  end}, {__index = real})
end)(redis)
"""
_INTERRUPTED: Final = re.compile(r"interrupted before the first write: (read|write) (\w+)")


@cache
def interrupting(name: str) -> Script:
    """The script `name`, with its calls wrapped; the plan is one more argument: `<number>/<calls or writes>`,
    0 for never.
    """
    first, rest = load(name).text.split("\n", 1)
    names = ", ".join(f"{write} = true" for write in WRITES)
    text = first + _WRAPPER % (names, "true" if name in READS_LATER else "false") + rest
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())


@cache
def _name_of(sha: str) -> str:
    return next(name for name in script_names() if load(name).sha == sha)


class Interrupting:
    """A client of Redis whose scripts are interrupted; everything else is the client's.

    `chosen` says of a script's name whether this call of it is; `interruptions` counts them by script and by
    what was interrupted.
    """

    def __init__(self, client: Any, chosen: Callable[[str], bool] = lambda name: True) -> None:
        self._client = client
        self._chosen = chosen
        self._one_at_a_time = asyncio.Lock()
        self.interruptions: Counter[tuple[str, str, str]] = Counter()
        #: What the next scripts are to fail at, instead: a write of this number; 0 for never.
        self.fail_at_write: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def execute_command(self, *arguments: Any, **options: Any) -> Any:
        if arguments[0] != "EVALSHA":
            return await self._client.execute_command(*arguments, **options)
        script, rest = interrupting(_name_of(arguments[1])), arguments[2:]
        if self.fail_at_write is not None:
            return await self._run(script, rest, f"{self.fail_at_write}/writes")
        async with self._one_at_a_time:  # a gate may have two calls of a shard in flight
            return await self._interrupted(script, rest)

    async def _interrupted(self, script: Script, rest: Sequence[Any]) -> Any:
        if self._chosen(script.name):
            before = await self._contents(rest[1])
            await self._interrupt_each(script, rest)
            after = await self._contents(rest[1])
            changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
            assert not changed, (
                f"{script.name}: interrupted before its first write, but these have changed: {changed}"
            )
        return await self._run(script, rest, "0/calls")

    async def _interrupt_each(self, script: Script, rest: Sequence[Any]) -> None:
        """Fails at the first call, the second, and so on up to and including the first write."""
        call = 0
        while True:
            call += 1
            try:
                await self._run(script, rest, f"{call}/calls")
            except ResponseError as error:
                found = _INTERRUPTED.search(str(error))
                if found is None:
                    raise
                self.interruptions[script.name, found[1], found[2]] += 1
                if found[1] == "write":
                    return
            else:
                return  # it writes nothing

    async def _run(self, script: Script, rest: Sequence[Any], plan: str) -> Any:
        try:
            return await self._client.execute_command("EVALSHA", script.sha, *rest, plan)
        except NoScriptError:
            return await self._client.execute_command("EVAL", script.text, *rest, plan)

    async def _contents(self, key: str) -> dict[bytes, Any]:
        """All keys of a key's shard, byte for byte; of hashes and sets without their order, which a read may
        change.
        """
        names = [
            name async for name in self._client.scan_iter(match=f"{key[: key.index('}')]}*", count=1_000)
        ]
        return {name: await self._value(name) for name in names}

    async def _value(self, name: bytes) -> Any:
        kind = await self._client.type(name)
        if kind == b"hash":
            return await self._client.hgetall(name)
        return await self._client.smembers(name) if kind == b"set" else await self._client.dump(name)
