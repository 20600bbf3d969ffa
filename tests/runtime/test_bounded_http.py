"""What a foreign server may send for one request: no more than a bound, in whatever part of an answer."""

import aiohttp
import pytest
from aiohttp import web

from grabstream.runtime.bounded_http import AnswerTooLong, body_of, bounded_session
from tests.conftest import until
from tests.support.flooding import FLOODS, flooding
from tests.support.web_servers import serving

BYTES_MAX = 65_536


@pytest.mark.parametrize("kind", FLOODS)
async def test_an_answer_without_end_is_cut_at_the_bound(kind: str) -> None:
    """The time limit would end it much later: only the bound ends it here."""
    async with flooding(kind) as flood, bounded_session(BYTES_MAX, 60.0) as session:
        with pytest.raises(aiohttp.ClientError) as raised:
            async with session.get(f"http://127.0.0.1:{flood.port}/") as answer:
                await answer.read()
        # Too many headers are a separate error, whichever comes first.
        assert isinstance(raised.value, AnswerTooLong) or kind in ("headers", "trailers"), raised.value
        await until(lambda: flood.ended_by_client, what="the end of the connection")
    # More than the bound is on its way, in the buffers of both sockets.
    assert flood.sent < 32 * 1024 * 1024


async def test_each_answer_of_a_connection_has_the_whole_bound() -> None:
    """Connections are used again, and what came for one request does not count for the next."""
    peers = set()

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        return web.Response(body=b"x" * int(request.query["size"]))

    application = web.Application()
    application.router.add_get("/", answer)
    async with serving(application) as port, bounded_session(BYTES_MAX, 60.0) as session:
        url = f"http://127.0.0.1:{port}/"
        for _ in range(4):
            async with session.get(url, params={"size": "60000"}) as response:
                assert len(await response.read()) == 60_000
        assert len(peers) == 1
        async with session.get(url, params={"size": "65536"}) as response:
            assert response.status == 200
            with pytest.raises(AnswerTooLong, match="more than 65536 bytes"):
                await response.read()
        async with session.get(url, params={"size": "1"}) as response:
            assert await response.read() == b"x"
        # A body may have its own bound.
        async with session.get(url, params={"size": "1000"}) as response:
            assert await body_of(response, 1_000) == b"x" * 1_000
        async with session.get(url, params={"size": "1001"}) as response:
            with pytest.raises(AnswerTooLong, match="more than 1000 bytes"):
                await body_of(response, 1_000)


async def test_a_compressed_body_is_not_asked_for_and_not_unpacked() -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.headers["accept-encoding"] == "identity"
        return web.Response(body=b"\x1f\x8b rubbish", headers={"content-encoding": "gzip"})

    application = web.Application()
    application.router.add_get("/", answer)
    async with (
        serving(application) as port,
        bounded_session(BYTES_MAX, 60.0) as session,
        session.get(f"http://127.0.0.1:{port}/") as response,
    ):
        assert await response.read() == b"\x1f\x8b rubbish"
