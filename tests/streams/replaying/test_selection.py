"""Which events `replay --user` picks."""

import json
from typing import Any

from grabstream.models.events import decode_event
from grabstream.models.transfers import transfers_of
from grabstream.projections.cursors import Fact
from grabstream.streams.replaying.selection import Selection, Wanted


def fact(seq: int, type_: str, **rest: Any) -> Fact:
    head = {"type": type_, "v": 1, "shard": 0, "seq": seq, "offer_seq": seq, "offer": "s", "at": seq}
    line = json.dumps({**head, "command": f"c{seq}", "grab": "g", **rest}).encode()
    event = decode_event(line)
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
