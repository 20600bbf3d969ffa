"""The view `operations`: it shows every action of an operator, whatever its reason text, and no action of the
system itself.
"""

import json
from typing import Any

import pytest

from grabstream.models.upcasting import NEWER
from grabstream.projections import cursors
from grabstream.settings import Settings
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import until
from tests.streams.projecting.sums import adjusted
from tests.support.projecting import (
    SHARD,
    JournalWriter,
    catching_up,
    granted,
    journal,  # noqa: F401 - a fixture
    opened,
    rows,
    until_at_seq,
)


def offer_event(type: str, seq: int, command: str, **rest: Any) -> bytes:
    """An event about the offer `e`."""
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
    return offer_event("offer.closed", seq, command, **rest)


#: Each event, and whether an operator caused it.
EVENTS = [
    (opened("e", 1), True),
    (granted("e", 2), False),
    (adjusted(3, 5, reason="a mistake"), True),
    # Reasons of an operator that the system uses as well.
    (adjusted(4, 5, reason="drained"), True),
    (adjusted(5, 5, reason="deadline"), True),
    # A command id that is reserved now, in a journal of an older release.
    (adjusted(6, 5).replace(b'"command":"a6"', b'"command":"sweep"'), True),
    (offer_event("offer.paused", 7, "sweep", operator="olga"), True),
    (closed(8, "close-1", "command"), True),
    (closed(9, "sweep", "command"), True),
    (closed(10, "g9", "drained"), False),
    (closed(11, "sweep", "deadline"), False),
    (offer_event("offer.retired", 12, "sweep"), False),
]


@pytest.fixture
async def booked(system: Settings, journal: JournalWriter) -> Settings:
    lines = [line for line, _ in EVENTS]
    await journal.marker(1, "a")
    await journal.block(lines, 1, len(lines))
    async with catching_up(system, "audit"):
        await until_at_seq(system, len(lines), "audit")
    return system


async def test_operations_shows_every_action_of_an_operator_whatever_its_reason(booked: Settings) -> None:
    shown = [seq for (seq,) in await rows(booked, "SELECT seq FROM operations ORDER BY seq")]
    assert shown == [seq for seq, (_, by_operator) in enumerate(EVENTS, 1) if by_operator]


@pytest.mark.long
async def test_a_title_cannot_make_a_stop_look_like_one_of_a_newer_release(
    system: Settings, journal: JournalWriter
) -> None:
    """PostgreSQL quotes the refused row in its error, with the title. The title must not be taken for this
    program's reason of the stop.
    """
    lines = [opened("e", 1, total=5).replace("你好".encode(), NEWER.encode()), granted("e", 2, amount=99)]
    await journal.marker(1, "a")
    await journal.block(lines, 1, 1)
    await journal.block(lines, 2, 2)
    seen = []
    for _ in range(2):
        async with catching_up(system, "balances") as [balances]:
            await until(lambda balances=balances: balances._stopped == {SHARD}, 30, "the stop")
        async with await open_books(system) as books:
            seen += await cursors.stops(books)
    assert NEWER in seen[0].reason
    # The second process did not remove the stop that the first one stored.
    assert [stop.newer for stop in seen] == [False, False]
    assert seen[0].stopped_at == seen[1].stopped_at
