"""The view `operations`: what operators did stands in it, in whatever words; what the system did by itself
does not.
"""

import json
from typing import Any

import pytest

from grabstream.models.upcasting import NEWER
from grabstream.ops.rehearsal.run import open_books
from grabstream.ops.settings import Settings
from grabstream.projections import cursors
from grabstream.streams.projecting.projector import CatchUp
from tests.conftest import until
from tests.streams.projecting.sums import adjusted
from tests.support.projecting import (
    SHARD,
    JournalWriter,
    granted,
    journal,  # noqa: F401 - a fixture
    opened,
    rows,
    running,
    until_at_seq,
)


def steered(type: str, seq: int, command: str, **rest: Any) -> bytes:
    head = {
        "type": type,
        "v": 1,
        "shard": SHARD,
        "seq": seq,
        "offer_seq": seq,
        "offer": "e",
        "at": seq,
        "command": command,
    }
    return json.dumps(head | {"digest": "d"} | rest, separators=(",", ":")).encode()


def closed(seq: int, command: str, reason: str) -> bytes:
    rest = {"reason": reason, "asset": "CNY", "amount": 0, "left": 0, "refund_to": "wallet:alice"}
    return steered("offer.closed", seq, command, **rest)


#: Each with whether it is somebody's doing.
EVENTS = [
    (opened("e", 1), True),
    (granted("e", 2), False),
    (adjusted(3, 5, reason="a mistake"), True),
    # Words of whoever sent it, which the system uses too.
    (adjusted(4, 5, reason="drained"), True),
    (adjusted(5, 5, reason="deadline"), True),
    # An id that is reserved today, in a journal of before.
    (adjusted(6, 5).replace(b'"command":"a6"', b'"command":"sweep"'), True),
    (steered("offer.paused", 7, "sweep", operator="olga"), True),
    (closed(8, "close-1", "command"), True),
    (closed(9, "sweep", "command"), True),
    (closed(10, "g9", "drained"), False),
    (closed(11, "sweep", "deadline"), False),
    (steered("offer.retired", 12, "sweep"), False),
]


@pytest.fixture
async def booked(system: Settings, journal: JournalWriter) -> Settings:
    lines = [line for line, _ in EVENTS]
    await journal.marker(1, "a")
    await journal.block(lines, 1, len(lines))
    async with running(system, "audit") as [audit]:
        await audit.put(CatchUp(SHARD))
        await until_at_seq(system, len(lines), "audit")
    return system


async def test_nobody_s_words_hide_what_they_did(booked: Settings) -> None:
    shown = [seq for (seq,) in await rows(booked, "SELECT seq FROM operations ORDER BY seq")]
    assert shown == [seq for seq, (_, somebody) in enumerate(EVENTS, 1) if somebody]


async def test_nobody_s_title_makes_a_stop_one_that_a_newer_release_mends(
    system: Settings, journal: JournalWriter
) -> None:
    """PostgreSQL quotes the row that it refuses, title included: that is no word of ours about why it
    stopped.
    """
    lines = [opened("e", 1, total=5).replace("你好".encode(), NEWER.encode()), granted("e", 2, amount=99)]
    await journal.marker(1, "a")
    await journal.block(lines, 1, 1)
    await journal.block(lines, 2, 2)
    seen = []
    for _ in range(2):
        async with running(system, "balances") as [balances]:
            await balances.put(CatchUp(SHARD))
            await until(lambda balances=balances: balances._stopped == {SHARD}, 30, "the stop")
        async with await open_books(system) as books:
            seen += await cursors.stops(books)
    assert NEWER in seen[0].reason
    # The second process did not take back what the first one wrote down.
    assert [stop.newer for stop in seen] == [False, False]
    assert seen[0].stopped_at == seen[1].stopped_at
