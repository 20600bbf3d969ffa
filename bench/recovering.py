"""How long Redis is unavailable: events per second of a rebuild, the time of a takeover, and the time of a
recovery with ten million past grabs.
"""

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from aiokafka import AIOKafkaProducer
from psycopg import AsyncConnection

from bench.stage import SEALER, envelope, grabs, private_redis, system, taken_over_gate
from bench.streaming import until_booked
from grabstream.connections.opening import key_space, open_gate, open_redis
from grabstream.gate.calls import GateLimits
from grabstream.lua.keys import KeySpace
from grabstream.lua.running import run_script
from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.models.commands import Confirm, Grab, Open
from grabstream.models.journal import GENESIS, Accepted, Cursor, block_headers, chain, marker_headers
from grabstream.models.offers import Limit, StockTerms
from grabstream.models.runs import RUN_VERSION, decode_line
from grabstream.projections.definitions import PROJECTIONS
from grabstream.projections.versions import use_read_model
from grabstream.settings import Settings
from grabstream.streams import brokers
from grabstream.streams.relaying.ownership import OwnedShard
from grabstream.streams.relaying.recovery import Position, Recovery
from grabstream.streams.relaying.relay import ShardRelay
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.run import open_books

BLOCK_EVENTS = 1_000
LISTS = 100
#: The time that row `past` allows from an emptied Redis to the next decision.
SECONDS_ALLOWED = 10.0
LINES = """
local found = {}
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+')) do
  for i = 2, #entry[2], 2 do found[#found + 1] = entry[2][i] end
end
return found
"""


async def _journaled(client: Any, keys: KeySpace) -> list[list[Accepted]]:
    """The lines of each shard as its journal would have them, from outboxes that were not relayed."""
    found = []
    for number in range(keys.shards):
        lines = await client.eval(LINES, 1, keys.shard(number).outbox)
        hashes = chain(GENESIS, lines)
        found.append(
            [
                Accepted(decode_line(line).last_seq, line, hash_)
                for line, hash_ in zip(lines, hashes, strict=True)
            ]
        )
    return found


async def rebuild(runs: int, count: int) -> dict[str, Any]:
    """Row `rebuild`: events per second that a rebuild applies, against the decisions per second that made
    them: envelope grabs, then holds under limits.
    """
    ours, theirs = [], []
    for _ in range(runs):
        with private_redis() as port:
            gate, client = await taken_over_gate(
                port, GateLimits(queue_commands_max=10**7, outbox_events_max=10**8, timeout_ms=60_000)
            )
            stock = [Open(id=f"o-s{n}", offer=f"s{n}", terms=_stock(count)) for n in range(8)]
            await gate.decide([*(envelope(f"e{n}", count) for n in range(8)), *stock], "decided")
            commands: list[Any] = [grab for n in range(8) for grab in grabs(f"e{n}", count // 24)]
            holds = [grab for n in range(8) for grab in grabs(f"s{n}", count // 24)]
            began = time.perf_counter()
            for listed in (
                commands,
                holds,
                [Confirm(id=f"c{hold.id}", offer=hold.offer, grab=hold.id) for hold in holds],
            ):
                await asyncio.gather(*(gate.decide(listed[n::LISTS], "decided") for n in range(LISTS)))
            decided = time.perf_counter() - began
            journaled = await _journaled(client, KeySpace("bench", 8))
            await gate.close()
            await client.flushall()
            events = sum(shard_events[-1].seq for shard_events in journaled if shard_events)
            began = time.perf_counter()
            await asyncio.gather(
                *(_fold(client, number, shard_events) for number, shard_events in enumerate(journaled))
            )
            ours.append(events / (time.perf_counter() - began))
            theirs.append(events / decided)
            await client.aclose()
    return {"ours": ours, "theirs": theirs, "unit": "events/s"}


async def takeover(runs: int, count: int) -> dict[str, Any]:
    """Row `takeover`: milliseconds until a new relay has taken over an idle shard, against connecting and one
    awaited send.
    """
    ours, theirs = [], []
    async with system(()) as (settings, _):
        client = open_redis(settings)
        keys, topic = key_space(settings), Topics(settings.prefix).journal
        for number in range(runs * count):
            shard = keys.shard(number % keys.shards)
            relay = ShardRelay(client, shard, keys.shards, settings.brokers, topic, SEALER)
            began = time.perf_counter()
            relaying = asyncio.create_task(relay.run())
            while relay.state != "relaying":
                await asyncio.sleep(0.001)
            ours.append((time.perf_counter() - began) * 1000)
            relaying.cancel()
            await asyncio.wait({relaying})
            began = time.perf_counter()
            producer = AIOKafkaProducer(**brokers.at(settings.brokers), acks="all", enable_idempotence=True)
            await producer.start()
            await producer.send_and_wait(Topics(settings.prefix).rejected, b"bench")
            theirs.append((time.perf_counter() - began) * 1000)
            await producer.stop()
        await client.aclose()
    return {"ours": ours, "theirs": theirs, "unit": "ms"}


def _stock(count: int) -> StockTerms:
    return StockTerms(
        issuer="bench",
        total=count,
        hold_ms=3_600_000,
        limits=(Limit("user", "day", 5), Limit("user", "offer", 9)),
    )


async def _fold(client: Any, number: int, accepted: Sequence[Accepted]) -> None:
    shard = OwnedShard(client, KeySpace("bench", 8).shard(number))
    ownership = (await shard.raise_term(0)).ownership
    last_seq = accepted[-1].seq if accepted else 0

    async def journal(base: Cursor) -> AsyncGenerator[tuple[Cursor, Sequence[Accepted]], None]:
        for start in range(0, len(accepted), BLOCK_EVENTS):
            yield base, accepted[start : start + BLOCK_EVENTS]

    await Recovery(shard, SEALER).rebuild(ownership, Position("other", 0), journal)
    await run_script(client, "reconcile", [shard.keys.state], (*ownership.arguments, last_seq, 8))


async def beside_the_past(runs: int, past: int) -> dict[str, Any]:
    """Row `past`: seconds from an emptied Redis to the next decision in every shard, with `past` grabs of
    retired offers in journal and audit trail, against the seconds allowed.
    """
    ours = []
    async with system(("decide,relay,sweep", "project")) as (settings, workers):
        async with open_gate(settings) as gate:
            offers = [envelope(f"e{n}", 2_000) for n in range(64)]
            await gate.decide(offers, patience_ms=30_000, timeout_ms=30_000)
            for n in range(64):
                await gate.decide(grabs(f"e{n}", 100), timeout_ms=30_000)
        await until_booked(settings, 64 * 101)
        for worker in workers:
            worker.send_signal(signal.SIGSTOP)
        await asyncio.gather(
            *(_add_past(settings, number, past // settings.shards) for number in range(settings.shards))
        )
        workers[0].send_signal(signal.SIGCONT)
        for _ in range(runs):
            ours.append(await _seconds_away(settings))
    return {"ours": ours, "theirs": [SECONDS_ALLOWED] * runs, "unit": "s"}


async def _seconds_away(settings: Settings) -> float:
    client = open_redis(settings)
    keys = key_space(settings)
    await client.flushall()
    began = time.perf_counter()
    while not all(
        [await client.hget(keys.shard(number).state, "server_epoch") for number in range(keys.shards)]
    ):
        await asyncio.sleep(0.02)
    async with open_gate(settings) as gate:
        answers = await gate.decide(
            [Grab(id=f"again{n}-{began}", offer=f"e{n}", user=f"again{began}") for n in range(64)],
            "decided",
            5_000,
        )
    seconds = time.perf_counter() - began
    assert {answer.outcome for answer in answers} == {"granted"}, answers[0]
    await client.aclose()
    return seconds


async def _add_past(settings: Settings, shard: int, count: int) -> None:
    """Adds the events of a drained and retired envelope after the last event of a shard, and sets the cursors
    of all read models after them.
    """
    topic = Topics(settings.prefix).journal
    async with await open_books(settings) as books:
        await use_read_model(books, settings.schema_, "audit")
        row = await (
            await books.execute(
                "SELECT seq, hash, at FROM audit WHERE shard = %s ORDER BY seq DESC LIMIT 1",
                (shard,),
            )
        ).fetchone()
        assert row is not None
        seq, head, at = int(row[0]), bytes(row[1]), int(row[2])
        producer = AIOKafkaProducer(
            **brokers.at(settings.brokers), acks="all", max_request_size=RECORD_BYTES_MAX
        )
        await producer.start()
        await producer.send_and_wait(
            topic, b"", partition=shard, headers=marker_headers(shard, 1_000, "past")
        )
        end = seq + count
        first = seq + 1
        while first <= end:
            last = min(first + BLOCK_EVENTS - 1, end)
            lines = [_past_line(shard, number, seq, end, at) for number in range(first, last + 1)]
            hashes = chain(head, lines)
            headers = block_headers(shard, 1_000, "past", first, len(lines), head, hashes[-1])
            sent = await producer.send_and_wait(topic, b"\n".join(lines), partition=shard, headers=headers)
            await _audit(books, shard, at, first, lines, hashes)
            head, first = hashes[-1], last + 1
        await producer.stop()
        for projection in PROJECTIONS:
            await use_read_model(books, settings.schema_, projection)
            await books.execute(
                "UPDATE projection_cursors SET (seq, head, next_offset, term, owner) = (%s, %s, %s, %s, %s) "
                "WHERE shard = %s",
                (end, head, sent.offset + 1, 1_000, "past", shard),
            )


def _past_line(shard: int, seq: int, before: int, end: int, at: int) -> bytes:
    offer_seq = seq - before
    type_ = "offer.opened" if offer_seq == 1 else "offer.retired" if seq == end else "grab.granted"
    version = RUN_VERSION if type_ == "grab.granted" else 1
    head = (
        f'{{"type":"{type_}","v":{version},"shard":{shard},"seq":{seq},"offer_seq":{offer_seq},'
        f'"offer":"past{shard}","at":{at}'
    )
    if type_ != "grab.granted":
        return f'{head},"command":"c{offer_seq}"}}'.encode()
    return (
        f'{head},"grabs":["g{seq:031d}"],"users":["u{seq:031d}"],"amounts":[150],"asset":"CNY",'
        f'"place":{offer_seq},"left":{end - seq},"digests":["0123456789abcdef"]}}'
    ).encode()


async def _audit(
    books: AsyncConnection[Any], shard: int, at: int, first: int, lines: list[bytes], hashes: list[bytes]
) -> None:
    rows = "".join(
        f"{shard}\t{first + n}\tpast{shard}\t{line[9:21].decode()}\t{at}\t"
        f"{line.decode()}\t\\\\x{hashes[n].hex()}\n"
        for n, line in enumerate(lines)
    ).replace("offer.retire\t", "offer.retired\t")
    async with (
        books.cursor() as cursor,
        cursor.copy("COPY audit_1 (shard, seq, offer, type, at, body, hash) FROM STDIN") as copy,
    ):
        await copy.write(rows)
