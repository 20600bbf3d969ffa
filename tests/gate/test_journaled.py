"""Journaled answers: each waits until Kafka has its event in its history, up to a time limit."""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

import pytest

from grabstream.gate import decided
from grabstream.gate.calls import GateLimits
from grabstream.gate.decided import LostDecision
from grabstream.gate.gate import Gate
from grabstream.gate.journaled import HistoryChanged, Journaled
from grabstream.lua.keys import KeySpace
from grabstream.lua.running import run_script
from grabstream.models.commands import Confirm, Grab, Open, Release
from grabstream.models.offers import StockTerms
from grabstream.models.outcomes import OutcomeUnknown
from tests.conftest import until
from tests.support.shards import SEALER, announce, grabs, opening


async def test_a_journaled_answer_waits_for_its_own_event_only(
    make_gate: Any, client: Any, keys: KeySpace
) -> None:
    gate = make_gate(timeout_ms=20_000)
    gate.start()
    number = keys.shard_of_offer("e")
    await gate.decide([opening(), *grabs(3)], "decided")
    first, second = (asyncio.create_task(gate.decide([grab])) for grab in grabs(2))
    refused = await gate.decide([Grab(id="no", offer="none", user="u")])
    assert refused[0].outcome == "no_such_offer"  # no event to wait for
    # The third wait is the gate's: it follows the events that it answered as decided.
    await until(lambda: len(gate.journaled._waiting.get(number, ())) == 3)
    await announce(client, keys.shard(number), 2)
    assert (await first)[0].seq == 2
    assert not second.done()
    # This answer depends on the event of the second grab.
    already_taken = asyncio.create_task(gate.decide([Grab(id="later", offer="e", user="u1")]))
    await until(lambda: len(gate.journaled._waiting.get(number, ())) == 3)
    assert not second.done()
    await announce(client, keys.shard(number), 3)
    assert (await second)[0].seq == 3
    assert (await already_taken)[0].outcome == "already_taken"
    # An answer whose event is journaled already does not wait.
    assert (await gate.decide(grabs(2)))[1].repeated
    await gate.close()


async def test_a_list_waits_until_its_last_event_is_journaled(
    make_gate: Any, client: Any, keys: KeySpace
) -> None:
    gate = make_gate(timeout_ms=20_000)
    gate.start()
    number = keys.shard_of_offer("e")
    deciding = asyncio.create_task(gate.decide([opening(), *grabs(3)]))
    await until(lambda: client.hexists(keys.shard(number).users("e"), grabs(3)[2].user))
    await announce(client, keys.shard(number), 3)
    await gate.journaled.refresh(number)
    await asyncio.sleep(0)
    assert not deciding.done()
    await announce(client, keys.shard(number), 4)
    assert [answer.seq for answer in await deciding] == [1, 2, 3, 4]
    await gate.close()


async def test_a_journaled_answer_waits_for_its_own_history(private_redis: Any) -> None:
    """An announcement of another history ends no wait: the gate sends the command again, and waits for the
    event of the new answer.
    """
    client, keys = private_redis
    shard = keys.shard(0)
    gate = Gate(client, keys, SEALER, GateLimits(timeout_ms=20_000))
    gate.start()
    await gate.decide([opening("j")], "decided")
    waiting = asyncio.create_task(gate.decide(grabs(1, "j")))
    await until(lambda: client.hexists(shard.users("j"), grabs(1)[0].user))
    assert not waiting.done()
    # A recovery starts another history with the same state.
    term, server_epoch, *_ = await run_script(client, "raise_term", [shard.state], [0, "second"])
    seq = await client.hget(shard.state, "seq")
    await run_script(client, "reconcile", [shard.state], [term, "second", server_epoch, seq, 1])
    await announce(client, shard, 1)
    await asyncio.wait({waiting}, timeout=0.5)
    assert not waiting.done()
    await announce(client, shard, seq)
    [answer] = await waiting
    assert (answer.outcome, answer.repeated) == ("granted", True)
    await gate.close()


@pytest.mark.parametrize("field", ["history", "journaled_seq"])
async def test_damaged_numbers_of_a_shard_end_no_wait_and_no_listener(private_redis: Any, field: str) -> None:
    """They are announced and polled; a waiter gets its answer when the shard is sound again."""
    client, keys = private_redis
    shard = keys.shard(0)
    gate = Gate(client, keys, SEALER, GateLimits(timeout_ms=20_000))
    gate.start()
    await gate.decide([opening("j")], "decided")
    waiting = asyncio.create_task(gate.decide(grabs(1, "j")))
    await until(lambda: client.hexists(shard.users("j"), grabs(1)[0].user))
    sound = await client.hget(shard.state, "history")
    await client.hset(shard.state, field, "x")
    for message in (b"x 2", b"2 x", b"", b"x", b"9" * 5_000 + b" 1"):
        await client.publish(shard.channel, message)
    await gate.journaled.refresh(0)
    await until(lambda: 0 in gate.journaled._polling)
    await asyncio.wait({waiting}, timeout=0.3)
    assert not waiting.done()
    listening = gate.journaled._listening
    assert listening is not None
    assert not listening.done()
    assert 0 in gate.journaled._polling
    await client.hset(shard.state, "history", sound)
    await announce(client, keys.shard(0), 2)
    assert [answer.outcome for answer in await waiting] == ["granted"]
    await gate.close()


async def test_a_seq_journaled_in_one_history_ends_no_wait_of_another(private_redis: Any) -> None:
    """The known seq was journaled in the present history; an answer of the previous history is not in it."""
    client, keys = private_redis
    gate = Gate(client, keys, SEALER)
    await gate.decide([opening("j")], "decided")
    await announce(client, keys.shard(0), 1)
    history = int(await client.hget(keys.shard(0).state, "history"))
    journaled = Journaled(client, keys)
    journaled.start()
    try:
        await journaled.refresh(0)
        async with asyncio.timeout(90):
            await journaled.wait(0, history, 1)
            with pytest.raises(HistoryChanged):
                await journaled.wait(0, history - 1, 1)
    finally:
        # Closed even if the test fails: a listener that is cancelled only once, at the end of the loop, may
        # never end.
        await journaled.close()
        await gate.close()


class Lost(list[LostDecision]):
    """The lost decisions that a gate reports."""

    async def report(self, found: Sequence[LostDecision]) -> None:
        self.extend(found)


async def lose(client: Any, shard: Any) -> None:
    """Takes back all decisions about the offer `e`, and makes a new history, as a recovery does."""
    await client.delete(shard.users("e"), shard.answers("e"))
    await client.hincrby(shard.state, "history", 1)


async def recovered(client: Any, shard: Any, gate: Gate) -> None:
    """Makes a new history, and waits until the gate has found there what it keeps."""
    history = await client.hincrby(shard.state, "history", 1)
    await until(lambda: {kept.history for kept in gate._decided._kept[0]} == {history})


async def test_decided_answers_that_only_a_second_recovery_loses_are_reported(private_redis: Any) -> None:
    """The first recovery keeps a decision that Redis has and the journal has not; the second one loses it."""
    client, keys = private_redis
    shard, lost = keys.shard(0), Lost()
    gate = Gate(client, keys, SEALER, report_lost=lost.report)
    gate.start()
    await gate.decide([opening(), *grabs(2)], "decided")
    await client.hdel(shard.users("e"), grabs(1)[0].user)
    await recovered(client, shard, gate)
    assert [one.command.id for one in lost] == [grabs(1)[0].id]
    await lose(client, shard)
    await until(lambda: len(lost) == 3)
    assert [one.command.id for one in lost[1:]] == [opening().id, grabs(2)[1].id]
    assert gate._decided.kept == 0
    await gate.close()


async def test_a_lost_answer_is_reported_although_it_was_a_repeat(private_redis: Any) -> None:
    """The caller's first answer is a repeat, or names the grab of another command, where the connection broke
    after the decision. Several answers to one command are one report.
    """
    client, keys = private_redis
    shard, lost = keys.shard(0), Lost()
    before, gate = Gate(client, keys, SEALER), Gate(client, keys, SEALER, report_lost=lost.report)
    before.start()
    await before.decide([opening(), *grabs(3)], "decided")
    await before.close()
    gate.start()
    for _ in range(2):
        assert (await gate.decide(grabs(1), "decided"))[0].repeated
    later = Grab(id="later", offer="e", user=grabs(3)[2].user)
    assert (await gate.decide([later], "decided"))[0].outcome == "already_taken"
    assert gate._decided.kept == 3
    # A recovery that loses nothing.
    await recovered(client, shard, gate)
    assert (lost, gate._decided.kept) == ([], 3)
    await lose(client, shard)
    await until(lambda: gate.measures.lost_answers["written"] == 2)
    assert [(one.command.id, one.answer.outcome) for one in lost] == [
        (grabs(1)[0].id, "granted"),
        ("later", "already_taken"),
    ]
    assert gate._decided.kept == 0
    await gate.close()


async def test_an_answer_with_a_refund_that_is_lost_is_reported(private_redis: Any) -> None:
    """It is a refusal, but it has promised that the money goes back."""
    client, keys = private_redis
    shard, lost = keys.shard(0), Lost()
    gate = Gate(client, keys, SEALER, report_lost=lost.report)
    gate.start()
    terms = StockTerms(issuer="shop", total=2, price=5, currency="CNY", hold_ms=60_000)
    await gate.decide([Open(id="o", offer="e", terms=terms), *grabs(1)], "decided")
    await gate.decide([Release(id="r", offer="e", grab=grabs(1)[0].id)], "decided")
    paid = Confirm(id="c", offer="e", grab=grabs(1)[0].id, payment="p", paid=5, currency="CNY")
    [answer] = await gate.decide([paid], "decided")
    assert (answer.positive, answer.seq) == (False, 4)
    await recovered(client, shard, gate)
    assert lost == []
    await lose(client, shard)
    await until(lambda: "c" in {one.command.id for one in lost})
    await gate.close()


async def test_a_lost_answer_is_kept_until_it_is_reported(
    private_redis: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PostgreSQL may be away at the moment. What does not fit next to waiting entries is logged and
    counted.
    """
    client, keys = private_redis
    monkeypatch.setattr(decided, "REPORT_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(decided, "WAITING_REPORTS_MAX", 3)
    lost, tries = Lost(), list[int]()
    is_back = asyncio.Event()

    async def report(found: Sequence[LostDecision]) -> None:
        tries.append(len(found))
        if not is_back.is_set():
            raise OSError("PostgreSQL is away")
        await lost.report(found)

    gate = Gate(client, keys, SEALER, report_lost=report)
    gate.start()
    await gate.decide([opening(), *grabs(4)], "decided")
    await lose(client, keys.shard(0))
    await until(lambda: len(tries) > 2 and tries[-1] == 3)
    counted = gate.measures.lost_answers
    assert counted == {"found": 5, "written": 0, "dropped": 2, "not_followed": 0}
    is_back.set()
    await until(lambda: counted["written"] == 3)
    assert [one.command.id for one in lost] == [opening().id, *(grab.id for grab in grabs(2))]
    await gate.close()
    assert sum("recovery lost the decision" in record.getMessage() for record in caplog.records) == 5


@pytest.mark.parametrize("is_back", [True, False])
async def test_what_waits_is_reported_when_the_gate_ends(
    private_redis: Any, is_back: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, keys = private_redis
    monkeypatch.setattr(decided, "REPORT_PAUSE_SECONDS", 3_600.0)
    lost, tries = Lost(), 0

    async def report(found: Sequence[LostDecision]) -> None:
        nonlocal tries
        tries += 1
        if tries == 1 or not is_back:
            raise OSError("PostgreSQL is away")
        await lost.report(found)

    gate = Gate(client, keys, SEALER, report_lost=report)
    gate.start()
    await gate.decide([opening(), *grabs(1)], "decided")
    await lose(client, keys.shard(0))
    await until(lambda: tries == 1 and gate.measures.lost_answers["found"] == 2)
    await gate.close()
    assert len(lost) == (2 if is_back else 0)
    assert gate.measures.lost_answers["written" if is_back else "dropped"] == 2
    assert ("2 lost answers are in the log only" in caplog.text) is not is_back


async def test_answers_beyond_the_bound_are_counted_as_not_followed(
    private_redis: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, keys = private_redis
    monkeypatch.setattr(decided, "KEPT_ANSWERS_MAX", 3)
    gate = Gate(client, keys, SEALER)
    gate.start()
    await gate.decide([opening()], "decided")
    await gate.decide(grabs(2), "decided")
    for _ in range(2):
        await gate.decide(grabs(2), "decided")
    assert (gate._decided.kept, gate.measures.lost_answers["not_followed"]) == (3, 4)
    assert sum("would not be noticed" in record.getMessage() for record in caplog.records) == 1
    await announce(client, keys.shard(0), 3)
    await until(lambda: gate._decided.kept == 0)
    await gate.close()


async def test_an_event_not_journaled_within_the_time_limit_is_unknown(private_redis: Any) -> None:
    client, keys = private_redis
    gate = Gate(client, keys, SEALER, GateLimits(timeout_ms=1_500))
    gate.start()
    with pytest.raises(OutcomeUnknown, match="not journaled within the timeout"):
        await gate.decide([opening(secrets.token_hex(4))])
    await gate.close()


async def test_a_command_of_a_lost_history_is_unknown_if_then_fenced(private_redis: Any) -> None:
    """The command was decided once, and it is not known yet whether that survived; `fenced` would say that it
    did not.
    """
    client, keys = private_redis
    shard = keys.shard(0)
    gate = Gate(client, keys, SEALER, GateLimits(timeout_ms=1_500))
    gate.start()
    await gate.decide([opening("j")], "decided")
    waiting = asyncio.create_task(gate.decide(grabs(1, "j")))
    await until(lambda: client.hexists(shard.users("j"), grabs(1)[0].user))
    await client.hset(shard.state, "history", 99)
    await client.hdel(shard.state, "server_epoch")
    with pytest.raises(OutcomeUnknown, match="under their ids"):
        await waiting
    await gate.close()
