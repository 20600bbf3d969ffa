"""Logs the shards that a worker relays in few lines: many shards taken over at its start, or passed on when
another worker comes, are one change.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

#: A change is announced when nothing has changed for this long, in lengths of a lease: leases are passed on
#: one after the other …
QUIET_LEASES: Final = 1
#: … and after this time at the latest.
UNSAID_LEASES_MAX: Final = 5


class RelayedShards(NamedTuple):
    """The shards that a worker relays now; those of them that it has taken over since the last change, and
    those that it no longer has.
    """

    relayed: list[int]
    taken_over: list[int]
    given_up: list[int]


class Announcing:
    """Collects changes. A shard taken over and given up between two of them is in neither."""

    def __init__(self, lease_seconds: float) -> None:
        self._quiet_seconds = QUIET_LEASES * lease_seconds
        self._unsaid_seconds_max = UNSAID_LEASES_MAX * lease_seconds
        #: The shards and the terms in which they were taken over, as announced and as seen last.
        self._said: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._changed_at = 0.0
        #: The time of the first change that is not announced.
        self._unsaid_since: float | None = None

    def look(self, held: Mapping[int, int], now: float, at_once: bool = False) -> RelayedShards | None:
        """The change to announce, if it is time to, or `at_once`. `held` are the shards whose leases the
        worker has, with the term of the last takeover, 0 before the first one. A shard remains the worker's
        while its server is down.
        """
        terms = {shard: term or self._seen.get(shard, 0) for shard, term in held.items()}
        terms = {shard: term for shard, term in terms.items() if term}
        if terms != self._seen:
            self._seen, self._changed_at = terms, now
            if self._unsaid_since is None:
                self._unsaid_since = now
        if self._unsaid_since is None or not (
            at_once
            or now - self._changed_at >= self._quiet_seconds
            or now - self._unsaid_since >= self._unsaid_seconds_max
        ):
            return None
        self._unsaid_since, said, self._said = None, self._said, terms
        taken_over = sorted(shard for shard, term in terms.items() if said.get(shard) != term)
        given_up = sorted(said.keys() - terms.keys())
        return RelayedShards(sorted(terms), taken_over, given_up) if taken_over or given_up else None
