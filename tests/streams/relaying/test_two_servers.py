"""A takeover while some connections of its client still lead to another server, as after a failover behind
one address: what it reads of a shard is what the server of its scripts has, whatever the other one says.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from grabstream.connections.opening import key_space, open_gate, open_redis, sealer
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import EnvelopeTerms
from grabstream.settings import Settings
from grabstream.streams.relaying.relay import ShardRelay
from grabstream.streams.topics import Topics
from tests.conftest import until
from tests.streams.state import assert_state_is_the_journal_s

pytestmark = pytest.mark.long

OTHER_DATABASE = 1


class ClientOfTwo:
    """A client whose scripts reach one server, and whose other commands reach another one."""

    def __init__(self, scripts: Any, others: Any) -> None:
        self._scripts = scripts
        self._others = others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)

    async def execute_command(self, *words: Any, **options: Any) -> Any:
        """Runs a script here, and any other command there."""
        is_script = words[0] in ("FCALL", "EVALSHA", "EVAL")
        client = self._scripts if is_script else self._others
        return await client.execute_command(*words, **options)


def beside(settings: Settings) -> Settings:
    """The same system on the other server: here, another database, so both have one run id, and only what is
    read distinguishes them.
    """
    return settings.model_copy(update={"redis_url": settings.redis_url.rsplit("/", 1)[0] + "/1"})


def envelope(offer: str) -> Open:
    terms = EnvelopeTerms(issuer="alice", funding="pay", asset="CNY", total=900, parts=100)
    return Open(id=f"open-{offer}", offer=offer, terms=terms)


def beside_in_shard(settings: Settings, offer: str) -> str:
    """The id of another offer of the same shard."""
    shard_of_offer = key_space(settings).shard_of_offer
    return next(
        other
        for other in (f"only-here-{number}" for number in range(10_000))
        if shard_of_offer(other) == shard_of_offer(offer)
    )


def by(*users: str) -> list[Grab]:
    return [Grab(id=f"e-{user}", offer="e", user=user) for user in users]


@asynccontextmanager
async def relays(settings: Settings, redis: Any) -> AsyncIterator[list[ShardRelay]]:
    """Relays of all shards with a client, until the end."""
    running = [
        ShardRelay(
            redis, keys, settings.shards, settings.kafka, Topics(settings.prefix).journal, sealer(settings)
        )
        for keys in map(key_space(settings).shard, range(settings.shards))
    ]
    tasks = [asyncio.create_task(relay.run()) for relay in running]
    try:
        yield running
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_takeover_reads_the_server_of_its_scripts(
    private: Settings, worker: Callable[..., Any]
) -> None:
    """Two servers continue one history. The journal has what one of them decided; the other one is taken over
    with a client that also reaches the first. Its decisions do not follow from the journal, although they
    have the next numbers.
    """
    other = beside(private)
    here, there = open_redis(private), open_redis(other)
    asked = {"patience_ms": 20_000}
    try:
        deciding = worker(private, "decide,relay,sweep")
        async with open_gate(private) as gate:
            assert (await gate.decide([envelope("e")], **asked))[0].outcome == "opened"
            assert {answer.outcome for answer in await gate.decide(by("ann", "bob"), **asked)} == {"granted"}
        assert deciding.stop() == 0
        async for key in here.scan_iter(match="*", count=1_000):
            assert await here.copy(key, key, destination_db=OTHER_DATABASE)

        deciding = worker(other, "decide,relay,sweep")
        async with open_gate(other) as gate:
            assert {answer.outcome for answer in await gate.decide(by("eve", "joe"), **asked)} == {"granted"}
        assert deciding.stop() == 0

        async with open_gate(private) as gate:
            # One by one: no two in one run.
            for command in (*by("kim", "lea", "max"), envelope(beside_in_shard(private, "e"))):
                [lost] = await gate.decide([command], "decided")
                assert lost.outcome in ("granted", "opened")
            async with relays(private, ClientOfTwo(here, there)) as running:
                await until(
                    lambda: all(relay.state.startswith("relaying") for relay in running), 30,
                    "the takeover of all shards",
                )  # fmt: skip
                [again] = await gate.decide(by("eve"), **asked)
                assert (again.outcome, again.repeated) == ("granted", True)
                [kim] = await gate.decide(by("kim"), **asked)
                assert (kim.outcome, kim.repeated, kim.place) == ("granted", False, 5)
        await assert_state_is_the_journal_s(private)
    finally:
        await here.aclose()
        await there.aclose()
