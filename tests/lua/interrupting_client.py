"""A Redis client that runs every script with `redis.call` wrapped, so that a chosen call of Redis fails.

By default each script call is first interrupted at its first call of Redis, then at its second, and so on up
to and including its first write. After each interruption the shard must be unchanged. Then the script runs
without interruption. In a wrapped script, a read after a write is an error.
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

#: The Redis commands by which scripts write. A new one must be added here.
WRITES: Final = (
    "XADD", "XTRIM", "HSET", "HDEL", "HINCRBY", "RPUSH", "LPOP", "LTRIM", "ZADD", "ZREM", "SADD", "SREM",
    "SET", "DEL", "UNLINK", "PUBLISH",
    "PERSIST", "PEXPIRE", "RENAME", "SETRANGE",
)  # fmt: skip
#: Scripts that may read after a write: what they write has no effect until the script ends.
READS_LATER: Final = ("apply",)

# The first line of a script (shebang) must stay first. The wrapper follows it directly, so that line numbers
# in errors shift by a constant only.
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
      may_read = true -- the script's error handling may read
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
    """The script `name` with its calls wrapped. Its last argument is the plan, `<number>/<calls or writes>`:
    which call, or which write, fails; 0 for none.
    """
    first, rest = load(name).text.split("\n", 1)
    names = ", ".join(f"{write} = true" for write in WRITES)
    text = first + _WRAPPER % (names, "true" if name in READS_LATER else "false") + rest
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())


@cache
def _name_of(sha: str) -> str:
    return next(name for name in script_names() if load(name).sha == sha)


class InterruptingClient:
    """A Redis client whose script calls are interrupted; everything else is passed to the wrapped client.

    `chosen` is asked before each script call, with the script's name, whether to interrupt that call.
    `interruptions` counts interruptions by script, "read" or "write", and Redis command.
    """

    def __init__(self, client: Any, chosen: Callable[[str], bool] = lambda name: True) -> None:
        self._client = client
        self._chosen = chosen
        self._one_at_a_time = asyncio.Lock()
        self.interruptions: Counter[tuple[str, str, str]] = Counter()
        #: If set, script calls are not interrupted as above, but fail at the write of this number; 0: at
        #: none.
        self.fail_at_write: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def execute_command(self, *arguments: Any, **options: Any) -> Any:
        if arguments[0] == "FCALL":  # only the text of a plain script can be wrapped
            raise ResponseError("unknown command 'FCALL', with args beginning with: ")
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
                interrupted = _INTERRUPTED.search(str(error))
                if interrupted is None:
                    raise
                self.interruptions[script.name, interrupted[1], interrupted[2]] += 1
                if interrupted[1] == "write":
                    return
            else:
                return  # the script writes nothing

    async def _run(self, script: Script, rest: Sequence[Any], plan: str) -> Any:
        try:
            return await self._client.execute_command("EVALSHA", script.sha, *rest, plan)
        except NoScriptError:
            return await self._client.execute_command("EVAL", script.text, *rest, plan)

    async def _contents(self, key: str) -> dict[bytes, Any]:
        """The values of all keys in the shard of `key`, byte for byte; hashes and sets without their order,
        which a read may change.
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
