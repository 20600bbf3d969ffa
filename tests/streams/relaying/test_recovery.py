"""Recovery of Redis: it is emptied, loses its last second, or is replaced by an old copy, under traffic, and
the relays make it equal to the journal again.

After that all checks pass, every `journaled` answer is in the read models, and each key in Redis equals that
of a fold of the journal.
"""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from grabstream.connections.opening import (
    gate_limits,
    key_space,
    open_gate,
    open_redis,
    sealer,
    snapshots,
)
from grabstream.gate.gate import Gate
from grabstream.lua.keys import LAYOUT
from grabstream.models.commands import Close, Confirm, Grab, Open, Release
from grabstream.models.journal import Accepted, Cursor, parse_block
from grabstream.models.offers import EnvelopeTerms, Limit, StockTerms
from grabstream.projections.versions import use_read_model
from grabstream.settings import Settings, child_environment
from grabstream.streams.journal import open_reader
from grabstream.streams.relaying.leases import request_lease
from grabstream.streams.relaying.ownership import OwnedShard
from grabstream.streams.relaying.recovery import Recovery
from grabstream.streams.relaying.relay import ShardRelay
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.run import open_books
from grabstream.workshop.services import LocalServices
from tests.conftest import some_by_tier, until
from tests.copies import copy_package
from tests.lua.interrupting_client import InterruptingClient
from tests.streams.state import assert_state_is_the_journal_s
from tests.streams.traffic import traffic
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import rows
from tests.support.redis_keys import delete_keys

NEXT_LAYOUT = LAYOUT + 1


def aof(services: LocalServices) -> Path:
    return services.redis.directory / "appendonlydir"


def log_of(services: LocalServices) -> Path:
    """The file to which Redis appends."""
    return sorted(aof(services).glob("*.incr.aof"))[-1]


def cut_the_tail(services: LocalServices, size: int) -> None:
    """Truncates the log as a power cut does: to `size` bytes, or by one byte if it is shorter. Its last
    command may be incomplete.
    """
    services.redis.kill()
    log = log_of(services)
    with log.open("r+b") as file:
        file.truncate(min(size, log.stat().st_size - 1))
    services.redis.start()


def put_back(services: LocalServices, copy: Path) -> None:
    """Restarts Redis from a copy of its log."""
    services.redis.kill()
    shutil.rmtree(aof(services))
    shutil.copytree(copy, aof(services))
    services.redis.start()


async def state_numbers(settings: Settings, field: str) -> list[int]:
    """A number in the state of every shard; 0 where it is missing."""
    redis = open_redis(settings)
    keys = key_space(settings)
    try:
        return [
            int(await redis.hget(keys.shard(number).state, field) or 0) for number in range(settings.shards)
        ]
    finally:
        await redis.aclose()


@pytest.mark.requirement("A10")
@pytest.mark.parametrize(
    "fault",
    [
        "tail cut",
        *(
            pytest.param(fault, marks=pytest.mark.nightly)
            for fault in ("emptied", "tail cut by 1 byte", "an old copy")
        ),
    ],
)
@pytest.mark.every_change("one recovery")
async def test_redis_recovers_after_a_loss_under_traffic(
    private: Settings, private_services: LocalServices, worker: Callable[..., Any], tmp_path: Path, fault: str
) -> None:
    deciding, projecting = worker(private, "decide,relay,sweep"), worker(private, "project,publish")
    async with traffic(private) as crowd:
        await crowd.rehearsal.open()
        had, copy, size = (
            await state_numbers(private, "seq"),
            tmp_path / "copy",
            log_of(private_services).stat().st_size,
        )
        await asyncio.to_thread(shutil.copytree, aof(private_services), copy)
        crowd.let_in()
        await crowd.until_answered(0.5)

        async def kafka_has_more() -> bool:
            return any(
                new > old for new, old in zip(await state_numbers(private, "journaled_seq"), had, strict=True)
            )

        # Wait for the relay: some of the lost events must be in the journal, or the recovery would have
        # nothing to apply.
        await until(kafka_has_more, 60, "events that are in Kafka and not in the copy")
        if fault == "emptied":
            redis = open_redis(private)
            await redis.flushall()
            await redis.aclose()
        elif fault == "an old copy":
            await asyncio.to_thread(put_back, private_services, copy)
        else:
            await asyncio.to_thread(
                cut_the_tail, private_services, size + 1_000 if fault == "tail cut" else sys.maxsize
            )
        await crowd.adds_up()
        await assert_state_is_the_journal_s(private)
    recoveries = await rows(
        private, "SELECT shard, kind, redis_seq, journal_seq, snapshot_seq, applied FROM recoveries"
    )
    if fault != "tail cut by 1 byte":  # the lost command may not have been in Kafka yet
        assert recoveries
    assert await rows(private, "SELECT * FROM lost_decisions") == []
    assert deciding.stop() == 0
    assert projecting.stop() == 0


def envelope(offer: str = "e", parts: int = 100) -> Open:
    return Open(
        id=f"open-{offer}",
        offer=offer,
        terms=EnvelopeTerms(issuer="alice", funding="pay", asset="CNY", total=parts * 9, parts=parts),
    )


def by(*users: str, offer: str = "e") -> list[Grab]:
    return [Grab(id=f"{offer}-{user}", offer=offer, user=user) for user in users]


async def copied(services: LocalServices, to: Path) -> Path:
    """Copies the log as it is now, with all answered commands in it."""
    await asyncio.to_thread(shutil.copytree, aof(services), to)
    return to


@pytest.mark.long
async def test_another_history_is_replaced_and_its_lost_decisions_are_reported(
    private: Settings, private_services: LocalServices, worker: Callable[..., Any], tmp_path: Path
) -> None:
    deciding = worker(private, "decide,relay,sweep")
    projecting = worker(private, "project")
    async with open_gate(private) as gate:
        asked = {"patience_ms": 20_000}
        assert (await gate.decide([envelope()], **asked))[0].outcome == "opened"
        assert {answer.outcome for answer in await gate.decide(by("ann", "bob"), **asked)} == {"granted"}
        assert deciding.stop() == 0
        before = await copied(private_services, tmp_path / "before")
        decided = await gate.decide(by("eve", "joe", "kim"), "decided")
        assert {answer.outcome for answer in decided} == {"granted"}
        other = await copied(private_services, tmp_path / "other")
        # Redis loses events that Kafka never had: the shard continues without them, and the gate reports the
        # answers that were lost.
        await asyncio.to_thread(put_back, private_services, before)
        deciding = worker(private, "decide,relay,sweep")
        assert {answer.outcome for answer in await gate.decide(by("lea", "max"), **asked)} == {"granted"}
        lost = "SELECT command, user_id, amount FROM lost_decisions WHERE told_by = 'gate' ORDER BY seq"
        expected = [
            (f"e-{user}", user, answer.amount)
            for user, answer in zip(("eve", "joe", "kim"), decided, strict=True)
        ]
        await until(lambda: rows(private, lost), 10, "the report of the gate")
        assert await rows(private, lost) == expected
        # The copy with the lost events is put back. They are another history now: the relay lists them as
        # lost decisions, and they do not count.
        assert deciding.stop() == 0
        await asyncio.to_thread(put_back, private_services, other)
        deciding = worker(private, "decide,relay,sweep")
        [again] = await gate.decide(by("lea"), **asked)
        assert (again.outcome, again.repeated) == ("granted", True)
        lost = lost.replace("gate", "relay")
        assert await rows(private, lost) == expected
        shard = key_space(private).shard_of_offer("e")
        assert await rows(private, "SELECT shard, kind, redis_seq, journal_seq FROM recoveries") == [
            (shard, "other", 6, 5)
        ]
        # Their command ids can be used again.
        assert {
            (answer.outcome, answer.repeated)
            for answer in await gate.decide(by("eve", "joe", "kim"), **asked)
        } == {("granted", False)}
    await assert_state_is_the_journal_s(private)
    assert deciding.stop() == 0
    assert projecting.stop() == 0


@pytest.fixture
async def with_retired_offers(system: Settings, worker: Callable[..., Any]) -> Any:
    """A system with retired offers, one of them in a campaign that still exists, with all events in the audit
    trail; and its deciding worker.
    """
    deciding, projecting = worker(system, "decide,relay,sweep"), worker(system, "project")
    async with open_gate(system) as gate:
        asked = {"patience_ms": 60_000, "timeout_ms": 60_000}
        offers = ["m:old", "m:now", "gone", "here"]
        terms = StockTerms(
            issuer="shop", total=50, limits=(Limit("user", "offer", 2, "campaign"),), retire_after_ms=1
        )
        await gate.decide([Open(id=f"o-{offer}", offer=offer, terms=terms) for offer in offers], **asked)
        for offer in offers:
            await gate.decide(by("ann", "bob", "eve", offer=offer), **asked)
        await gate.decide([Close(id=f"c-{offer}", offer=offer) for offer in ("m:old", "gone")], **asked)
    retired = "SELECT count(*) FROM offers WHERE retired_at IS NOT NULL HAVING count(*) = 2"
    await until(lambda: rows(system, retired), 90, "retirement in SQL")
    audited = "SELECT 1 FROM cursors GROUP BY shard HAVING min(seq) <> max(seq)"
    await until(lambda: no_rows(system, audited), 90, "the audit trail")
    assert projecting.stop() == 0
    return system, deciding


async def no_rows(settings: Settings, query: str) -> bool:
    return not await rows(settings, query)


@pytest.mark.long
async def test_a_recovery_starts_from_the_audit_trail(with_retired_offers: Any) -> None:
    """An emptied Redis is rebuilt from the audit trail and the later events of the journal; retired offers
    are not restored.
    """
    system, _ = with_retired_offers
    async with open_gate(system) as gate:
        asked = {"patience_ms": 60_000, "timeout_ms": 60_000}
        await gate.decide(by("joe", "kim", offer="m:now"), **asked)
        await delete_keys(system)
        assert {answer.outcome for answer in await gate.decide(by("max", offer="m:now"), **asked)} == {
            "granted"
        }
        [again] = await gate.decide(by("ann", offer="m:now"), **asked)
        assert (again.outcome, again.repeated) == ("granted", True)
        # The limit of the campaign still counts grabs of the retired offer.
        [limited] = await gate.decide([Grab(id="third", offer="m:now", user="ann")], **asked)
        assert limited.outcome == "limit_reached"
        [gone] = await gate.decide(
            [Open(id="x", offer="gone", terms=StockTerms(issuer="shop", total=1))], **asked
        )
        assert gone.outcome == "conflict"
        number = key_space(system).shard_of_offer("m:now")

        async def all_recovered() -> bool:
            recovered = {shard for (shard,) in await rows(system, "SELECT shard FROM recoveries")}
            return recovered == {key_space(system).shard_of_offer(offer) for offer in NAMES}

        await until(all_recovered, 20, "recovery")
    [[snapshot_seq, journal_seq, applied]] = await rows(
        system, f"SELECT snapshot_seq, journal_seq, applied FROM recoveries WHERE shard = {number}"
    )
    assert 0 < snapshot_seq < journal_seq
    assert applied <= journal_seq
    await assert_state_is_the_journal_s(system)


NAMES = ("m:old", "m:now", "gone", "here")


async def _decides_as_the_journal(system: Settings) -> None:
    async with open_gate(system) as gate:
        [answer] = await gate.decide(by("max", offer="here"), patience_ms=20_000, timeout_ms=20_000)
        assert answer.outcome == "granted"
    await assert_state_is_the_journal_s(system)


@pytest.mark.long
async def test_a_recovery_without_postgresql_reads_the_journal(
    with_retired_offers: Any, worker: Callable[..., Any]
) -> None:
    system, deciding = with_retired_offers
    assert deciding.stop() == 0
    await delete_keys(system)
    away = system.model_copy(update={"postgres": "postgresql://nobody@127.0.0.1:9/none"})
    worker(away, "relay,sweep")
    await _decides_as_the_journal(system)


@pytest.mark.long
@pytest.mark.parametrize("source", ["the audit trail", "the journal"])
@pytest.mark.parametrize("living", some_by_tier([False, True], 2))
async def test_payments_have_their_first_outcome_after_a_recovery(
    system: Settings, worker: Callable[..., Any], source: str, living: bool
) -> None:
    """Payments of a retired offer, in a campaign that still exists or not: a repeat of a payment gets its
    first outcome, a served payment is not refunded, and new payments are decided.
    """
    deciding, projecting = worker(system, "decide,relay,sweep"), worker(system, "project")
    asked = {"patience_ms": 60_000, "timeout_ms": 60_000}
    terms = StockTerms(issuer="shop", total=9, price=250, currency="CNY", hold_ms=60_000, retire_after_ms=1)

    def paid(payment: str, number: str = "") -> Confirm:
        return Confirm(
            id=f"c-{payment}{number}", offer="m:a", grab="m:a-ann", payment=payment, paid=250, currency="CNY"
        )

    async with open_gate(system) as gate:
        offers = ["m:a", "m:living"] if living else ["m:a"]
        opened = await gate.decide(
            [Open(id=f"o-{offer}", offer=offer, terms=terms) for offer in offers], **asked
        )
        assert {answer.outcome for answer in opened} == {"opened"}
        await gate.decide(by("ann", "bob", offer="m:a"), **asked)
        [served, unserved] = await gate.decide([paid("p1"), paid("p2")], **asked)
        assert (served.outcome, unserved.outcome) == ("confirmed", "not_held")
        await gate.decide([Release(id="r", offer="m:a", grab="m:a-bob"), Close(id="c", offer="m:a")], **asked)
        retired = "SELECT 1 FROM offers WHERE retired_at IS NOT NULL"
        await until(lambda: rows(system, retired), 90, "retirement in SQL")
        [late] = await gate.decide([paid("p3")], **asked)
        assert (late.outcome, late.message) == ("no_such_offer", "the payment is to be paid back")
        firsts = {"p1": served, "p2": unserved, "p3": late}
        for round_ in ("1", "2"):
            audited = f"SELECT 1 FROM cursors WHERE projection = 'audit' AND seq >= {late.seq}"
            await until(lambda query=audited: rows(system, query), 90, "the audit trail")
            if source == "the journal":
                assert deciding.stop() == 0
                deciding = worker(
                    system.model_copy(update={"postgres": "postgresql://nobody@127.0.0.1:9/none"}),
                    "decide,relay,sweep",
                )
            await delete_keys(system)
            for payment, first in firsts.items():
                [again] = await gate.decide([paid(payment, f"-again{round_}")], **asked)
                assert (again.outcome, again.repeated, again.seq) == (first.outcome, True, first.seq)
            [late] = await gate.decide([paid(f"new{round_}")], **asked)
            assert (late.outcome, late.repeated) == ("no_such_offer", False)
            firsts[f"new{round_}"] = late
            await assert_state_is_the_journal_s(system)
    due = "SELECT payment, outcome FROM payments WHERE state = 'refund_due' ORDER BY seq"
    await until(lambda: rows(system, "SELECT 1 FROM payments WHERE payment = 'new2'"), 30, "payments in SQL")
    assert await rows(system, due) == [
        ("p2", "not_held"), ("p3", "no_such_offer"), ("new1", "no_such_offer"), ("new2", "no_such_offer"),
    ]  # fmt: skip
    if source == "the audit trail":
        assert await rows(system, "SELECT 1 FROM recoveries WHERE snapshot_seq > 0")
    assert deciding.stop() == 0
    assert projecting.stop() == 0


@pytest.mark.long
async def test_a_recovery_ignores_an_audit_trail_of_another_history(
    with_retired_offers: Any, worker: Callable[..., Any]
) -> None:
    """The hash of its cursor is not in the chain of the journal: the whole journal is read instead."""
    system, deciding = with_retired_offers
    assert deciding.stop() == 0
    async with await open_books(system) as books:
        await use_read_model(books, system.schema_, "audit")
        await books.execute(
            "UPDATE projection_cursors SET head = sha256(head), next_offset = next_offset - 1 WHERE seq > 0"
        )
    await delete_keys(system)
    worker(system, "relay,sweep")
    async with open_gate(system) as gate:
        asked = {"patience_ms": 60_000, "timeout_ms": 60_000}
        answers = await gate.decide(by("max", offer="here"), **asked)
        assert {answer.outcome for answer in answers} == {"granted"}
    await assert_state_is_the_journal_s(system)


@pytest.mark.long
async def test_a_killed_recovery_starts_again(with_retired_offers: Any, worker: Callable[..., Any]) -> None:
    system, deciding = with_retired_offers
    for step in ("recovery.wiped", "recovery.applied:2"):
        assert deciding.stop() == 0
        await delete_keys(system)
        doomed = worker(system, "relay,sweep", fail_at=step)
        assert await asyncio.to_thread(doomed.process.wait, 30) == -signal.SIGKILL
        deciding = worker(system, "relay,sweep")
        await assert_state_is_the_journal_s(system)


@pytest.mark.long
async def test_a_shard_stays_fenced_when_the_journal_lost_events(with_retired_offers: Any) -> None:
    """Redis has a checkpoint after the end of the journal. The shard stays fenced, so that these events are
    not lost, and its state names the command to run.
    """
    system, deciding = with_retired_offers
    assert deciding.stop() == 0
    redis, shard = open_redis(system), key_space(system).shard(key_space(system).shard_of_offer("here"))
    try:
        await redis.hset(
            shard.state,
            mapping={"journaled_seq": 10_000, "journaled_offset": 10_000, "server_epoch": "another"},
        )
        relay = ShardRelay(
            redis,
            shard,
            system.shards,
            system.kafka,
            Topics(system.prefix).journal,
            sealer(system),
            snapshots=snapshots(system),
        )
        relaying = asyncio.create_task(relay.run())
        await until(lambda: relay.state.startswith("fenced"), 20, "the fence")
        assert "it contained seq 10000" in relay.state
        assert "rebuild journal --from audit" in relay.state
        assert b"lost events" in await redis.hget(shard.state, "fault")
        relaying.cancel()
        await asyncio.wait({relaying})
        async with open_gate(system) as gate:
            [answer] = await gate.decide(by("max", offer="here"))
            assert answer.outcome == "fenced"
    finally:
        await redis.aclose()


@pytest.mark.long
@pytest.mark.parametrize("by_whom", ["a recovery", "a former release"])
async def test_a_checkpoint_within_another_term_hides_no_event(
    by_whom: str, with_retired_offers: Any, worker: Callable[..., Any]
) -> None:
    """A recovery that ends between two of its steps leaves a checkpoint among records of an earlier owner.
    The next taker reads on from there, and these records still count. Former releases stored the term and the
    owner of the recovery with it.
    """
    system, deciding = with_retired_offers
    assert deciding.stop() == 0
    number = key_space(system).shard_of_offer("here")
    redis, shard = open_redis(system), OwnedShard(open_redis(system), key_space(system).shard(number))
    steps: list[Cursor] = []

    async def first_step() -> AsyncGenerator[tuple[Cursor, Sequence[Accepted]], None]:
        """The journal up to an event in its middle."""
        cursor = Cursor()
        async with open_reader(system.kafka, Topics(system.prefix).journal) as reader:
            async for records in reader.read(number, 0, await reader.end(number)):
                for record in records:
                    cursor, accepted = cursor.feed(record.offset, parse_block(record.headers, record.value))
                    steps.append(cursor)
                    yield cursor, accepted
                    if accepted:
                        return

    try:
        ownership = (await shard.raise_term(100)).ownership
        await Recovery(shard, sealer(system)).make(ownership, lambda base: first_step())
        checkpoint = await shard.checkpoint(ownership)
        assert checkpoint == steps[-1]
        assert 0 < checkpoint.term < ownership.term
        if by_whom == "a former release":
            wrong = {"journaled_term": ownership.term, "journaled_owner": ownership.owner}
            await redis.hset(shard.keys.state, mapping=wrong)
        worker(system, "decide,relay,sweep")
        await assert_state_is_the_journal_s(system)
        async with open_gate(system) as gate:
            [again] = await gate.decide(by("eve", offer="here"), patience_ms=20_000, timeout_ms=20_000)
        assert (again.outcome, again.repeated) == ("granted", True)
    finally:
        await shard.redis.aclose()
        await redis.aclose()


@pytest.mark.long
async def test_a_shard_of_a_newer_key_layout_is_left_to_the_newer_program(
    with_retired_offers: Any, tmp_path: Path
) -> None:
    """The next release has another key layout and rebuilds the shards in it; this release does not change
    them afterwards.
    """
    system, deciding = with_retired_offers
    newer = next_release(tmp_path)
    assert deciding.stop() == 0
    redis, keys = open_redis(system), key_space(system)
    environment = child_environment(
        prefix=system.prefix, schema=system.schema_, redis_url=system.redis_url, kafka=system.kafka,
        postgres=system.postgres,
        shards=str(system.shards), seal_keys=system.seal_keys.get_secret_value(), )  # fmt: skip
    log = (tmp_path / "newer.log").open("wb")
    command = [sys.executable, "-m", "grabstream.ops.cli", "-v", "worker", "--roles", "decide,relay,sweep"]
    process = subprocess.Popen(
        command, env=environment | {"PYTHONPATH": str(newer)}, cwd=newer, stdout=log, stderr=log
    )
    try:

        async def taken_over() -> bool:
            states = [
                await redis.hmget(keys.shard(number).state, ["layout", "server_epoch"])
                for number in range(keys.shards)
            ]
            return all(
                layout == str(NEXT_LAYOUT).encode() and server_epoch for layout, server_epoch in states
            )

        await until(taken_over, 40, "the takeover of the newer program")
        async with open_gate(system) as gate:
            [refused] = await gate.decide(by("max", offer="here"))
            assert refused.outcome == "fenced"
            assert "upgrade" in (refused.message or "")
        relay = ShardRelay(
            redis, keys.shard(0), system.shards, system.kafka, Topics(system.prefix).journal, sealer(system)
        )
        relaying = asyncio.create_task(relay.run())
        await until(lambda: "upgrade" in relay.state, 20, "the refusal")
        relaying.cancel()
        await asyncio.wait({relaying})
        assert (await request_lease(redis, keys.shard(0), "old", 1_000)).holder != "old"
    finally:
        process.terminate()
        assert process.wait(20) == 0
        log.close()
        await redis.aclose()
    await delete_keys(system)


def next_release(folder: Path) -> Path:
    """Makes a copy of this program with the next key layout; returns its folder."""
    copy = folder / "next"
    copy_package(copy)
    include = copy / "grabstream/lua/includes/shard.lua"
    text = include.read_text()
    this_layout = f"local LAYOUT = {LAYOUT}\n"
    assert this_layout in text
    include.write_text(text.replace(this_layout, f"local LAYOUT = {NEXT_LAYOUT}\n"))
    # Libraries of both layouts are present side by side.
    names = copy / "grabstream/lua/keys.py"
    text = names.read_text().replace(f"\nLAYOUT: Final = {LAYOUT}\n", f"\nLAYOUT: Final = {NEXT_LAYOUT}\n")
    names.write_text(text)
    return copy


@pytest.mark.long
@pytest.mark.parametrize("layout", [0, None])
async def test_a_shard_of_an_older_key_layout_is_journaled_and_rebuilt(
    with_retired_offers: Any, worker: Callable[..., Any], layout: int | None
) -> None:
    """An upgrade loses no event that the previous release decided and has not journaled, and keeps nothing of
    the keys of its shards. A shard that names no layout has an older one.
    """
    system, deciding = with_retired_offers
    assert deciding.stop() == 0
    redis, shard = open_redis(system), key_space(system).shard(key_space(system).shard_of_offer("here"))
    try:
        async with open_gate(system) as gate:
            decided = await gate.decide(by("joe", "kim", offer="here"), "decided")
            assert {answer.outcome for answer in decided} == {"granted"}
            of_older = [f"{shard.tag}:offer:here:older", f"{shard.tag}:older"]
            for key in of_older:
                await redis.set(key, "of another form")
            if layout is None:
                await redis.hdel(shard.state, "layout")
            else:
                await redis.hset(shard.state, "layout", layout)
            worker(system, "relay,sweep")
            asked = {"patience_ms": 60_000, "timeout_ms": 60_000}
            again = await gate.decide(by("joe", "kim", offer="here"), **asked)
        assert [(answer.outcome, answer.seq, answer.repeated) for answer in again] == [
            ("granted", answer.seq, True) for answer in decided
        ]
        assert await redis.hget(shard.state, "layout") == str(LAYOUT).encode()
        assert await redis.exists(*of_older) == 0
    finally:
        await redis.aclose()
    await assert_state_is_the_journal_s(system)


@pytest.mark.long
async def test_rebuild_redis_beside_a_worker(with_retired_offers: Any) -> None:
    system, _ = with_retired_offers
    words = env_of(system)
    planned = await asyncio.to_thread(grabstream, "rebuild", "redis", "--dry-run", "--json", **words)
    assert planned.returncode == 0, planned.stderr
    assert [row["shard"] for row in json.loads(planned.stdout)] == list(range(system.shards))
    done = await asyncio.to_thread(grabstream, "rebuild", "redis", "--json", **words)
    assert done.returncode == 0, done.stderr
    assert sum(row["applied"] for row in json.loads(done.stdout)) > 10
    assert (await asyncio.to_thread(grabstream, "rebuild", "redis", "--shard", "8", **words)).returncode == 2
    await _decides_as_the_journal(system)


@pytest.mark.long
async def test_a_script_that_fails_while_it_writes_causes_a_rebuild_and_loses_no_answer(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """The events of the script are in the outbox: the relay journals them and rebuilds the shard from them,
    and the same grabs get their first answers.
    """
    relaying = worker(system, "relay,sweep,project")
    client = open_redis(system)
    broken = InterruptingClient(client)
    gate = Gate(broken, key_space(system), sealer(system), gate_limits(system))
    gate.start()
    shard = key_space(system).shard(key_space(system).shard_of_offer("e"))
    try:
        broken.fail_at_write = 0
        assert (await gate.decide([envelope()], patience_ms=20_000))[0].outcome == "opened"
        history = await client.hget(shard.state, "history")
        broken.fail_at_write = 4
        asked = asyncio.create_task(gate.decide(by("ann", "bob"), timeout_ms=30_000))

        async def is_fenced_or_mended() -> bool:
            return await client.hget(shard.state, "history") != history

        await until(is_fenced_or_mended, 20, "the fence")
        broken.fail_at_write = 0
        answers = await asked
        assert [(answer.outcome, answer.repeated, answer.place) for answer in answers] == [
            ("granted", True, 1),
            ("granted", True, 2),
        ]
        assert (await gate.decide(by("cid")))[0].place == 3
        await assert_state_is_the_journal_s(system)
    finally:
        await gate.close()
        await client.aclose()
    [(kind, problem)] = await rows(system, "SELECT kind, problem FROM recoveries")
    assert kind == "other"
    assert problem.startswith("Redis is incomplete at seq 3 of 3")
    assert await rows(system, "SELECT * FROM lost_decisions") == []
    assert relaying.stop() == 0
