"""Shares of shards: the reports of workers, how many shards each should have, and which worker passes one to
which.

Every worker computes this from Redis. Workers that read different states may disagree; then a shard may be
passed on once more than necessary, which does no harm.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

#: From this lag of its event loop on, a worker counts as overloaded, if it lasts; callers of its shards wait
#: as long.
OVERLOADED_LAG_MS: Final = 100.0
#: A worker is overloaded only in comparison: some other worker's lag is at most this share of its own.
OTHER_LAG_SHARE: Final = 0.5
#: Below this lag, an overloaded worker has recovered.
CALM_LAG_MS: Final = 25.0
#: How long a worker must be overloaded before it gives a shard away, and again before it gives the next.
OVERLOADED_SECONDS: Final = 10.0
#: How long it must have recovered before it takes one back, and again before it takes the next.
CALM_SECONDS: Final = 300.0


_is_number = re.compile(r"[0-9]{1,9}").fullmatch


class Worker(NamedTuple):
    """The report of a worker: the lag of its event loop, and the maximum of shards that it wants; None if it
    wants its share.
    """

    lag_ms: int
    shards_max: int | None = None

    def encode(self) -> str:
        """The form in Redis."""
        return f"{self.lag_ms} {'-' if self.shards_max is None else self.shards_max}"

    @classmethod
    def decode(cls, text: str) -> "Worker":
        """Reads the form in Redis. A later release may add words; what cannot be read is ignored."""
        numbers = [int(word) if _is_number(word) else None for word in text.split(" ")[:2]]
        lag_ms, shards_max = (*numbers, None, None)[:2]
        return cls(lag_ms or 0, shards_max)


def shares(shards: int, held: Mapping[str, int], shards_max: Mapping[str, int]) -> dict[str, int]:
    """How many shards each worker should have: as even as the workers' own bounds allow. If the shards cannot
    be divided evenly, the workers that hold most have one more, so that the fewest shards move.

    The sum is smaller than `shards` if the bounds of all workers are.
    """
    result: dict[str, int] = {}
    left, open_ended = shards, sorted(held, key=lambda worker: (-held[worker], worker))
    while open_ended:
        least, over = divmod(left, len(open_ended))
        bounded = [worker for worker in open_ended if shards_max.get(worker, shards + 1) <= least]
        if not bounded:
            result |= {worker: least + (place < over) for place, worker in enumerate(open_ended)}
            break
        for worker in bounded:
            result[worker] = shards_max[worker]
            left -= result[worker]
        open_ended = [worker for worker in open_ended if worker not in bounded]
    return result


def takers(
    giver: str,
    shards: int,
    holders: Collection[str],
    workers: Collection[str],
    shards_max: Mapping[str, int],
) -> list[str]:
    """The workers that should get a shard of the giver, best first; none if the giver has no more than its
    share, or all others have theirs.

    `holders` has one item for each held shard. Several givers with the same readings choose different
    workers, while there are enough.
    """
    held = Counter(dict.fromkeys(workers, 0))
    held.update(holders)
    share = shares(shards, held, shards_max)
    too_many = [worker for worker in sorted(held) for _ in range(held[worker] - share[worker])]
    too_few = [worker for worker in sorted(held) for _ in range(share[worker] - held[worker])]
    if giver not in too_many:
        return []
    place = too_many.index(giver)
    if place >= len(too_few):
        return []
    return list(dict.fromkeys(too_few[place:] + too_few[:place]))


class Overload:
    """Decides the maximum of shards that a worker wants, from the lag of its event loop and of the others'.

    A worker overloaded for some time wants one shard less than it has. After a much longer time almost
    without lag it wants one more, until it has its share.
    """

    def __init__(self) -> None:
        self.shards_max: int | None = None
        self._overloaded_since: float | None = None
        self._calm_since: float | None = None

    def update(
        self, now: float, lag_ms: float, lags_of_others_ms: Collection[float], held: int, share: int
    ) -> None:
        """Adds a measurement; `now` is in seconds, `share` is that of an even spread."""
        is_overloaded = lag_ms >= OVERLOADED_LAG_MS and any(
            other <= lag_ms * OTHER_LAG_SHARE for other in lags_of_others_ms
        )
        if not is_overloaded:
            self._overloaded_since = None
        elif self._overloaded_since is None:
            self._overloaded_since = now
        elif now - self._overloaded_since >= OVERLOADED_SECONDS:
            self.shards_max, self._overloaded_since = max(held - 1, 0), now
        if self.shards_max is None or lag_ms > CALM_LAG_MS:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        elif now - self._calm_since >= CALM_SECONDS:
            more = self.shards_max + 1
            self.shards_max, self._calm_since = (more if more < share else None), now
