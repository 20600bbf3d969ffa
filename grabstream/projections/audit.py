"""The audit trail: every line of the journal byte for byte, with the hash of the chain after it. Rows never
change.
"""

from collections.abc import Sequence
from typing import Any

from psycopg import AsyncConnection

from grabstream.projections.cursors import Fact
from grabstream.projections.database.arrays import copy_rows

NAME = "audit"


async def apply(connection: AsyncConnection[Any], facts: Sequence[Fact]) -> None:
    """Adds the events, in the caller's transaction. A run of grabs is one row, of several seqs."""
    rows = []
    for line, hash_, event, _ in facts:
        # JSON has no raw tabs or newlines, so the backslash is the only byte with a meaning for COPY.
        body = line.replace(b"\\", b"\\\\").decode()
        type_ = event.__struct_config__.tag
        rows.append(
            f"{event.shard}\t{event.seq}\t{event.offer}\t{type_}\t{event.at}\t{body}\t\\\\x{hash_.hex()}"
            f"\t{event.seqs}\n"
        )
    await copy_rows(connection, "audit_1 (shard, seq, offer, type, at, body, hash, seqs)", rows)


async def finish(connection: AsyncConnection[Any]) -> None:
    """Does nothing: the audit trail has no sums."""
