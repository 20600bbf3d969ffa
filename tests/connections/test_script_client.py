"""The client that calls scripts over one connection: replies, errors, lost connections, cancellations."""

import asyncio
import builtins
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    NoScriptError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)

from bench.stage import private_redis
from grabstream.connections.opening import cancellable, open_redis
from grabstream.connections.redis_cluster import SLOTS, ClusterClient, _SlotMap
from grabstream.lua import script_client
from grabstream.lua.script_client import ScriptClient
from grabstream.runtime.ending import end
from grabstream.runtime.trouble import is_trouble
from grabstream.settings import Settings
from tests.conftest import until

ECHO = "return ARGV[1]"


@pytest.fixture
async def server() -> AsyncIterator[int]:
    with private_redis() as port:
        yield port


@pytest.fixture
async def client(server: int) -> AsyncIterator[ScriptClient]:
    client = ScriptClient(port=server)
    yield client
    await client.aclose()


async def lines_of(client: ScriptClient) -> set[str]:
    """The connections that have called a script last, by id."""
    clients = await client.client_list()
    return {one["id"] for one in clients if one["cmd"] in ("eval", "evalsha", "fcall")}


async def hanging_calls(client: ScriptClient, count: int) -> list[asyncio.Task[Any]]:
    """Calls that have been sent over an open connection, and get no replies while the server is paused."""
    await client.execute_command("EVAL", ECHO, 0, "before")
    await client.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
    calls = [asyncio.create_task(client.execute_command("EVAL", ECHO, 0, n)) for n in range(count)]
    await asyncio.sleep(0)
    return calls


async def test_calls_share_one_connection_and_get_their_own_replies(client: ScriptClient) -> None:
    words = [f"{number}" * number for number in range(1, 60)]
    replies = await asyncio.gather(*(client.execute_command("EVAL", ECHO, 0, word) for word in words))
    assert replies == [word.encode() for word in words]
    assert len(await lines_of(client)) == 1


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("return redis.error_reply('READONLY You can\\'t write')", ReadOnlyError),
        ("return redis.error_reply('NOSCRIPT none')", NoScriptError),
        ("error('it fails')", ResponseError),
        ("return {1, redis.error_reply('ERR inside'), 3}", None),
    ],
)
async def test_errors_are_those_of_redis_py(
    client: ScriptClient, server: int, script: str, kind: Any
) -> None:
    plain = cancellable(redis.asyncio.Redis(port=server))
    outcomes = await asyncio.gather(
        *(one.execute_command("EVAL", script, 0) for one in (client, plain)), return_exceptions=True
    )
    await plain.aclose()
    ours, theirs = map(repr, outcomes)
    assert ours == theirs
    assert kind is None or isinstance(outcomes[0], kind)
    assert await client.execute_command("EVAL", ECHO, 0, "after") == b"after"


async def test_nested_values_of_any_size(client: ScriptClient) -> None:
    script = "return {1, {'a', {}}, false, string.rep('x', tonumber(ARGV[1]))}"
    for size in (0, 1, 70_000, 3_000_000):
        assert await client.execute_command("EVAL", script, 0, size) == [1, [b"a", []], None, b"x" * size]


async def test_a_lost_connection_fails_all_its_calls_and_the_next_one_opens_another(
    client: ScriptClient, server: int
) -> None:
    calls = await hanging_calls(client, 3)
    [line] = await lines_of(client)
    await client.execute_command("CLIENT", "KILL", "ID", line)
    await client.execute_command("CLIENT", "UNPAUSE")
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, ConnectionError), outcome
        assert is_trouble(outcome)
    assert await client.execute_command("EVAL", ECHO, 0, "after") == b"after"
    assert await lines_of(client) != {line}


@pytest.mark.long
@pytest.mark.requirement("F3")
async def test_a_server_that_hangs_fails_the_calls_in_time(
    client: ScriptClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_client, "REPLY_SECONDS_MAX", 0.2)
    await client.execute_command("EVAL", ECHO, 0, "before")
    await client.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
    calls = [client.execute_command("EVAL", ECHO, 0, n) for n in range(2)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [TimeoutError, TimeoutError]
    await client.execute_command("CLIENT", "UNPAUSE")
    assert await client.execute_command("EVAL", ECHO, 0, "after") == b"after"


async def test_after_a_cancelled_call_the_others_get_their_replies_and_the_next_one_another_connection(
    client: ScriptClient,
) -> None:
    await client.execute_command("EVAL", ECHO, 0, "before")
    first = await lines_of(client)
    calls = [asyncio.create_task(client.execute_command("EVAL", ECHO, 0, n)) for n in range(3)]
    await asyncio.sleep(0)
    calls[1].cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert outcomes[0::2] == [b"0", b"2"]
    assert isinstance(outcomes[1], asyncio.CancelledError)
    assert await client.execute_command("EVAL", ECHO, 0, "after") == b"after"
    assert first.isdisjoint(await lines_of(client))


async def test_callers_that_come_while_it_connects_share_the_connection(client: ScriptClient) -> None:
    calls = [asyncio.create_task(client.execute_command("EVAL", ECHO, 0, n)) for n in range(5)]
    await asyncio.sleep(0)
    calls[0].cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert outcomes[1:] == [b"1", b"2", b"3", b"4"]
    assert len(await lines_of(client)) == 1


@pytest.mark.long
async def test_a_server_that_is_away_is_trouble_and_is_found_again(server: int) -> None:
    client = ScriptClient(port=1)
    for _ in range(2):
        with pytest.raises(ConnectionError) as raised:
            await client.execute_command("EVAL", ECHO, 0, "x")
        assert is_trouble(raised.value)
    client.connection_pool.connection_kwargs["port"] = server
    assert await client.execute_command("EVAL", ECHO, 0, "x") == b"x"
    await client.aclose()


async def test_login_and_database_are_those_of_the_url(settings: Settings, server: int) -> None:
    admin = cancellable(redis.asyncio.Redis(port=server))
    await admin.execute_command("ACL", "SETUSER", "caller", "on", ">secret", "~*", "+@all")
    script = "return redis.call('SET', KEYS[1], ARGV[1])"
    allowed = settings.model_copy(update={"redis_url": f"redis://caller:secret@127.0.0.1:{server}/3"})
    client = open_redis(allowed)
    assert await client.execute_command("EVAL", script, 1, "key", "value") == b"OK"
    await client.aclose()
    await admin.select(3)
    assert await admin.get("key") == b"value"
    await admin.aclose()
    refused = settings.model_copy(update={"redis_url": f"redis://caller:wrong@127.0.0.1:{server}/3"})
    client = open_redis(refused)
    with pytest.raises(AuthenticationError):
        await client.execute_command("EVAL", script, 1, "key", "value")
    await client.aclose()


@pytest.mark.long
async def test_only_calls_that_waited_too_long_fail_and_later_ones_use_another_connection(
    client: ScriptClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_client, "REPLY_SECONDS_MAX", 0.5)
    await client.execute_command("EVAL", ECHO, 0, "before")
    await client.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
    early = asyncio.create_task(client.execute_command("EVAL", ECHO, 0, "early"))
    done, _ = await asyncio.wait({early}, timeout=0.3)
    late = asyncio.create_task(client.execute_command("EVAL", ECHO, 0, "late"))
    with pytest.raises(TimeoutError):
        await early
    await client.execute_command("CLIENT", "UNPAUSE")
    assert await client.execute_command("EVAL", ECHO, 0, "other") == b"other"
    assert await late == b"late"
    assert not done


async def test_callers_that_gave_up_while_it_opened_leave_nothing_to_later_ones(server: int) -> None:
    """A server that hangs, then a connection that is opened for no caller."""
    async with HangingServer(server) as hanging:
        client = ScriptClient(port=hanging.port)
        for _ in range(2):
            with pytest.raises(builtins.TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.execute_command("EVAL", ECHO, 0, "x")
        hanging.passes.set()
        assert await client.execute_command("EVAL", ECHO, 0, "x") == b"x"
        for _ in range(3):
            cancelled = asyncio.create_task(client.execute_command("EVAL", ECHO, 0, "y"))
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.wait({cancelled})
            assert await client.execute_command("EVAL", ECHO, 0, "z") == b"z"
        await client.aclose()


class HangingServer:
    """Stands before a server: connections that were made before `passes` was set get nothing."""

    def __init__(self, port: int) -> None:
        self.passes = asyncio.Event()
        self.port = 0
        self._to = port
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "HangingServer":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        await end(self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.passes.is_set():
            return
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._to)
        for source, target in ((reader, there_writer), (there_reader, writer)):
            self._tasks.add(asyncio.create_task(self._pass_on(source, target)))

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            target.write(data)
        target.close()


@pytest.mark.long
async def test_a_client_that_is_closed_or_dropped_leaves_no_connection(server: int) -> None:
    admin = cancellable(redis.asyncio.Redis(port=server))

    async def others() -> bool:
        return len(await admin.client_list()) == 1

    for is_dropped in (False, True):
        client: ScriptClient | None = ScriptClient(port=server)
        assert client is not None
        await client.execute_command("EVAL", ECHO, 0, "x")
        await admin.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
        calls = [asyncio.create_task(client.execute_command("EVAL", ECHO, 0, n)) for n in range(2)]
        await asyncio.sleep(0)
        calls[0].cancel()
        if is_dropped:
            calls[1].cancel()
        else:
            await client.aclose()
        await asyncio.wait(calls)
        del client, calls
        gc.collect()
        await until(others)
        await admin.execute_command("CLIENT", "UNPAUSE")
    await admin.aclose()


async def test_a_client_that_is_closed_while_it_connects_says_so(client: ScriptClient) -> None:
    call = asyncio.create_task(client.execute_command("EVAL", ECHO, 0, "x"))
    await asyncio.sleep(0)
    await client.aclose()
    with pytest.raises(ConnectionError, match="closed"):
        await call


async def test_a_caller_that_is_cancelled_as_the_client_is_closed_is_cancelled(server: int) -> None:
    async with HangingServer(server) as hanging:
        client = ScriptClient(port=hanging.port)
        call = asyncio.create_task(client.execute_command("EVAL", ECHO, 0, "x"))
        await asyncio.sleep(0)
        client.lose_lines()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await client.aclose()


async def test_lost_lines_fail_their_calls_at_once(client: ScriptClient) -> None:
    [call] = await hanging_calls(client, 1)
    client.lose_lines()
    with pytest.raises(ConnectionError):
        await call
    await client.execute_command("CLIENT", "UNPAUSE")
    assert await client.execute_command("EVAL", ECHO, 0, "after") == b"after"


async def test_a_closed_client_fails_the_calls_on_their_way(client: ScriptClient) -> None:
    [call] = await hanging_calls(client, 1)
    await client.aclose()
    with pytest.raises(ConnectionError, match="closed"):
        await call


async def test_calls_to_a_master_of_a_cluster_end_when_another_replaces_it(server: int) -> None:
    """A master that hangs would keep them for the whole timeout."""
    with private_redis() as other:
        cluster = ClusterClient(
            [("127.0.0.1", server), ("127.0.0.1", other)],
            lambda host, port: ScriptClient(host=host, port=port),
        )
        before, after = f"127.0.0.1:{server}", f"127.0.0.1:{other}"
        cluster._adopt(_SlotMap([before] * SLOTS, [before], [after]))
        client = cluster._servers[before].client
        [call] = await hanging_calls(client, 1)
        cluster._adopt(_SlotMap([after] * SLOTS, [after], [before]))
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(90):
                await call
        await cluster.aclose()
