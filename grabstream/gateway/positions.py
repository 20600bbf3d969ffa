"""Positions on waiting lists, sent to users in their streams of events: the position of a grab once it is
known, and then after each change.

A list of a hundred thousand may move with every event. So positions are not sent by event: every
POSITIONS_SECONDS, each list that has moved and has a waiting stream is read once for all streams, and each
stream gets its user's position if it has changed.

Events come from the audit trail, positions from the read model `balances`, which may lag behind it, or stop,
in each shard. A list is read when the read model has an event that moved it. A user whose own grabs in a
shard may have changed gets nothing about lists of this shard before the read model has that, too.

What PostgreSQL cannot answer is retried in later rounds, after everything else, and less often each time. A
list that takes PostgreSQL long is read less often, too.
"""

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from time import monotonic
from typing import Any, Final, NamedTuple

import msgspec
from psycopg import Error

from grabstream.gateway.bounds import (
    POSITIONS_FAILED_SECONDS_MAX,
    POSITIONS_REST_SECONDS_MAX,
    POSITIONS_REST_TIMES,
    POSITIONS_SECONDS,
    STREAM_WAITS_MAX,
    WAITERS_LOOKED_UP_MAX,
    WAITING_POSITIONS_MAX,
)
from grabstream.gateway.problems import Problem
from grabstream.gateway.view_reader import ViewReader

log = logging.getLogger(__name__)

REACHED: Final = "SELECT shard, seq FROM cursors WHERE projection = 'balances'"
#: After how many rounds in which something could not be read a warning is logged: PostgreSQL may be busy for
#: a moment.
LATE_ROUNDS: Final = 5
#: A query that cannot be answered now, or not at all.
FAILURES: Final = (Problem, Error)
#: What users wait for: the grabs that joined first.
WAITS: Final = """
    SELECT asked.user_id AS "user", waits.offer, waits.grab, waits.shard, waits.place
    FROM unnest(%s::text[]) AS asked (user_id), LATERAL (
        SELECT offer, grab, shard, place FROM grabs
        WHERE grabs.user_id = asked.user_id AND state = 'waiting' ORDER BY at, shard, seq LIMIT %s
    ) AS waits
"""
#: The numbers of the first grabs of a waiting list, in order.
WAITING_PLACES: Final = "SELECT place FROM grabs WHERE offer = %s AND is_waiting ORDER BY place LIMIT %s"

_encode = msgspec.json.Encoder().encode


class _QueuePlace(NamedTuple):
    """A grab's number on its waiting list, and the shard of the list."""

    shard: int
    number: int


#: By offer and grab.
_Places = dict[tuple[str, str], _QueuePlace]


class _Moved(NamedTuple):
    """A list that has to be read when the read model has the event `first` of its shard, and again when it
    has `last`, the newest event that moved the list.
    """

    shard: int
    first: int
    last: int


class _Rest(NamedTuple):
    """The number of failed reads in a row, and when to retry, by `monotonic`."""

    failures: int = 0
    until: float = 0.0

    def after_failure(self) -> "_Rest":
        """Doubles the pause after each failure."""
        seconds = min(POSITIONS_SECONDS * 2.0 ** min(self.failures, 16), POSITIONS_FAILED_SECONDS_MAX)
        return _Rest(self.failures + 1, monotonic() + seconds)


def _rest_after(seconds: float) -> _Rest:
    """A slow read gets only a small share of the time."""
    return _Rest(0, monotonic() + min(POSITIONS_REST_TIMES * seconds, POSITIONS_REST_SECONDS_MAX))


class _Waiter:
    """What is known about the user of one stream."""

    def __init__(self, user: str, unknown: dict[int, int]) -> None:
        self.user = user
        #: By shard: the seq that the read model must have before what the user waits for there is known.
        self.unknown = unknown
        self.places: _Places = {}
        #: By offer and grab: the last position sent.
        self.sent_positions: dict[tuple[str, str], int] = {}
        #: How many users are looked up at once where this one is among them.
        self.at_once = WAITERS_LOOKED_UP_MAX
        #: When the user could not be looked up alone.
        self.rest = _Rest()


class WaitingPositions:
    """Sends streams of users their positions: `send` sends a message to a stream."""

    def __init__(self, books: ViewReader, send: Callable[[Any, bytes], None]) -> None:
        self._books = books
        self._send = send
        #: By stream.
        self._waiters: dict[Hashable, _Waiter] = {}
        #: By offer: the streams whose users wait for it.
        self._streams: dict[str, set[Hashable]] = {}
        #: By offer.
        self._moved: dict[str, _Moved] = {}
        #: By offer with a waiting stream, once its list was requested.
        self._rests: dict[str, _Rest] = {}
        #: What could not be read last, and in how many rounds not everything could be.
        self._late = ""
        self._late_rounds = 0
        self._some = asyncio.Event()

    # -- what the reader of the audit trail says -------------------------------------------------------------

    def joined(self, stream: Hashable, user: str, position: Sequence[int]) -> None:
        """A stream of a user begins at a position."""
        self._waiters[stream] = _Waiter(user, {shard: seq for shard, seq in enumerate(position) if seq})
        self._some.set()

    def left(self, stream: Hashable) -> None:
        """A stream has ended."""
        waiter = self._waiters.pop(stream, None)
        if waiter is not None:
            self._wait_for(stream, waiter, {})
        if not self._waiters:
            self._some.clear()

    def named(self, stream: Hashable, type_: str, shard: int, seq: int) -> None:
        """A stream has been given an event, which names its user."""
        waiter = self._waiters.get(stream)
        if waiter is not None and (type_ == "grab.queued" or waiter.places or waiter.unknown):
            waiter.unknown[shard] = seq

    def moved(self, offer: str, shard: int, seq: int) -> None:
        """An offer has had events, up to this one."""
        if offer in self._streams:
            before = self._moved.get(offer)
            self._moved[offer] = _Moved(shard, seq if before is None else before.first, seq)

    # -- telling ---------------------------------------------------------------------------------------------

    async def keep_telling(self) -> None:
        """Sends positions until cancelled."""
        while True:
            await self._some.wait()
            try:
                await self.tell()
            except Exception:
                # What was not sent is sent in the next round.
                log.exception("positions on waiting lists cannot be sent")
            await asyncio.sleep(POSITIONS_SECONDS)

    async def tell(self) -> None:
        """Sends each stream its known changes. Without changes, it queries nothing."""
        if not self._moved and not any(waiter.unknown for waiter in self._waiters.values()):
            self._count_late(False)
            return
        try:
            reached = {row["shard"]: row["seq"] for row in await self._books.rows(REACHED)}
        except FAILURES as problem:
            self._late = f"the progress of the read model cannot be read: {problem}"
            self._count_late(True)
            return
        await self._look_up(reached)
        await self._tell_offers(reached)
        self._count_late(
            any(rest.failures for rest in self._rests.values())
            or any(waiter.at_once < WAITERS_LOOKED_UP_MAX for waiter in self._waiters.values())
        )

    def _count_late(self, is_late: bool) -> None:
        """Says once that something cannot be read, and again only after everything could be."""
        if is_late:
            self._late_rounds += 1
            if self._late_rounds == LATE_ROUNDS:
                log.warning("some users get their positions on waiting lists late: %s", self._late)
            return
        if self._late_rounds >= LATE_ROUNDS:
            log.info("positions on waiting lists are sent in time again")
        self._late_rounds = 0

    async def _look_up(self, reached: Mapping[int, int]) -> None:
        """Finds out what users wait for in shards in which their grabs may have changed."""
        known: dict[Hashable, dict[int, int]] = {}
        groups: dict[int, list[Hashable]] = {}
        for stream, waiter in self._waiters.items():
            if monotonic() < waiter.rest.until:
                continue
            there = {shard: seq for shard, seq in waiter.unknown.items() if reached.get(shard, 0) >= seq}
            if there:
                known[stream] = there
                groups.setdefault(waiter.at_once, []).append(stream)
        has_time = _turn()
        for at_once, streams in sorted(groups.items(), reverse=True):
            for start in range(0, len(streams), at_once):
                if not has_time():
                    return
                await self._look_up_some(streams[start : start + at_once], known)

    async def _look_up_some(
        self, streams: Sequence[Hashable], known: Mapping[Hashable, Mapping[int, int]]
    ) -> None:
        """Looks up the users of some streams. `known` is the part of `unknown` of each stream that the read
        model has.
        """
        users = sorted({self._waiters[stream].user for stream in streams if stream in self._waiters})
        found: dict[str, _Places] = {user: {} for user in users}
        try:
            rows = await self._books.rows(WAITS, [users, STREAM_WAITS_MAX])
        except FAILURES as problem:
            self._late = f"the waiting grabs of users cannot be read: {problem}"
            # One of them may be the cause. The others are eventually looked up without it.
            for stream in streams:
                if (waiter := self._waiters.pop(stream, None)) is not None:
                    waiter.at_once = max(1, len(streams) // 2)
                    if len(streams) == 1:
                        waiter.rest = waiter.rest.after_failure()
                    self._waiters[stream] = waiter
            return
        for row in rows:
            found[row["user"]][row["offer"], row["grab"]] = _QueuePlace(row["shard"], row["place"])
        for stream in streams:
            waiter = self._waiters.get(stream)
            if waiter is None:
                continue  # it has ended meanwhile
            waiter.at_once, waiter.rest = WAITERS_LOOKED_UP_MAX, _Rest()
            # A shard in which the stream was given another event meanwhile stays unknown.
            waiter.unknown = dict(waiter.unknown.items() - known[stream].items())
            before = {key: at for key, at in waiter.places.items() if at.shard in waiter.unknown}
            now = {key: at for key, at in found[waiter.user].items() if at.shard not in waiter.unknown}
            self._wait_for(stream, waiter, before | now)

    def _wait_for(self, stream: Hashable, waiter: _Waiter, places: _Places) -> None:
        """Sets what the user of a stream waits for. The lists that may concern the user are read in this
        round.
        """
        before = {offer for offer, _ in waiter.places}
        after = {offer: at.shard for (offer, _), at in places.items()}
        waiter.places = places
        waiter.sent_positions = {
            key: position for key, position in waiter.sent_positions.items() if key in places
        }
        for offer in before - after.keys():
            self._streams[offer].discard(stream)
            if not self._streams[offer]:
                del self._streams[offer]
                self._moved.pop(offer, None)
                self._rests.pop(offer, None)
        for offer, shard in after.items():
            self._streams.setdefault(offer, set()).add(stream)
            if shard not in waiter.unknown:
                moved = self._moved.get(offer)
                self._moved[offer] = _Moved(shard, 0, 0 if moved is None else moved.last)

    async def _tell_offers(self, reached: Mapping[int, int]) -> None:
        """Tells positions on the lists that have moved, those that could not be read before last."""
        has_time = _turn()
        for offer in sorted(self._moved, key=lambda one: self._rest(one).failures > 0):
            moved = self._moved.get(offer)
            if moved is None or reached.get(moved.shard, 0) < moved.first:
                continue  # no stream waits for it any more, or it is not known yet
            if monotonic() < self._rest(offer).until:
                continue
            if not has_time():
                return
            # The next turn of others comes first.
            self._moved[offer] = self._moved.pop(offer)
            began = monotonic()
            try:
                await self._tell_offer(offer, reached.get(moved.shard, 0))
            except FAILURES as problem:
                self._late = f"the waiting list of {offer} cannot be read: {problem}"
                rest = self._rest(offer).after_failure()
            else:
                rest = _rest_after(monotonic() - began)
            if offer in self._streams:
                self._rests[offer] = rest

    def _rest(self, offer: str) -> _Rest:
        return self._rests.get(offer, _Rest())

    async def _tell_offer(self, offer: str, reached: int) -> None:
        """Tells positions on a list of a shard of which the read model has all events up to `reached`."""
        rows = await self._books.rows(WAITING_PLACES, [offer, WAITING_POSITIONS_MAX])
        moved = self._moved.get(offer)
        if moved is not None and reached >= moved.last:
            del self._moved[offer]
        elif moved is not None:
            self._moved[offer] = moved._replace(first=moved.last)
        numbers = [row["place"] for row in rows]
        for stream in list(self._streams.get(offer, ())):
            waiter = self._waiters[stream]
            for key, (shard, number) in waiter.places.items():
                # The user may have left the list by now; the list is read again when that is known.
                if key[0] != offer or shard in waiter.unknown:
                    continue
                position = position_in(numbers, number)
                if position is not None and waiter.sent_positions.get(key) != position:
                    waiter.sent_positions[key] = position
                    self._send(stream, _message(*key, position))


def _turn() -> Callable[[], bool]:
    """Returns whether there is time for another query in this round: PostgreSQL serves others, too."""
    loop = asyncio.get_running_loop()
    until = loop.time() + POSITIONS_SECONDS / 2
    return lambda: loop.time() <= until


def position_in(places: Sequence[int], place: int) -> int | None:
    """The position of a grab by its number on a waiting list whose numbers are `places`, in order; None if it
    is not among them: it may be too far back, or have joined a moment ago.
    """
    before = bisect_left(places, place)
    return before + 1 if before < len(places) and places[before] == place else None


def _message(offer: str, grab: str, position: int) -> bytes:
    """A message without an `id`: it is not an event, and a client resumes after the event before it."""
    return b"event: position\ndata: %b\n\n" % _encode({"offer": offer, "grab": grab, "position": position})
