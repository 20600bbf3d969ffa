"""Answers in the cache Redis (GRAB_CACHE_URL), which all gateways of a system share.

One round trip looks an answer up and, when there is no fresh one, draws who makes it: the others use the one
before it, or wait a moment. Ages are measured by the clock of that Redis: an answer expires there when it is
too old to be used at all. Whatever is wrong with the server or a value is a miss, never an error.
"""

import asyncio
import json
import secrets
import time
from hashlib import sha256
from typing import Any, Final, NamedTuple

from redis.exceptions import RedisError, ResponseError

from grabstream.gateway.bounds import (
    CACHE_SECONDS,
    CACHE_STALE_SECONDS_MAX,
    CACHE_WAIT_SECONDS_MAX,
    SHARED_ANSWER_BYTES_MAX,
)
from grabstream.gateway.cache_server import CacheServer

#: Raised whenever the form of values changes: gateways of both releases may run at the same time.
FORM_VERSION: Final = 2
#: How long a gateway that makes an answer keeps the others waiting, if it dies meanwhile.
MAKING_MS_MAX: Final = 2_000
POLL_SECONDS: Final = 0.02
CHECK_BYTES: Final = 32
LIFE_MS: Final = round((CACHE_SECONDS + CACHE_STALE_SECONDS_MAX) * 1000)
_STALE_MS: Final = round(CACHE_STALE_SECONDS_MAX * 1000)

#: KEYS: the answer, and who makes it. ARGV: this gateway, its time (ms), the largest value (bytes), the rest
#: of its life (ms) from which on an answer is not fresh. Returns the answer, the rest of its life (ms), and
#: whether this gateway is to make a new one, or the error for which that could not be recorded. A value that
#: is not an answer may have any type, and any size.
_FIND: Final = """
local value, left, bytes = '', -1, redis.pcall('STRLEN', KEYS[1])
if type(bytes) == 'number' and bytes > 0 and bytes <= tonumber(ARGV[3]) then
    value, left = redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])
    if left > tonumber(ARGV[4]) then return {value, left, 0, ''} end
end
local set = redis.pcall('SET', KEYS[2], ARGV[1], 'NX', 'PX', ARGV[2])
if not set then return {value, left, 0, ''} end
return {value, left, set.err and 0 or 1, set.err or ''}
"""
#: KEYS: as above. ARGV: the answer ('': there is none), the rest of its life (ms), this gateway, the longest
#: life (ms), and whether it replaces whatever is there. An answer that was read later, and so lives longer,
#: stays. Returns '', or the error for which it was not stored.
_STORE: Final = """
local problem, left = '', redis.call('PTTL', KEYS[1])
if ARGV[1] ~= '' and (ARGV[5] == '1' or left <= tonumber(ARGV[2]) or left > tonumber(ARGV[4])) then
    local set = redis.pcall('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
    problem = set.err or ''
end
if redis.pcall('GET', KEYS[2]) == ARGV[3] then redis.call('DEL', KEYS[2]) end
return problem
"""


class LookUpResult(NamedTuple):
    """What a look-up found: an answer with its age (s), or None. Then this gateway makes one: as `maker`, if
    others wait for it. With `is_damaged`, it replaces the stored value.
    """

    body: bytes | None = None
    age: float = 0.0
    maker: str = ""
    is_damaged: bool = False


class SharedAnswers:
    """Answers of one system, made by this release of the program. They are shared once it is known which
    system that is (`belong_to`): a copy of a system may have the same prefix and schema.
    """

    def __init__(self, server: CacheServer, release: str, prefix: str, schema: str) -> None:
        self._server = server
        self._prefix = prefix
        self._names = [FORM_VERSION, release, prefix, schema]
        self._identity: bytes | None = None
        self._find = server.client.register_script(_FIND)
        self._store = server.client.register_script(_STORE)

    @property
    def is_up(self) -> bool:
        """Whether the server can be asked, and the system's id is known."""
        return self._server.is_up and self._identity is not None

    def belong_to(self, system: str) -> None:
        """Sets the system, by what no copy of it shares."""
        self._identity = json.dumps([*self._names, system]).encode()

    async def find(self, question: bytes) -> LookUpResult:
        """The answer to a question, by the digest of the question. Waits for a gateway that makes it, at most
        CACHE_WAIT_SECONDS_MAX.
        """
        key = self._key(question)
        until = time.monotonic() + CACHE_WAIT_SECONDS_MAX
        maker = secrets.token_hex(8)
        while True:
            got = await self._run(
                self._find, key,
                [maker, MAKING_MS_MAX, SHARED_ANSWER_BYTES_MAX + CHECK_BYTES, _STALE_MS],
            )  # fmt: skip
            if not _is_found(got):
                return LookUpResult()
            value, left, is_maker, problem = got
            if problem:
                self._server.refused(ResponseError(problem.decode(errors="replace")))
            body = _body_of(key, value) if left > 0 else None
            if body is not None and not (is_maker or problem):
                return LookUpResult(body, max(0, LIFE_MS - left) / 1000)
            is_damaged = bool(value) and body is None
            if is_maker or problem or is_damaged or time.monotonic() >= until:
                return LookUpResult(None, 0.0, maker if is_maker else "", is_damaged)
            await asyncio.sleep(POLL_SECONDS)

    async def store(self, question: bytes, body: bytes, age: float, result: LookUpResult) -> None:
        """Shares an answer whose age (s) is known, if it is not too large or too old, and lets others make
        the next one.
        """
        left = LIFE_MS - round(age * 1000)
        is_shared = left > 0 and len(body) <= SHARED_ANSWER_BYTES_MAX
        if not (is_shared or result.maker):
            return
        key = self._key(question)
        value = _check_of(key, body) + body if is_shared else b""
        problem = await self._run(
            self._store, key, [value, max(left, 1), result.maker, LIFE_MS, int(result.is_damaged)]
        )
        if isinstance(problem, bytes) and problem:
            self._server.refused(ResponseError(problem.decode(errors="replace")))

    async def give_up(self, question: bytes, result: LookUpResult) -> None:
        """Lets another gateway make the answer that this one failed to make."""
        await self.store(question, b"", LIFE_MS / 1000, result)

    async def _run(self, script: Any, key: str, arguments: list[Any]) -> Any:
        """What a script returns; None while the server cannot be used."""
        if not self._server.is_up:
            return None
        try:
            return await script(keys=[key, f"{key}:maker"], args=arguments)
        except ResponseError as error:
            self._server.refused(error)
        except (RedisError, OSError) as error:
            self._server.failed(error)
        return None

    def _key(self, question: bytes) -> str:
        assert self._identity is not None, "nothing is shared before"
        digest = sha256(self._identity + b"\0" + question).hexdigest()
        return f"{self._prefix}:answers:{digest}"


def _is_found(got: Any) -> bool:
    """Whether a reply has the form of the script."""
    return (
        isinstance(got, list)
        and [type(one) for one in got] == [bytes, int, int, bytes]
        and len(got[0]) <= SHARED_ANSWER_BYTES_MAX + CHECK_BYTES
    )


def _check_of(key: str, body: bytes) -> bytes:
    """What shows that a value is the whole answer to this question of this system."""
    return sha256(key.encode() + b"\0" + body).digest()


def _body_of(key: str, value: bytes) -> bytes | None:
    """The answer in a value; None if it is damaged, or was stored by something else."""
    check, body = value[:CHECK_BYTES], value[CHECK_BYTES:]
    return body if body and check == _check_of(key, body) else None
