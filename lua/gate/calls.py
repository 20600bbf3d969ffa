"""Calls of the deciding scripts: commands of one type as one call, its reply or why there is none."""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from redis.exceptions import ClusterError, NoScriptError, OutOfMemoryError, ReadOnlyError, ResponseError

from grabstream.lua import loader
from grabstream.lua.gate import batches
from grabstream.lua.gate.staging import ScriptCall, discard, stage
from grabstream.lua.keys import KeySpace, ShardKeys
from grabstream.models.commands import AnyCommand, Open
from grabstream.models.offers import EnvelopeTerms
from grabstream.models.outcomes import Outcome

BUSY_RETRY_MS: Final = 200
#: Scripts that must work when the outbox is full: what they do gives room, or ends what fills it.
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
#: What a script replies in place of an outcome when the shard has another history than the call names
#: (includes/decide.lua).
_ANOTHER_HISTORY: Final = -1
#: With these words a script says that a write failed after another: its shard is fenced until it was rebuilt
#: (includes/decide.lua).
_BROKE: Final = "BROKEN OFF "
#: With these words Redis refuses a script before it begins: too few replicas, a disk that cannot be written,
#: another script that runs for seconds; and a script, when not even its first write could be done.
_NOT_WRITTEN: Final = ("NOREPLICAS", "MISCONF", "BUSY ", "UNWRITTEN ")
#: Where an error was raised: at the end of whatever a script says that fails. What has no such end was said
#: by the server itself.
_in_script = re.compile(r"\bon @user_(script|function)\b|\buser_(script|function):\d+:").search


class GateLimits(NamedTuple):
    """Bounds of a gate: commands a call, commands queued a shard, events an outbox, milliseconds of time-out
    and clock skew.
    """

    batch_commands_max: int = 512
    queue_commands_max: int = 20_000
    outbox_events_max: int = 200_000
    timeout_ms: int = 2_000
    clock_skew_ms_max: int = 5_000


def now_ms() -> int:
    """Milliseconds since 1970 by this machine's clock."""
    return time.time_ns() // 1_000_000


def is_raised_by_script(error: ResponseError) -> bool:
    """Whether a script itself raised before its first write: what it was called for is at fault, not the
    server.
    """
    said = str(error)
    return _in_script(said) is not None and not said.startswith((*_NOT_WRITTEN, _BROKE))


class CallRefused(Exception):
    """The script refused the whole call: nothing was decided."""

    def __init__(self, outcome: Outcome, message: str, retry_at: int) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message
        self.retry_at = retry_at


class AnotherHistory(Exception):
    """The shard was recovered since the callers' last commands were decided: nothing was decided now."""

    def __init__(self, history: int) -> None:
        super().__init__(history)
        self.history = history


class Undecidable(Exception):
    """A command raises where it is built or decided: nothing was decided."""


class BrokenOff(Exception):
    """A script failed after its first write; the shard is fenced."""


class Calls:
    """Calls scripts of one system. `clock` gives a time in ms that replaces the server's."""

    def __init__(
        self,
        redis: Any,
        keys: KeySpace,
        secrets: batches.Secrets,
        limits: GateLimits,
        clock: Callable[[], int] | None,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._secrets = secrets
        self._limits = limits
        self._clock = clock

    def now(self) -> int:
        """Milliseconds since 1970, of the clock if there is one."""
        return self._clock() if self._clock else now_ms()

    async def call(
        self, keys: ShardKeys, script: str, commands: Sequence[AnyCommand], history: int
    ) -> tuple[list[list[int]], int]:
        """Rows and history.

        Raises CallRefused, AnotherHistory, Undecidable, BrokenOff, and what a client raises that cannot
        reach its server.
        """
        batch = await self._built(keys, script, commands)
        try:
            packed = await stage(partial(run_script, self._redis), batch) if batch.staged else batch.arguments
            raw = await run_script(
                self._redis, script, [*keys.deciding(), *batch.keys],
                (*self._about_call(keys, script, history), *packed)
            )  # fmt: skip
        except OutOfMemoryError:
            raise CallRefused(Outcome.busy, "Redis memory is full", self.now() + BUSY_RETRY_MS) from None
        except ReadOnlyError:
            raise  # a master that is one no more: the client looks for the new one, and it is sent again
        except ResponseError as error:
            said = str(error)
            if said.startswith(_BROKE):
                raise BrokenOff(said.removeprefix(_BROKE)) from None
            if is_raised_by_script(error):
                # It failed before its first write, so nothing has changed.
                raise Undecidable(said) from None
            if isinstance(error, ClusterError):
                raise
            raise CallRefused(
                Outcome.busy, f"Redis refuses: {type(error).__name__} {said}", self.now() + BUSY_RETRY_MS
            ) from None
        finally:
            if batch.staged:
                await discard(self._redis, batch)
        reply = batches.decode_reply(raw)
        if reply.code == _ANOTHER_HISTORY:
            raise AnotherHistory(reply.history_or_retry_at)
        if reply.code != 0:
            raise CallRefused(Outcome(reply.code), str(reply.rows_or_message), reply.history_or_retry_at)
        return reply.rows(), reply.history_or_retry_at

    async def _built(self, keys: ShardKeys, script: str, commands: Sequence[AnyCommand]) -> ScriptCall:
        try:
            if script == "open" and sum(map(_parts_of, commands)) > 2_000:
                return await asyncio.to_thread(
                    batches.build, keys, script, commands, self._secrets, self.now()
                )
            return batches.build(keys, script, commands, self._secrets, self.now())
        except Exception as error:
            raise Undecidable(f"{type(error).__name__}: {error}") from error

    def _about_call(self, keys: ShardKeys, script: str, history: int) -> tuple[object, ...]:
        """The first arguments of every deciding script."""
        place = (
            f"{keys.shard}/{self._keys.shards}/{history}" if history else f"{keys.shard}/{self._keys.shards}"
        )
        outbox_max: int | str = "" if script in _ALWAYS_ADMITTED else self._limits.outbox_events_max
        return (
            place,
            now_ms(),
            self._clock() if self._clock else "",
            self._limits.clock_skew_ms_max,
            outbox_max,
        )


def _parts_of(command: AnyCommand) -> int:
    return (
        command.terms.parts if isinstance(command, Open) and isinstance(command.terms, EnvelopeTerms) else 0
    )


async def run_script(redis: Any, name: str, keys: Sequence[str], arguments: Sequence[object]) -> Any:
    """Runs a script by its SHA-1; a server that does not know it (new, restarted, failed over) is given its
    text.
    """
    script = loader.load(name)
    try:
        return await redis.execute_command("EVALSHA", script.sha, len(keys), *keys, *arguments)
    except NoScriptError:
        return await redis.execute_command("EVAL", script.text, len(keys), *keys, *arguments)
