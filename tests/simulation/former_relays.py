"""Relays as those of the release before: their records end between any two decisions, also within an entry of
the outbox.

Beside them, or after them, a relay finds an entry whose first events are journaled. The relays of this
release make none, but must take over such an entry, and must not remove it. Those relays know no runs of
grabs.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from unittest import mock

import msgspec

from grabstream.streams.relaying import relay
from grabstream.streams.relaying.ownership import OutboxLine


class _Event(msgspec.Struct):
    """What says with which others an event was decided, as long as clocks go on."""

    at: int
    command: str = ""
    basket: str | None = None
    waited: bool = False


_decode = msgspec.json.Decoder(_Event).decode


def _decisions_of(entry: Sequence[OutboxLine]) -> Iterator[list[OutboxLine]]:
    decision: list[OutboxLine] = []
    before = None
    for line in entry:
        event = _decode(line[0])
        joined = before is not None and (
            event.waited
            or (event.command == before.command != "sweep" and event.at == before.at)
            or (event.basket is not None and event.basket == before.basket and event.at == before.at)
        )
        if decision and not joined:
            yield decision
            decision = []
        decision.append(line)
        before = event
    if decision:
        yield decision


def entries_divided() -> AbstractContextManager[object]:
    """Inside the block, relays may end a record between two decisions of an entry."""
    of_entries = relay.blocks_of

    def blocks_of(entries: Iterable[Sequence[OutboxLine]], events_max: int) -> list[list[OutboxLine]]:
        return of_entries([one for entry in entries for one in _decisions_of(entry)], events_max)

    return mock.patch.object(relay, "blocks_of", blocks_of)
