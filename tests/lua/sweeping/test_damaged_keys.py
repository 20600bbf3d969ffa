"""Keys of the sweeper that are damaged: what no program writes is reported, and stops nothing else."""

import re
from typing import Any

import pytest
from redis.exceptions import ResponseError

from grabstream.lua.keys import LAYOUT, KeySpace, ShardKeys
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import StockTerms
from grabstream.models.outcomes import Outcome
from grabstream.streams.deciding import sweeper as sweeper_module
from grabstream.streams.deciding.payments import HoldQueries
from grabstream.streams.deciding.sweeper import Sweeper
from tests.support.shards import NOW, take_over

HOLD_MS = 60_000


class Swept:
    """A shard with a hold, its gate, and its sweeper."""

    def __init__(self, client: Any, gate: Any, shard: ShardKeys, shards: int) -> None:
        self.client, self.gate, self.shard = client, gate, shard
        self.written: list[tuple[int, int, str, int]] = []
        self.sweeper = Sweeper(client, shard, shards, 10**12, self._record)

    async def _record(self, shard: int, rows: Any) -> None:
        self.written += rows


@pytest.fixture
async def swept(client: Any, make_gate: Any, keys: KeySpace) -> Swept:
    await take_over(client, keys)
    gate = make_gate()
    terms = StockTerms(issuer="i", total=9, hold_ms=HOLD_MS, closes_at=NOW + 2 * HOLD_MS)
    answers = await gate.decide(
        [Open(id="open", offer="o", terms=terms), Grab(id="g", offer="o", user="ann")], "decided"
    )
    assert [answer.outcome for answer in answers] == ["opened", "held"]
    return Swept(client, gate, keys.shard(keys.shard_of_offer("o")), keys.shards)


DAMAGED = (b"no-slash", b"o/g/h", b"/g", b"o/", b"", b"\xff/\xfe", b"o/\x00", b"o/" + b"g" * 65)


@pytest.mark.parametrize("most", [1, 256])
async def test_members_that_no_program_writes_delay_no_hold_and_no_offer(
    swept: Swept, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(sweeper_module, "HOLDS_AT_ONCE_MAX", most)
    monkeypatch.setattr(sweeper_module, "OFFERS_AT_ONCE_MAX", most)
    client, shard, sweeper = swept.client, swept.shard, swept.sweeper
    for key in (shard.holds, shard.due, shard.past):
        scores = ("-inf", 0, 1, 2, 3, 4, 5, 6)
        await client.zadd(key, dict(zip(DAMAGED, scores, strict=True)))
    at_ms = NOW + 10 * HOLD_MS
    for _ in range(2 * len(DAMAGED)):
        await sweeper.read_due()
        await sweeper.sweep(at_ms)
        await sweeper.clean(at_ms)
    assert await client.zscore(shard.holds, "o/g") is None
    assert await client.hget(shard.offer("o"), "state") == b"closed"
    for key in (shard.holds, shard.due, shard.past):
        assert f"the sorted set {key} has members that no program writes" in caplog.text


async def test_the_first_score_may_be_endless(swept: Swept) -> None:
    for score, is_due in (("-inf", True), ("+inf", False)):
        await swept.client.delete(swept.shard.holds)
        await swept.client.zadd(swept.shard.holds, {"o/g": score})
        due = await swept.sweeper.read_due()
        assert (due.holds_ms is not None and due.holds_ms <= due.now_ms) == is_due
        assert due.seconds(5.0) >= 0


async def test_progress_of_cleaning_that_no_program_writes_ends(swept: Swept) -> None:
    """A pass that made no progress would be repeated a hundred times a second."""
    fields = {b"o": "0:0:0", b"\xff/answers": "0:0:0", b"o/other": "0:0:0", b"o/answers/x": "0:0:0"}
    progress = {b"o/answers": "x", b"o/payments": "0:" + "9" * 40 + ":0", b"other/answers": ""}
    await swept.client.hset(swept.shard.cleaning, mapping=fields | progress)
    assert await swept.sweeper.clean(NOW, steps_max=20) < 20
    assert not await swept.client.exists(swept.shard.cleaning)


async def test_the_records_of_an_empty_campaign_are_cleaned(
    swept: Swept, caplog: pytest.LogCaptureFixture
) -> None:
    await swept.client.hset(swept.shard.cleaning, mapping={b"/answers": "0:0:0", b"/payments": "0:0:0"})
    assert await swept.sweeper.clean(NOW, steps_max=20) < 20
    assert (await swept.client.exists(swept.shard.cleaning), caplog.text) == (0, "")


async def test_counts_that_no_program_writes_delay_no_others(
    swept: Swept, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = {
        b"x": 1, b"1:2": 1, b"1:2:": 1, b"1:2:\xff": 1, b"1:2:a\x00b": 1, b"-1:2:o": 1, b"1:2:two words": 1,
        b"1:99999:o": 1, b"9" * 20 + b":2:o": 1, b"1:2:p": "x", b"1:2:q": "9" * 30, b"1:2:r": "-1",
    }  # fmt: skip
    sold_out = f"1:{Outcome.sold_out.value}"
    await swept.client.hset(swept.shard.demand, mapping=damaged | {f"{sold_out}:o": 3, f"{sold_out}:*": 4})
    await swept.sweeper.flush_demand()
    assert sorted(swept.written) == [(1, Outcome.sold_out, "*", 4), (1, Outcome.sold_out, "o", 3)]
    assert not await swept.client.exists(swept.shard.demand)
    assert f"the hash {swept.shard.demand} has fields that no program writes" in caplog.text


async def test_damaged_holds_and_rules_are_not_asked_for(swept: Swept) -> None:
    asked: list[str] = []

    async def ask(holds: Any) -> list[Any]:
        asked.extend(hold.grab for hold in holds)
        return []

    await swept.client.hset(swept.shard.offer("o"), "rules", b"\xc1")
    soon = {member: 2 * 10**12 + number for number, member in enumerate((*DAMAGED, b"o/g"))}
    await swept.client.zadd(swept.shard.holds, soon | {b"o/h": "+inf"})
    queries = HoldQueries(swept.client, swept.shard, swept.gate, ask, 10**12)
    for _ in DAMAGED:
        assert await queries.next_ms(1) is None or await queries.ask_all() >= 0
    assert asked == []


async def test_a_shard_with_a_key_of_another_type_is_to_be_rebuilt(swept: Swept) -> None:
    """Its scripts would fail, as long as no one deletes the key."""
    client, shard = swept.client, swept.shard
    before = await client.hgetall(shard.state)
    for key in shard.deciding()[1:]:
        await client.copy(key, f"{shard.tag}:aside")
        await client.delete(key)
        await client.set(key, "of another program")
        with pytest.raises(ResponseError, match=f"DAMAGED the key {re.escape(key)} has the type string"):
            await swept.sweeper.read_due()
        state = await client.hgetall(shard.state)
        assert (state[b"partial"], state.get(b"server_epoch"), state.get(b"history")) == (b"1", None, None)
        assert key.encode() in state[b"fault"]
        [answer] = await swept.gate.decide([Grab(id="x", offer="o", user="bob")], "decided")
        assert (answer.outcome, key in (answer.message or "")) == ("fenced", True)
        await client.delete(key, shard.state)
        await client.hset(shard.state, mapping=before)
        if await client.exists(f"{shard.tag}:aside"):
            await client.rename(f"{shard.tag}:aside", key)
    assert (await swept.sweeper.read_due()).holds_ms is not None


async def test_a_shard_of_a_newer_program_is_left_unchanged(swept: Swept) -> None:
    client, shard = swept.client, swept.shard
    await client.hset(shard.state, "layout", LAYOUT + 1)
    await client.set(shard.cleaning, "of a newer program")
    before = await client.hgetall(shard.state)
    with pytest.raises(ResponseError, match="DAMAGED"):
        await swept.sweeper.read_due()
    assert await client.hgetall(shard.state) == before


async def test_a_shard_hash_of_another_type_is_deleted(swept: Swept) -> None:
    """Then the next takeover finds a shard without data, and rebuilds it."""
    await swept.client.delete(swept.shard.state)
    await swept.client.set(swept.shard.state, "of another program")
    with pytest.raises(ResponseError, match="DAMAGED"):
        await swept.sweeper.read_due()
    assert not await swept.client.exists(swept.shard.state)
