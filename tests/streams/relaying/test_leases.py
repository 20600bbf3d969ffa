"""Leases on a real Redis, with relays that only record who relays which shard: every shard always has a
relay, whatever workers join and leave, and the spread is even and at rest.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from grabstream.connections.opening import key_space, open_redis, sealer
from grabstream.lua.keys import KeySpace
from grabstream.settings import Settings
from grabstream.streams.relaying import leases as leases_module
from grabstream.streams.relaying.announcing import RelayedShards
from grabstream.streams.relaying.leases import BY_HAND, Leases, pass_lease, request_lease
from grabstream.streams.relaying.relay import Duty, ShardRelay
from grabstream.streams.relaying.shares import Worker
from grabstream.streams.topics import Topics
from tests.conftest import until

SHARDS = 8
LEASE_MS = 600
#: More renewals than a lease has, a takeover that is awaited takes, and several more.
REST_ROUNDS = 4 * leases_module.RENEWALS_PER_LEASE


class Shards:
    """Which worker relays each shard. A new relay ends the tenure of the one before, as a takeover does."""

    def __init__(self) -> None:
        self.relays: dict[int, tuple[str, asyncio.Event]] = {}
        self.takeovers: Counter[int] = Counter()
        #: Shards that had no relay for a moment.
        self.gaps: list[int] = []

    def relay(self, name: str, shard: int, duty: Duty) -> Any:
        async def run() -> None:
            fenced = asyncio.Event()
            while not duty.is_leaving:
                fenced = asyncio.Event()
                if shard in self.relays:
                    self.relays[shard][1].set()
                self.relays[shard] = name, fenced
                self.takeovers[shard] += 1
                duty.term = self.takeovers[shard]
                duty.is_relaying = True
                try:
                    await fenced.wait()
                finally:
                    duty.is_relaying = False
                    if not fenced.is_set():
                        del self.relays[shard]
                        self.gaps.append(shard)
                if not duty.is_leaving:
                    await asyncio.sleep(0.2)

        return run()

    def spread(self) -> list[int]:
        """How many shards each worker relays, the most first."""
        return sorted(Counter(name for name, _ in self.relays.values()).values(), reverse=True)


class CountedLeases(Leases):
    """Leases that count the renewals of each shard."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rounds: Counter[int] = Counter()

    async def _renew(self, shard: int) -> None:
        await super()._renew(shard)
        self.rounds[shard] += 1


class Crew:
    """Workers of one process, each with its own leases."""

    def __init__(self, redis: Any, keys: KeySpace) -> None:
        self.shards = Shards()
        self.lease_ms = LEASE_MS
        self.keys = keys
        self.redis = redis
        self.stops: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.leases: dict[str, CountedLeases] = {}
        self.changes: defaultdict[str, list[RelayedShards]] = defaultdict(list)

    def join(self, name: str, tasks_of: Callable[[int, Duty], list[Any]] | None = None) -> CountedLeases:
        """Starts a worker."""
        of_name = tasks_of or (lambda shard, duty: [self.shards.relay(name, shard, duty)])
        self.leases[name] = leases = CountedLeases(
            self.redis, self.keys, self.lease_ms, of_name, changed=self.changes[name].append
        )
        self.stops[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(leases.run(self.stops[name]))
        return leases

    async def leave(self, name: str) -> None:
        """Stops a worker in the orderly way."""
        self.stops[name].set()
        await self.tasks.pop(name)

    async def spread_becomes(self, *shards: int) -> None:
        """Returns when the shards are spread like this."""
        await until(lambda: self._is_spread(list(shards)), 60, f"a spread of {shards}")

    async def spread_is(self, *shards: int) -> None:
        """Returns when the shards are spread like this; checks that they stay where they are."""
        await self.spread_becomes(*shards)
        takeovers, where = self.shards.takeovers.total(), dict(self.shards.relays)
        await self.rest()
        assert self.shards.spread() == list(shards)
        assert (self.shards.takeovers.total(), self.shards.relays) == (takeovers, where)

    async def rest(self) -> None:
        """Returns when each worker that runs has renewed every lease REST_ROUNDS times."""
        workers = [self.leases[name] for name in self.tasks]
        before = [leases.rounds.copy() for leases in workers]

        def is_over() -> bool:
            return all(
                leases.rounds[shard] >= first[shard] + REST_ROUNDS
                for leases, first in zip(workers, before, strict=True)
                for shard in range(self.keys.shards)
            )

        await until(is_over, what="renewals by each worker")

    async def all_held_by(self, name: str) -> None:
        """Returns when a worker, which may be none of the crew, holds the leases of all shards."""

        async def are_held() -> bool:
            keys = [self.keys.shard(shard).lease for shard in range(self.keys.shards)]
            return {await self.redis.get(key) for key in keys} == {name.encode()}

        await until(are_held, what=f"all leases of {name}")

    def _is_spread(self, shards: list[int]) -> bool:
        # Two workers that both relay a shard take it over in turn, and pass through any spread.
        of_one = sum(len(leases.held) for leases in self.leases.values()) == len(self.shards.relays)
        return of_one and self.shards.spread() == shards


@pytest.fixture
async def crew(redis_client: Any, settings: Settings) -> AsyncIterator[Crew]:
    crew = Crew(redis_client, KeySpace(settings.prefix, SHARDS))
    yield crew
    for stop in crew.stops.values():
        stop.set()
    for task in crew.tasks.values():
        await task


@pytest.mark.long
async def test_a_worker_announces_which_shards_it_relays(crew: Crew) -> None:
    every = [*range(SHARDS)]
    crew.join("a")
    await until(lambda: crew.changes["a"], 60, "the takeovers")
    assert crew.changes["a"] == [RelayedShards(every, every, [])]
    crew.join("b")

    def said() -> bool:
        return all(changes and len(changes[-1].relayed) == SHARDS // 2 for changes in crew.changes.values())

    await until(said, 60, "the shards that were passed on")
    passed = sorted(shard for change in crew.changes["a"] for shard in change.given_up)
    assert passed == crew.changes["b"][-1].relayed
    await crew.leave("b")
    assert crew.changes["b"][-1] == RelayedShards([], [], passed)
    await crew.leave("a")
    assert crew.changes["a"][-1].relayed == []
    assert crew.changes["a"][-1].taken_over == []


@pytest.mark.long
async def test_shards_are_spread_evenly_without_a_moment_in_which_one_has_no_relay(crew: Crew) -> None:
    crew.join("a")
    await crew.spread_becomes(8)
    crew.join("b")
    await crew.spread_becomes(4, 4)
    crew.join("c")
    await crew.spread_becomes(3, 3, 2)
    crew.join("d")
    await crew.spread_is(2, 2, 2, 2)
    # 4, then 2, then 2 moved: as few as possible.
    assert crew.shards.takeovers.total() == 8 + 4 + 2 + 2
    await crew.leave("b")
    await crew.spread_becomes(3, 3, 2)
    await crew.leave("a")
    await crew.spread_becomes(4, 4)
    await crew.leave("c")
    await crew.spread_is(8)
    assert crew.shards.gaps == []
    assert {name for name, _ in crew.shards.relays.values()} == {"d"}


@pytest.mark.long
async def test_workers_that_start_together_share_at_once(crew: Crew) -> None:
    for name in "abc":
        crew.join(name)
    await crew.spread_is(3, 3, 2)
    assert crew.shards.gaps == []


@pytest.mark.long
async def test_workers_that_are_stopped_together_return_all_leases(crew: Crew) -> None:
    for name in "abc":
        crew.join(name)
    await crew.spread_becomes(3, 3, 2)
    # No lease expires before the test does.
    for leases in crew.leases.values():
        leases._lease_ms = 6_000

    async def are_long() -> bool:
        left = [await crew.redis.pttl(crew.keys.shard(shard).lease) for shard in range(SHARDS)]
        return min(left) > 5_000

    await until(are_long, 20, "leases of 6 s")
    async with asyncio.timeout(90):
        await asyncio.gather(*(crew.leave(name) for name in "abc"))
    for shard in range(SHARDS):
        assert await crew.redis.get(crew.keys.shard(shard).lease) is None
        assert await crew.redis.hgetall(crew.keys.shard(shard).present) == {}


@pytest.mark.long
async def test_more_workers_than_shards(redis_client: Any, settings: Settings) -> None:
    crew = Crew(redis_client, KeySpace(settings.prefix, 2))
    for name in "abc":
        crew.join(name)
    await crew.spread_is(1, 1)
    for name in "abc":
        await crew.leave(name)


@pytest.mark.long
async def test_a_worker_that_cannot_take_over_loses_the_shard_again(crew: Crew) -> None:
    """It holds leases, but cannot reach Kafka: the giver relays until the other has taken over."""
    crew.join("a")
    await until(lambda: crew.shards.spread() == [8])

    async def never() -> None:
        await asyncio.Event().wait()

    unable = crew.join("unable", lambda shard, duty: [never()])
    await until(lambda: unable.held, 20, "a shard that is passed to it")
    await until(lambda: not unable.held, 20, "the loss of the shard")
    await crew.rest()
    assert unable.held == []
    assert crew.shards.spread() == [8]
    assert (crew.shards.takeovers.total(), crew.shards.gaps) == (8, [])
    # Others still get their share.
    crew.join("c")
    await until(lambda: crew.shards.spread()[-1] >= 2 and len(crew.shards.spread()) == 2, 20, "c's share")
    assert crew.shards.gaps == []


@pytest.mark.long
async def test_a_taker_that_is_gone_costs_nothing(crew: Crew) -> None:
    """A worker says that it is present, and never asks again: its lease ends, the giver keeps the shard."""
    giver = crew.join("a")
    await until(lambda: crew.shards.spread() == [8])
    # It passes nothing on before it has had its shards for the length of a lease.
    await until(lambda: max(held.since for held in giver._running.values()) < giver._now() - LEASE_MS / 1000)
    for shard in range(SHARDS):
        await request_lease(
            crew.redis, crew.keys.shard(shard), "gone", LEASE_MS, about=leases_module.Worker(0)
        )

    async def passed() -> bool:
        return b"gone" in [await crew.redis.get(crew.keys.shard(shard).lease) for shard in range(SHARDS)]

    await until(passed, what="a shard that is passed to it")
    await until(lambda: not any(held.taker for held in crew.leases["a"]._running.values()), 20, "its return")
    assert (crew.shards.spread(), crew.shards.takeovers.total(), crew.shards.gaps) == ([8], 8, [])


async def prepare_to_leave(crew: Crew, lease_ms: int) -> None:
    """All shards are `a`'s; `c` is present, and so is `b`, which never asks again, and is the best taker."""
    crew.lease_ms = lease_ms
    crew.join("a")
    await until(lambda: crew.shards.spread() == [SHARDS])
    crew.join("c")
    for shard in range(SHARDS):
        keys = crew.keys.shard(shard)

        async def is_present(present: str = keys.present) -> bool:
            return bool(await crew.redis.hexists(present, crew.leases["c"].worker))

        await until(is_present, what="c")
        await request_lease(crew.redis, keys, "b", lease_ms, about=leases_module.Worker(0))
    assert min(leases.worker for leases in crew.leases.values()) > "b"


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of this process come after `b` in order, so `b` is given shards first."""
    monkeypatch.setattr(leases_module.os, "uname", lambda: SimpleNamespace(nodename="worker"))
    monkeypatch.setattr(leases_module.os, "getpid", lambda: "x")


async def test_a_taker_that_is_gone_is_passed_over_by_a_worker_that_leaves(named: None, crew: Crew) -> None:
    """Another worker is there: it gets the shards, without a moment in which one has no relay."""
    await prepare_to_leave(crew, LEASE_MS)
    await crew.leave("a")
    assert crew.shards.gaps == []
    assert crew.shards.spread() == [SHARDS]
    assert {name for name, _ in crew.shards.relays.values()} == {"c"}


async def test_a_worker_that_leaves_does_not_leave_leases_to_a_taker_that_is_gone(
    named: None, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is long, and there is no time to try another taker: the lease is free, and not the taker's
    until it ends.
    """
    monkeypatch.setattr(leases_module, "LEAVE_SECONDS_MAX", 0.3)
    await prepare_to_leave(crew, 8_000)
    await crew.leave("a")
    holders = [await crew.redis.get(crew.keys.shard(shard).lease) for shard in range(SHARDS)]
    assert b"b" not in holders
    # Every worker asks four times per lease, so this is before a lease of `b` would end.
    await until(lambda: crew.shards.spread() == [SHARDS], 7, "c relays all shards")


@pytest.mark.long
async def test_a_taker_that_is_slow_keeps_its_lease_when_the_giver_leaves(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has renewed the lease, so it is alive: no third worker restarts what it has begun."""
    monkeypatch.setattr(leases_module, "LEAVE_SECONDS_MAX", 1.5)
    # Four renewals in a lease: the taker renews it before `a` gives up, and a slow machine does not lose it.
    crew.lease_ms = 2_400
    crew.join("a")
    await until(lambda: crew.shards.spread() == [SHARDS])

    async def never() -> None:
        await asyncio.Event().wait()

    slow = crew.join("slow", lambda shard, duty: [never()])
    await until(lambda: len(slow._seen) == SHARDS)
    await crew.leave("a")
    holders = {await crew.redis.get(crew.keys.shard(shard).lease) for shard in range(SHARDS)}
    assert holders == {slow.worker.encode()}


async def test_a_worker_that_leaves_is_bounded_in_time_when_a_server_hangs(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the lease is."""
    monkeypatch.setattr(leases_module, "LEAVE_SECONDS_MAX", 0.4)
    monkeypatch.setattr(leases_module, "RETURN_SECONDS_MAX", 0.3)
    crew.lease_ms = 60_000
    hanging = crew.redis = SomeHang(crew.redis)
    crew.join("a")
    await until(lambda: crew.shards.spread() == [SHARDS])
    hanging.tags = {crew.keys.shard(shard).tag + ":" for shard in range(SHARDS)}
    async with asyncio.timeout(90):
        await crew.leave("a")
    hanging.tags = set()


async def test_a_host_may_have_any_name(
    redis_client: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker on a host named like a command that rebuilds shards by hand shares its shards as others do."""
    for host in ("rebuild-7", "rebuild", "-", "", "h\udcff\udc80 \n"):
        monkeypatch.setattr(leases_module.os, "uname", lambda host=host: SimpleNamespace(nodename=host))
        leases = Leases(redis_client, KeySpace(settings.prefix, SHARDS), LEASE_MS, lambda shard, duty: [])
        assert not leases.worker.startswith(BY_HAND)
        assert leases.worker.encode().isascii()
        assert not set(leases.worker) & set(" \n")
    keys = KeySpace(settings.prefix, SHARDS).shard(0)
    lease = await request_lease(redis_client, keys, leases.worker, LEASE_MS)
    assert lease.holder == leases.worker


@pytest.mark.long
async def test_garbage_in_the_keys_of_leases_is_ignored(crew: Crew) -> None:
    """It may come from an operator's typing error, or from a later release."""
    far = b"9" * 13
    garbage = {
        b"\xff\xfe": far + b" 1 2",
        b"bytes": far + b" \xff 2",
        b"digits": far + b" " + b"9" * 5_000 + b" " + b"8" * 5_000,
        b"for-ever": b"9" * 5_000 + b" 1 -",
        b"empty": b"",
        b"": b"1",
        b"words": far + b" one two three",
    }
    for shard in range(SHARDS):
        await crew.redis.hset(crew.keys.shard(shard).present, mapping=garbage)
    await crew.redis.set(crew.keys.shard(1).lease, b"\xff", px=LEASE_MS)
    await crew.redis.set(crew.keys.shard(2).lease, b"9" * 5_000, px=LEASE_MS)
    lease = await request_lease(crew.redis, crew.keys.shard(0), "reader", 0)
    assert b"\xff\xfe".decode(errors="replace") not in lease.present
    assert "for-ever" not in lease.present
    crew.join("a")
    crew.join("c")
    await until(lambda: sum(crew.shards.spread()) == SHARDS, 10, "all shards relayed")
    await crew.rest()
    assert not any(task.done() for task in crew.tasks.values())
    for name in "ac":
        await crew.leave(name)


async def test_a_lease_is_passed_only_to_a_worker_that_is_present(
    redis_client: Any, settings: Settings
) -> None:
    keys = KeySpace(settings.prefix, 1).shard(0)
    about = Worker(0)

    async def request(worker: str, about: Worker | None) -> str:
        return (await request_lease(redis_client, keys, worker, 60_000, about=about)).holder

    assert await request("giver", about) == "giver"
    assert not await pass_lease(redis_client, keys, "giver", "taker", 60_000)
    assert await request("taker", about) == "giver"
    await request("taker", None)  # it leaves
    assert not await pass_lease(redis_client, keys, "giver", "taker", 60_000)
    assert await request("taker", about) == "giver"
    assert await pass_lease(redis_client, keys, "giver", "taker", 60_000)
    assert await request("giver", None) == "taker"
    assert await pass_lease(redis_client, keys, "taker", "giver", 60_000, back=True)
    assert await request("taker", about) == "giver"


async def test_a_relay_whose_shard_was_passed_on_does_not_take_it_over_again(system: Settings) -> None:
    redis, shard = open_redis(system), key_space(system).shard(0)
    duties = [Duty(), Duty()]
    former, latter = (
        ShardRelay(
            redis,
            shard,
            system.shards,
            system.kafka,
            Topics(system.prefix).journal,
            sealer(system),
            duty=duty,
        )
        for duty in duties
    )
    relaying = [asyncio.create_task(former.run())]
    try:
        await until(lambda: duties[0].is_relaying, 30, "the first relay")
        duties[0].is_leaving = True
        relaying.append(asyncio.create_task(latter.run()))
        await asyncio.wait({relaying[0]}, timeout=30)
        assert relaying[0].done()
        await relaying[0]
        await until(lambda: duties[1].is_relaying, 30, "the second relay")
        assert not duties[0].is_relaying
    finally:
        for task in relaying:
            task.cancel()
        await asyncio.wait(relaying)
        await redis.aclose()


async def older_release(crew: Crew, name: str, stop: asyncio.Event) -> set[int]:
    """A worker of an older release: it takes free leases and renews them, knows nothing of shares, and says
    nothing about itself. Returns its leases at `stop`.
    """
    mine: set[int] = set()
    while not stop.is_set():
        for shard in range(SHARDS):
            lease = await request_lease(crew.redis, crew.keys.shard(shard), name, LEASE_MS)
            (mine.add if lease.holder == name else mine.discard)(shard)
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LEASE_MS / 4000)
    for shard in mine:
        await request_lease(crew.redis, crew.keys.shard(shard), name, 0)
    return mine


@pytest.mark.long
async def test_beside_a_worker_of_an_older_release(crew: Crew) -> None:
    """During an upgrade: nothing is passed to it or taken from it; what it returns is shared."""
    stop = asyncio.Event()
    old = asyncio.create_task(older_release(crew, "old", stop))
    await crew.all_held_by("old")
    crew.join("a")
    crew.join("b")
    await crew.rest()
    assert crew.shards.spread() == []
    stop.set()
    assert len(await old) == SHARDS
    await crew.spread_is(4, 4)
    stop.clear()
    old = asyncio.create_task(older_release(crew, "old", stop))
    await crew.rest()
    assert crew.shards.spread() == [4, 4]
    # The new workers leave: it takes what they return.
    await crew.leave("a")
    await crew.leave("b")
    await crew.all_held_by("old")
    stop.set()
    assert len(await old) == SHARDS


@pytest.mark.long
async def test_a_shard_that_is_rebuilt_by_hand_is_left_to_the_command(crew: Crew) -> None:
    crew.join("a")
    crew.join("b")
    await crew.spread_becomes(4, 4)
    name = f"{BY_HAND}x"
    for _ in range(12):
        lease = await request_lease(crew.redis, crew.keys.shard(0), name, LEASE_MS, seize=True)
        assert lease.holder == name
        await asyncio.sleep(LEASE_MS / 4000)
    assert 0 not in crew.shards.relays
    assert crew.shards.spread() == [4, 3]
    await request_lease(crew.redis, crew.keys.shard(0), name, 0)
    await crew.spread_is(4, 4)


@pytest.mark.long
async def test_a_worker_with_less_room_gets_less(crew: Crew) -> None:
    """What an overloaded worker says is heeded by all, and its shards do not come back while it says so."""
    crew.join("a")
    crew.join("b")
    await crew.spread_becomes(4, 4)
    crew.leases["a"]._overload.shards_max = 3
    await crew.spread_is(5, 3)
    crew.join("c")
    crew.leases["a"]._overload.shards_max = 1
    await crew.spread_is(4, 3, 1)
    crew.leases["a"]._overload.shards_max = None
    await crew.spread_is(3, 3, 2)
    assert crew.shards.gaps == []


class Counting:
    """A client that counts the calls of scripts in each turn of the event loop."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self.calls: list[int] = []
        self._is_counting = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._redis, name)

    async def execute_command(self, *words: Any, **options: Any) -> Any:
        if not self._is_counting:
            self._is_counting = True
            self.calls.append(0)
            asyncio.get_running_loop().call_soon(setattr, self, "_is_counting", False)
        self.calls[-1] += 1
        return await self._redis.execute_command(*words, **options)


@pytest.mark.long
async def test_all_leases_are_renewed_in_one_turn_of_the_event_loop(crew: Crew) -> None:
    """Also after one of the shards was renewed late, because its relay ended slowly."""
    counting = crew.redis = Counting(crew.redis)
    crew.lease_ms = 1_000
    crew.join("a")
    await until(lambda: crew.shards.spread() == [SHARDS])

    async def next_requests(count: int) -> list[int]:
        seen = len(counting.calls)
        await until(lambda: len(counting.calls) >= seen + count, 10, "renewals")
        return counting.calls[seen : seen + count]

    assert await next_requests(4) == [SHARDS] * 4
    await crew.leases["a"]._drop(3)
    await until(lambda: crew.shards.spread() == [SHARDS])
    assert await next_requests(4) == [SHARDS] * 4


class SomeHang:
    """A client of a cluster in which each shard has its own server; it cannot reach the servers of some
    shards: their calls time out.
    """

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self.tags: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._redis, name)

    def execute_command(self, *words: Any, **options: Any) -> Awaitable[Any]:
        if any(tag in str(word) for tag in self.tags for word in words[3:6]):
            return asyncio.sleep(60)
        return self._redis.execute_command(*words, **options)


@pytest.mark.long
async def test_a_worker_that_cannot_reach_some_servers_does_not_make_shards_wander(crew: Crew) -> None:
    """Another worker takes the shards of those servers; the rest is at rest, and is even afterwards."""
    partly, whole = SomeHang(crew.redis), crew.redis
    crew.redis = partly
    crew.join("a")
    crew.redis = whole
    crew.join("b")
    await crew.spread_is(4, 4)
    partly.tags = {crew.keys.shard(shard).tag + ":" for shard in range(4)}
    # Here a relay without a server continues, and both take its shard over again and again.
    await crew.rest()

    async def observed() -> tuple[list[int], list[bytes | None]]:
        leases = [await whole.get(crew.keys.shard(shard).lease) for shard in range(SHARDS)]
        return [crew.shards.takeovers[shard] for shard in range(4, SHARDS)], leases

    async def is_at_rest() -> bool:
        before = await observed()
        await crew.rest()
        return all(before[1]) and await observed() == before

    await until(is_at_rest, 20, "the rest of the other shards")
    partly.tags = set()
    await crew.spread_is(4, 4)
