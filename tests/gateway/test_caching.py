"""The cache of the gateway: asked once for a crowd, never older than it may be, within its memory."""

import asyncio
import secrets
import time
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grabstream.gateway.caching import ENTRY_BYTES, Cache, digest_of
from grabstream.gateway.problems import Problem
from grabstream.gateway.slots import Room
from tests.conftest import until
from tests.gateway.conftest import Door
from tests.gateway.test_questions import position
from tests.support.gateways import Caller
from tests.support.projecting import open_tables


class Source:
    """Makes documents that count up; waits while `open` is not set."""

    def __init__(self) -> None:
        self.made = 0
        self.open = asyncio.Event()
        self.open.set()

    async def make(self) -> bytes:
        self.made += 1
        number = self.made
        await self.open.wait()
        return b"%d" % number


async def test_crowd_asks_once() -> None:
    cache, source = Cache(), Source()
    source.open.clear()
    crowd = [asyncio.create_task(cache.document("offers", {}, source.make)) for _ in range(100)]
    await until(lambda: source.made == 1)
    crowd[0].cancel()
    source.open.set()
    got = await asyncio.gather(*crowd, return_exceptions=True)
    assert {one.body for one in got if not isinstance(one, BaseException)} == {b"1"}
    assert sum(isinstance(one, asyncio.CancelledError) for one in got) == 1
    assert (await cache.document("offers", {}, source.make)).body == b"1"
    assert (await cache.document("offers", {"kind": "coupon"}, source.make)).body == b"2"


async def test_question_takes_the_room_to_ask_or_to_wait_and_none_for_a_kept_document() -> None:
    cache, source, taken = Cache(), Source(), list[str]()
    room = Room(partial(taken.append, "ask"), partial(taken.append, "join"))
    source.open.clear()
    asked = [asyncio.create_task(cache.document("offers", {}, source.make, room=room)) for _ in range(3)]
    await until(lambda: len(taken) == 3)
    source.open.set()
    await asyncio.gather(*asked)
    await cache.document("offers", {}, source.make, room=room)
    assert taken == ["ask", "join", "join"]

    def refuse() -> None:
        raise Problem("busy", "There is no room.")

    with pytest.raises(Problem, match="no room"):
        await cache.document("offers", {"kind": "coupon"}, source.make, room=Room(refuse, refuse))
    assert (source.made, cache.misses) == (1, 1)


async def test_kept_document_is_not_older_than_it_may_be() -> None:
    cache, source = Cache(seconds=0.0), Source()
    assert [(await cache.document("offer", {}, source.make)).body for _ in range(3)] == [b"1", b"2", b"3"]


async def test_document_read_since_a_time_is_made_once_and_never_replaced_by_an_older_one() -> None:
    """One that is being made may have been read before."""
    cache, source = Cache(), Source()
    source.open.clear()
    older = asyncio.create_task(cache.document("offer", {}, source.make))
    await until(lambda: source.made == 1)
    slow, source.open = source.open, asyncio.Event()
    since = time.monotonic()
    crowd = [asyncio.create_task(cache.document("offer", {}, source.make, since)) for _ in range(50)]
    await until(lambda: source.made == 2)
    # A request for any version joins the newer one.
    crowd.append(asyncio.create_task(cache.document("offer", {}, source.make)))
    await asyncio.wait(crowd, timeout=0.01)
    source.open.set()
    assert {(await one).body for one in crowd} == {b"2"}
    slow.set()
    assert (await older).body == b"1"
    assert (await cache.document("offer", {}, source.make)).body == b"2"
    assert (await cache.document("offer", {}, source.make, since)).body == b"2"
    assert (await cache.document("offer", {}, source.make, time.monotonic())).body == b"3"
    assert (cache.hits, cache.misses) == (52, 3)
    assert not cache._making


async def test_error_is_not_kept() -> None:
    cache, source = Cache(), Source()

    async def fail() -> bytes:
        raise OSError("away")

    for _ in range(2):
        with pytest.raises(OSError, match="away"):
            await cache.document("offer", {}, fail)
    assert (await cache.document("offer", {}, source.make)).body == b"1"


async def test_memory_is_bounded_and_the_least_used_go_first() -> None:
    cache = Cache(bytes_max=10 * (1_000 + ENTRY_BYTES))

    async def make() -> bytes:
        return b"x" * 1_000

    async def never() -> bytes:
        raise AssertionError("it was kept")

    for number in range(1_000):
        await cache.document("offer", {"offer": f"o{number}"}, make)
        await cache.document("offer", {"offer": "o0"}, never)
    assert cache._bytes == sum(len(kept.body) + ENTRY_BYTES for kept in cache._kept.values())
    assert len(cache._kept) == 10
    assert not cache._making

    async def make_large() -> bytes:
        return b"x" * 100_000

    assert len((await cache.document("offer", {"offer": "large"}, make_large)).body) == 100_000
    assert (cache._bytes, len(cache._kept)) == (0, 0)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "c"]), st.text("ab=&", max_size=4)),
    st.dictionaries(st.sampled_from(["a", "b", "c"]), st.text("ab=&", max_size=4)),
)
def test_digest_is_of_the_arguments_in_any_order(one: dict[str, str], other: dict[str, str]) -> None:
    assert (digest_of("x", one) == digest_of("x", other)) is (one == other)
    assert digest_of("x", dict(reversed(one.items()))) == digest_of("x", one)
    assert digest_of("y", one) != digest_of("x", one)
    assert digest_of("x", {"cursor": "C\0\0limit\x005"}) != digest_of("x", {"cursor": "C", "limit": "5"})


@pytest.mark.requirement("E10")
async def test_gateway_keeps_what_a_crowd_asks_and_answers_after_with_the_event(
    caller: Caller, door: Door, offer: str
) -> None:
    opened = await caller.open(offer, total=5)
    path = f"/v1/offers/{offer}"
    first = await caller.send("GET", f"{path}?{position(opened)}")
    assert first.headers["cache-control"] == "max-age=2, stale-while-revalidate=8"
    got = await caller.post(f"{path}/grabs", {"user": "ann"})
    assert (await caller.send("GET", f"{path}?{position(got)}")).body["given"] == 1
    # The books change behind the cache: the document is served as it was, while it is fresh.
    async with await open_tables(door.settings) as tables:

        async def titled(title: str) -> None:
            await tables.execute("UPDATE offers_1 SET title = %s WHERE offer = %s", (title, offer))
            await tables.commit()

        async def is_kept() -> bool:
            """Whether the document is served as it was before a change; not if it was no longer fresh."""
            before = await caller.send("GET", path)
            await titled(secrets.token_hex(5))
            asked = [await caller.send("GET", one) for one in (path, f"{path}?{position(got)}")]
            return all(one.raw == before.raw for one in asked)

        title = (await caller.send("GET", path)).body["title"]
        # Also for a question about an event that is booked.
        await until(is_kept, 20, "an answer from the cache")
        await titled(title)
    mine = await caller.send("GET", f"/v1/users/ann-{offer}/grabs")
    assert mine.headers["cache-control"] == "private, no-store"
