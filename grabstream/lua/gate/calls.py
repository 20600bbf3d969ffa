"""Calls the deciding scripts: sends commands of one type as one call; returns its reply, or raises the reason
why there is none.
"""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from redis.exceptions import ClusterError, NoScriptError, OutOfMemoryError, ReadOnlyError, ResponseError

from grabstream.lua import loader
from grabstream.lua.gate import encoding
from grabstream.lua.gate.authority import NO_KEYS, Authority
from grabstream.lua.gate.batches import Batch
from grabstream.lua.gate.drawing import NotWanted, in_slices
from grabstream.lua.gate.staging import ScriptCall, discard, stage
from grabstream.lua.keys import KeySpace, ShardKeys, state_key_beside
from grabstream.lua.library import LibraryMissing, is_missing, library, why_unusable
from grabstream.lua.measures import FUNCTION_SECONDS
from grabstream.models.commands import Open
from grabstream.models.outcomes import Outcome

BUSY_RETRY_MS: Final = 200
#: Scripts that must run when the outbox is full: they make room, or end what fills it.
_ALWAYS_ADMITTED: Final = frozenset(
    {
        "pause",
        "resume",
        "close",
        "amend",
        "adjust",
        "confirm",
        "release",
        "extend",
        "return",
        "redeem",
        "unredeem",
    }
)
#: Scripts that run before or at the first step of a takeover, so they run without the library too.
_BEFORE_TAKEOVER: Final = frozenset({"lease", "pass_lease", "raise_term", "server_epoch", "time"})
#: After this time a client tries again whether a shard has functions, after it ran plain scripts there.
PLAIN_SECONDS: Final = 10.0
LIBRARY_RETRY_MS: Final = 1_000
#: Until when (time of the event loop, s) a client runs plain scripts, by the shard's key.
_plain_until: WeakKeyDictionary[Any, dict[str, float]] = WeakKeyDictionary()
#: The code of a reply when the shard has another history than the call names (includes/decide.lua).
_ANOTHER_HISTORY: Final = -1
#: The beginning of a script's error when a write failed after another had succeeded: the shard is fenced
#: until it is rebuilt (includes/decide.lua).
_BROKEN_OFF: Final = "BROKEN OFF "
#: The beginnings of errors after which nothing was written: Redis refuses a script before it begins, because
#: of too few replicas, a disk that cannot be written, or another script that has run for seconds; or the
#: first write of a script fails (UNWRITTEN).
_NOT_WRITTEN: Final = ("NOREPLICAS", "MISCONF", "BUSY ", "UNWRITTEN ")
#: The position in the script, at the end of an error that a script raises. An error without it comes from the
#: server itself.
_in_script = re.compile(r"\bon @user_(script|function)\b|\buser_(script|function):\d+:").search


class GateLimits(NamedTuple):
    """Bounds of a gate: commands per call, commands queued per shard, events in an outbox; timeout and clock
    skew in ms; whether an `open` may have its own seed, and must name a beacon; who must sign commands.
    """

    batch_commands_max: int = 512
    queue_commands_max: int = 20_000
    outbox_events_max: int = 200_000
    timeout_ms: int = 2_000
    clock_skew_ms_max: int = 5_000
    #: A gate that is made from the settings accepts none, unless GRAB_ISSUER_SEEDS says so.
    issuer_seeds: bool = True
    #: Whether an envelope must await a round of a public randomness beacon.
    beacon_required: bool = False
    #: Whether the metadata of grabs must be sealed: the gate has keys of users.
    seals_metadata: bool = False
    #: The signatures that commands must carry.
    authority: Authority = NO_KEYS


def now_ms() -> int:
    """Returns milliseconds since 1970 UTC by this machine's clock."""
    return time.time_ns() // 1_000_000


def is_raised_by_script(error: ResponseError) -> bool:
    """Whether a script raised an error before its first write: then its commands caused the error, not the
    server.
    """
    text = str(error)
    return _in_script(text) is not None and not text.startswith((*_NOT_WRITTEN, _BROKEN_OFF))


class CallRefused(Exception):
    """The script refused the whole call: nothing was decided."""

    def __init__(self, outcome: Outcome, message: str, retry_at: int) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message
        self.retry_at = retry_at


class AnotherHistory(Exception):
    """The shard was recovered after the callers' last commands were decided: nothing was decided now."""

    def __init__(self, history: int) -> None:
        super().__init__(history)
        self.history = history


class Undecidable(Exception):
    """A command causes an error when its arguments are built or when it is decided: nothing was decided."""


class BrokenOff(Exception):
    """A script failed after its first write; the shard is fenced."""


class Calls:
    """Calls the scripts of one system. `clock` returns a time in ms that replaces the server's."""

    def __init__(
        self,
        redis: Any,
        keys: KeySpace,
        secrets: encoding.Secrets,
        limits: GateLimits,
        clock: Callable[[], int] | None,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._secrets = secrets
        self._limits = limits
        self._clock = clock

    def now(self) -> int:
        """Returns milliseconds since 1970 UTC, by `clock` if there is one."""
        return self._clock() if self._clock else now_ms()

    async def call(
        self,
        keys: ShardKeys,
        batch: Batch,
        history: int,
        journaled_seq: int,
        built: ScriptCall | None = None,
    ) -> encoding.ScriptReply:
        """Returns the reply that has the rows of the commands and the history of the shard. The call must be
        decided in a history (0: any), by a server that has events up to `journaled_seq`. `built` is what
        `draw` has made of them.

        Raises CallRefused, AnotherHistory, Undecidable, BrokenOff, and errors of a client that cannot reach
        its server.
        """
        script = batch.script
        if script == "open":
            call = built or await self.draw(keys, batch.commands)
        else:
            call = self._built(keys, batch)
        try:
            packed = await stage(partial(run_script, self._redis), call) if call.staged else call.arguments
            raw = await run_script(
                self._redis, script, [*keys.deciding(), *call.keys],
                (*self._first_arguments(keys, script, history, journaled_seq), *packed)
            )  # fmt: skip
        except OutOfMemoryError:
            raise CallRefused(Outcome.busy, "Redis memory is full", self.now() + BUSY_RETRY_MS) from None
        except LibraryMissing as error:
            raise CallRefused(Outcome.fenced, str(error), self.now() + LIBRARY_RETRY_MS) from None
        except ReadOnlyError:
            # The server is no longer the master: the client finds the new master, and the call is sent again.
            raise
        except ResponseError as error:
            text = str(error)
            if text.startswith(_BROKEN_OFF):
                raise BrokenOff(text.removeprefix(_BROKEN_OFF)) from None
            if is_raised_by_script(error):
                # The script failed before its first write, so nothing has changed.
                raise Undecidable(text) from None
            if isinstance(error, ClusterError):
                raise
            raise CallRefused(
                Outcome.busy, f"Redis refuses: {type(error).__name__} {text}", self.now() + BUSY_RETRY_MS
            ) from None
        finally:
            if call.staged:
                await discard(self._redis, call)
        reply = encoding.decode_reply(raw)
        if reply.code == _ANOTHER_HISTORY:
            raise AnotherHistory(reply.history_or_retry_at)
        if reply.code != 0:
            raise CallRefused(Outcome(reply.code), str(reply.rows_or_message), reply.history_or_retry_at)
        return reply

    async def draw(
        self, keys: ShardKeys, commands: Sequence[Open], is_wanted: Callable[[], bool] = lambda: True
    ) -> ScriptCall:
        """Makes the call that opens offers; draws parts in slices. Raises Undecidable, NotWanted."""
        try:
            return await in_slices(
                encoding.building_open(keys, commands, self._secrets, self.now()), is_wanted
            )
        except NotWanted:
            raise
        except Exception as error:
            raise Undecidable(f"{type(error).__name__}: {error}") from error

    def _built(self, keys: ShardKeys, batch: Batch) -> ScriptCall:
        try:
            return encoding.build(keys, batch, self._secrets)
        except Exception as error:
            raise Undecidable(f"{type(error).__name__}: {error}") from error

    def _first_arguments(
        self, keys: ShardKeys, script: str, history: int, journaled_seq: int
    ) -> tuple[object, ...]:
        """Returns the first arguments of every deciding script."""
        shard = f"{keys.shard}/{self._keys.shards}/{history or ''}/{journaled_seq or ''}"
        outbox_max: int | str = "" if script in _ALWAYS_ADMITTED else self._limits.outbox_events_max
        return (
            shard,
            now_ms(),
            self._clock() if self._clock else "",
            self._limits.clock_skew_ms_max,
            outbox_max,
        )


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
    state = state_key_beside(keys[0])
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
