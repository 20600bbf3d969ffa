"""Answers that gateways share in the cache Redis: found by all of them, made by one, and never needed. Each
`Cache` here is the cache of one gateway.
"""

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from grabstream.connections.cache_redis import open_cache
from grabstream.connections.opening import checked_database
from grabstream.gateway import shared_answers
from grabstream.gateway.api_keys import digest_of, new_secret
from grabstream.gateway.bounds import CACHE_STALE_SECONDS_MAX, SHARED_ANSWER_BYTES_MAX
from grabstream.gateway.cache_server import CacheServer
from grabstream.gateway.caching import Cache
from grabstream.gateway.rates import RequestCounters, read_rates
from grabstream.gateway.shared_answers import LIFE_MS, SharedAnswers
from grabstream.projections.tables import api_keys
from grabstream.settings import Settings
from grabstream.workshop.services import free_ports
from grabstream.workshop.services.servers import Redis
from tests.conftest import until
from tests.drill.switch import Switch
from tests.gateway.conftest import Door
from tests.gateway.test_caching import Source
from tests.gateway.test_questions import position
from tests.support.gateways import GatewayProcess, calling
from tests.support.projecting import rows


@pytest.fixture(scope="module")
def cache_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    """A cache Redis that tests may stop and fill."""
    [port] = free_ports(1)
    redis = Redis(tmp_path_factory.mktemp("cache"), port, "cache")
    redis.start()
    yield redis
    redis.kill()


@pytest.fixture
async def server(servers: Settings, cache_redis: Redis) -> AsyncIterator[CacheServer]:
    """The client of a gateway, without any entries."""
    async with open_cache(servers.model_copy(update={"cache_url": url_of(cache_redis)})) as server:
        assert server is not None
        assert server.is_up
        await server.client.flushall()
        yield server


def url_of(redis: Redis) -> str:
    return f"redis://127.0.0.1:{redis.port}/0"


def gateway_of(
    server: CacheServer, release: str = "1", prefix: str = "p", schema: str = "s", system: str = "of one"
) -> Cache:
    shared = SharedAnswers(server, release, prefix, schema)
    shared.belong_to(system)
    return Cache(shared=shared)


async def ask(cache: Cache, source: Source, read_since: float | None = None) -> bytes:
    return (await cache.document("offers", {"kind": "coupon"}, source.make, read_since)).body


async def entry_of(server: CacheServer) -> bytes:
    """The key of the only answer."""
    [key] = [key for key in await server.client.keys() if not key.endswith(b":maker")]
    assert isinstance(key, bytes)
    return key


async def never() -> bytes:
    raise AssertionError("it was shared")


# -- sharing -------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_two_gateways_share_an_answer_with_its_age(server: CacheServer) -> None:
    one, two, source = gateway_of(server), gateway_of(server), Source()
    assert await ask(one, source) == b"1"
    await server.client.pexpire(await entry_of(server), LIFE_MS - 1_000)
    before = asyncio.get_running_loop().time()
    kept = await two.document("offers", {"kind": "coupon"}, never)
    assert kept.body == b"1"
    assert before - 1.5 < kept.since <= asyncio.get_running_loop().time() - 1.0
    assert kept.until - kept.since == pytest.approx(2.0)
    # From now on it is in the memory of the second, too.
    await server.client.flushall()
    assert (await two.document("offers", {"kind": "coupon"}, never)).body == b"1"
    assert source.made == 1
    # What is asked otherwise has another answer.
    assert (await two.document("offers", {"kind": "stock"}, source.make)).body == b"2"


async def test_answer_is_made_once_for_the_crowds_of_all_gateways(server: CacheServer) -> None:
    gateways, source = [gateway_of(server) for _ in range(5)], Source()
    source.open.clear()
    crowd = [asyncio.create_task(ask(gateway, source)) for gateway in gateways * 20]
    await until(lambda: source.made == 1)
    source.open.set()
    assert set(await asyncio.gather(*crowd)) == {b"1"}
    assert source.made == 1


async def test_answer_before_is_used_while_another_gateway_makes_the_next_one(server: CacheServer) -> None:
    one, two, source = gateway_of(server), gateway_of(server), Source()
    assert await ask(one, source) == b"1"
    await server.client.pexpire(await entry_of(server), round(CACHE_STALE_SECONDS_MAX * 1000) - 500)
    source.open.clear()
    making = asyncio.create_task(ask(gateway_of(server), source))
    await until(lambda: source.made == 2)
    assert (await two.document("offers", {"kind": "coupon"}, never)).body == b"1"
    source.open.set()
    assert await making == b"2"

    async def has_next() -> bool:
        return (await two.document("offers", {"kind": "coupon"}, never)).body == b"2"

    await until(has_next, what="the next answer")


async def test_gateway_that_cannot_make_it_lets_the_next_one_try_at_once(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the time of the first one nor that of the next one has run out."""
    monkeypatch.setattr(shared_answers, "MAKING_MS_MAX", 60_000)
    monkeypatch.setattr(shared_answers, "CACHE_WAIT_SECONDS_MAX", 60.0)
    started, fails, source = asyncio.Event(), asyncio.Event(), Source()

    async def fail() -> bytes:
        started.set()
        await fails.wait()
        raise OSError("away")

    failing = asyncio.create_task(gateway_of(server).document("offers", {"kind": "coupon"}, fail))
    await started.wait()
    waiting = asyncio.create_task(ask(gateway_of(server), source))
    await asyncio.wait({waiting}, timeout=0.1)
    assert source.made == 0
    fails.set()
    with pytest.raises(OSError, match="away"):
        await failing
    await until(lambda: source.made == 1, 30)
    assert await waiting == b"1"
    assert [key for key in await server.client.keys() if key.endswith(b":maker")] == []


async def test_gateway_that_dies_while_it_makes_it_does_not_hold_up_others(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_answers, "MAKING_MS_MAX", 60_000)
    source, away = Source(), Source()
    away.open.clear()
    dead = asyncio.create_task(ask(gateway_of(server), away))
    await until(lambda: away.made == 1)
    async with asyncio.timeout(90):
        assert await ask(gateway_of(server), source) == b"1"
    assert (await gateway_of(server).document("offers", {"kind": "coupon"}, never)).body == b"1"
    away.open.set()
    await dead


async def test_question_with_after_is_made_and_shared_and_never_replaced_by_an_older_one(
    server: CacheServer,
) -> None:
    one, two, source = gateway_of(server), gateway_of(server), Source()
    source.open.clear()
    older = asyncio.create_task(ask(one, source))
    await until(lambda: source.made == 1)
    slow, source.open = source.open, asyncio.Event()
    source.open.set()
    await asyncio.wait({older}, timeout=0.01)  # so that the ages differ in ms
    since = time.monotonic()
    assert await ask(two, source, since) == b"2"
    slow.set()
    assert await older == b"1"
    other = gateway_of(server)
    assert (await other.document("offers", {"kind": "coupon"}, never)).body == b"2"
    assert await ask(two, source, since) == b"2"
    # When another gateway has read one, the age is not known exactly.
    assert await ask(other, source, since) == b"3"
    assert (await gateway_of(server).document("offers", {"kind": "coupon"}, never)).body == b"3"


async def test_systems_and_releases_never_see_answers_of_others(server: CacheServer) -> None:
    source = Source()
    systems = [
        ("1", "p", "s"), ("1", "p", "t"), ("1", "q", "s"), ("2", "p", "s"), ("1", 'p", "s', ""),
        ("1", "p", "s", "a copy of one"),
    ]  # fmt: skip
    got = [await ask(gateway_of(server, *system), source) for system in systems]
    assert got == [b"1", b"2", b"3", b"4", b"5", b"6"]
    # Also when a value is at the key of another one.
    keys = [key for key in await server.client.keys("p:*") if not key.endswith(b":maker")]
    values = [await server.client.get(key) for key in keys]
    for key, value in zip(keys, values[1:] + values[:1], strict=True):
        await server.client.set(key, value, px=LIFE_MS)
    again = [await ask(gateway_of(server, *system), source) for system in systems if system[1] == "p"]
    assert again == [b"7", b"8", b"9", b"10"]


async def test_nothing_is_shared_before_the_system_is_known(server: CacheServer) -> None:
    source = Source()
    unknown = [Cache(shared=SharedAnswers(server, "1", "p", "s")) for _ in range(2)]
    assert [await ask(cache, source) for cache in unknown] == [b"1", b"2"]
    assert await server.client.dbsize() == 0


# -- what is wrong with the server ---------------------------------------------------------------------------


@pytest.mark.parametrize("life_ms", [None, LIFE_MS, 10 * LIFE_MS])
@pytest.mark.parametrize("kind", ["text", "empty", "cut", "changed", "large", "list"])
async def test_foreign_and_damaged_values_are_misses(
    server: CacheServer, kind: str, life_ms: int | None
) -> None:
    source, client = Source(), server.client
    assert await ask(gateway_of(server), source) == b"1"
    key = await entry_of(server)
    value = await client.get(key)
    await client.delete(key)
    texts = {
        "text": b"hello", "empty": b"", "cut": value[:-1], "changed": value[:-1] + b"\xff",
        "large": b"x" * (SHARED_ANSWER_BYTES_MAX + 100),
    }  # fmt: skip
    if kind == "list":
        await client.rpush(key, "a")
    else:
        await client.set(key, texts[kind])
    if life_ms:
        await client.pexpire(key, life_ms)
    assert await ask(gateway_of(server), source) == b"2"
    assert server.is_up
    if life_ms != LIFE_MS:  # otherwise it expires as an answer would
        assert (await gateway_of(server).document("offers", {"kind": "coupon"}, never)).body == b"2"


async def test_large_answer_is_not_shared(server: CacheServer) -> None:
    async def make() -> bytes:
        return b"x" * (SHARED_ANSWER_BYTES_MAX + 1)

    assert len((await gateway_of(server).document("offers", {}, make)).body) == SHARED_ANSWER_BYTES_MAX + 1
    assert await server.client.keys() == []


async def test_full_server_stays_in_use_for_what_it_has(
    server: CacheServer, caplog: pytest.LogCaptureFixture
) -> None:
    """One log line, however many commands it refuses; rates are counted in memory meanwhile."""
    source = Source()
    assert await ask(gateway_of(server), source) == b"1"
    await server.client.config_set("maxmemory", "1mb")  # less than an empty server uses
    try:
        with caplog.at_level(logging.INFO):
            assert (await gateway_of(server).document("offers", {"kind": "coupon"}, never)).body == b"1"
            for number in range(5):
                name = {"offer": f"o{number}"}
                got = await gateway_of(server).document("offer", name, source.make)
                assert got.body == b"%d" % (number + 2)
            counters = RequestCounters(server, "p")
            assert [
                await counters.hit(read_rates("2/hour"), "key", "a") > 0 for _ in range(4)
            ] == [False, False, True, True]  # fmt: skip
            await server.client.pexpire(await entry_of(server), 500)
            assert await ask(gateway_of(server), source) == b"7"
        assert server.is_up
        assert len(caplog.records) == 1, caplog.text
        assert "refuses a command" in caplog.text
        assert "OOM" in caplog.text
    finally:
        await server.client.config_set("maxmemory", "0")
    assert await ask(gateway_of(server), source) == b"8"
    assert (await gateway_of(server).document("offers", {"kind": "coupon"}, never)).body == b"8"


@pytest.mark.long
async def test_server_that_hangs_is_left_alone_until_it_answers(
    server: CacheServer, cache_redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    cache, source, loop = gateway_of(server), Source(), asyncio.get_running_loop()
    checking = asyncio.create_task(server.keep_checking())
    cache_redis.send_signal(signal.SIGSTOP)
    try:
        start = loop.time()
        assert await ask(cache, source) == b"1"
        assert not server.is_up
        assert loop.time() - start < 1.5
        start = loop.time()
        assert (await cache.document("offer", {}, source.make)).body == b"2"
        assert loop.time() - start < 0.2
    finally:
        cache_redis.send_signal(signal.SIGCONT)
    await until(lambda: server.is_up, 10, "the cache")
    checking.cancel()
    assert await ask(gateway_of(server), source) == b"3"
    assert (await gateway_of(server).document("offers", {"kind": "coupon"}, never)).body == b"3"
    assert [("cannot be used" in one.message, "used again" in one.message) for one in caplog.records] == [
        (True, False), (False, True),
    ]  # fmt: skip


async def test_server_that_fails_again_and_again_rests_longer_each_time(server: CacheServer) -> None:
    rests = []
    for _ in range(8):
        server.failed(OSError("away"))
        server.failed(OSError("also those that were asked at the same time"))
        rests.append(server._rest_seconds)
        await server.check()
        assert server.is_up
    assert rests == [1, 2, 4, 8, 16, 30, 30, 30]
    server._up_since -= 100
    server.failed(OSError("away"))
    assert server._rest_seconds == 1


async def test_server_that_is_killed_while_an_answer_is_made(server: CacheServer, cache_redis: Redis) -> None:
    source = Source()
    source.open.clear()
    making = [asyncio.create_task(ask(gateway_of(server), source)) for _ in range(3)]
    await until(lambda: source.made == 1)
    await asyncio.to_thread(cache_redis.kill)
    try:
        source.open.set()
        assert len(await asyncio.gather(*making)) == 3
        assert not server.is_up
    finally:
        await asyncio.to_thread(cache_redis.start)


# -- whole gateways ------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.requirement("E10")
async def test_hit_asks_neither_postgresql_nor_the_core(
    door: Door, cache_redis: Redis, tmp_path: Path, offer: str
) -> None:
    """A gateway whose PostgreSQL goes away answers what another gateway has answered."""
    port, nobody = free_ports(2)
    postgres = str(door.settings.postgres)
    there = int(conninfo_to_dict(postgres)["port"] or 0)
    switch = Switch(there)
    await switch.start(port)
    common: dict[str, Any] = {"cache_url": url_of(cache_redis), "gate_timeout_ms": "20000"}
    without_books = door.settings.model_copy(update={"postgres": postgres.replace(f":{there}/", f":{port}/")})
    with (
        GatewayProcess(door.settings, tmp_path / "one", **common) as one,
        GatewayProcess(without_books, tmp_path / "two", **common) as two,
    ):
        async with calling(one.port) as first, calling(two.port) as second:
            opened = await first.open(offer, total=5)
            path = f"/v1/offers/{offer}"
            # By this, it knows which system it is.
            assert (await second.send("GET", "/v1/offers?limit=1")).status == 200
            switch.point_at(nobody)
            await switch.cut()
            assert (await second.send("GET", path)).status == 503
            made = await first.send("GET", f"{path}?{position(opened)}")
            got = await second.send("GET", path)
            assert (got.status, got.raw, got.headers["etag"]) == (200, made.raw, made.headers["etag"])
            listed = await first.send("GET", "/v1/offers?order=random&visitor=ann&limit=3")
            same = await second.send("GET", "/v1/offers?limit=3&visitor=ann&order=random")
            assert (same.status, same.raw) == (200, listed.raw)
        assert one.text().count("\n") == 1, one.text()
    await switch.close()


@pytest.mark.long
async def test_what_is_answered_is_in_the_books_when_the_cache_is_killed(
    door: Door, cache_redis: Redis, tmp_path: Path, offer: str
) -> None:
    """It counts the requests of the crowd, and keeps what the crowd asks for. While it is away, and when it
    comes back, every command is decided, and questions are answered as far as PostgreSQL has time.
    """
    secret = new_secret()
    async with checked_database(door.settings) as connection:
        scopes = ["grab", "operate", "read"]
        await api_keys.create(connection, offer, scopes, digest_of(secret.encode()), None)
    given = {
        "cache_url": url_of(cache_redis), "gate_timeout_ms": "20000",
        "gateway_authentication": "required", "gateway_key_rate": "100000/second",
    }  # fmt: skip
    answers: dict[str, dict[str, Any]] = {}
    shown: list[str] = []
    is_over = asyncio.Event()
    with GatewayProcess(door.settings, tmp_path / "log", **given) as gateway:
        async with calling(gateway.port) as anyone:
            caller = anyone.having(secret)
            opened = await caller.open(offer, total=1_000_000)
            path = f"/v1/offers/{offer}"
            assert (await caller.send("GET", f"{path}?{position(opened)}")).status == 200

            async def grab(user: str) -> None:
                number = 0
                while not is_over.is_set():
                    got = await caller.post(f"{path}/grabs", {"user": user}, f"{user}-{number}")
                    assert got.status == 201, got
                    answers[f"{user}-{number}"] = got.body
                    got = await caller.send("GET", path)
                    # PostgreSQL may need more than its 2 s on a busy machine.
                    assert got.status == 200 or (got.status == 503 and "retry-after" in got.headers), got
                    if got.status == 200:
                        shown.append(user)
                    number += 1

            async def until_more(count: int, what: str) -> None:
                wanted, before = len(answers) + count, len(shown)
                await until(
                    lambda: (
                        (len(answers) >= wanted and len(shown) > before) or any(one.done() for one in crowd)
                    ),
                    60,
                    what,
                )

            crowd = [asyncio.create_task(grab(f"u{number}")) for number in range(8)]
            await until_more(24, "answers beside the cache")
            await asyncio.to_thread(cache_redis.kill)
            try:
                await until_more(80, "answers without the cache")
                assert (
                    "cannot be used; each gateway counts requests and keeps answers separately"
                    in gateway.text()
                )
            finally:
                await asyncio.to_thread(cache_redis.start)
            await until(lambda: "can be used again" in gateway.text(), 60, "the cache")
            await until_more(24, "answers beside the cache that is back")
            is_over.set()
            await asyncio.gather(*crowd)

            async def are_booked() -> bool:
                found = await rows(
                    door.settings, f"SELECT grab, user_id, place, seq FROM grabs WHERE offer = '{offer}'"
                )
                return sorted(found) == sorted(
                    (one["grab"], one["user"], one["place"], one["seq"]) for one in answers.values()
                )

            await until(are_booked, 60, "exactly the answers in the books")
        assert "Traceback" not in gateway.text()
