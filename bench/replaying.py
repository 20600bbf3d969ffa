"""Row 4: from the journal to a complete ledger, against COPY of one row a grab (id, offer, user, amount,
time) with its primary key.
"""

import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from aiokafka import AIOKafkaProducer
from psycopg import AsyncConnection, sql

from grabstream.connections.opening import where_of
from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.models.journal import GENESIS, Cursor, block_headers, chain, marker_headers
from grabstream.ops.initialization import make_system
from grabstream.projections import versions
from grabstream.runtime.collecting import collect_rarely
from grabstream.settings import Settings, load_settings
from grabstream.streams import brokers
from grabstream.streams.rebuilding.reading import open_rebuild_source
from grabstream.streams.rebuilding.rebuild import open_rebuild
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.stage import take_down

#: Grabs of a run, as many as one call of 20 callers grants, and lines of a record.
RUN_GRABS = 20
BLOCK_LINES = 50
COPY_ROWS = 3_000


def _lines(shard: int, count: int, run_grabs: int) -> list[tuple[bytes, int]]:
    """An envelope and its grants in runs, with ids of 32 characters: each line, and its seqs."""
    opened = (
        f'{{"type":"offer.opened","v":1,"shard":{shard},"seq":1,"offer_seq":1,"offer":"e{shard}",'
        '"at":1800000000000,"command":"open",'
        f'"kind":"envelope","issuer":"bench","funding":"bench","asset":"CNY","total":{count * 100},"opens_'
        'at":1,"closes_at":9,'
        f'"terms":{{"kind":"envelope","parts":{count}}},"digest":"0123456789abcdef"}}'
    )
    lines = [(opened.encode(), 1)]
    for first in range(2, count + 1, run_grabs):
        seqs = range(first, min(first + run_grabs, count + 1))
        run = {
            "type": "grab.granted", "v": 2, "shard": shard, "seq": first, "offer_seq": first,
            "offer": f"e{shard}", "at": 1800000000000, "grabs": [f"g{seq:031d}" for seq in seqs],
            "users": [f"u{seq + shard * 10**9:031d}" for seq in seqs], "amounts": [100] * len(seqs),
            "asset": "CNY", "place": first - 1, "left": count - seqs[-1],
        }  # fmt: skip
        lines.append((json.dumps(run, separators=(",", ":")).encode(), len(seqs)))
    return lines


async def fill_journal(settings: Settings, count: int, run_grabs: int = RUN_GRABS) -> dict[int, Cursor]:
    """Fills the journal with `count` events; returns the cursor at the end of each shard."""
    ends = {}
    topic = Topics(settings.prefix).journal
    producer = AIOKafkaProducer(**brokers.at(settings.brokers), acks="all", max_request_size=RECORD_BYTES_MAX)
    await producer.start()
    try:
        for shard in range(settings.shards):
            lines, head, seq = _lines(shard, count // settings.shards, run_grabs), GENESIS, 0
            await producer.send_and_wait(
                topic, b"", partition=shard, headers=marker_headers(shard, 1, "bench")
            )
            for first in range(0, len(lines), BLOCK_LINES):
                part = lines[first : first + BLOCK_LINES]
                block, seqs = [line for line, _ in part], sum(seqs for _, seqs in part)
                after = chain(head, block)[-1]
                headers = block_headers(shard, 1, "bench", seq + 1, len(block), head, after, seqs)
                sent = await producer.send_and_wait(
                    topic, b"\n".join(block), partition=shard, headers=headers
                )
                head, seq = after, seq + seqs
            ends[shard] = Cursor(seq, head, sent.offset + 1, 1, "bench")
    finally:
        await producer.stop()
    return ends


async def replay(runs: int, count: int) -> dict[str, Any]:
    """Row 4, in events per second: read, verify, decode, load, sum and index, against loading and indexing
    a row a grab without any logic.
    """
    ours, theirs = [], []
    collect_rarely()
    name = f"bench{secrets.token_hex(4)}"
    settings = load_settings().model_copy(update={"prefix": name, "schema_": name})
    await make_system(settings)
    async with await AsyncConnection.connect(settings.postgres, autocommit=True) as connection:
        await versions.use_read_model(connection, name, "ledger")
        try:
            # The live ledger is at the end of the journal, so that the rebuild reads all of it.
            for shard, end in (await fill_journal(settings, count)).items():
                await connection.execute(
                    "UPDATE projection_cursors SET (seq, head, next_offset, term, owner) = "
                    "(%s, %s, %s, %s, %s) WHERE shard = %s",
                    (*end, shard),
                )
            events = count // settings.shards * settings.shards
            rows = [
                part for shard in range(settings.shards) for part in _rows(shard, count // settings.shards)
            ]
            for _ in range(runs):
                ours.append(events / await build(settings))
                theirs.append(events / await _copy(connection, name, rows))
        finally:
            await take_down(settings)
    return {"ours": ours, "theirs": theirs, "unit": "events/s"}


async def build(settings: Settings) -> float:
    """Builds the ledger from the journal; returns the seconds."""
    where = where_of(settings)
    async with (
        open_rebuild(where, "ledger", jobs=os.cpu_count() or 1) as work,
        open_rebuild_source("journal", where) as source,
    ):
        await work.drop("building")
        began = time.perf_counter()
        await work.build(source)
        return time.perf_counter() - began


async def _copy(connection: AsyncConnection[Any], schema: str, rows: Sequence[bytes]) -> float:
    """Copies a row a grab into an empty table, and adds its primary key; returns the seconds."""
    table = sql.Identifier(schema, "classic")
    await connection.execute("SET synchronous_commit = off; SET maintenance_work_mem = '256MB'")
    await connection.execute(
        sql.SQL(
            "CREATE TABLE {} (id text NOT NULL, offer text NOT NULL, user_id text NOT NULL, "
            "amount bigint NOT NULL, at bigint NOT NULL)"
        ).format(table)
    )
    began = time.perf_counter()
    async with connection.transaction():
        async with (
            connection.cursor() as cursor,
            cursor.copy(sql.SQL("COPY {} FROM STDIN").format(table)) as copy,
        ):
            for part in rows:
                await copy.write(part)
        await connection.execute(sql.SQL("ALTER TABLE {} ADD PRIMARY KEY (id)").format(table))
    seconds = time.perf_counter() - began
    await connection.execute(sql.SQL("DROP TABLE {}").format(table))
    return seconds


def _rows(shard: int, count: int) -> Iterator[bytes]:
    """The grabs of `_lines`, in the text format of COPY, in parts of some hundred kilobytes."""
    for first in range(2, count + 1, COPY_ROWS):
        yield "".join(
            f"g{shard}{seq:030d}\te{shard}\tu{seq + shard * 10**9:031d}\t100\t1800000000000\n"
            for seq in range(first, min(first + COPY_ROWS, count + 1))
        ).encode()
