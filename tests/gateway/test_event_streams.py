"""Streams of events: what comes is what the view `events` has, in its order, once, however often a client
connects again; and what clients do wrong, or do not take, is bounded.
"""

import asyncio
import random
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from grabstream.gateway import event_streams
from grabstream.gateway.event_streams import EventStreams, Streamed, Watch
from grabstream.gateway.problems import Problem
from grabstream.gateway.requests import Gone, Request
from grabstream.gateway.view_reader import ViewReader
from grabstream.models.identifiers import shard_of
from tests.conftest import until
from tests.gateway.conftest import Door
from tests.support.gateways import Caller, GatewayProcess, Message, calling
from tests.support.projecting import rows


async def events_of(door: Door, condition: str) -> list[tuple[int, int, str, str]]:
    """Shard, seq, type and text of events, in the order of the journal."""
    return await rows(
        door.settings, f"SELECT shard, seq, type, body FROM events WHERE {condition} ORDER BY shard, seq"
    )


async def followed(caller: Caller, path: str, count: int, place: str | None = None) -> list[Message]:
    """The first messages with data of a stream."""
    found: list[Message] = []
    async with asyncio.timeout(90), aclosing(caller.follow(path, place)) as messages:
        async for message in messages:
            if message.type:
                found.append(message)
            if len(found) == count:
                break
    return found


async def place_now(caller: Caller, path: str) -> str:
    """The position of a stream that begins now."""
    async with asyncio.timeout(90), aclosing(caller.follow(path)) as messages:
        async for message in messages:
            return message.place
    raise AssertionError("the stream has ended")


# -- what comes ----------------------------------------------------------------------------------------------


async def test_stream_of_an_offer_has_its_events_as_on_grab_events(
    caller: Caller, door: Door, offer: str
) -> None:
    path = f"/v1/offers/{offer}/events"
    following = asyncio.create_task(followed(caller, f"{path}?after=0", 13))
    # It waits for an offer that does not exist.
    await asyncio.wait({following}, timeout=0.5)
    await caller.open(offer, total=10)
    grabs = [
        caller.post(f"/v1/offers/{offer}/grabs", {"user": f"u{n}", "metadata": {"n": "é"}}) for n in range(10)
    ]
    assert {got.status for got in await asyncio.gather(*grabs)} == {201}
    await caller.post(f"/v1/offers/{offer}/grabs/unknown/release", {"user": "u1"})
    await caller.post("/v1/offers/other-" + offer, {"user": "u1"})
    await caller.post(f"/v1/offers/{offer}/pause")
    await caller.post(f"/v1/offers/{offer}/close")
    got = await following
    known = await events_of(door, f"offer = '{offer}'")
    assert [(one.place, one.type, one.text) for one in got] == [
        (f"{shard}-{seq}", type_, text) for shard, seq, type_, text in known
    ]
    assert [one.type for one in got][1:11] == ["grab.granted"] * 10
    assert await followed(caller, path, 13, "0") == got
    # From every place on, what follows, and nothing else.
    for number in range(12):
        assert await followed(caller, path, 12 - number, got[number].place) == got[number + 1 :]
        query = f"{path}?after={got[number].place}"
        assert await followed(caller, query, 12 - number) == got[number + 1 :]


async def follow_at_random(caller: Caller, path: str, place: str, ends: int, chance: Any) -> list[Message]:
    """Follows a stream over many connections, each for some messages, until the grab `end` has come from a
    number of offers.
    """
    found: list[Message] = []
    while ends:
        left = chance.choice([0, 1, 3, 10, 50, 200])
        async with aclosing(caller.follow(path, place)) as messages:
            async for message in messages:
                place = message.place
                if message.type:
                    assert message.type != "reset", message
                    found.append(message)
                    ends -= '"grab":"end"' in message.text
                left -= 1
                if not ends or left <= 0:
                    break
    return found


@pytest.mark.long
async def test_clients_that_connect_again_at_random_miss_nothing_and_get_nothing_twice(
    caller: Caller, door: Door, offer: str
) -> None:
    """While a crowd grabs in two shards: followers of each offer, and of a user who grabs everywhere."""
    shards, chance = door.settings.shards, random.Random(offer)
    named = [f"{offer}-{number}" for number in range(99)]
    offers = [next(name for name in named if shard_of(name, shards) == shard) for shard in range(shards)]
    user = f"all-{offer}"
    for name in offers:
        await caller.open(name, total=100_000)
    paths = [*(f"/v1/offers/{name}/events" for name in offers), f"/v1/users/{user}/events"]
    places = [*("0" for _ in offers), await place_now(caller, paths[-1])]
    followers = [
        asyncio.create_task(
            follow_at_random(caller, path, place, len(offers) if "users" in path else 1, chance)
        )
        for path, place in zip(paths, places, strict=True)
        for _ in range(2)
    ]

    async def grab(number: int) -> None:
        for turn in range(60):
            who = user if turn % 3 == 0 else f"{user}-{number}"
            got = await caller.post(f"/v1/offers/{offers[turn % shards]}/grabs", {"user": who})
            assert got.status == 201, got

    await asyncio.gather(*(grab(number) for number in range(30)))
    for name in offers:
        assert (await caller.post(f"/v1/offers/{name}/grabs", {"user": user}, "end")).status == 201
    async with asyncio.timeout(60):
        got = await asyncio.gather(*followers)
    for messages, path in zip(got, [path for path in paths for _ in range(2)], strict=True):
        if "users" in path:
            known = await events_of(door, f"body::jsonb->>'user' = '{user}'")
            assert len(known) == 30 * 20 + len(offers)
            # For a user, the order is that of each shard.
            messages = sorted(messages, key=lambda one: f'"shard":{1},' in one.text)
        else:
            known = await events_of(door, f"offer = '{path.split('/')[3]}'")
            assert len(known) == 30 * 60 / shards + 2
        assert [(one.type, one.text) for one in messages] == [(type_, text) for *_, type_, text in known]


# -- positions -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "place", "words"),
    [
        ("offers", "none", "not a position of this stream"),
        ("offers", "7-1", "not a position of this stream"),
        ("offers", "1.1", "not a position of this stream"),
        ("users", "0-1", "not a position of this stream"),
        ("users", "1.2.3", "not a position of this stream"),
        ("users", "9999999999999999.1", "after the newest event"),
        ("users", "99999999999999999.1", "not a position of this stream"),
        ("users", "\u00e9", "not a position of this stream"),
    ],
)
async def test_position_that_cannot_be_resumed_is_a_reset(
    caller: Caller, door: Door, offer: str, kind: str, place: str, words: str
) -> None:
    path = f"/v1/{kind}/{offer}/events"
    await caller.open(offer, total=10)
    await followed(caller, f"/v1/offers/{offer}/events?after=0", 1)
    before = await place_now(caller, path)
    following = asyncio.create_task(followed(caller, path, 2, place))
    [reset] = await followed(caller, path, 1, place)
    assert reset.type == "reset"
    assert words in reset.text
    assert (await caller.post(f"/v1/offers/{offer}/grabs", {"user": offer})).status == 201
    first, second = await following
    assert (first.type, second.type) == ("reset", "grab.granted")
    # What is lost by a reset was before its position.
    assert await followed(caller, path, 1, before) == [second]
    assert await followed(caller, path, 1, reset.place) == [second]
    if "newest" not in words:
        got = await caller.send("GET", f"{path}?after={'%C3%A9' if place == chr(233) else place}")
        assert (got.status, got.body["field"]) == (400, "after")


@pytest.mark.long
async def test_position_that_the_read_model_has_not_reached_is_waited_for(
    caller: Caller, door: Door, offer: str
) -> None:
    await caller.open(offer, total=20)
    for number in range(10):
        got = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "u"}, f"k{number}")
        path = f"/v1/offers/{offer}/events?after={got.body['shard']}-{got.body['seq']}"
        following = asyncio.create_task(followed(caller, path, 1))
        assert (await caller.post(f"/v1/offers/{offer}/grabs", {"user": "u"}, f"l{number}")).status == 201
        [message] = await following
        assert f'"grab":"l{number}"' in message.text


# -- the reader ----------------------------------------------------------------------------------------------


class Client:
    """The client of a stream in this process: takes what is sent until it is stopped."""

    def __init__(self) -> None:
        self.got = b""
        self.takes = asyncio.Event()
        self.takes.set()
        self.gone = asyncio.Event()
        self.is_aborted = False

    async def send(self, message: Any) -> None:
        await self.takes.wait()
        self.got += message["body"]

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    def abort(self) -> None:
        self.is_aborted = True
        self.gone.set()


def request_for(path: dict[str, str], client: Client, **headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "GET", "query_string": b"", "headers": raw}
    return Request(scope, client.receive, path)


async def opened(
    streams: EventStreams, offer: str, client: Client | None = None, **headers: str
) -> tuple[Streamed, Client]:
    client = client or Client()
    got = await streams.offer_events(request_for({"offer": offer}, client, **headers), b"")
    assert isinstance(got, Streamed)
    return got, client


async def test_one_reader_asks_for_all_streams_and_nothing_when_there_are_none(
    caller: Caller, door: Door, books: ViewReader, offer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ask = books.rows

    async def counted(query: str, parameters: Any = ()) -> Any:
        asked.append(query)
        return await ask(query, parameters)

    monkeypatch.setattr(books, "rows", counted)
    streams = EventStreams(books, door.settings.shards)
    reading = asyncio.create_task(streams.keep_reading())
    await asyncio.wait({reading}, timeout=0.6)
    assert asked == []
    await caller.open(offer, total=500)
    clients = [Client() for _ in range(100)]
    got = [one for one, _ in await asyncio.gather(*(opened(streams, offer, one) for one in clients))]
    asked.clear()
    start = time.monotonic()
    sending = [
        asyncio.create_task(one.stream.send(client.send, client.abort))
        for one, client in zip(got, clients, strict=True)
    ]
    assert (await caller.post(f"/v1/offers/{offer}/grabs", {"user": "u"})).status == 201
    await until(lambda: all(b"grab.granted" in client.got for client in clients), 10)
    assert len({client.got.partition(b"\n")[2] for client in clients}) == 1
    assert len(asked) <= 2 + 2 * (time.monotonic() - start) / event_streams.POLL_SECONDS
    for client in clients:
        client.gone.set()
    await asyncio.gather(*sending)
    assert streams.count == 0
    asked.clear()
    await asyncio.wait({reading}, timeout=0.6)
    assert len(asked) <= 1
    reading.cancel()


async def test_client_that_takes_nothing_is_ended(
    door: Door, books: ViewReader, offer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_streams, "WRITE_SECONDS_MAX", 0.2)
    streams = EventStreams(books, door.settings.shards)
    reading = asyncio.create_task(streams.keep_reading())
    got, client = await opened(streams, offer)
    client.takes.clear()
    async with asyncio.timeout(90):
        await got.stream.send(client.send, client.abort)
    assert client.is_aborted
    assert streams.measures.slow == {"behind": 0, "ended": 1}
    assert (streams.count, streams._by_offer, streams._bytes) == (0, {}, 0)
    reading.cancel()


@pytest.mark.long
async def test_stream_whose_client_is_slower_than_its_events_is_cut_and_resumes(
    caller: Caller, door: Door, books: ViewReader, offer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_streams, "STREAM_BYTES_MAX", 5_000)
    streams = EventStreams(books, door.settings.shards)
    reading = asyncio.create_task(streams.keep_reading())
    await caller.open(offer, total=500)
    got, client = await opened(streams, offer, last_event_id="0")
    sending = asyncio.create_task(got.stream.send(client.send, client.abort))
    await until(lambda: b"offer.opened" in client.got, 10)
    client.takes.clear()
    await asyncio.gather(
        *(caller.post(f"/v1/offers/{offer}/grabs", {"user": f"u{number}"}) for number in range(300))
    )
    await until(lambda: got.stream.watch.is_cut, 10)
    client.takes.set()
    async with asyncio.timeout(90):
        await sending
    assert streams.count == 0
    # It resumes, over as many connections as it takes.
    places = [line[4:] for line in client.got.decode().splitlines() if line.startswith("id: ")]
    rest = await followed(
        caller, f"/v1/offers/{offer}/events", 300 - client.got.count(b"grab.granted") // 2, places[-1]
    )
    seen = [line[6:] for line in client.got.decode().splitlines() if line.startswith("data: ")]
    known = await events_of(door, f"offer = '{offer}'")
    assert [*seen, *(one.text for one in rest)] == [text for *_, text in known]
    reading.cancel()


async def test_streams_are_bounded(
    door: Door, books: ViewReader, offer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_streams, "STREAMS_MAX", 3)
    streams = EventStreams(books, door.settings.shards)
    reading = asyncio.create_task(streams.keep_reading())
    got = [await opened(streams, offer) for _ in range(3)]
    with pytest.raises(Problem, match="streams, its maximum"):
        await opened(streams, offer)
    stream, client = got[0]
    client.gone.set()
    await stream.stream.send(client.send, client.abort)
    await opened(streams, offer)
    reading.cancel()


async def test_streams_of_one_end_user_are_bounded(
    door: Door, books: ViewReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_streams, "STREAMS_USER_MAX", 2)
    streams = EventStreams(books, door.settings.shards)
    reading = asyncio.create_task(streams.keep_reading())

    async def follow(user: str) -> Streamed:
        request = request_for({"user": user}, Client())
        request.user = user
        got = await streams.user_events(request, b"")
        assert isinstance(got, Streamed)
        return got

    first, _ = [await follow("ann") for _ in range(2)]
    with pytest.raises(Problem, match="ann has 2 streams at this gateway"):
        await follow("ann")
    await follow("bob")
    streams.ended(first.stream)
    await follow("ann")
    reading.cancel()


async def test_stream_that_waits_for_its_beginning_ends_with_its_client(
    door: Door, books: ViewReader, offer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_streams, "STREAMS_JOINING_MAX", 1)
    streams = EventStreams(books, door.settings.shards)
    client = Client()
    waiting = asyncio.create_task(opened(streams, offer, client))
    await until(lambda: len(streams._joining) == 1)
    with pytest.raises(Problem, match="opening 1 streams"):
        await opened(streams, offer)
    client.gone.set()
    with pytest.raises(Gone):
        await waiting
    assert (streams.count, streams._joining, streams._bytes) == (0, [], 0)


@pytest.mark.long
async def test_streams_take_no_room_of_commands(door: Door, offer: str, tmp_path: Path) -> None:
    """They wait for a position that no event has, more of them than the gateway takes commands."""
    bounds = {"gateway_requests_max": "5", "gate_timeout_ms": "20000"}
    with GatewayProcess(door.settings, tmp_path / "log", **bounds) as gateway:
        async with calling(gateway.port) as caller:
            shard = (await caller.open(offer, total=10)).body["shard"]
            path = f"/v1/offers/{offer}/events?after={shard}-{10**15}"
            waiting = [asyncio.create_task(caller.send("GET", path)) for _ in range(20)]
            await asyncio.wait(waiting, timeout=0.5)
            assert not any(one.done() for one in waiting)
            for number in range(5):
                got = await caller.post(f"/v1/offers/{offer}/grabs", {"user": f"u{number}"}, f"k{number}")
                assert got.status == 201
            for one in waiting:
                one.cancel()


class Lines:
    """Books that have lines when they are asked for them."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    async def rows(self, query: str, parameters: Any = ()) -> list[dict[str, Any]]:
        if query == event_streams._NEWEST:
            return [{"shard": 0, "seq": len(self.lines)}]
        return self.lines if query == event_streams._LINES else []


async def test_heartbeat_of_a_stream_that_was_just_cut_names_no_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A turn of the loop in which the heartbeat is due takes so long that the stream is cut in it."""
    monkeypatch.setattr(event_streams, "STREAM_HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(event_streams, "STREAM_BYTES_MAX", 1_000)
    books = Lines()
    streams = EventStreams(books, 1)  # type: ignore[arg-type]
    opening = asyncio.create_task(opened(streams, "o"))
    await until(lambda: bool(streams._joining))
    await streams._round()
    got, client = await opening
    sending = asyncio.create_task(got.stream.send(client.send, client.abort))
    await until(lambda: b"id: 0-0" in client.got)
    body = '{"type":"grab.granted","pad":"%s"}' % ("x" * 400)
    books.lines = [
        {"shard": 0, "seq": seq, "seqs": 1, "type": "grab.granted", "offer": "o", "body": body}
        for seq in range(1, 6)
    ]
    rounds: list[asyncio.Task[bool]] = []

    def long_turn() -> None:
        time.sleep(0.3)
        rounds.append(asyncio.create_task(streams._round()))

    asyncio.get_running_loop().call_soon(long_turn)
    async with asyncio.timeout(90):
        await sending
    assert got.stream.watch.is_cut
    assert [line for line in client.got.split(b"\n") if line.startswith(b"id: ")] == [b"id: 0-0"]


async def test_stream_that_has_missed_too_much_is_reset(
    caller: Caller, door: Door, books: ViewReader, offer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_streams, "STREAM_MISSED_SEQS_MAX", 5)
    await caller.open(offer, total=10)
    for number in range(6):
        got = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "u"}, f"k{number}")
    streams = EventStreams(books, door.settings.shards)
    reading = asyncio.create_task(streams.keep_reading())
    path = f"/v1/offers/{offer}/events?after={got.body['shard']}-{got.body['seq'] - 1}"
    await followed(caller, path, 1)
    for name, value in (("offer", offer), ("user", "u")):
        client = Client()
        request = request_for({name: value}, client, last_event_id="0" if name == "offer" else "0.0")
        ask = streams.offer_events if name == "offer" else streams.user_events
        one = await ask(request, b"")
        assert isinstance(one, Streamed)
        sending = asyncio.create_task(one.stream.send(client.send, client.abort))
        await until(lambda client=client: b"\n\n" in client.got, 10)
        assert b"event: reset" in client.got
        assert b"more than 5 events ago" in client.got
        client.gone.set()
        await sending
    reading.cancel()


def test_watches_of_all_streams_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fill() -> None:
        streams: EventStreams = EventStreams(None, 1)  # type: ignore[arg-type]
        watches = [Watch("x", None, None) for _ in range(4)]
        for watch in watches:
            streams._by_offer.setdefault("x", set()).add(watch)
        for watch in watches:
            streams._add([watch], b"x" * 30)
        assert sorted(watch.is_cut for watch in watches) == [False, False, False, True]
        assert streams._bytes == 90
        for watch in watches:
            streams.leave(watch)
        assert (streams._bytes, streams._by_offer) == (0, {})

    monkeypatch.setattr(event_streams, "STREAMS_BYTES_MAX", 100)
    asyncio.run(fill())


# -- the end -------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_streams_end_when_the_gateway_is_stopped(door: Door, offer: str, tmp_path: Path) -> None:
    with GatewayProcess(door.settings, tmp_path / "log", gate_timeout_ms="20000") as gateway:
        async with calling(gateway.port) as caller:
            await caller.open(offer, total=10)
            got: list[list[str]] = [[] for _ in range(20)]

            async def follow(types: list[str]) -> None:
                async with aclosing(caller.follow(f"/v1/offers/{offer}/events?after=0")) as messages:
                    async for message in messages:
                        if message.type:
                            types.append(message.type)

            followers = [asyncio.create_task(follow(types)) for types in got]
            # A stream that has not begun would be refused.
            await until(lambda: all(got), 20, "the first event of each stream")
            start = time.monotonic()
            stopped = asyncio.get_running_loop().run_in_executor(None, gateway.stop)
            async with asyncio.timeout(90):
                await asyncio.gather(*followers)
                assert await stopped == 0
            assert time.monotonic() - start < 8
            assert got == [["offer.opened"]] * 20
        assert "Traceback" not in gateway.text()
        assert gateway.text().count("\n") == 2, gateway.text()


@pytest.mark.long
async def test_stream_outlives_the_time_limits_of_requests(caller: Caller, offer: str) -> None:
    """Also its connection is checked every second; a client that closes it is forgotten."""
    path = f"/v1/offers/{offer}/events"
    head = await caller.send("HEAD", path)
    assert (head.status, head.headers["content-type"]) == (200, "text/event-stream")
    following = asyncio.create_task(followed(caller, path, 1))
    await asyncio.wait({following}, timeout=16)
    assert not following.done()
    await caller.open(offer, total=1)
    assert [one.type for one in await following] == ["offer.opened"]
