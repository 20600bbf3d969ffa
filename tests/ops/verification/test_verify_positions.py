"""What `verify` compares besides values: whether a key expires, whether the checkpoint of Redis has the right
offset, and whether another verifier compares the shard.
"""

import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from grabstream.crypto.sealing import Sealer, new_seal_key
from grabstream.lua.keys import LAYOUT, KeySpace
from grabstream.models.journal import Accepted, Cursor
from grabstream.ops.verification.checks import RedisShard
from grabstream.ops.verification.journal_positions import PositionChecks
from grabstream.streams.relaying.recovery import literal
from grabstream.streams.relaying.shadow import VERIFIER_SHADOW, NoRoom, ShadowShard, TimeShare, open_shadow


@pytest.fixture
async def prefix(redis: Any) -> AsyncIterator[str]:
    name = f"positions-{secrets.token_hex(4)}"
    yield name
    if names := [key async for key in redis.scan_iter(match=f"{literal(name)}*", count=1_000)]:
        await redis.unlink(*names)


@pytest.mark.long
@pytest.mark.parametrize("fields", [3, 700], ids=["small", "large"])
async def test_a_key_that_expires_is_reported(redis: Any, prefix: str, fields: int) -> None:
    live, made = KeySpace(prefix, 1).shard(0), KeySpace(f"{prefix}/made", 1).shard(0)
    await redis.hset(live.state, mapping={"seq": 0, "server_epoch": "x", "layout": LAYOUT})
    for keys in (live, made):
        for offer in ("a", "b"):
            await redis.hset(keys.offer(offer), mapping={str(n): n for n in range(fields)})
    shadow = ShadowShard(redis, live, made, None, None, None, TimeShare(1.0))  # type: ignore[arg-type]
    assert (await shadow.compare()).differences == []
    await redis.expire(live.offer("b"), 3_600)
    [difference] = (await shadow.compare()).differences
    assert difference.startswith("shard 0: offer:b: Redis will forget it in 3")
    await redis.persist(live.offer("b"))
    assert (await shadow.compare()).differences == []


async def test_verify_and_the_verifier_may_compare_a_shard_at_once(redis: Any, prefix: str) -> None:
    async def room(key: str) -> str:
        return ""

    def open_one(**place: Any) -> Any:
        sealer = Sealer.from_text(new_seal_key())
        return open_shadow(
            redis, KeySpace(prefix, 1), 0, sealer, None, None, pace=TimeShare(1.0), room=room, **place
        )  # type: ignore[arg-type]

    async with open_one(prefix=VERIFIER_SHADOW), open_one():
        with pytest.raises(NoRoom):
            async with open_one():
                pass


OWNER, HEAD = "0123456789abcdef", b"h" * 32
JOURNAL = [
    (0, Cursor(0, b"g", 1, 1, OWNER), []),
    (1, Cursor(2, HEAD, 2, 1, OWNER), [Accepted(1, b"", b"f"), Accepted(2, b"", HEAD)]),
    (2, Cursor(2, HEAD, 3, 2, "another"), []),
]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, ""),
        ({"journaled_offset": 3, "journaled_term": 2, "journaled_owner": "another"}, ""),
        ({"journaled_offset": 1}, "seq is 2, the journal has 0"),
        ({"journaled_offset": 9}, "no record of the journal ends at offset 9"),
        ({"journaled_term": 7}, "term is 7, the journal has 1"),
        ({"journaled_owner": "nobody"}, "owner is nobody, the journal has 0123456789abcdef"),
        ({"journaled_term": 7, "decides": False}, ""),
        ({"journaled_head": b"x"}, "the hash at seq 2 is 78… in Redis, 6868686868686868… in the journal"),
    ],
)
def test_a_checkpoint_that_differs_from_the_journal_is_reported(
    changed: dict[str, Any], problem: str
) -> None:
    in_redis = RedisShard(2, 2, HEAD, 2, 1, OWNER, True)._replace(**changed)
    positions = PositionChecks(0, {}, in_redis)
    for offset, cursor, events in JOURNAL:
        positions.after(offset, cursor, events)
    reported = positions.checkpoint_problem(JOURNAL[-1][1])
    assert problem in reported if problem else reported == ""
