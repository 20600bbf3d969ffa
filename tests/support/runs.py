"""Lines of the journal, where grants and holds are runs, from single events, and the other way round."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from grabstream.models.commands import CARRIED
from grabstream.models.events import AnyEvent, GrabGranted, GrabHeld, decode_event, encode_event
from grabstream.models.runs import AnyRun, GrantedRun, HeldRun, decode_line, is_run, singles

GRABS_MAX = 1_000


def as_lines(events: Iterable[bytes]) -> list[bytes]:
    """The lines of the journal for events: each single grant or hold is a run of one grab."""
    return [line for event in events for line in ([event] if is_run(event) else as_runs([event]))]


def as_runs(lines: Iterable[bytes], grabs_max: int = GRABS_MAX) -> list[bytes]:
    """The lines, with consecutive grants and holds of one offer, time, basket, price and deadline as runs."""
    runs: list[list[AnyEvent]] = []
    for event in (one for line in lines for one in single_events(line)):
        if runs and len(runs[-1]) < grabs_max and _common(runs[-1][-1]) == _common(event) is not None:
            runs[-1].append(event)
        else:
            runs.append([event])
    return [msgspec.json.encode(run_of(run) if _common(run[0]) else run[0]) for run in runs]


def as_singles(lines: Iterable[bytes]) -> list[bytes]:
    """The lines, with the grabs of each run one by one."""
    return [encode_event(one) if is_run(line) else line for line in lines for one in single_events(line)]


def single_events(line: bytes) -> Sequence[AnyEvent]:
    """The event of a single grab or of another type; the events of the grabs of a run."""
    return singles(decode_line(line)) if is_run(line) else (decode_event(line),)


def _common(event: AnyEvent) -> tuple[Any, ...] | None:
    """What all grabs of a run have in common; None if the event is not one of a run."""
    if isinstance(event, GrabGranted):
        return (event.offer, event.at, event.basket, event.quantity == event.amount)
    if not isinstance(event, GrabHeld):
        return None
    price = None if event.due is None else event.due / event.quantity
    served_by = event.command if event.waited else None
    return (event.offer, event.at, event.basket, event.deadline_at, price, event.currency, served_by)


def run_of(events: Sequence[Any]) -> AnyRun:
    """A run of grants, or of holds, that follow each other."""
    first, last = events[0], events[-1]

    def column(values: Iterable[Any], default: Any = None) -> tuple[Any, ...]:
        found = tuple(values)
        return () if all(value == default for value in found) else found

    is_waited = isinstance(first, GrabHeld) and first.waited
    tickets = ((one.ticket, one.ticket_ends_at) if one.ticket is not None else None for one in events)
    quantities = column((one.quantity for one in events), 1)
    common: dict[str, Any] = {
        "v": 2, "shard": first.shard, "seq": first.seq, "offer_seq": first.offer_seq, "offer": first.offer,
        "at": first.at, "command": first.command if is_waited else None,
        "grabs": tuple(one.grab for one in events), "users": tuple(one.user for one in events),
        "quantities": quantities,
        "amounts": () if all(one.amount == one.quantity for one in events)
        else tuple(one.amount for one in events),
        "asset": first.asset, "place": first.place, "left": last.left,
        "asked": column(one.asked for one in events),
        "attributes": column(one.attributes or None for one in events),
        **{name: column(getattr(one, name) for one in events) for name in CARRIED},
        "tickets": column(tickets), "basket": first.basket,
        "digests": column((one.digest for one in events), None if is_waited else "plain"),
    }  # fmt: skip
    if isinstance(first, GrabGranted):
        return GrantedRun(**common, codes=column((one.codes for one in events), ()))
    price = (first.due or 0) // first.quantity
    return HeldRun(
        **common, deadline_at=first.deadline_at, price=price, currency=first.currency, waited=first.waited
    )
