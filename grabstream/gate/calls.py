"""Calls the deciding scripts: sends commands of one type as one call; returns its reply, or raises the reason
why there is none.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from redis.exceptions import ClusterError, OutOfMemoryError, ReadOnlyError, ResponseError

from grabstream.gate import encoding
from grabstream.gate.authority import NO_KEYS, Authority
from grabstream.gate.batches import Batch
from grabstream.gate.drawing import NotWanted, in_slices
from grabstream.gate.staging import ScriptCall, discard, stage
from grabstream.lua.keys import KeySpace, ShardKeys
from grabstream.lua.library import LibraryMissing
from grabstream.lua.running import BROKEN_OFF, is_raised_by_script, run_script
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
LIBRARY_RETRY_MS: Final = 1_000
#: The code of a reply when the shard has another history than the call names (includes/decide.lua).
_ANOTHER_HISTORY: Final = -1


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
            if text.startswith(BROKEN_OFF):
                raise BrokenOff(text.removeprefix(BROKEN_OFF)) from None
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
