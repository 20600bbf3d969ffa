"""The Redis users of docs/operating.md: they may do what a worker and a gate do, and a gate may not load
functions.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import NoPermissionError

from grabstream.connections.libraries import delete_others, load_everywhere
from grabstream.connections.opening import open_redis, require_core
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.lua.library import library, load
from grabstream.models.commands import Open
from grabstream.models.offers import StockTerms
from grabstream.ops.grants import apply_redis, redis_commands
from grabstream.settings import load_settings
from grabstream.streams.deciding.sweeper import Sweeper
from grabstream.streams.relaying.shadow import SHADOW, VERIFIER_SHADOW
from grabstream.workshop.services import free_ports
from grabstream.workshop.services.cluster import join_redis
from grabstream.workshop.services.servers import Redis
from tests.conftest import wait_until
from tests.support.shards import SEALER, grabs, opening, private_server, take_over

__all__ = ["private_server"]
PAGE = Path(__file__).parents[2] / "docs" / "operating.md"


@pytest.fixture
async def users(private_server: Any) -> Any:
    """Clients of a private Redis: its administrator, and the two users of the page."""
    port = private_server[1]
    clients = {"admin": redis.asyncio.Redis(port=port)}
    block = re.search(r"<!-- redis users -->\n```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    for line in block[1].splitlines():
        words = line.split()
        await clients["admin"].execute_command(*words)
        clients[words[2]] = redis.asyncio.Redis(port=port, username=words[2], password="secret")
    await clients["admin"].config_set("maxmemory-policy", "noeviction")
    yield clients
    for client in clients.values():
        await client.aclose()


async def test_the_users_of_the_page_can_work(users: Any) -> None:
    worker, gate_user, keys = users["grab_worker"], users["grab_gate"], KeySpace("grab", 2)
    [server] = await load_everywhere(worker)
    assert (server.plain, server.others) == ("", [])
    await take_over(worker, keys)
    for client in (worker, gate_user):
        await require_core(client)
    async with gate_user.pubsub() as pubsub:
        await pubsub.subscribe(*(keys.shard(number).channel for number in range(2)))
    gate = Gate(gate_user, keys, SEALER)
    stock = Open(id="s", offer="s", terms=StockTerms(issuer="i", total=5, hold_ms=60_000))
    answers = await gate.decide([opening(), *grabs(2), stock], "decided")
    assert [answer.outcome for answer in answers] == ["opened", "granted", "granted", "opened"]
    await gate.close()
    await Sweeper(worker, keys.shard(0), 2, 10**9).sweep()
    stats = await users["admin"].info("commandstats")
    assert "cmdstat_evalsha" not in stats
    with pytest.raises(NoPermissionError):
        await gate_user.execute_command("FUNCTION", "LOAD", library().text)
    with pytest.raises(NoPermissionError):
        await gate_user.set("another:key", "x")


@pytest.mark.parametrize("given_by", ["page", "grants"])
async def test_a_worker_may_use_the_shadows_with_which_verifiers_compare(users: Any, given_by: str) -> None:
    admin = users["admin"]
    if given_by == "grants":
        for words in redis_commands("grab"):
            await admin.execute_command(*words)
    for name in (SHADOW, VERIFIER_SHADOW):
        shadow = KeySpace("grab" + name, 2).shard(1)
        for words in (("SET", shadow.lease, "1"), ("PUBLISH", shadow.channel, "1")):
            assert await admin.execute_command("ACL", "DRYRUN", "grab_worker", *words) == b"OK", words


async def test_libraries_of_other_releases_are_named_and_deleted_on_request(users: Any) -> None:
    admin = users["admin"]
    assert await load(admin) == ""
    for name in ("grabstream_1_aa", "somebodys"):
        await admin.function_load(
            f"#!lua name={name}\nredis.register_function('{name}_f', function() return 1 end)"
        )
    servers = await load_everywhere(admin)
    assert [(server.plain, server.others) for server in servers] == [("", ["grabstream_1_aa"])]
    await delete_others(admin, servers)
    await delete_others(admin, servers)  # another process may have been faster
    assert [server.others for server in await load_everywhere(admin)] == [[]]
    assert len(await admin.function_list()) == 2


async def test_init_says_why_functions_cannot_be_used(users: Any) -> None:
    [server] = await load_everywhere(users["grab_gate"])
    assert "function|load" in server.plain


@pytest.mark.long
async def test_users_are_known_to_each_server_of_a_cluster_also_after_a_failover(tmp_path: Path) -> None:
    """A worker and a gate of the least rights work there, and with the replica once it is the master."""
    ports, buses = free_ports(2), free_ports(2)
    servers = [Redis(tmp_path / f"{n}", ports[n], f"redis-{n}", buses[n]) for n in range(2)]
    settings, keys = load_settings(), KeySpace("grab", 2)

    def client_of(login: str = "") -> Any:
        nodes = ",".join(f"127.0.0.1:{port}" for port in ports)
        return open_redis(settings.model_copy(update={"redis_url": f"redis-cluster://{login}{nodes}"}))

    try:
        for server in servers:
            server.start()
        join_redis(servers, 1)
        for server in servers:
            with server.client() as client:
                wait_until(lambda client=client: len(client.cluster("SLOTS")[0]) == 4, 30, "a replica")
        admin = client_of()
        commands = [[*words, ">secret"] for words in redis_commands("grab")]
        assert sorted(await apply_redis(admin, commands)) == sorted(f"127.0.0.1:{port}" for port in ports)
        await admin.aclose()
        worker, gate_user = client_of("grab_worker:secret@"), client_of("grab_gate:secret@")
        await load_everywhere(worker)
        await take_over(worker, keys)
        gate = Gate(gate_user, keys, SEALER)
        [answer] = await gate.decide([opening()], "decided")
        assert answer.outcome == "opened"
        await gate.close()
        with servers[1].client() as replica:
            replica.execute_command("CLUSTER", "FAILOVER")
            wait_until(lambda: replica.role()[0] == b"master", 30, "the failover")
        for client in (worker, gate_user):
            assert await client.hget(keys.shard(answer.shard).state, "seq") == b"1"
            await client.aclose()
    finally:
        for server in servers:
            server.kill()
