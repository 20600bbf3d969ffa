"""The shadow of a shard: the shard rebuilt from its events alone, next to the live one, and compared with it
key by key.

The keys of the shadow have a prefix that no system can have. The scripts that recover a shard make them, and
they are deleted afterwards. The live shard changes meanwhile. So apparent differences are read again, in one
transaction with the live shard's seq; the shadow follows the journal to exactly that seq; and only what then
still differs, repeatedly, is a difference.
"""

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, Final, NamedTuple

from grabstream.crypto.sealing import Sealer
from grabstream.lua.keys import LAYOUT, STAGED, KeySpace, ShardKeys
from grabstream.lua.packed_values import Damaged, in_fields, offer_of_answer, offer_of_payment, unpacked
from grabstream.lua.server import time_ms_of
from grabstream.models.calendar import opens_next
from grabstream.models.journal import Accepted, Cursor
from grabstream.models.offers import PAYMENTS_KNOWN_MS
from grabstream.streams.journal import JournalReader
from grabstream.streams.relaying.ownership import OwnedShard, Ownership
from grabstream.streams.relaying.recovery import AcceptedEvents, Recovery, Snapshot, Snapshots, literal

#: Follows the system's prefix. No prefix contains its `/`, so no other system's keys can begin like this.
SHADOW: Final = "/verify"
#: The same for the verifier that always runs: `grabstream verify` neither waits for it nor fails because of
#: it.
VERIFIER_SHADOW: Final = "/verifier"
#: Keys that do not follow from events: refusals and their counts, events not yet journaled, the progress of
#: cleaning, and the lease.
NOT_IN_EVENTS: Final = ("refusals", "refusal_order", "demand", "outbox", "lease", "cleaning")
#: The fields of the shard's hash that follow from its events.
SHARD_FIELDS_IN_EVENTS: Final = (b"time",)

KEYS_AT_ONCE: Final = 200
#: A key with more fields than this is read in pages.
PAGE: Final = 500
DOUBTS_AT_ONCE: Final = 200
#: The pauses, in seconds, before a difference is read again: some steps, such as those of a retirement, are
#: not events.
LOOKS: Final = (0.0, 0.1, 0.4, 1.0, 2.0)
#: The comparison ends after this many differences.
DIFFERENCES_MAX: Final = 500
LEASE_MS: Final = 60_000
#: The sweeper postpones a closed offer that still has holds by a minute (lua/sweeping/sweep.lua); one second
#: more, because two clocks are compared.
SWEPT_AGAIN_MS: Final = 61_000
ROOM_SECONDS: Final = 1.0

Value = Any


class NoRoom(Exception):
    """The shadow cannot be made; the text states why."""


class NotComparable(Exception):
    """The live shard cannot be compared with its journal; the text states why, and is reported as a
    difference.
    """


class KeyPart(NamedTuple):
    """A part of a key that is read by one command: fields of a hash, members of a set or sorted set, a range
    of a list or string. Or a property of the key: its `size`, its type (`key`), or its `expiry`.
    """

    name: str
    kind: str
    what: tuple[Any, ...] = ()


class Compared(NamedTuple):
    """The result: the seq at which the two were compared last, the number of keys, and the differences in
    words.
    """

    seq: int
    keys: int
    differences: list[str]


class TimeShare:
    """Limits a task to a share of the time by pauses; calls `beat` about once a second."""

    def __init__(self, share: float = 0.5) -> None:
        self._rest = 1 / share - 1
        self._began = self._beaten = time.monotonic()
        self.beat: Callable[[], Awaitable[None]] | None = None

    async def __call__(self) -> None:
        """Pauses; called after every step."""
        now = time.monotonic()
        if self.beat is not None and now - self._beaten > ROOM_SECONDS:
            self._beaten = now
            await self.beat()
        await asyncio.sleep((now - self._began) * self._rest)
        self._began = time.monotonic()

    async def wait(self, seconds: float) -> None:
        """Waits in the middle of a step. It does not count as work for the pause after the step."""
        began = time.monotonic()
        await asyncio.sleep(seconds)
        self._began += time.monotonic() - began


class ShardEvents:
    """The events of a shard that count, in order, read from the journal up to a requested seq at a time."""

    def __init__(self, reader: JournalReader, shard: int, wait_seconds: float, pace: TimeShare) -> None:
        self._reader = reader
        self._shard = shard
        self._wait_seconds = wait_seconds
        self._pace = pace
        self._cursor = Cursor()
        self._over: list[Accepted] = []

    def begin(self, cursor: Cursor) -> None:
        """Starts reading at a cursor."""
        self._cursor, self._over = cursor, []

    async def up_to(self, seq: int | None = None) -> AcceptedEvents:
        """The next events up to a seq, for which it waits some time, or up to the journal's end. Raises
        Corrupt or Gap.
        """
        over, self._over = self._over, []
        if over:
            yield self._cursor, self._keep(over, seq)
        deadline = time.monotonic() + self._wait_seconds
        passed = 0  # the last offsets before it may be without records
        while not self._over and (seq is None or self._cursor.seq < seq):
            end = await self._reader.end(self._shard)
            if max(self._cursor.next_offset, passed) >= end:
                if seq is None or time.monotonic() > deadline:
                    return
                await self._pace.wait(0.05)
                continue
            async with aclosing(self._reader.read(self._shard, self._cursor.next_offset, end)) as lists:
                async for records in lists:
                    news: list[Accepted] = []
                    for record in records:
                        self._cursor, accepted = self._cursor.feed(record.offset, self._reader.block(record))
                        news += accepted
                    yield self._cursor, self._keep(news, seq)
                    if self._over:
                        break
            passed = end
            if seq is None:
                return

    def _keep(self, news: list[Accepted], seq: int | None) -> list[Accepted]:
        """The events up to the seq; the others are kept for the next call."""
        if seq is None:
            return news
        self._over += [event for event in news if event.seq > seq]
        return [event for event in news if event.seq <= seq]


class ShadowShard:
    """The shadow of one shard; `open_shadow` makes it."""

    def __init__(
        self,
        redis: Any,
        live: ShardKeys,
        shadow: ShardKeys,
        events: ShardEvents,
        recovery: Recovery,
        ownership: Ownership,
        pace: TimeShare,
        compared: Callable[[int, int], None] = lambda keys, of: None,
    ) -> None:
        self._redis = redis
        self._live = live
        self._shadow = shadow
        self._events = events
        self._recovery = recovery
        self._ownership = ownership
        self._pace = pace
        #: Called with the number of keys compared, of how many.
        self._compared = compared
        self.seq = 0

    async def make(self) -> None:
        """Builds the shadow from the journal up to its present end; raises streams.recovery.Impossible."""

        async def journal(base: Cursor) -> AcceptedEvents:
            self._events.begin(base)
            async with aclosing(self._paced(self._events.up_to())) as reading:
                async for events in reading:
                    yield events

        self.seq, _ = await self._recovery.make(self._ownership, journal)

    async def _paced(self, reading: AcceptedEvents) -> AcceptedEvents:
        async with aclosing(reading):
            async for events in reading:
                yield events
                await self._pace()

    async def compare(self) -> Compared:
        """Compares every key of both. Raises NotComparable if the live shard is incomplete, or not at the seq
        of its journal.
        """
        names = sorted(
            {*await self._names(self._live), *await self._names(self._shadow)} - set(NOT_IN_EVENTS)
        )
        differences: list[str] = []
        doubts: list[KeyPart] = [KeyPart("shard", "hash", SHARD_FIELDS_IN_EVENTS)]
        for start in range(0, len(names), KEYS_AT_ONCE):
            async with aclosing(
                self._doubts([name for name in names[start : start + KEYS_AT_ONCE] if name != "shard"])
            ) as doubting:
                async for doubt in doubting:
                    doubts.append(doubt)
                    if len(doubts) >= DOUBTS_AT_ONCE:
                        differences += await self._judge(doubts)
                        doubts = []
                    if len(differences) >= DIFFERENCES_MAX:
                        return Compared(self.seq, len(names), differences)
            await self._pace()
            self._compared(min(start + KEYS_AT_ONCE, len(names)), len(names))
        differences += await self._judge(doubts)
        return Compared(self.seq, len(names), differences)

    async def _names(self, keys: ShardKeys) -> list[str]:
        start = f"{keys.tag}:"
        names = [
            # A key may have any bytes: it is compared, and named, too.
            key.decode(errors="surrogateescape").removeprefix(start)
            async for key in self._redis.scan_iter(match=f"{literal(start)}*", count=1_000)
        ]
        return [name for name in names if not name.startswith(STAGED)]

    # -- what seems to differ --------------------------------------------------------------------------------

    async def _read(self, keys: ShardKeys, parts: Sequence[KeyPart]) -> list[Value]:
        if not parts:
            return []
        async with self._redis.pipeline(transaction=False) as pipe:
            for part in parts:
                _ask(pipe, keys, part)
            values: list[Value] = await pipe.execute()
            return values

    async def _doubts(self, names: Sequence[str]) -> AsyncGenerator[KeyPart, None]:
        """The parts that differ when the two shards are read one after the other."""
        kinds = dict(
            zip(names, await self._read(self._shadow, [KeyPart(name, "key") for name in names]), strict=True)
        )
        kinds_live = dict(
            zip(names, await self._read(self._live, [KeyPart(name, "key") for name in names]), strict=True)
        )
        for name in names:
            if _is_cleaned(name) and b"none" in (kinds[name], kinds_live[name]):
                # All contents of the key may count as forgotten: the missing key is compared as an empty one.
                kinds[name] = kinds_live[name] = max(
                    kinds[name], kinds_live[name], key=lambda kind: kind != b"none"
                )
            if kinds[name] != kinds_live[name]:
                yield KeyPart(name, "key")
        endings = await self._read(self._live, [KeyPart(name, "expiry") for name in names])
        for name, milliseconds in zip(names, endings, strict=True):
            if milliseconds >= 0 and kinds[name] == kinds_live[name]:
                yield KeyPart(name, "expiry")
        there = [(name, kinds[name].decode()) for name in names if kinds[name] == kinds_live[name] != b"none"]
        sized = [KeyPart(name, "size", (kind,)) for name, kind in there]
        sizes = list(
            zip(
                there, await self._read(self._shadow, sized), await self._read(self._live, sized), strict=True
            )
        )
        small = [
            KeyPart(name, f"whole {kind}")
            for (name, kind), shadow, live in sizes
            if max(shadow, live) <= PAGE
        ]
        for part, shadow, live in zip(
            small, await self._read(self._shadow, small), await self._read(self._live, small), strict=True
        ):
            for doubt in _differing(part, shadow, live):
                yield doubt
        for (name, kind), shadow, live in sizes:
            if max(shadow, live) > PAGE:
                if _is_cleaned(name) and kind in _WITH_MEMBERS:
                    # The sizes say nothing: records that count as forgotten may be on either side.
                    async with aclosing(self._surplus(name, kind)) as surplus:
                        async for doubt in surplus:
                            yield doubt
                else:
                    yield KeyPart(name, "size", (kind,))
                async with aclosing(self._pages(self._shadow, name, kind, shadow)) as pages:
                    async for page in pages:
                        [shadow_page], [live_page] = (
                            await self._read(self._shadow, [page]),
                            await self._read(self._live, [page]),
                        )
                        for doubt in _differing_parts(page, shadow_page, live_page):
                            yield doubt
                        await self._pace()

    async def _pages(self, keys: ShardKeys, name: str, kind: str, size: int) -> AsyncGenerator[KeyPart, None]:
        """The parts of a large key."""
        if kind in ("list", "string"):
            # Indexes count from the end: taking elements from the front of a list does not change them.
            for start in range(-size, 0, PAGE):
                yield KeyPart(name, kind, (start, min(start + PAGE, 0) - 1))
            return
        scan: Any = {"hash": self._redis.hscan, "set": self._redis.sscan, "zset": self._redis.zscan}[kind]
        cursor: int | None = None
        while cursor != 0:
            cursor, page = await scan(f"{keys.tag}:{name}", cursor or 0, count=PAGE)
            members = [member for member, _ in page] if kind == "zset" else list(page)
            for start in range(0, len(members), PAGE):
                yield KeyPart(name, kind, tuple(members[start : start + PAGE]))

    # -- what does differ ------------------------------------------------------------------------------------

    async def _judge(self, doubts: Sequence[KeyPart]) -> list[str]:
        """The doubts that differ at the same seq, repeatedly, in words."""
        differing: list[tuple[KeyPart, Value, Value]] = []
        for wait in LOOKS:
            await self._pace.wait(wait)
            live = await self._at_one_seq(doubts)
            shadow = await self._read(self._shadow, doubts)
            differing = [
                (part, shadow_value, live_value)
                for part, shadow_value, live_value in zip(doubts, shadow, live, strict=True)
                if not _same(part, shadow_value, live_value)
                and not await self._is_postponed(part)
                and not await self._is_forgotten(part, shadow_value, live_value)
            ]
            doubts = [part for part, *_ in differing]
            if not differing:
                return []
        words = []
        for part, shadow_value, live_value in differing:
            surplus = await self._first_surplus(part) if part.kind == "size" else []
            if surplus:
                words += await self._judge(surplus)
            else:
                words += _difference_lines(self._live.shard, part, shadow_value, live_value)
        return words

    async def _at_one_seq(self, parts: Sequence[KeyPart]) -> list[Value]:
        """The live shard's values of these parts, all at one seq; then the shadow is at that seq, too."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hmget(self._live.state, ["seq", "partial", "server_epoch", "fault", "layout"])
            for part in parts:
                _ask(pipe, self._live, part)
            answers: list[Value] = await pipe.execute()
        [seq, partial, server_epoch, fault, layout], *values = answers
        if partial is not None or server_epoch is None:
            raise NotComparable(
                "its relay has not reconciled it with the journal yet"
                + (f" ({fault.decode(errors='replace')})" if fault else "")
            )
        if seq is not None and not seq.isdigit():
            raise NotComparable(f"its seq in Redis is {_text(seq)}, which is not a number")
        if layout != b"%d" % LAYOUT:
            named = _text(layout) if layout else "none"
            raise NotComparable(f"its keys have layout {named}, this program writes layout {LAYOUT}")
        await self._follow(int(seq or 0))
        return values

    async def _follow(self, seq: int) -> None:
        if seq > self.seq:
            self.seq = await self._recovery.follow(
                self._ownership, self.seq, self._paced(self._events.up_to(seq))
            )
        if seq != self.seq:
            raise NotComparable(f"it is at seq {seq}, but its journal is at seq {self.seq}")

    async def _is_postponed(self, part: KeyPart) -> bool:
        """Whether these are times to which the sweeper postponed offers, which is not an event: a closed
        offer that still had holds, or an open one whose waiting list it should have served at an opening, if
        it came so late that the hours were over.
        """
        if (part.name, part.kind) != ("due", "zset"):
            return False
        async with self._redis.pipeline(transaction=False) as pipe:
            for member in part.what:
                key = self._shadow.offer(member.decode(errors="replace"))
                pipe.hmget(key, ["state", "rules", "closes_at"])
            offers = await pipe.execute()
        [shadow], [live] = await self._read(self._shadow, [part]), await self._read(self._live, [part])
        last = await self._redis.hget(self._live.state, "time") or b""
        now = max(await time_ms_of(self._redis, self._live.state), int(last) if last.isdigit() else 0)
        return all(
            None not in (due, again) and due <= again and _is_postponed(due, again, now, *offer_fields)
            for offer_fields, due, again in zip(offers, shadow, live, strict=True)
        )

    async def _is_forgotten(self, part: KeyPart, shadow: Value, live: Value) -> bool:
        """Whether all differences in this part are about retired offers, whose records no longer count,
        whether they are deleted already or not.
        """
        if not _is_cleaned(part.name) or part.kind not in ("hash", "zset"):
            return False
        for member, shadow_value, live_value in zip(part.what, shadow, live, strict=True):
            if _unpacked(shadow_value) == _unpacked(live_value):
                continue
            if shadow_value is not None and live_value is not None:
                return False
            value = live_value if shadow_value is None else shadow_value
            try:
                forgotten = await self._counts_no_more(part.name, member.decode(errors="replace"), value)
            except Damaged:
                return False
            if not forgotten:
                return False
        return True

    async def _counts_no_more(self, name: str, member: str, value: Value) -> bool:
        campaign, _, what = name.removeprefix("campaign:").partition("/")
        if what in ("answers", "payments"):
            offer = offer_of_answer(value, campaign) if what == "answers" else offer_of_payment(value)
            is_retired = await self._redis.sismember(self._live.retired, offer)
            if what == "answers" or not is_retired:
                # There may be as many as a retired offer had, so nothing else is compared.
                return bool(is_retired)
            scores = [await self._redis.zscore(keys.past, offer) for keys in (self._live, self._shadow)]
            now = await time_ms_of(self._redis, self._live.state)
            return all(at is None or now >= at + PAYMENTS_KNOWN_MS for at in scores)
        now = await time_ms_of(self._redis, self._live.state)
        if name == "past":
            return bool(now >= value + PAYMENTS_KNOWN_MS)
        retired_at = re.fullmatch(rb"\d+:(\d+)", value) if member.startswith("retired/") else None
        return retired_at is not None and now >= int(retired_at[1]) + PAYMENTS_KNOWN_MS

    async def _surplus(self, name: str, kind: str) -> AsyncGenerator[KeyPart, None]:
        """The parts of a large key that only the live shard seems to have."""
        async with aclosing(self._pages(self._live, name, kind, 0)) as pages:
            async for page in pages:
                [values] = await self._read(self._shadow, [page])
                for member, value in zip(page.what, values, strict=True):
                    if _absent(value):
                        yield KeyPart(name, kind, (member,))
                await self._pace()

    async def _first_surplus(self, part: KeyPart) -> list[KeyPart]:
        """As many of them, for a key whose size differs, as are judged at once."""
        [kind] = part.what
        surplus: list[KeyPart] = []
        if kind in _WITH_MEMBERS:
            async with aclosing(self._surplus(part.name, kind)) as doubting:
                async for doubt in doubting:
                    surplus.append(doubt)
                    if len(surplus) == DOUBTS_AT_ONCE:
                        break
        return surplus


_SIZE: Final = {
    "hash": "hlen",
    "set": "scard",
    "zset": "zcard",
    "list": "llen",
    "string": "strlen",
    "stream": "xlen",
}
_WHOLE: Final[dict[str, tuple[Any, ...]]] = {
    "hash": ("hgetall",), "set": ("smembers",), "zset": ("zrange", 0, -1, False, True),
    "list": ("lrange", 0, -1), "string": ("get",),
}  # fmt: skip
_SOME: Final = {"hash": "hmget", "set": "smismember", "zset": "zmscore"}
_WITH_MEMBERS: Final = frozenset(_SOME)


def _ask(pipe: Any, keys: ShardKeys, part: KeyPart) -> None:
    """Queues the command that reads a part."""
    key = f"{keys.tag}:{part.name}".encode(errors="surrogateescape")
    if part.kind == "key":
        pipe.type(key)
    elif part.kind == "expiry":
        pipe.pttl(key)
    elif part.kind == "size":
        getattr(pipe, _SIZE[part.what[0]])(key)
    elif part.kind.startswith("whole "):
        command, *arguments = _WHOLE[part.kind.removeprefix("whole ")]
        getattr(pipe, command)(key, *arguments)
    elif part.kind == "list":
        pipe.lrange(key, *part.what)
    elif part.kind == "string":
        pipe.getrange(key, *part.what)
    else:
        getattr(pipe, _SOME[part.kind])(key, list(part.what))


def _differing(part: KeyPart, shadow: Value, live: Value) -> list[KeyPart]:
    """The differing parts of a small key that was read whole: one for each field."""
    kind = part.kind.removeprefix("whole ")
    if shadow == live:
        return []
    if kind in ("list", "string"):
        return [KeyPart(part.name, kind, (0, -1))]
    if kind == "set":
        return [KeyPart(part.name, kind, (member,)) for member in sorted(shadow ^ live)]
    shadow_fields, live_fields = dict(shadow), dict(live)
    return [
        KeyPart(part.name, kind, (field,))
        for field in sorted(shadow_fields.keys() | live_fields.keys())
        if shadow_fields.get(field) != live_fields.get(field)
    ]


def _differing_parts(page: KeyPart, shadow: Value, live: Value) -> list[KeyPart]:
    if shadow == live:
        return []
    if page.kind in ("list", "string"):
        return [page]
    return [
        KeyPart(page.name, page.kind, (field,))
        for field, shadow_value, live_value in zip(page.what, shadow, live, strict=True)
        if shadow_value != live_value
    ]


def _absent(value: Value) -> bool:
    return value is None or value == 0


def _is_cleaned(name: str) -> bool:
    """Whether the key may still contain records that count as forgotten, until they are deleted."""
    return name == "past" or (
        name.startswith("campaign:") and name.endswith(("/answers", "/payments", "/state"))
    )


def _same(part: KeyPart, shadow: Value, live: Value) -> bool:
    if part.name == "shard":
        # A shard without events has no time, or the time 0.
        return [value or b"0" for value in shadow] == [value or b"0" for value in live]
    return bool(_unpacked(shadow) == _unpacked(live))


def _unpacked(value: Value) -> Any:
    """A value in the form that is compared: packed bytes are unpacked."""
    if isinstance(value, bytes):
        return unpacked(value)
    return list(map(_unpacked, value)) if isinstance(value, list) else value


def _is_postponed(
    due: float, again: float, now: int, state: bytes | None, rules: bytes | None, closes_at: bytes | None
) -> bool:
    """Whether the sweeper may have postponed an offer of this state from one time to another, up to now."""
    if state == b"closed":
        return again <= now + SWEPT_AGAIN_MS
    terms = unpacked(rules or b"")
    if state != b"open" or closes_at is None or not terms.get("hours") or due > now:
        return False
    opens = partial(opens_next, terms["hours"], terms["offsets"])
    if again > (opens(now) or now):
        return False
    # To the end of a time outside the hours: the next opening, or the close.
    opening = opens(int(again) - 1)
    return opening is not None and again in (opening, int(closes_at))


def _difference_lines(shard: int, part: KeyPart, shadow: Value, live: Value) -> list[str]:
    """A line for each difference."""
    where = f"shard {shard}: {part.name}".encode(errors="backslashreplace").decode()
    if part.kind == "key":
        if shadow == b"none":
            return [f"{where} is in Redis, but no event creates it"]
        return [
            f"{where} is not in Redis"
            if live == b"none"
            else f"{where} is a {live.decode()}, the journal makes it a {shadow.decode()}"
        ]
    if part.kind == "expiry":
        return [f"{where}: Redis will forget it in {live / 1000:.0f} s"] if live >= 0 else []
    if part.kind == "size":
        return [f"{where}: Redis has {live} elements, the journal makes it {shadow}"]
    if part.kind in ("string", "list"):
        first = next(
            (index for index, (is_, was) in enumerate(zip(live, shadow, strict=False)) if is_ != was),
            min(len(shadow), len(live)),
        )
        place, things = ("byte", "bytes") if part.kind == "string" else ("index", "elements")
        return [
            f"{where}: differs from {place} {first} on; Redis has {len(live)} {things} there, "
            f"the journal makes it {len(shadow)}"
        ]
    lines = []
    for field, shadow_value, live_value in zip(part.what, shadow, live, strict=True):
        if _unpacked(shadow_value) == _unpacked(live_value):
            continue
        named = f"{where}, {_text(field)}"
        packed = isinstance(shadow_value, bytes) and isinstance(live_value, bytes)
        fields = in_fields(shadow_value, live_value) if packed else None
        if (_absent(live_value) and part.kind != "zset") or live_value is None:
            lines.append(f"{named} is not in Redis")
        elif (_absent(shadow_value) and part.kind != "zset") or shadow_value is None:
            lines.append(f"{named} is in Redis, but no event creates it")
        elif fields:
            lines.append(
                f"{named}: "
                + ", ".join(
                    f"{name} is {_text(is_)} in Redis, {_text(was)} by the journal"
                    for name, was, is_ in fields
                )
            )
        else:
            lines.append(f"{named}: is {_text(live_value)} in Redis, {_text(shadow_value)} by the journal")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        text = value.decode("ascii", "replace")
        text = text if text.isprintable() and "\ufffd" not in text else value.hex()
    elif isinstance(value, float) and value.is_integer():
        text = str(int(value))
    else:
        text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


@asynccontextmanager
async def open_shadow(
    redis: Any, keys: KeySpace, shard: int, sealer: Sealer, reader: JournalReader,
    snapshots: Snapshots | None, *,
    pace: TimeShare, room: Callable[[str], Awaitable[str]], wait_seconds: float = 10.0, prefix: str = SHADOW,
    made: Callable[[int], None] = lambda applied: None,
    compared: Callable[[int, int], None] = lambda keys, of: None,
) -> AsyncIterator[ShadowShard]:  # fmt: skip
    """The shadow of a shard, empty at first, deleted at the end. `room(key)` returns why the server with that
    key has no room for it, or ''. `made` is called with the number of events applied, `compared` with the
    numbers of compared keys and of all keys.

    Raises NoRoom, also when another process compares the same shard under the same prefix.
    """
    shadow = KeySpace(keys.prefix + prefix, keys.shards).shard(shard)
    token = secrets.token_hex(8).encode()
    if not await redis.set(shadow.lease, token, nx=True, px=LEASE_MS):
        raise NoRoom(f"shard {shard} is being compared by another process: try again when it has ended")

    async def beat() -> None:
        if await redis.get(shadow.lease) != token:
            raise NoRoom(
                f"shard {shard}: the comparison was suspended for too long, and another process has begun one"
            )
        await redis.pexpire(shadow.lease, LEASE_MS)
        if problem := await room(shadow.state):
            raise NoRoom(f"the shadow of shard {shard} cannot be built: {problem}")

    async def paced(events: AsyncIterator[Sequence[Any]]) -> AsyncIterator[Sequence[Any]]:
        async for part in events:
            yield part
            await pace()

    @asynccontextmanager
    async def open_snapshot(number: int) -> AsyncIterator[Snapshot | None]:
        assert snapshots is not None
        async with snapshots.open(number) as snapshot:
            yield snapshot and snapshot._replace(events=paced(snapshot.events))

    pace.beat = beat
    owned = OwnedShard(redis, shadow)
    recovery = Recovery(owned, sealer, snapshots and snapshots._replace(open=open_snapshot), progress=made)
    try:
        await beat()
        ownership = (await owned.raise_term(0)).ownership
        try:
            yield ShadowShard(
                redis,
                keys.shard(shard),
                shadow,
                ShardEvents(reader, shard, wait_seconds, pace),
                recovery,
                ownership,
                pace,
                compared,
            )
        finally:
            await recovery.wipe(ownership)
    finally:
        if await redis.get(shadow.lease) == token:
            await redis.unlink(shadow.state, shadow.lease)
