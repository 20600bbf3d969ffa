"""The signed journal on real servers: what a writer without a relay's key writes changes nothing, stops
nothing, and is reported.
"""

import asyncio
import itertools
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from aiokafka import AIOKafkaProducer

from grabstream.connections.opening import key_space, open_gate, open_redis, sealer, snapshots
from grabstream.gate.gate import Gate
from grabstream.models.commands import Grab, Open
from grabstream.models.journal import (
    SIGNED_OWNER,
    Cursor,
    anchor_headers,
    block_headers,
    chain,
    is_signed_owner,
    marker_headers,
)
from grabstream.models.offers import CouponTerms
from grabstream.ops.diagnosis.examination import examine
from grabstream.ops.verification.signatures import IgnoredRecords
from grabstream.ops.verification.verifying import verify
from grabstream.projections import cursors
from grabstream.projections.database.migrate import PROJECTIONS
from grabstream.settings import Settings
from grabstream.streams.clients import started
from grabstream.streams.journal import open_reader
from grabstream.streams.journal_keys import JournalKeys, lacking, new_key_pair, use_keys
from grabstream.streams.projecting.publisher import CURSOR_HEADER, encode_cursor, event_source
from grabstream.streams.relaying.relay import ShardRelay
from grabstream.streams.relaying.takeover import NO_KEY
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import until
from tests.streams.state import assert_state_is_the_journal_s
from tests.support.command_line import env_of, grabstream
from tests.support.losses import delete_topics
from tests.support.projecting import rows
from tests.support.raw_batches import RawRecord, produce_batch, raw_batch
from tests.support.redis_keys import delete_keys

RELAY, NEXT, STRANGER = (new_key_pair() for _ in range(3))
KEYS: Final = {"journal_keys": f"k1:{RELAY[0]}", "journal_public_keys": f"k1:{RELAY[1]},k2:{NEXT[1]}"}
#: What a process has that only reads.
PUBLIC: Final = {"journal_public_keys": KEYS["journal_public_keys"]}
OFFER: Final = "sale"


@pytest.fixture
def knowing() -> Iterator[None]:
    """This process knows the public keys of the relays."""
    use_keys(JournalKeys.from_text("", PUBLIC["journal_public_keys"]))
    yield
    use_keys(JournalKeys())


@asynccontextmanager
async def opened_sale(settings: Settings) -> AsyncIterator[Gate]:
    """A gate of a system in which a coupon is offered."""
    async with open_gate(settings) as gate:
        terms = CouponTerms(issuer="shop", total=1_000)
        [answer] = await gate.decide(
            [Open(id="o", offer=OFFER, terms=terms)], patience_ms=30_000, timeout_ms=30_000
        )
        assert answer.outcome in ("opened", "conflict") or answer.repeated
        yield gate


async def grab(gate: Gate, user: str) -> int:
    """The seq of a journaled grab."""
    command = Grab(id=f"g-{user}-{secrets.token_hex(3)}", offer=OFFER, user=user)
    [answer] = await gate.decide([command], patience_ms=30_000, timeout_ms=30_000)
    assert answer.outcome == "granted", answer
    assert answer.seq is not None
    return answer.seq


def odd_batches(shard: int, at: Cursor) -> list[bytes]:
    """Batches of one record each that brokers store, and that no library would write: of the last one,
    readers would take an offset for their position that is far after the end.
    """
    marker = [(name.encode(), value) for name, value in marker_headers(shard, 6_000, "mallory")]
    now_ms = round(time.time() * 1_000)
    records = (
        RawRecord(b"", [*marker, (b"\xff\xfe", b"x")]),
        RawRecord(b"", [(b"", None), (b"a\0b", b"\0")], timestamp_delta=-(2**62)),
        RawRecord(None, marker, attributes=0xFF),
        RawRecord(b"", [(name.encode(), value) for name, value in anchor_headers(at, shard)], None, 0, 10**6),
    )
    return [raw_batch([record], now_ms) for record in records]


class Forger:
    """A writer of the topics without a relay's key."""

    def __init__(self, settings: Settings, producer: AIOKafkaProducer, shard: int) -> None:
        self._settings, self._producer, self.shard = settings, producer, shard
        self._topics = Topics(settings.prefix)
        self.offsets: list[int] = []

    async def write(self, headers: Any, value: bytes = b"") -> int:
        sent = await self._producer.send_and_wait(
            self._topics.journal, value, partition=self.shard, headers=list(headers)
        )
        self.offsets.append(sent.offset)
        return int(sent.offset)

    async def end(self) -> Cursor:
        """The cursor of the audit trail at the end of the journal."""
        async with open_reader(self._settings.kafka, self._topics.journal) as reader:
            end = await reader.end(self.shard)

        async def caught_up() -> Cursor | None:
            async with await open_books(self._settings) as books:
                cursor = (await cursors.load(books, "audit"))[self.shard]
                return cursor if cursor.next_offset >= end else None

        found = await until(caught_up, 30, "the audit trail at the end of the journal")
        assert isinstance(found, Cursor)
        return found

    def line(self, seq: int, user: str) -> bytes:
        """A grab that was never decided."""
        return (
            f'{{"type":"grab.granted","v":2,"shard":{self.shard},"seq":{seq},"offer_seq":{seq},'
            f'"offer":"{OFFER}","at":9999999999999,"grabs":["f{seq}"],"users":["{user}"],'
            f'"quantities":[100],"asset":"coupon:{OFFER}","place":{seq},"left":1}}'
        ).encode()

    async def forge(self, at: Cursor) -> int:
        """Writes a marker of a higher term with a self-made block, and its like, after a cursor; returns the
        number of records.
        """
        before = len(self.offsets)
        for number, owner in enumerate(("mallory", f"mallory{SIGNED_OWNER}"), 1_000):
            lines = [self.line(at.seq + 1, "mallory"), self.line(at.seq + 2, "mallory")]
            block = block_headers(
                self.shard, number, owner, at.seq + 1, 2, at.head, chain(at.head, lines)[-1]
            )
            await self.write(marker_headers(self.shard, number, owner))
            await self.write(block, b"\n".join(lines))
        stranger = JournalKeys.from_text(f"k9:{STRANGER[0]}", "").signer
        assert stranger is not None
        forged = Cursor(at.seq + 50, bytes(32), 0, at.term, at.owner)
        for headers in (
            stranger.signed(self._topics.journal, self.shard, marker_headers(self.shard, 5_000, at.owner)),
            anchor_headers(forged, self.shard),
            # In the name of the present owner, after a gap.
            block_headers(self.shard, at.term, at.owner, at.seq + 40, 1, bytes(32), bytes(32)),
            [("count", b"0"), ("term", b"9" * 5_000)],
            [],
        ):
            await self.write(headers)
        for batch in odd_batches(self.shard, at):
            offset = await produce_batch(self._settings.kafka, self._topics.journal, self.shard, batch)
            self.offsets.append(offset)
        await self.replay()
        return len(self.offsets) - before

    async def replay(self) -> None:
        """Writes old signed records again: they are not forged, and change nothing."""
        async with open_reader(self._settings.kafka, self._topics.journal) as reader:
            async for records in reader.read(self.shard, 0, min(8, await reader.end(self.shard))):
                for record in records:
                    if dict(record.headers).get("key") != b"k1":
                        continue
                    sent = await self._producer.send_and_wait(
                        self._topics.journal, record.value, partition=self.shard, headers=list(record.headers)
                    )
                    assert sent.offset > record.offset

    async def publish_cursor(self, cursor: Cursor) -> None:
        """Writes to the topic of events a cursor after forged records."""
        headers = [
            ("ce_source", event_source(self._settings.prefix).encode()),
            ("ce_id", b"%d-%d" % (self.shard, cursor.seq)),
            (CURSOR_HEADER, encode_cursor(cursor)),
        ]
        for batch in odd_batches(self.shard, cursor):
            await produce_batch(self._settings.kafka, self._topics.events, self.shard, batch)
        await self._producer.send_and_wait(self._topics.events, b"{}", partition=self.shard, headers=headers)


@pytest.fixture
async def forger(system: Settings) -> AsyncIterator[Forger]:
    producer = AIOKafkaProducer(bootstrap_servers=system.kafka, acks="all")
    async with started(producer):
        yield Forger(system, producer, key_space(system).shard_of_offer(OFFER))


async def owner_of(settings: Settings, shard: int) -> tuple[int, str]:
    redis = open_redis(settings)
    try:
        term, owner = await redis.hmget(key_space(settings).shard(shard).state, ["term", "owner"])
        return int(term or 0), (owner or b"").decode()
    finally:
        await redis.aclose()


async def assert_sound(settings: Settings, seq: int, forged: int) -> None:
    """All checks pass, no read model has a forged row, and the forged records are named."""

    async def checks() -> list[Any] | None:
        found = await verify(settings, 30)
        return found if all(check.passed for check in found) else None

    found = await until(checks, 60, "a clean verification")
    assert isinstance(found, list)
    [signatures] = [check for check in found if "signed" in check.name]
    assert not forged or f"{forged} records do not count" in " ".join(signatures.notes)
    assert not await rows(settings, "SELECT 1 FROM audit WHERE body LIKE '%%mallory%%'")
    assert not await rows(settings, "SELECT 1 FROM balances WHERE user_id = 'mallory'")
    assert await rows(settings, "SELECT 1 FROM stopped_shards") == []
    async with await open_books(settings) as books:
        for name in PROJECTIONS:
            assert seq <= max(cursor.seq for cursor in (await cursors.load(books, name)).values())
    await assert_state_is_the_journal_s(settings)


@pytest.mark.long
@pytest.mark.usefixtures("knowing")
async def test_what_no_relay_signed_is_no_money_stops_nothing_and_is_reported(
    system: Settings, worker: Callable[..., Any], forger: Forger
) -> None:
    first = worker(system, **KEYS)
    async with opened_sale(system) as gate:
        await grab(gate, "anna")
        owner = await owner_of(system, forger.shard)
        assert is_signed_owner(owner[1])
        forged = await forger.forge(await forger.end())
        # The relay neither stops nor steps down: that would be for anyone to cause.
        seq = await grab(gate, "ben")
        assert await owner_of(system, forger.shard) == owner
        # Another relay takes over, and reads past the same records; more of them come while it is away.
        at = await forger.end()
        assert first.stop() == 0
        forged += await forger.forge(at)
        worker(system, **KEYS)
        seq = await grab(gate, "carl")
        await assert_sound(system, seq, forged)
    [(what, open_)] = await rows(
        system, "SELECT what, cleared_at IS NULL FROM findings WHERE kind = 'journal'"
    )
    assert open_
    assert "does not count" in what
    found = json.loads(grabstream("doctor", "--json", **env_of(system), **PUBLIC).stdout)["findings"]
    [finding] = [one for one in found if "does not count" in one["what"]]
    assert (finding["severity"], "no read model is affected" in finding["means"]) == ("risk", True), finding
    assert "GRAB_JOURNAL_PUBLIC_KEYS is not set here" in grabstream("doctor", **env_of(system)).stdout
    for words in (("rebuild", "all"), ("rebuild", "redis")):
        done = grabstream(*words, **env_of(system), **KEYS)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    await assert_sound(system, seq, forged)
    replayed = grabstream("replay", "--into", "-", **env_of(system), **PUBLIC)
    users = [user for line in replayed.stdout.splitlines() for user in json.loads(line).get("users", [])]
    assert users == ["anna", "ben", "carl"], replayed


async def signed_from(settings: Settings, shard: int) -> int:
    """The offset of the first signed record."""
    async with open_reader(settings.kafka, Topics(settings.prefix).journal) as reader:
        async for records in reader.read(shard, 0, await reader.end(shard)):
            for record in records:
                if reader.is_signed(record):
                    return record.offset
    raise AssertionError("nothing is signed")


async def ignored(settings: Settings, shard: int) -> int:
    """How many records of a shard do not count."""
    records = IgnoredRecords()
    async with open_reader(settings.kafka, Topics(settings.prefix).journal) as reader:
        await records.read(reader, shard, await reader.end(shard))
    return records.counts.get(shard, 0)


@pytest.mark.long
@pytest.mark.usefixtures("knowing")
async def test_signing_begins_after_unsigned_history_and_cannot_be_taken_back(
    system: Settings, worker: Callable[..., Any], forger: Forger
) -> None:
    """The history before counts; a relay that dies after its first signed marker has begun it; and a relay
    without a key cannot continue.
    """
    unsigned = worker(system, **PUBLIC)
    async with opened_sale(system) as gate:
        await grab(gate, "anna")
        before = await forger.end()
        assert not is_signed_owner(before.owner)
        dying = worker(system, "relay,decide,sweep", fail_at="relay.took_over", **KEYS)
        assert unsigned.stop() == 0
        await until(lambda: dying.process.poll() is not None, 30, "the end of the first relay that signs")
        # A worker of before: it does not take shards from relays that sign.
        late = worker(system, "relay,decide,sweep,project", **PUBLIC)
        await until(lambda: NO_KEY in late.log.read_text(), 30, "a relay that needs a key")
        seen = "SELECT 1 FROM cursors WHERE owner LIKE '%-signed'"
        await until(lambda: rows(system, seen), 30, "a read model that has seen that the journal is signed")
        assert late.stop() == 0
        # From then on such a worker does not start, since it would hold leases of shards that it cannot
        # relay.
        without_any = worker(system, "relay,decide,sweep")
        await until(lambda: without_any.process.poll() == 2, 30, "a worker that needs a key")
        assert "GRAB_JOURNAL_KEYS is not set" in without_any.log.read_text()
        signing = worker(system, **KEYS)
        seq = await grab(gate, "ben")
        began = await signed_from(system, forger.shard)
        assert began >= before.next_offset
        # The worker without a key may have written a marker here before it met the signed one.
        late_markers = await ignored(system, forger.shard)
        assert late_markers <= 1
        forged = await forger.forge(await forger.end())
        # A cursor after forged records, in a topic that others may write to.
        at = await forger.end()
        lines = [forger.line(at.seq + 1, "mallory")]
        await forger.write(marker_headers(forger.shard, 7_000, "mallory"))
        head = chain(at.head, lines)[-1]
        block = block_headers(forger.shard, 7_000, "mallory", at.seq + 1, 1, at.head, head)
        end = await forger.write(block, lines[0])
        await forger.publish_cursor(Cursor(at.seq + 1, head, end + 1, 7_000, "mallory"))
        assert signing.stop() == 0
        worker(system, **KEYS)
        seq = await grab(gate, "carl")
        found = await verify(system, 30)
        assert all(check.passed for check in found), found
        assert f"shard {forger.shard}: {late_markers + forged + 2} records do not count" in str(found)
        await until_published(system, forger.shard, seq)
    assert await signed_from(system, forger.shard) == began


async def until_published(settings: Settings, shard: int, seq: int) -> None:
    """Returns when a grab is on the topic of events, and nothing of the forger is."""

    async def is_published() -> bool:
        users: dict[bytes, str] = {}
        async with open_reader(settings.kafka, Topics(settings.prefix).events) as reader:
            async for records in reader.read(shard, 0, await reader.end(shard)):
                for record in records:
                    if not (ce_id := dict(record.headers).get("ce_id")):
                        continue  # not an event
                    event = json.loads(record.value)
                    assert event.get("user") != "mallory"
                    users[ce_id] = event.get("user", "")
        return b"%d-%d" % (shard, seq) in users

    await until(is_published, 30, "the last grab on the topic of events")


OTHER_KEYS: Final = {"journal_keys": f"k2:{NEXT[0]}", "journal_public_keys": f"k2:{NEXT[1]}"}


def test_keys_that_a_process_lacks_are_named() -> None:
    recorded = {"k1": RELAY[1], "k2": NEXT[1]}
    assert lacking(JournalKeys.from_text("", PUBLIC["journal_public_keys"]), recorded) == ""
    # Without any keys, a process counts what is signed as what is not.
    assert lacking(JournalKeys(), recorded) == ""
    only = JournalKeys.from_text(f"k2:{NEXT[0]}", "")
    assert lacking(only, {"k2": NEXT[1]}) == ""
    assert lacking(only, recorded).startswith("GRAB_JOURNAL_PUBLIC_KEYS lacks the key k1, ")
    assert "has another key under the id k2 " in lacking(only, {"k2": RELAY[1]})


@pytest.mark.nightly
@pytest.mark.usefixtures("knowing")
async def test_a_relay_that_lacks_a_key_forgets_nothing_that_was_acknowledged(
    system: Settings, worker: Callable[..., Any], forger: Forger
) -> None:
    """It neither starts, nor takes a shard: not even if Redis is empty, and the audit trail lags."""
    first = worker(system, "relay,decide,sweep", **KEYS)
    async with opened_sale(system) as gate:
        seq = await grab(gate, "anna")
        assert first.stop() == 0
        await delete_keys(system)
        refused = worker(system, "relay,decide,sweep", **OTHER_KEYS)
        await until(lambda: refused.process.poll() == 2, 30, "a worker that needs a key")
        assert "GRAB_JOURNAL_PUBLIC_KEYS lacks the key k1" in refused.log.read_text()
        # The same of one that was running when the first key came, here that of this process.
        use_keys(JournalKeys.from_text(OTHER_KEYS["journal_keys"], OTHER_KEYS["journal_public_keys"]))
        redis = open_redis(system)
        relay = ShardRelay(
            redis, key_space(system).shard(forger.shard), system.shards, system.kafka,
            Topics(system.prefix).journal, sealer(system), snapshots=snapshots(system),
        )  # fmt: skip
        relaying = asyncio.create_task(relay.run())
        await until(lambda: "lacks the key k1" in relay.state, 30, "a relay that stays away")
        findings = [
            finding for _, finding in (await examine(system)).findings if "lacks the key k1" in finding.what
        ]
        assert [finding.severity for finding in findings] == ["stuck"]
        # Nor while the keys cannot be read, since Redis does not say what was acknowledged.
        relaying.cancel()
        await asyncio.wait({relaying})
        away = system.model_copy(update={"postgres": "postgresql://grabstream@127.0.0.1:1/none"})
        relay = ShardRelay(
            redis, key_space(system).shard(forger.shard), system.shards, system.kafka,
            Topics(system.prefix).journal, sealer(system), snapshots=snapshots(away),
        )  # fmt: skip
        relaying = asyncio.create_task(relay.run())
        await until(lambda: relay.state.startswith("retrying"), 30, "a relay that waits for PostgreSQL")
        relaying.cancel()
        await asyncio.wait({relaying})
        await redis.aclose()
        use_keys(JournalKeys.from_text("", PUBLIC["journal_public_keys"]))
        keys = {
            "journal_keys": OTHER_KEYS["journal_keys"],
            "journal_public_keys": KEYS["journal_public_keys"],
        }
        worker(system, **keys)
        assert await grab(gate, "ben") == seq + 1
    await assert_sound(system, seq + 1, 0)


@pytest.mark.long
@pytest.mark.usefixtures("knowing")
async def test_a_relay_signs_with_a_new_key_without_a_restart(
    system: Settings, worker: Callable[..., Any], tmp_path: Path
) -> None:
    """It takes the shard over for that, so that the new key is recorded before it signs an event."""
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"k1:{RELAY[0]}")
    worker(system, journal_keys_file=str(keys), **PUBLIC)
    shard = key_space(system).shard_of_offer(OFFER)

    async def signed_by() -> str:
        async with open_reader(system.kafka, Topics(system.prefix).journal) as reader:
            end = await reader.end(shard)
            found = [
                dict(record.headers)
                async for records in reader.read(shard, 0, end)
                for record in records
                if dict(record.headers).get("count", b"0") != b"0"
            ]
        return found[-1]["key"].decode()

    async with opened_sale(system) as gate:
        await grab(gate, "anna")
        assert await signed_by() == "k1"
        (tmp_path / "next").touch(mode=0o600)
        (tmp_path / "next").write_text(f"k2:{NEXT[0]},k1:{RELAY[0]}")
        os.replace(tmp_path / "next", keys)
        users = itertools.count()

        async def is_new() -> bool:
            await grab(gate, f"u{next(users)}")
            return await signed_by() == "k2"

        await until(is_new, 60, "a block of the new key")
        seq = await grab(gate, "ben")
        known = await rows(system, "SELECT key_id FROM journal_keys ORDER BY key_id")
        assert known == [("k1",), ("k2",)]
        await assert_sound(system, seq, 0)


@pytest.mark.nightly
@pytest.mark.usefixtures("knowing")
async def test_a_restored_journal_is_signed_again(
    system: Settings, worker: Callable[..., Any], forger: Forger
) -> None:
    """And it needs the key: an unsigned copy would let anyone write again."""
    first = worker(system, **KEYS)
    async with opened_sale(system) as gate:
        await grab(gate, "anna")
        await forger.end()
        assert first.stop() == 0
        await delete_topics(system, Topics(system.prefix).journal)
        words = ("rebuild", "journal", "--from", "audit", "--new-journal")
        refused = grabstream(*words, **env_of(system), **PUBLIC)
        assert refused.returncode == 1
        assert "GRAB_JOURNAL_KEYS" in refused.stderr + refused.stdout
        done = grabstream(*words, **env_of(system), **KEYS)
        assert done.returncode == 0, done
        worker(system, **KEYS)
        seq = await grab(gate, "ben")
        forged = await forger.forge(await forger.end())
        await assert_sound(system, seq, forged)
