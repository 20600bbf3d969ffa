"""Streams of events by `Client` and `AsyncClient`: what comes through gateways that are killed, and what they
do with replies that are refusals, odd, or cut.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from grabstream import AsyncClient, Client, RequestProblem, ServedEvent, StreamReset, WaitingPosition
from grabstream.workshop.services import free_ports
from tests.client.scripted import DROP, reply, scripted
from tests.conftest import until
from tests.gateway.conftest import Door
from tests.support.gateways import GatewayProcess, calling
from tests.support.projecting import rows

Kind = type[Client] | type[AsyncClient]


@pytest.fixture(params=[Client, AsyncClient])
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


async def followed(kind: Kind, url: str, ask: str, *words: Any) -> AsyncIterator[ServedEvent]:
    """The events of a stream, of either client."""
    if kind is AsyncClient:
        async with AsyncClient(url) as client:
            async for event in getattr(client, ask)(*words):
                yield event
        return
    with Client(url) as client:
        events = getattr(client, ask)(*words)
        while (event := await asyncio.to_thread(next, events, None)) is not None:
            yield event


async def first(kind: Kind, url: str, count: int, ask: str, *words: Any) -> list[ServedEvent]:
    found: list[ServedEvent] = []
    async with asyncio.timeout(60):
        async for event in followed(kind, url, ask, *words):
            found.append(event)
            if len(found) == count:
                break
    return found


@pytest.mark.long
async def test_gateway_that_is_killed_loses_and_doubles_nothing(
    door: Door, offer: str, tmp_path: Path
) -> None:
    """The gateway is killed (kill -9) twice while a crowd grabs, and starts again at its address."""
    [port] = free_ports(1)
    count = 91
    got: dict[Any, list[ServedEvent]] = {}
    url = f"http://127.0.0.1:{port}"
    asked = {
        (kind, ask): (ask, *words)
        for kind in (Client, AsyncClient)
        for ask, *words in (
            ("offer_events", offer, 0),
            ("user_events", offer, ".".join("0" * door.settings.shards)),
        )
    }

    async def follow(name: Any) -> None:
        wanted = count if name[1] == "offer_events" else 90
        async for event in followed(name[0], url, *asked[name]):
            got[name].append(event)
            if len(got[name]) == wanted:
                return

    following: list[asyncio.Task[None]] = []
    async with calling(door.gateway.port) as caller:
        await caller.open(offer, total=90)
        for number in range(3):
            words = ("--port", str(port))
            with GatewayProcess(door.settings, tmp_path / f"log-{number}", *words):
                if not following:
                    got.update({name: [] for name in asked})
                    following = [asyncio.create_task(follow(name)) for name in asked]
                path = f"/v1/offers/{offer}/grabs"
                grabs = [caller.post(path, {"user": offer}) for _ in range(30)]
                assert {answer.status for answer in await asyncio.gather(*grabs)} == {201}
                least = 30 * number + 5

                async def all_have(least: int = least) -> bool:
                    return all(len(events) > least for events in got.values())

                await until(all_have, 60, "events of each stream")
                if number == 2:
                    async with asyncio.timeout(60):
                        await asyncio.gather(*following)
    known = await rows(
        door.settings, f"SELECT shard, seq, type FROM events WHERE offer = '{offer}' ORDER BY seq"
    )
    for (_, ask), events in got.items():
        expected = [tuple(row) for row in known if ask == "offer_events" or row[2] == "grab.granted"]
        assert [(one.event.shard, one.event.seq, one.event.type) for one in events] == expected


HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def message(seq: int, **fields: Any) -> bytes:
    """The message of an event of an offer."""
    event = {
        "type": "offer.paused", "v": 1, "shard": 0, "seq": seq, "offer_seq": seq, "offer": "o", "at": 1,
        "command": "c", "digest": "d", **fields,
    }  # fmt: skip
    return f"id: 0-{seq}\nevent: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


async def test_stream_resumes_after_what_came_whole_and_drops_what_comes_twice(kind: Kind) -> None:
    begun = HEAD + b"retry: 1\nid: 0-1\n\n"
    steps: list[bytes | str] = [
        reply(503, "", "retry-after: 0"),
        begun + message(2) + message(3)[:-1],
        DROP,
        HEAD + message(2) + message(3) + b": \nid: 0-5\n\n",
        HEAD + message(6),
    ]
    async with scripted(steps, closes=True) as (url, requests):
        found = await first(kind, url, 3, "offer_events", "o", 0)
    assert [(one.id, one.event.seq) for one in found] == [("0-2", 2), ("0-3", 3), ("0-6", 6)]
    assert {type(one.event).__name__ for one in found} == {"OfferPaused"}
    places = [
        line for request in requests for line in request.lower().split(b"\r\n") if b"last-event-id" in line
    ]
    assert places == [b"last-event-id: 0-2"] * 2 + [b"last-event-id: 0-5"]
    assert [b"?after=0 " in request for request in requests] == [True, True, False, False, False]


REFUSED: Final[list[tuple[bytes, str]]] = [
    (reply(400, '{"type":"/problems/invalid","detail":"after: …","field":"after"}'), "400 invalid"),
    (reply(401, '{"type":"/problems/unauthenticated","detail":"send a key"}'), "401 unauthenticated"),
    (reply(404, "nothing here"), "404 unexpected_reply"),
    (reply(200, "{}", "content-type: application/json"), "200 unexpected_reply"),
    (reply(302, "", "location: http://127.0.0.1:1/"), "302 unexpected_reply"),
    (HEAD + b"data: " + b"x" * 1_100_000, "200 unexpected_reply"),
]


@pytest.mark.parametrize(("step", "expected"), REFUSED, ids=[case[1] for case in REFUSED])
async def test_what_is_refused_is_an_error_at_once(kind: Kind, step: bytes, expected: str) -> None:
    async with scripted([step], closes=True) as (url, requests):
        with pytest.raises(RequestProblem) as error:
            await first(kind, url, 1, "user_events", "ann")
    assert f"{error.value.status} {error.value.type}" == expected
    assert len(requests) == 1


async def test_positions_are_told_beside_events_and_move_no_place(kind: Kind) -> None:
    """Without a request for them, a client gets only events."""
    told: list[WaitingPosition] = []
    position = b'event: position\ndata: {"offer":"o","grab":"g","position":3,"more":1}\n\n'
    steps: list[bytes | str] = [HEAD + message(2) + position, HEAD + position + message(3) + position]
    for given in ((None, told.append), ()):
        async with scripted(steps, closes=True) as (url, requests):
            found = await first(kind, url, 2, "user_events", "ann", *given)
        assert [one.event.seq for one in found] == [2, 3]
        assert b"last-event-id: 0-2\r\n" in requests[1].lower()
    assert told[:2] == [WaitingPosition("o", "g", 3)] * 2
    async with scripted([HEAD + position.replace(b"3", b'"x"')], closes=True) as (url, _):
        with pytest.raises(RequestProblem, match="a position cannot be read"):
            await first(kind, url, 1, "user_events", "ann", None, told.append)


@pytest.mark.parametrize(
    "raised",
    [
        aiohttp.ClientError("of the caller"),
        OSError("of the caller"),
    ],
)
async def test_error_of_who_is_told_positions_ends_the_stream(kind: Kind, raised: Exception) -> None:
    """Also one that looks like a failure of the connection."""

    def tell(position: WaitingPosition) -> None:
        raise raised

    position = b'event: position\ndata: {"offer":"o","grab":"g","position":3}\n\n'
    async with scripted([HEAD + message(2) + position], closes=True) as (url, requests):
        with pytest.raises(type(raised), match="of the caller"):
            await first(kind, url, 2, "user_events", "ann", None, tell)
    assert len(requests) == 1


async def test_reset_says_that_events_are_missing_and_where_to_begin(kind: Kind) -> None:
    reset = b'id: 0-9\nevent: reset\ndata: {"reason":"The stream cannot resume: too far."}\n\n'
    async with scripted([HEAD + reset], closes=True) as (url, _):
        with pytest.raises(StreamReset, match=r"too far\. Events are missing: begin again") as error:
            await first(kind, url, 1, "offer_events", "o")
    assert error.value.id == "0-9"


async def test_stream_ends_with_its_client() -> None:
    async with scripted([HEAD + b"id: 0-1\n\n"]) as (url, requests):
        client = AsyncClient(url)
        following = asyncio.create_task(anext(client.offer_events("o"), None))  # type: ignore[arg-type]

        async def is_asked() -> bool:
            return bool(requests)

        await until(is_asked, 20, "the request")
        await client.end()
        async with asyncio.timeout(90):
            assert await following is None
    [port] = free_ports(1)
    waiting = Client(f"http://127.0.0.1:{port}")
    found: list[ServedEvent] = []
    thread = threading.Thread(target=lambda: found.extend(waiting.offer_events("o")))
    thread.start()
    waiting.end()
    await asyncio.to_thread(thread.join, 20)
    assert not thread.is_alive()
    assert not found
