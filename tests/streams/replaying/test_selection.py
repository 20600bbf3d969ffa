"""Which events `replay` picks for a user, and between two points."""

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast

import pytest

from grabstream.models.events import GrabGranted, decode_event
from grabstream.models.journal import Cursor
from grabstream.models.runs import GrantedRun, decode_line
from grabstream.models.transfers import transfers_of
from grabstream.projections.cursors import Fact
from grabstream.streams.follower import Chunk
from grabstream.streams.history.chunks import Point
from grabstream.streams.history.sources import Source, Start
from grabstream.streams.replaying.replay import Done, Planned, Stretch, replay
from grabstream.streams.replaying.selection import Selection, Wanted
from tests.streams.replaying.histories import runs_of_ten
from tests.support.projecting import SHARD
from tests.support.runs import as_lines, as_singles


def fact(seq: int, type_: str, **rest: Any) -> Fact:
    head = {"type": type_, "v": 1, "shard": 0, "seq": seq, "offer_seq": seq, "offer": "s", "at": seq}
    [line] = as_lines([json.dumps({**head, "command": f"c{seq}", "grab": "g", **rest}).encode()])
    event = decode_line(line)
    return Fact(line, b"", event, transfers_of(event))


def due(seq: int, **user: str) -> Fact:
    return fact(
        seq, "payment.refund_due", payment=f"p{seq}", amount=5, asset="CNY", outcome="not_held", digest="d",
        **user,
    )  # fmt: skip


def test_a_refund_due_belongs_to_the_user_whom_it_names() -> None:
    """Where it names none, to the user of the grab. A user who paid for another user's grab does not get its
    other refunds.
    """
    facts = [
        fact(1, "grab.granted", user="ann", quantity=1, amount=1, asset="sku:s", place=1, left=0, digest="d"),
        due(2, user="bob"), due(3), due(4, user="ann"),
    ]  # fmt: skip
    for user, seqs in (("ann", [1, 3, 4]), ("bob", [2]), ("eve", [])):
        selection = Selection(Wanted(users=(user,)), False)
        assert [picked.event.seq for picked in selection.of(facts)] == seqs


def test_grabs_of_a_user_are_single_events_or_runs_of_one_for_read_models() -> None:
    history = Runs()
    expected = [line for line in as_singles(history.lines) if b'"user":"u3"' in line]
    assert len(expected) == 3
    for for_read_models, form in ((False, GrabGranted), (True, GrantedRun)):
        picked = Selection(Wanted(users=("u3",)), for_read_models).of(history.facts())[for_read_models:]
        assert {type(fact.event) for fact in picked} == {form}
        assert [fact.line for fact in picked] == (as_lines(expected) if for_read_models else expected)
        assert as_singles(fact.line for fact in picked) == expected
        assert [tuple(fact.transfers) for fact in picked] == [
            tuple(transfers_of(decode_event(line))) for line in expected
        ]


class Runs:
    """A history of an opening and two runs of ten grabs, in two chunks; and what a replay writes of it."""

    name = "journal"

    def __init__(self) -> None:
        self.lines = runs_of_ten()
        self.written: list[bytes] = []

    def facts(self) -> list[Fact]:
        return [Fact(line, b"", event := decode_line(line), transfers_of(event)) for line in self.lines]

    async def chunks(self, shard: int, start: Start) -> AsyncGenerator[Chunk, None]:
        facts = self.facts()
        yield Chunk(shard, Cursor(), Cursor(seq=11), facts[:2], 1)
        yield Chunk(shard, Cursor(seq=11), Cursor(seq=21), facts[2:], 1)

    async def write(self, chunk: Chunk, facts: Sequence[Fact]) -> int:
        self.written += [fact.line for fact in facts]
        return len(facts)

    async def flush(self) -> None:
        pass


@pytest.mark.parametrize(("first", "last"), [(1, 21), (5, 8), (2, 11), (9, 12), (12, 12), (21, 30)])
async def test_single_events_begin_and_end_at_any_grab_of_a_run_and_lines_stay_whole(
    first: int, last: int
) -> None:
    history, done = Runs(), dict[int, Done]()
    planned = [Planned(Stretch(SHARD, Point(seq=first), Point(seq=last)), Start(Cursor(), 3), 2)]
    source = cast(Source, history)
    await replay(source, planned, Selection(Wanted(), False), history, lambda *_: None, done)
    assert history.written == [
        line
        for line, run in zip(history.lines, map(decode_line, history.lines), strict=True)
        if run.last_seq >= first and run.seq <= last
    ]
    single, history.written = as_singles(history.lines), []
    await replay(source, planned, Selection(Wanted(), False, (), True), history, lambda *_: None, done)
    assert history.written == single[first - 1 : last]
    assert done[SHARD].events == min(last, 21) - first + 1
