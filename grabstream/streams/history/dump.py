"""The records of the journal as JSON lines, for readers in other languages (docs/journal.md).

A line has the fields that `kcat -J` writes: `topic`, `partition`, `offset`, `headers` (name, value, name, …)
and `payload`. Bytes that are not UTF-8, which this program never writes, are `{"base64": …}`.
"""

from base64 import b64encode
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from grabstream.streams.journal import JournalReader, JournalRecord

_encode = msgspec.json.Encoder().encode


def _text(data: bytes | None) -> Any:
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(data).decode()}


def dumped(topic: str, record: JournalRecord) -> bytes:
    """The line of a record, without its newline."""
    return _encode(
        {
            "topic": topic,
            "partition": record.shard,
            "offset": record.offset,
            "headers": [one for name, value in record.headers for one in (name, _text(value))],
            "payload": _text(record.value),
        }
    )


async def dump_lines(
    reader: JournalReader, topic: str, shard: int, start: int, end: int
) -> AsyncGenerator[tuple[int, bytes], None]:
    """The records of a shard with start ≤ offset < end, in pieces: how many records, and their lines."""
    async with aclosing(reader.read(shard, start, end)) as lists:
        async for records in lists:
            yield len(records), b"".join(dumped(topic, record) + b"\n" for record in records)
