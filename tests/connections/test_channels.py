"""Messages of channels, as the client of scripts hands them on."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError, NoPermissionError, TimeoutError

from bench.stage import private_redis
from grabstream.lua.script_client import ScriptClient
from grabstream.runtime.trouble import is_trouble
from tests.conftest import until


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with private_redis() as port:
        yield port


@pytest.fixture(params=[2, 3])
async def client(server: int, request: pytest.FixtureRequest) -> AsyncIterator[ScriptClient]:
    client = ScriptClient(port=server, protocol=request.param)
    yield client
    await client.aclose()


class Listener:
    """Keeps what is handed on; raises `error` in place of it, if there is one."""

    def __init__(self, client: ScriptClient, channels: Sequence[str] = ("a", "b")) -> None:
        self.got: list[tuple[bytes, bytes]] = []
        self.error: Exception | None = None
        self.task = asyncio.create_task(client.listen_to(channels, self.take))

    def take(self, channel: bytes, data: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.got.append((channel, data))


async def until_listening(client: ScriptClient, count: int, channel: str = "a") -> None:
    async def is_so() -> bool:
        return (await client.pubsub_numsub(channel))[0][1] == count  # type: ignore[no-untyped-call]

    await until(is_so, 20, f"{count} listeners")


async def test_messages_are_handed_on_in_their_order(client: ScriptClient) -> None:
    listener = Listener(client)
    await until_listening(client, 1, "b")
    sent = [(b"a" if number % 3 else b"b", b"%d " % number * (1 + number % 500)) for number in range(3_000)]
    async with client.pipeline(transaction=False) as pipe:
        for channel, data in [*sent, (b"another", b"x")]:
            pipe.publish(channel, data)
        await pipe.execute()
    await until(lambda: len(listener.got) >= len(sent), 20, "all messages")
    assert listener.got == sent
    assert not listener.task.done()
    # Calls of scripts have another connection.
    assert await client.execute_command("EVAL", "return ARGV[1]", 0, "x") == b"x"
    listener.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listener.task
    await until_listening(client, 0)


async def test_a_connection_that_the_server_ends_is_trouble(client: ScriptClient) -> None:
    listener = Listener(client)
    await until_listening(client, 1)
    assert await client.client_kill_filter(_type="pubsub") == 1
    with pytest.raises(ConnectionError) as caught:
        await listener.task
    assert is_trouble(caught.value)
    # The next one listens again.
    second = Listener(client)
    await until_listening(client, 1)
    await client.publish("a", "x")
    await until(lambda: second.got == [(b"a", b"x")], 20, "the message")
    await client.aclose()
    with pytest.raises(ConnectionError, match="the client has closed"):
        await second.task


@pytest.mark.long
async def test_what_is_refused_and_what_fails_is_raised(client: ScriptClient, server: int) -> None:
    await client.acl_setuser("deaf", enabled=True, nopass=True, commands=["+@all"], reset=True)
    deaf = ScriptClient(port=server, username="deaf", password="")
    with pytest.raises(NoPermissionError):
        await Listener(deaf).task
    await deaf.aclose()
    listener = Listener(client)
    await until_listening(client, 1)
    listener.error = ValueError("not taken")
    await client.publish("a", "x")
    with pytest.raises(ValueError, match="not taken"):
        await listener.task
    await until_listening(client, 0)
    nowhere = ScriptClient(port=1)
    with pytest.raises(redis.exceptions.ConnectionError):
        await Listener(nowhere).task


async def test_a_server_that_never_answers_is_trouble() -> None:
    """It accepts the connection and what comes before the subscription."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while b"SUBSCRIBE" not in (said := await reader.read(65_536)) and said:
            writer.write(b"+OK\r\n" * said.count(b"\r\nSETINFO\r\n"))
        await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        client = ScriptClient(port=server.sockets[0].getsockname()[1], protocol=2, socket_timeout=0.5)
        with pytest.raises(TimeoutError) as caught:
            await Listener(client).task
        assert is_trouble(caught.value)
        await client.aclose()
