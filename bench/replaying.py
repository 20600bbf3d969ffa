"""Row 4: from the journal to a complete ledger, against COPY of the same rows into the same tables."""

import os
import secrets
import time
from typing import Any

from aiokafka import AIOKafkaProducer
from psycopg import AsyncConnection, sql

from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.models.journal import GENESIS, Cursor, block_headers, chain, marker_headers
from grabstream.ops.commands.rebuild.read_models import few_collections, where_of
from grabstream.ops.initialization import make_system
from grabstream.ops.rehearsal.stage import take_down
from grabstream.ops.settings import Settings, load_settings
from grabstream.projections import versions
from grabstream.projections.definitions import definition_of
from grabstream.streams.rebuilding.reading import open_rebuild_source
from grabstream.streams.rebuilding.rebuild import open_rebuild
from grabstream.streams.topics import Topics

BLOCK_EVENTS = 1_000
COPY_BYTES = 256 * 1024


def _lines(shard: int, count: int) -> list[bytes]:
    """The events of an envelope and its grants, with ids of 32 characters."""
    opened = (
        f'{{"v":1,"type":"offer.opened","shard":{shard},"seq":1,"offer_seq":1,"offer":"e{shard}",'
        '"at":1800000000000,"command":"open",'
        f'"kind":"envelope","issuer":"bench","funding":"bench","asset":"CNY","total":{count * 100},"opens_'
        'at":1,"closes_at":9,'
        f'"terms":{{"kind":"envelope","parts":{count}}},"digest":"0123456789abcdef"}}'
    )
    grants = (
        f'{{"v":1,"type":"grab.granted","shard":{shard},"seq":{seq},"offer_seq":{seq},"offer":"e{shard}",'
        '"at":1800000000000,'
        f'"command":"g{seq:031d}","grab":"g{seq:031d}","user":"u{seq + shard * 10**9:031d}","quantity":1,'
        '"amount":100,"asset":"CNY",'
        f'"place":{seq - 1},"left":{count - seq},"digest":"0123456789abcdef"}}'
        for seq in range(2, count + 1)
    )
    return [opened.encode(), *(line.encode() for line in grants)]


async def _journal(settings: Settings, connection: AsyncConnection[Any], count: int) -> None:
    """Fills the journal, and sets the cursors of the live ledger to its end, so that the rebuild reads all of
    it.
    """
    topic = Topics(settings.prefix).journal
    producer = AIOKafkaProducer(
        bootstrap_servers=settings.kafka, acks="all", max_request_size=RECORD_BYTES_MAX
    )
    await producer.start()
    try:
        for shard in range(settings.shards):
            lines, head = _lines(shard, count // settings.shards), GENESIS
            await producer.send_and_wait(
                topic, b"", partition=shard, headers=marker_headers(shard, 1, "bench")
            )
            for first in range(0, len(lines), BLOCK_EVENTS):
                block = lines[first : first + BLOCK_EVENTS]
                after = chain(head, block)[-1]
                headers = block_headers(shard, 1, "bench", first + 1, len(block), head, after)
                sent = await producer.send_and_wait(
                    topic, b"\n".join(block), partition=shard, headers=headers
                )
                head = after
            end = Cursor(len(lines), head, sent.offset + 1, 1, "bench")
            await connection.execute(
                "UPDATE projection_cursors SET (seq, head, next_offset, term, owner) = (%s, %s, %s, %s, %s) "
                "WHERE shard = %s",
                (*end, shard),
            )
    finally:
        await producer.stop()


async def replay(runs: int, count: int) -> dict[str, Any]:
    """Row 4, in events per second: read, verify, decode, load, sum and index, against loading and indexing
    the resulting rows.
    """
    ours, theirs = [], []
    few_collections()
    name = f"bench{secrets.token_hex(4)}"
    settings = load_settings().model_copy(update={"prefix": name, "schema_": name})
    await make_system(settings)
    async with await AsyncConnection.connect(settings.postgres, autocommit=True) as connection:
        await versions.use_read_model(connection, name, "ledger")
        try:
            await _journal(settings, connection, count)
            events = count // settings.shards * settings.shards
            for _ in range(runs):
                ours.append(events / await _build(settings))
                theirs.append(events / await _copy(connection, name, settings.shards))
        finally:
            await take_down(settings)
    return {"ours": ours, "theirs": theirs, "unit": "events/s"}


async def _build(settings: Settings) -> float:
    where = where_of(settings)
    async with (
        open_rebuild(where, "ledger", jobs=os.cpu_count() or 1) as work,
        open_rebuild_source("journal", where) as source,
    ):
        await work.drop("building")
        began = time.perf_counter()
        await work.build(source)
        return time.perf_counter() - began


async def _copy(connection: AsyncConnection[Any], schema: str, shards: int) -> float:
    """Reads the rows of the version just built and copies them into an empty one; returns the seconds of the
    copy.
    """
    built = await versions.in_state(connection, schema, "ledger", "building")
    assert built is not None
    rows: dict[str, bytes] = {}
    for table in definition_of("ledger").tables:
        source = sql.SQL("COPY {} TO STDOUT").format(sql.Identifier(built.schema, table))
        async with connection.cursor() as cursor, cursor.copy(source) as copy:
            rows[table] = b"".join([bytes(data) async for data in copy])
    await versions.discard(connection, schema, built)
    await connection.execute("SET synchronous_commit = off; SET maintenance_work_mem = '256MB'")
    async with connection.transaction():
        empty = await versions.create(connection, schema, "ledger", shards)
    began = time.perf_counter()
    async with connection.transaction():
        for table, data in rows.items():
            async with (
                connection.cursor() as cursor,
                cursor.copy(sql.SQL("COPY {} FROM STDIN").format(sql.Identifier(table))) as copy,
            ):
                for start in range(0, len(data), COPY_BYTES):
                    await copy.write(data[start : start + COPY_BYTES])
        await versions.complete(connection, "ledger")
    seconds = time.perf_counter() - began
    await versions.discard(connection, schema, empty)
    return seconds
