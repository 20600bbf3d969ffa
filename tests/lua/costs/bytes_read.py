"""Counts the bytes that each call of a script reads from Redis."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha1
from typing import Any, Final, NamedTuple

import pytest

from grabstream.gate import calls as gate_calls
from grabstream.lua import loader
from grabstream.lua.loader import Script
from grabstream.streams.deciding import sweeper
from grabstream.streams.relaying import ownership
from tests.lua.costs.measured_shard import MeasuredShard
from tests.support.plain_scripts import use_plain_scripts

#: Adds up the texts in replies of Redis.
_COUNTING: Final = """local redis = (function(redis)
  local bytes, shared, texts_of = 0, 0, nil
  function texts_of(reply)
    if type(reply) == 'string' then return #reply end
    local sum = 0
    if type(reply) == 'table' then for i = 1, #reply do sum = sum + texts_of(reply[i]) end end
    return sum
  end
  local function call(command, ...)
    local reply = redis.call(command, ...)
    local read = texts_of(reply)
    bytes = bytes + read
    if command == 'HMGET' and #reply > 1 then
      for i = 1, #reply do shared = math.max(shared, texts_of(reply[i])) end
    end
    if read > 0 then redis.call('SET', 'bytes', bytes .. ' ' .. shared) end
    return reply
  end
  return setmetatable({call = call}, {__index = redis})
end)(redis)
"""


class ReadBytes(NamedTuple):
    """A call of a script: the bytes that it read, and those of the longest record that it read together with
    others.
    """

    script: str
    bytes: int
    shared: int


@cache
def counting(name: str) -> Script:
    """The script, which stores the bytes that it has read in the key `bytes`."""
    head, _, text = loader.assemble(name).partition("\n")
    text = f"{head}\n{text}" if "no-writes" in head else f"{head}\n{_COUNTING}{text}"
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())


@contextmanager
def counting_bytes(system: MeasuredShard) -> Iterator[list[ReadBytes]]:
    """Within it, the list gets each call, made one at a time."""
    calls: list[ReadBytes] = []
    real, one_at_a_time = gate_calls.run_script, asyncio.Lock()

    async def run(client: Any, name: str, keys: Sequence[str], arguments: Sequence[object]) -> Any:
        async with one_at_a_time:
            await system.redis.delete("bytes")
            reply = await real(client, name, keys, arguments)
            read, shared = map(int, (await system.redis.get("bytes") or b"0 0").split())
            calls.append(ReadBytes(name, read, shared))
            return reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "load", counting)
        use_plain_scripts(patch)
        for module in (gate_calls, sweeper, ownership):
            patch.setattr(module, "run_script", run)
        yield calls
