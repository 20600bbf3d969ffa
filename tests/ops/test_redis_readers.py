"""The Redis user `reader` of `grabstream grants`: what it reads reveals no future parts and codes."""

from itertools import product
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import NoPermissionError

from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.commands import Open
from grabstream.models.offers import StockTerms
from grabstream.ops.grants import redis_commands
from tests.support.shards import SEALER, grabs, opening, private_server, take_over

__all__ = ["private_server"]
#: Offers whose ids look like the names of other keys.
STRANGE = ("x:campaign:y", "x:shard", "system")


async def test_a_reader_reads_no_seed_and_no_parts(private_server: Any) -> None:
    port = private_server[1]
    admin, keys = redis.asyncio.Redis(port=port), KeySpace("grab", 2)
    for words in redis_commands("grab"):
        await admin.execute_command(*words, ">secret")
    await take_over(admin, keys)
    gate = Gate(admin, keys, SEALER)
    strange = [Open(id=one, offer=one, terms=StockTerms(issuer="i", total=5)) for one in STRANGE]
    answers = await gate.decide([opening(), *grabs(2), *strange], "decided")
    assert [answer.outcome for answer in answers] == ["opened", "granted", "granted", *3 * ["opened"]]
    await gate.close()
    reader = redis.asyncio.Redis(port=port, username="grab_reader", password="secret")
    offer = answers[0].offer or ""
    shard = keys.shard(keys.shard_of_offer(offer))
    assert await admin.hget(shard.offer(offer), "seed")
    assert await admin.strlen(shard.parts(offer))
    refused = [shard.offer(offer), shard.parts(offer), shard.staged("t")]
    refused += [keys.shard(keys.shard_of_offer(one)).offer(one) for one in STRANGE]
    refused += ["grab.eu:{grab.eu-s0}:shard", "grab2:system"]
    for key in refused:
        with pytest.raises(NoPermissionError):
            await reader.execute_command("TYPE", key)
    gateway = redis.asyncio.Redis(port=port, username="grab_gate", password="secret")
    # These name keys, or channels, of all prefixes.
    naming: tuple[tuple[str, ...], ...] = (
        ("SCAN", "0"), ("RANDOMKEY",), ("CLIENT", "TRACKING", "ON", "BCAST"),
        ("CLUSTER", "GETKEYSINSLOT", "0", "9"), ("PUBSUB", "CHANNELS"), ("PUBSUB", "SHARDCHANNELS"),
    )  # fmt: skip
    for client, words in product((reader, gateway), naming):
        with pytest.raises(NoPermissionError):
            await client.execute_command(*words)
    await gateway.aclose()
    assert int(await reader.hget(shard.state, "seq")) >= 3
    assert await reader.hlen(shard.users(offer)) == 2
    for key in (keys.system, shard.outbox, shard.due, shard.lease, *shard.campaign_keys(offer)):
        await reader.execute_command("TYPE", key)
    for client in (reader, admin):
        await client.aclose()
