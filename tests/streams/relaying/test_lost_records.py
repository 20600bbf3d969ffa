"""A journal that loses records while a shard is relayed: as when its topic is deleted and created again, or
when a broker that was behind becomes the leader.
"""

import asyncio
from typing import Any

import pytest
from aiokafka.admin import NewTopic
from aiokafka.errors import RecordTooLargeError

from grabstream.connections.opening import key_space, open_gate, open_redis, sealer
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import CouponTerms
from grabstream.models.outcomes import OutcomeUnknown
from grabstream.settings import Settings
from grabstream.streams.journal import open_reader
from grabstream.streams.relaying import relay
from grabstream.streams.relaying.relay import RETRY_SECONDS_MAX, ShardRelay
from grabstream.streams.topics import Topics, make_topics
from tests.conftest import until
from tests.support.losses import delete_topics

OFFER = "sale"


def relay_of(settings: Settings, redis: Any) -> ShardRelay:
    """The relay of the shard of the offer."""
    keys = key_space(settings)
    return ShardRelay(
        redis, keys.shard(keys.shard_of_offer(OFFER)), settings.shards, settings.kafka,
        Topics(settings.prefix).journal, sealer(settings),
    )  # fmt: skip


def by(user: str) -> Grab:
    return Grab(id=f"g-{user}", offer=OFFER, user=user)


@pytest.mark.long
@pytest.mark.parametrize("by_anchor", [False, True], ids=["block", "anchor"])
async def test_a_relay_whose_record_gets_an_offset_again_fences_its_shard(
    system: Settings, monkeypatch: pytest.MonkeyPatch, by_anchor: bool
) -> None:
    """Events before that record are in no journal. If it counted, the checkpoint would hide the loss from
    every later takeover, and callers would get answers whose events no reader finds.
    """

    async def watch(tail: Any) -> None:
        # It would notice, too, but later than a busy shard sends its next block.
        await asyncio.Event().wait()

    redis, keys = open_redis(system), key_space(system)
    shard = keys.shard(keys.shard_of_offer(OFFER))
    journal = Topics(system.prefix).journal
    monkeypatch.setattr(relay._Tail, "watch", watch)
    of_shard = relay_of(system, redis)
    relaying = asyncio.create_task(of_shard.run())
    try:
        async with open_gate(system) as gate:
            terms = CouponTerms(issuer="shop", total=10)
            asked: Any = {"patience_ms": 60_000, "timeout_ms": 60_000}
            assert (await gate.decide([Open(id="o", offer=OFFER, terms=terms)], **asked))[0].seq == 1
            for user in ("ann", "bob", "cat"):
                [answer] = await gate.decide([by(user)], **asked)
                assert answer.outcome == "granted"
            before = await redis.hmget(shard.state, "journaled_seq", "journaled_offset", "journaled_head")
            assert before[0] == b"4"
            await delete_topics(system, journal)
            await make_topics(system.kafka, [NewTopic(journal, system.shards, 1)])
            if by_anchor:
                async with of_shard._producer() as producer:
                    cursor = await of_shard._shard.checkpoint(await owner_of(shard, redis))
                    with pytest.raises(relay.SteppedDown, match="has lost some"):
                        await of_shard._anchor(producer, cursor, None)  # type: ignore[arg-type]
            with pytest.raises(OutcomeUnknown):
                await gate.decide([by("dan")], timeout_ms=2_000)
            await until(lambda: of_shard.state.startswith("fenced"), 60, "the fence")
            assert "it has lost events" in of_shard.state
            assert "rebuild journal --from audit" in of_shard.state
            assert (
                await redis.hmget(shard.state, "journaled_seq", "journaled_offset", "journaled_head")
                == before
            ), "the checkpoint shows what was acknowledged"
            [fenced] = await gate.decide([by("eve")])
            assert (fenced.outcome, "lost events" in str(fenced.message)) == ("fenced", True)
    finally:
        relaying.cancel()
        await asyncio.wait({relaying})
        await redis.aclose()


async def owner_of(shard: Any, redis: Any) -> relay.Ownership:
    """The ownership of the shard as Redis has it."""
    term, owner, epoch = await redis.hmget(shard.state, "term", "owner", "server_epoch")
    return relay.Ownership(int(term), owner.decode(), epoch.decode())


@pytest.mark.long
async def test_a_relay_that_cannot_send_takes_its_shard_over_ever_more_slowly(
    system: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takeover leaves a marker in the journal, which is kept permanently."""

    async def refuse(*_: Any) -> Any:
        raise RecordTooLargeError

    redis, keys = open_redis(system), key_space(system)
    of_shard = relay_of(system, redis)
    relaying = asyncio.create_task(of_shard.run())
    try:
        async with (
            open_gate(system) as gate,
            open_reader(system.kafka, Topics(system.prefix).journal) as journal,
        ):
            terms = CouponTerms(issuer="shop", total=10)
            asked: Any = {"patience_ms": 60_000, "timeout_ms": 60_000}
            assert (await gate.decide([Open(id="o", offer=OFFER, terms=terms)], **asked))[0].seq == 1
            append = of_shard._append
            monkeypatch.setattr(of_shard, "_append", refuse)
            await gate.decide([by("ann")], "decided")
            await until(lambda: of_shard._pause_seconds == RETRY_SECONDS_MAX, 60, "the longest pause")
            assert of_shard._trouble.is_present
            assert await journal.end(keys.shard_of_offer(OFFER)) > 2
            monkeypatch.setattr(of_shard, "_append", append)
            [answer] = await gate.decide([by("ann")], **asked)
            assert (answer.outcome, answer.repeated) == ("granted", True)
            assert not of_shard._trouble.is_present
    finally:
        relaying.cancel()
        await asyncio.wait({relaying})
        await redis.aclose()
