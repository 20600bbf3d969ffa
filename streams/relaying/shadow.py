"""A shard made anew beside the live one, from its events alone, and the two compared key by key.

What is beside the live shard stands under a prefix of its own that no system can have, is made by the very
scripts that recover a shard, and goes away afterwards. The live shard moves meanwhile: what seems to differ
is read once more in one transaction with the seq it is at, the shard beside follows the journal to exactly
that seq, and only what differs then, and stays so, is a difference.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, NamedTuple

from grabstream.lua.gate.sealing import Sealer
from grabstream.lua.keys import STAGED, KeySpace, ShardKeys
from grabstream.lua.records import in_fields, offer_of_answer, offer_of_payment, unpacked
from grabstream.lua.server import time_ms_of
from grabstream.models.journal import Accepted, Cursor, parse_block
from grabstream.models.offers import PAYMENTS_KNOWN_MS
from grabstream.streams.journal import JournalReader
from grabstream.streams.relaying.ownership import OwnedShard, Ownership
from grabstream.streams.relaying.recovery import Recovery, Snapshot, Snapshots, literal

#: Behind the system's prefix, with a character that no prefix has: no other system's keys can begin so.
BESIDE: Final = "/verify"
#: … and there for the verifier that always runs: who is asked to verify now does not wait for it, nor fail
#: because of it.
BESIDE_STEADILY: Final = "/verifier"
#: No events tell of these: refusals and how often there were any, what is not yet journaled, how far cleaning
#: is, and who relays.
NOT_TOLD: Final = ("refusals", "refusal_order", "demand", "outbox", "lease", "cleaning")
#: Of the shard's own hash, what its events tell of.
SHARD_TOLD: Final = (b"time",)

KEYS_AT_ONCE: Final = 200
#: A key with more than so many fields is read in pages.
PAGE: Final = 500
DOUBTS_AT_ONCE: Final = 200
#: When what differs is looked at again, in seconds: some steps, as those of a retirement, are in none of the
#: events.
LOOKS: Final = (0.0, 0.1, 0.4, 1.0, 2.0)
#: Further differences are counted no more.
DIFFERENCES_MAX: Final = 500
LEASE_MS: Final = 60_000
#: A closed offer that has holds when it is due is looked at again so much later (lua/sweeping/sweep.lua), and
#: a second for two clocks.
SWEPT_AGAIN_MS: Final = 61_000
ROOM_SECONDS: Final = 1.0

Value = Any


class NoRoom(Exception):
    """The shard cannot be made beside the live one, in words."""


class NotComparable(Exception):
    """The live shard cannot be compared with its journal at all; the text says why, and is the difference."""


class Part(NamedTuple):
    """Something of a key that is read at once: fields of a hash, members of a set or sorted set, a range of a
    list or string; or its `size`, or which kind of `key` it is, or its `expiry`, when Redis will forget
    it.
    """

    name: str
    kind: str
    what: tuple[Any, ...] = ()


class Compared(NamedTuple):
    """What came of it: the seq at which the two were compared last, how many keys there are, and what
    differs, in words.
    """

    seq: int
    keys: int
    differences: list[str]


class Pace:
    """Lets others work: of the time a task takes at most a share; `beat` is called about once a second."""

    def __init__(self, share: float = 0.5, beat: Callable[[], Awaitable[None]] | None = None) -> None:
        self._rest = 1 / share - 1
        self._began = self._beaten = time.monotonic()
        self.beat = beat

    async def __call__(self) -> None:
        """Behind every step."""
        now = time.monotonic()
        if self.beat is not None and now - self._beaten > ROOM_SECONDS:
            self._beaten = now
            await self.beat()
        await asyncio.sleep((now - self._began) * self._rest)
        self._began = time.monotonic()


class Events:
    """The events of a shard that count, in order, read on in the journal as far as is asked for."""

    def __init__(self, reader: JournalReader, shard: int, wait_seconds: float) -> None:
        self._reader = reader
        self._shard = shard
        self._wait_seconds = wait_seconds
        self._cursor = Cursor()
        self._over: list[Accepted] = []

    def begin(self, cursor: Cursor) -> None:
        """From here on."""
        self._cursor, self._over = cursor, []

    async def up_to(self, seq: int | None = None) -> AsyncGenerator[tuple[Cursor, Sequence[Accepted]], None]:
        """The next events up to a seq, which is waited for some time; or to the journal's end. Raises Corrupt
        or Gap.
        """
        over, self._over = self._over, []
        if over:
            yield self._cursor, self._keep(over, seq)
        deadline = time.monotonic() + self._wait_seconds
        while not self._over and (seq is None or self._cursor.seq < seq):
            end = await self._reader.end(self._shard)
            if self._cursor.next_offset >= end:
                if seq is None or time.monotonic() > deadline:
                    return
                await asyncio.sleep(0.05)
                continue
            async with aclosing(self._reader.read(self._shard, self._cursor.next_offset, end)) as lists:
                async for records in lists:
                    news: list[Accepted] = []
                    for record in records:
                        self._cursor, accepted = self._cursor.feed(
                            record.offset, parse_block(record.headers, record.value)
                        )
                        news += accepted
                    yield self._cursor, self._keep(news, seq)
                    if self._over:
                        break
            if seq is None:
                return

    def _keep(self, news: list[Accepted], seq: int | None) -> list[Accepted]:
        """What is asked for of these; the others are kept for the next time."""
        if seq is None:
            return news
        self._over += [one for one in news if one.seq > seq]
        return [one for one in news if one.seq <= seq]


class Beside:
    """One shard beside the live one; `open_beside` makes it."""

    def __init__(
        self,
        redis: Any,
        live: ShardKeys,
        made: ShardKeys,
        events: Events,
        recovery: Recovery,
        own: Ownership,
        pace: Pace,
    ) -> None:
        self._redis = redis
        self._live = live
        self._made = made
        self._events = events
        self._recovery = recovery
        self._own = own
        self._pace = pace
        self.seq = 0

    async def make(self) -> None:
        """Makes the shard of the journal as far as it goes now; raises streams.recovery.Impossible."""

        async def journal(base: Cursor) -> AsyncGenerator[tuple[Cursor, Sequence[Accepted]], None]:
            self._events.begin(base)
            async with aclosing(self._paced(self._events.up_to())) as reading:
                async for found in reading:
                    yield found

        self.seq, _ = await self._recovery.make(self._own, journal)

    async def _paced(
        self, reading: AsyncGenerator[tuple[Cursor, Sequence[Accepted]], None]
    ) -> AsyncGenerator[tuple[Cursor, Sequence[Accepted]], None]:
        async with aclosing(reading):
            async for found in reading:
                yield found
                await self._pace()

    async def compare(self) -> Compared:
        """Every key of both. Raises NotComparable when the live shard is not whole, or not where its journal
        is.
        """
        names = sorted({*await self._names(self._live), *await self._names(self._made)} - set(NOT_TOLD))
        found: list[str] = []
        doubts: list[Part] = [Part("shard", "hash", SHARD_TOLD)]
        for start in range(0, len(names), KEYS_AT_ONCE):
            async with aclosing(
                self._doubts([name for name in names[start : start + KEYS_AT_ONCE] if name != "shard"])
            ) as doubting:
                async for doubt in doubting:
                    doubts.append(doubt)
                    if len(doubts) >= DOUBTS_AT_ONCE:
                        found += await self._judge(doubts)
                        doubts = []
                    if len(found) >= DIFFERENCES_MAX:
                        return Compared(self.seq, len(names), found)
            await self._pace()
        found += await self._judge(doubts)
        return Compared(self.seq, len(names), found)

    async def _names(self, keys: ShardKeys) -> list[str]:
        start = f"{keys.tag}:"
        names = [
            key.decode().removeprefix(start)
            async for key in self._redis.scan_iter(match=f"{literal(start)}*", count=1_000)
        ]
        return [name for name in names if not name.startswith(STAGED)]

    # -- what seems to differ --------------------------------------------------------------------------------

    async def _read(self, keys: ShardKeys, parts: Sequence[Part]) -> list[Value]:
        if not parts:
            return []
        async with self._redis.pipeline(transaction=False) as pipe:
            for part in parts:
                _ask(pipe, keys, part)
            values: list[Value] = await pipe.execute()
            return values

    async def _doubts(self, names: Sequence[str]) -> AsyncGenerator[Part, None]:
        """What differs at a look at one after the other."""
        kinds = dict(
            zip(names, await self._read(self._made, [Part(name, "key") for name in names]), strict=True)
        )
        kinds_live = dict(
            zip(names, await self._read(self._live, [Part(name, "key") for name in names]), strict=True)
        )
        for name in names:
            if _is_cleaned(name) and b"none" in (kinds[name], kinds_live[name]):
                # All that is in it may count as forgotten: it is compared as an empty one.
                kinds[name] = kinds_live[name] = max(
                    kinds[name], kinds_live[name], key=lambda kind: kind != b"none"
                )
            if kinds[name] != kinds_live[name]:
                yield Part(name, "key")
        endings = await self._read(self._live, [Part(name, "expiry") for name in names])
        for name, milliseconds in zip(names, endings, strict=True):
            if milliseconds >= 0 and kinds[name] == kinds_live[name]:
                yield Part(name, "expiry")
        there = [(name, kinds[name].decode()) for name in names if kinds[name] == kinds_live[name] != b"none"]
        sized = [Part(name, "size", (kind,)) for name, kind in there]
        sizes = list(
            zip(there, await self._read(self._made, sized), await self._read(self._live, sized), strict=True)
        )
        small = [Part(name, f"whole {kind}") for (name, kind), made, live in sizes if max(made, live) <= PAGE]
        for part, made, live in zip(
            small, await self._read(self._made, small), await self._read(self._live, small), strict=True
        ):
            for doubt in _differing(part, made, live):
                yield doubt
        for (name, kind), made, live in sizes:
            if max(made, live) > PAGE:
                yield Part(name, "size", (kind,))
                async with aclosing(self._pages(self._made, name, kind, made)) as pages:
                    async for page in pages:
                        [one], [other] = (
                            await self._read(self._made, [page]),
                            await self._read(self._live, [page]),
                        )
                        for doubt in _of_page(page, one, other):
                            yield doubt
                        await self._pace()

    async def _pages(self, keys: ShardKeys, name: str, kind: str, size: int) -> AsyncGenerator[Part, None]:
        """A large key in parts."""
        if kind in ("list", "string"):
            # From behind: what is taken from the front of a list does not move the others.
            for start in range(-size, 0, PAGE):
                yield Part(name, kind, (start, min(start + PAGE, 0) - 1))
            return
        scan: Any = {"hash": self._redis.hscan, "set": self._redis.sscan, "zset": self._redis.zscan}[kind]
        cursor: int | None = None
        while cursor != 0:
            cursor, found = await scan(f"{keys.tag}:{name}", cursor or 0, count=PAGE)
            members = [one[0] for one in found] if kind == "zset" else list(found)
            for start in range(0, len(members), PAGE):
                yield Part(name, kind, tuple(members[start : start + PAGE]))

    # -- what does differ ------------------------------------------------------------------------------------

    async def _judge(self, doubts: Sequence[Part]) -> list[str]:
        """What of these differs at one and the same seq, in words, and does not cease to in a while."""
        found: list[tuple[Part, Value, Value]] = []
        for wait in LOOKS:
            await asyncio.sleep(wait)
            live = await self._at_one_seq(doubts)
            made = await self._read(self._made, doubts)
            found = [one for one in zip(doubts, made, live, strict=True) if not _same(*one)]
            found = [
                one
                for one in found
                if not await self._is_postponed(one[0]) and not await self._is_forgotten(*one)
            ]
            doubts = [part for part, *_ in found]
            if not found:
                return []
        words = []
        for part, made_value, live_value in found:
            if part.kind == "size" and ((surplus := await self._surplus(part)) or _is_cleaned(part.name)):
                words += await self._judge(surplus) if surplus else []
            else:
                words += _in_words(self._live.shard, part, made_value, live_value)
        return words

    async def _at_one_seq(self, parts: Sequence[Part]) -> list[Value]:
        """What the live shard has of these, all at one seq; behind it, the shard beside is at the same."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hmget(self._live.state, ["seq", "partial", "life", "fault"])
            for part in parts:
                _ask(pipe, self._live, part)
            answers: list[Value] = await pipe.execute()
        [seq, partial, server_epoch, fault], *values = answers
        if partial is not None or server_epoch is None:
            raise NotComparable(
                f"its relay has yet to reconcile it with the journal{f' ({fault.decode()})' if fault else ''}"
            )
        await self._follow(int(seq or 0))
        return values

    async def _follow(self, seq: int) -> None:
        if seq > self.seq:
            self.seq = await self._recovery.follow(self._own, self.seq, self._paced(self._events.up_to(seq)))
        if seq != self.seq:
            raise NotComparable(f"it is at seq {seq}, and its journal at {self.seq}")

    async def _is_postponed(self, part: Part) -> bool:
        """Whether this is when the sweeper looks again at a closed offer that had holds when it was due: no
        event tells.
        """
        if (part.name, part.kind) != ("due", "zset"):
            return False
        async with self._redis.pipeline(transaction=False) as pipe:
            for member in part.what:
                pipe.hget(self._live.offer(member.decode()), "state")
            states = await pipe.execute()
        [made], [live] = await self._read(self._made, [part]), await self._read(self._live, [part])
        now = max(
            await time_ms_of(self._redis, self._live.state),
            int(await self._redis.hget(self._live.state, "time") or 0),
        )
        return all(
            state == b"closed" and None not in (due, again) and due <= again <= now + SWEPT_AGAIN_MS
            for state, due, again in zip(states, made, live, strict=True)
        )

    async def _is_forgotten(self, part: Part, made: Value, live: Value) -> bool:
        """Whether all that this says is of offers that have retired, so that it counts no more whether it is
        deleted already or not.
        """
        if not _is_cleaned(part.name) or part.kind not in ("hash", "zset"):
            return False
        for member, one, other in zip(part.what, made, live, strict=True):
            if _told(one) == _told(other):
                continue
            if one is not None and other is not None:
                return False
            if not await self._counts_no_more(part.name, member.decode(), other if one is None else one):
                return False
        return True

    async def _counts_no_more(self, name: str, member: str, value: Value) -> bool:
        now = await time_ms_of(self._redis, self._live.state)
        campaign, _, what = name.removeprefix("campaign:").partition("/")
        if name == "past":
            return bool(now >= value + PAYMENTS_KNOWN_MS)
        if what == "state":
            return member.startswith("retired/") and now >= int(value.split(b":")[1]) + PAYMENTS_KNOWN_MS
        offer = offer_of_answer(value, campaign) if what == "answers" else offer_of_payment(value)
        if not await self._redis.sismember(self._live.retired, offer):
            return False
        retired_at = [await self._redis.zscore(keys.past, offer) for keys in (self._live, self._made)]
        return what == "answers" or all(at is None or now >= at + PAYMENTS_KNOWN_MS for at in retired_at)

    async def _surplus(self, part: Part) -> list[Part]:
        """What only the live one of a large key has."""
        [kind] = part.what
        if kind in ("list", "string"):
            return []
        found: list[Part] = []
        async with aclosing(self._pages(self._live, part.name, kind, 0)) as pages:
            async for page in pages:
                [values] = await self._read(self._made, [page])
                found += [
                    Part(part.name, kind, (one,))
                    for one, value in zip(page.what, values, strict=True)
                    if _absent(value)
                ]
                await self._pace()
        return found[:DOUBTS_AT_ONCE]


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


def _ask(pipe: Any, keys: ShardKeys, part: Part) -> None:
    """One command for one part."""
    key = f"{keys.tag}:{part.name}"
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


def _differing(part: Part, made: Value, live: Value) -> list[Part]:
    """What of a small key, read whole, is to be judged: a part for each field."""
    kind = part.kind.removeprefix("whole ")
    if made == live:
        return []
    if kind in ("list", "string"):
        return [Part(part.name, kind, (0, -1))]
    if kind == "set":
        return [Part(part.name, kind, (member,)) for member in sorted(made ^ live)]
    one, other = dict(made), dict(live)
    return [
        Part(part.name, kind, (field,))
        for field in sorted(one.keys() | other.keys())
        if one.get(field) != other.get(field)
    ]


def _of_page(page: Part, made: Value, live: Value) -> list[Part]:
    if made == live:
        return []
    if page.kind in ("list", "string"):
        return [page]
    return [
        Part(page.name, page.kind, (field,))
        for field, one, other in zip(page.what, made, live, strict=True)
        if one != other
    ]


def _absent(value: Value) -> bool:
    return value is None or value == 0


def _is_cleaned(name: str) -> bool:
    """Whether what counts as forgotten may stand in the key until it is deleted."""
    return name == "past" or (
        name.startswith("campaign:") and name.endswith(("/answers", "/payments", "/state"))
    )


def _same(part: Part, made: Value, live: Value) -> bool:
    if part.kind == "size" and _is_cleaned(part.name):
        return False  # as many may be others
    if part.name == "shard":
        # A shard without an event has no time, or the time 0.
        return [value or b"0" for value in made] == [value or b"0" for value in live]
    return bool(_told(made) == _told(live))


def _told(value: Value) -> Any:
    """A value in the form that is compared: what is packed, unpacked."""
    if isinstance(value, bytes):
        return unpacked(value)
    return list(map(_told, value)) if isinstance(value, list) else value


def _in_words(shard: int, part: Part, made: Value, live: Value) -> list[str]:
    """A line for each difference."""
    where = f"shard {shard}: {part.name}"
    if part.kind == "key":
        if made == b"none":
            return [f"{where} is in Redis, and nothing the journal says makes it"]
        return [
            f"{where} is not in Redis"
            if live == b"none"
            else f"{where} is a {live.decode()}, the journal makes it a {made.decode()}"
        ]
    if part.kind == "expiry":
        return [f"{where}: Redis will forget it in {live / 1000:.0f} s"] if live >= 0 else []
    if part.kind == "size":
        return [f"{where}: Redis has {live} in it, the journal makes it {made}"]
    if part.kind == "string":
        at = next(
            (at for at, (one, other) in enumerate(zip(made, live, strict=False)) if one != other),
            min(len(made), len(live)),
        )
        return [
            f"{where}: differs from byte {at} on; Redis has {len(live)} bytes there, the journal makes it "
            f"{len(made)}"
        ]
    if part.kind == "list":
        at = next(
            (at for at, (one, other) in enumerate(zip(made, live, strict=False)) if one != other),
            min(len(made), len(live)),
        )
        return [
            f"{where}: differs from place {at} on; Redis has {len(live)} there, the journal makes it "
            f"{len(made)}"
        ]
    lines = []
    for field, one, other in zip(part.what, made, live, strict=True):
        if _told(one) == _told(other):
            continue
        named = f"{where}, {_text(field)}"
        fields = in_fields(one, other) if isinstance(one, bytes) and isinstance(other, bytes) else None
        if (_absent(other) and part.kind != "zset") or other is None:
            lines.append(f"{named} is not in Redis")
        elif (_absent(one) and part.kind != "zset") or one is None:
            lines.append(f"{named} is in Redis, and nothing the journal says makes it")
        elif fields:
            lines.append(
                f"{named}: "
                + ", ".join(
                    f"{name} is {_text(is_)} in Redis, {_text(was)} by the journal"
                    for name, was, is_ in fields
                )
            )
        else:
            lines.append(f"{named}: is {_text(other)} in Redis, {_text(one)} by the journal")
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
async def open_beside(
    redis: Any, keys: KeySpace, shard: int, sealer: Sealer, reader: JournalReader,
    snapshots: Snapshots | None, *,
    pace: Pace, room: Callable[[str], Awaitable[str]], wait_seconds: float = 10.0, place: str = BESIDE,
) -> AsyncIterator[Beside]:  # fmt: skip
    """A shard beside the live one, empty at first, and gone at the end. `room` says of the server with a key
    why it has none, or ''.

    Raises NoRoom, also when another process is about the same shard at the same place.
    """
    made = KeySpace(keys.prefix + place, keys.shards).shard(shard)
    token = secrets.token_hex(8).encode()
    if not await redis.set(made.lease, token, nx=True, px=LEASE_MS):
        raise NoRoom(f"shard {shard} is being compared by another process: try again when it has ended")

    async def beat() -> None:
        if await redis.get(made.lease) != token:
            raise NoRoom(
                f"shard {shard}: comparing it was suspended for too long, and another process does it now"
            )
        await redis.pexpire(made.lease, LEASE_MS)
        if problem := await room(made.state):
            raise NoRoom(f"shard {shard} cannot be made a second time: {problem}")

    async def paced(events: AsyncIterator[Sequence[Any]]) -> AsyncIterator[Sequence[Any]]:
        async for found in events:
            yield found
            await pace()

    @asynccontextmanager
    async def open_snapshot(number: int) -> AsyncIterator[Snapshot | None]:
        assert snapshots is not None
        async with snapshots.open(number) as snapshot:
            yield snapshot and snapshot._replace(events=paced(snapshot.events))

    pace.beat = beat
    owned = OwnedShard(redis, made)
    recovery = Recovery(owned, sealer, snapshots and Snapshots(open_snapshot, snapshots.newest))
    try:
        await beat()
        own = (await owned.raise_term(0)).ownership
        try:
            yield Beside(
                redis, keys.shard(shard), made, Events(reader, shard, wait_seconds), recovery, own, pace
            )
        finally:
            await recovery.wipe(own)
    finally:
        if await redis.get(made.lease) == token:
            await redis.unlink(made.state, made.lease)
