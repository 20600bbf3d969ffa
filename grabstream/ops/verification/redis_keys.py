"""Compares Redis with the journal: builds a shadow of each shard from the journal, and compares the two
key by key.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from aiokafka.errors import OffsetOutOfRangeError
from redis.exceptions import RedisError

from grabstream.connections.opening import key_space, sealer, snapshots
from grabstream.connections.redis_servers import information
from grabstream.crypto.sealing import CannotOpen
from grabstream.ops.verification.checks import POLL_SECONDS, VerificationCheck, VerificationProgress
from grabstream.ops.verification.read_model_comparison import ReadModelComparison
from grabstream.settings import BadSettings, Settings
from grabstream.streams.journal import JournalReader, open_reader
from grabstream.streams.relaying.ownership import NewerProgram, SteppedDown
from grabstream.streams.relaying.recovery import Impossible, Snapshots
from grabstream.streams.relaying.shadow import (
    VERIFIER_SHADOW,
    Compared,
    NoRoom,
    NotComparable,
    TimeShare,
    open_shadow,
)
from grabstream.streams.topics import Topics

log = logging.getLogger(__name__)


#: A shard is copied only on a Redis server that uses less than this share of its `maxmemory`, or without a
#: `maxmemory`, less than the other share of its machine's memory.
ROOM_SHARE: Final = 0.9
ROOM_SHARE_OF_MACHINE: Final = 0.7


class _ComparisonProgress:
    """Reports the progress of the comparison, in events: half of a shard's when its shadow is made, which
    takes about as long as the comparison with it.
    """

    def __init__(self, report: VerificationProgress, ends: Mapping[int, int]) -> None:
        self._report = report
        self._ends = ends
        self._total = sum(ends.values())
        self._shard = self._reached = 0

    def begin(self, shard: int) -> None:
        """The next shard begins."""
        self._shard = shard
        self._at(0)

    def made(self, applied: int) -> None:
        """The number of events in the shadow."""
        self._at(min(applied / max(self._ends.get(self._shard, 0), 1), 1) / 2)

    def compared(self, keys: int, of: int) -> None:
        """The number of compared keys, of all."""
        self._at((1 + keys / of) / 2)

    def end(self) -> None:
        """All shards are compared."""
        self._report("comparing Redis", self._total, self._total)

    def _at(self, share: float) -> None:
        before = sum(self._ends.get(shard, 0) for shard in range(self._shard))
        # Never less than before: a shadow that follows the live shard is made further while it is compared.
        self._reached = max(self._reached, before + round(share * self._ends.get(self._shard, 0)))
        self._report("comparing Redis", self._reached, self._total)


async def redis_check(
    settings: Settings, redis: Any, reader: JournalReader, books: ReadModelComparison, wait_seconds: float,
    report: VerificationProgress, share: float
) -> VerificationCheck:  # fmt: skip
    """Checks that every key of every shard is what a recovery would make from the journal. Waits up to
    `wait_seconds` for a shard that is being taken over.
    """
    keys, problems, notes = 0, [], []
    reached = _ComparisonProgress(report, books.ends)
    for shard in range(settings.shards):
        reached.begin(shard)
        if shard in books.broken:
            notes.append(f"shard {shard} is not compared: its journal is broken")
            continue
        if shard in books.ahead or shard in books.not_journaled:
            notes.append(f"shard {shard} is not compared: Redis and the journal end at different events")
            continue
        seq, server_epoch = await redis.hmget(key_space(settings).shard(shard).state, ["seq", "server_epoch"])
        if seq is None and server_epoch is None:
            if books.ends[shard]:
                problems.append(
                    f"shard {shard}: Redis has no data of it, but its journal ends at seq {books.ends[shard]}"
                )
            continue
        trail = snapshots(settings, slowly=True) if shard in books.trail_is_sound else None
        try:
            settings.require_opening_keys("`verify`")
            compared = await _compare_shard(
                settings, redis, reader, shard, [trail], share, patience_seconds=wait_seconds,
                wait_seconds=wait_seconds, made=reached.made, compared=reached.compared,
            )  # fmt: skip
            keys += compared.keys
            problems += compared.differences
        except NotComparable as error:
            problems.append(f"shard {shard}: {error}")
        except OffsetOutOfRangeError:
            # The journal lacks its beginning, so an archive is given, and all else was compared with it.
            notes.append(
                f"shard {shard} is not compared: a copy of it needs records that the journal no longer has"
            )
        except (NoRoom, NewerProgram, SteppedDown) as error:
            problems.append(f"not compared: {error} (--quick skips this check)")
        except (CannotOpen, BadSettings) as error:
            problems.append(f"shard {shard} is not compared: {error} (--quick skips this check)")
        except (Impossible, msgspec.DecodeError) as error:
            if any(record.shard == shard and record.event_count for record in books.aside):
                notes.append(f"shard {shard} is not compared: events of it were set aside ({error})")
            else:
                problems.append(f"shard {shard}: the journal contradicts itself: {error}")
    reached.end()
    return VerificationCheck("Redis = fold of the journal", keys, "keys", problems, notes)


def compares_keys(settings: Settings, redis: Any) -> Callable[[int, float], Awaitable[list[str] | None]]:
    """Returns the function with which the verifier compares a shard's keys. It takes the shard and the share
    of the time that it may use, and returns the differences, or None when the shard cannot be compared now.
    """

    async def compare(shard: int, share: float) -> list[str] | None:
        if await redis.hget(key_space(settings).shard(shard).state, "server_epoch") is None:
            return None
        try:
            async with open_reader(settings.brokers, Topics(settings.prefix).journal) as reader:
                # The audit trail has not been compared with the journal: what differs from a copy that begins
                # with the trail, which is faster, counts if it also differs from one of the journal alone.
                trails = [snapshots(settings, slowly=True), None]
                compared = await _compare_shard(
                    settings, redis, reader, shard, trails, share, prefix=VERIFIER_SHADOW
                )
                return compared.differences
        except (
            NotComparable, NoRoom, NewerProgram, SteppedDown, Impossible, CannotOpen, msgspec.DecodeError
        ) as error:  # fmt: skip
            log.info("shard %d is not compared key by key: %s", shard, error)
            return None

    return compare


async def _compare_shard(
    settings: Settings, redis: Any, reader: JournalReader, shard: int, trails: Sequence[Snapshots | None],
    share: float, *, patience_seconds: float = 0.0, **how: Any
) -> Compared:  # fmt: skip
    """Compares a shard's keys with a copy that begins with an audit trail (None: of the journal alone); while
    there are differences, with the next one. Waits up to `patience_seconds` for a shard that is being taken
    over.
    """
    compared = Compared(0, 0, [])
    for trail in trails:
        deadline = time.monotonic() + patience_seconds
        async with open_shadow(
            redis, key_space(settings), shard, sealer(settings), reader, trail, pace=TimeShare(share),
            room=_room_of(redis), **how,
        ) as shadow:  # fmt: skip
            await shadow.make()
            while True:
                try:
                    compared = await shadow.compare()
                    break
                except NotComparable:
                    # The shard may be in the middle of a takeover, which ends soon.
                    if time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(POLL_SECONDS)
        if not compared.differences:
            break
    return compared


def _room_of(redis: Any) -> Callable[[str], Any]:
    async def room(key: str) -> str:
        """Why the server of a key has no room for a copy; '' when it has."""
        try:
            [(server, memory)] = (await information(redis, "memory", key)).items()
        except RedisError:
            return ""
        bytes_max, share = int(memory.get("maxmemory", 0)), ROOM_SHARE
        if not bytes_max:
            bytes_max, share = int(memory.get("total_system_memory", 0)), ROOM_SHARE_OF_MACHINE
        if bytes_max and int(memory["used_memory"]) > share * bytes_max:
            return f"{server or 'Redis'} has {int(memory['used_memory']):,} of {bytes_max:,} bytes in use"
        return ""

    return room
