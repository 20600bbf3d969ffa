"""Runs: a run is read as the single events that its grabs would have been, byte for byte."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grabstream.lua.loader import assemble
from grabstream.models.events import GrabGranted, GrabHeld, decode_event, encode_event
from grabstream.models.runs import (
    RUN_GRABS_MAX,
    RUN_TYPES,
    AnyRun,
    GrantedRun,
    HeldRun,
    decode_line,
    decode_lines,
    singles,
)
from grabstream.models.transfers import transfers_of
from grabstream.models.upcasting import NewerEvent, UpcastFailed
from grabstream.projections.definitions import definition_of
from tests.models.test_golden_events import EXAMPLES, HEAD
from tests.support.runs import as_runs

ids = st.text("abz09._:-", min_size=1, max_size=5)
texts = st.text('a"\\é你🧧\u2028', max_size=5)


@st.composite
def grants(draw: st.DrawFn) -> list[bytes]:
    """Lines of grants or holds of one offer that follow each other."""
    kind = draw(st.sampled_from(["envelope", "coupon", "held", "priced", "waited"]))
    count = draw(st.integers(1, 5))
    quantities = [1 if kind == "envelope" else draw(st.integers(1, 3)) for _ in range(count)]
    left = draw(st.integers(0, 9)) + sum(quantities)
    basket = draw(st.none() | ids) if kind != "waited" else None
    lines = []
    for i, quantity in enumerate(quantities):
        grab, left = f"g{i}", left - quantity
        ticket = draw(st.none() | ids)
        event: dict[str, Any] = {
            "v": 1, "shard": 3, "seq": 41 + i, "offer_seq": 7 + i, "offer": "sale:a", "at": 5_000,
            "command": "c" if kind == "waited" else grab, "grab": grab, "user": draw(ids),
            "quantity": quantity, "amount": draw(st.integers(1, 10**13)) if kind == "envelope" else quantity,
            "asset": "CNY" if kind == "envelope" else "sku:sale:a", "place": 9 + i, "left": left,
            "asked": draw(st.none() | st.just(quantity + 1)), "basket": basket,
            "attributes": draw(st.dictionaries(ids, ids, max_size=2)),
            "metadata": draw(st.none() | st.dictionaries(ids, texts, min_size=1, max_size=2)),
            "ticket": ticket,
            "ticket_ends_at": None if ticket is None else draw(st.none() | st.integers(0, 9)),
            "digest": None if kind == "waited" else draw(st.sampled_from(["plain", "b2$x"])),
        }  # fmt: skip
        if kind in ("envelope", "coupon"):
            codes = tuple(draw(st.lists(ids, max_size=2))) if kind == "coupon" else ()
            lines.append(encode_event(GrabGranted(**event, codes=codes)))
        else:
            money = {"due": 5 * quantity, "currency": "CNY"} if kind == "priced" else {}
            lines.append(encode_event(GrabHeld(**event, **money, deadline_at=6_000, waited=kind == "waited")))
    return lines


@given(grants(), st.integers(1, 5))
def test_a_run_is_read_as_its_single_events(lines: list[bytes], grabs_max: int) -> None:
    runs = as_runs(lines, grabs_max)
    decoded = [decode_line(run) for run in runs]
    assert all(isinstance(run, GrantedRun | HeldRun) for run in decoded)
    assert [encode_event(event) for run in decoded for event in singles(run)] == lines
    assert decoded[-1].last_seq == decode_event(lines[-1]).seq
    moved = [transfer for run in decoded for transfer in transfers_of(run)]
    assert moved == [transfer for line in lines for transfer in transfers_of(decode_event(line))]
    assert [len(transfers_of(run)) for run in decoded] == [run.seqs for run in decoded]
    assert [msgspec.json.encode(run) for run in decoded] == runs


def example(type_: str) -> bytes:
    """The text of a single event."""
    return json.dumps({"type": type_, "v": 1, **HEAD, **EXAMPLES[type_]}).encode()


@given(grants(), st.lists(st.sampled_from(sorted(EXAMPLES.keys() - RUN_TYPES)), max_size=3))
def test_lines_of_all_types_are_read_in_one_list(lines: list[bytes], types: list[str]) -> None:
    block = [*map(example, types), *as_runs(lines)]
    assert decode_lines(b"[" + b",".join(block) + b"]") == [decode_line(line) for line in block]


@pytest.mark.parametrize("type_", RUN_TYPES)
def test_a_grant_or_hold_that_is_not_a_run_is_no_line(type_: str) -> None:
    """The same text is an event of `grab.events`."""
    line = example(type_)
    assert decode_event(line)
    for decode in (lambda: decode_line(line), lambda: decode_lines(b"[" + line + b"]")):
        with pytest.raises(UpcastFailed, match=f"{type_} v1: there is no such version here"):
            decode()


@given(grants())
def test_each_grab_of_a_run_is_a_run_by_itself(lines: list[bytes]) -> None:
    runs = [decode_line(run) for run in as_runs(lines)]
    alone = [run.grab(number) for run in runs if isinstance(run, AnyRun) for number in range(run.seqs)]
    assert [encode_event(event) for run in alone for event in singles(run)] == lines
    assert [decode_line(msgspec.json.encode(run)) for run in alone] == alone


RUN: dict[str, Any] = {
    "type": "grab.granted", "v": 2, "shard": 0, "seq": 1, "offer_seq": 2, "offer": "a", "at": 1,
    "grabs": ["x", "y"], "users": ["u", "v"], "amounts": [1, 2], "asset": "CNY", "place": 1, "left": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"grabs": []}, "at least one grab"),
        ({"users": ["u"]}, "users: 1 values for 2 grabs"),
        ({"users": []}, "users: 0 values for 2 grabs"),
        ({"amounts": [1]}, "amounts: 1 values for 2 grabs"),
        ({"codes": [["c"]]}, "codes: 1 values for 2 grabs"),
        ({"metadata": [{"a": "b"}]}, "metadata: 1 values for 2 grabs"),
        ({"quantities": [1, "2"]}, "Expected `int`"),
        ({"place": None}, "Expected `int`"),
    ],
)
def test_a_run_whose_columns_do_not_fit_is_refused(change: dict[str, Any], problem: str) -> None:
    assert decode_line(json.dumps(RUN).encode())
    line = json.dumps(RUN | change).encode()
    for decode in (lambda: decode_line(line), lambda: decode_lines(b"[" + line + b"]")):
        with pytest.raises(msgspec.ValidationError, match=problem) as refused:
            decode()
        assert not isinstance(refused.value, NewerEvent)


@pytest.mark.parametrize(("type_", "version"), [("grab.granted", 3), ("grab.held", 3), ("grab.queued", 2)])
def test_what_a_newer_release_writes_is_said_to_be_newer(type_: str, version: int) -> None:
    line = json.dumps(RUN | {"type": type_, "v": version}).encode()
    for decode in (lambda: decode_line(line), lambda: decode_lines(b"[" + line + b"]")):
        with pytest.raises(NewerEvent, match=f"{type_} v{version} was written by a newer grabstream"):
            decode()


def test_scripts_readers_and_tables_have_one_bound_of_a_run() -> None:
    assert f"local GRABS_MAX, BYTES_MAX = {RUN_GRABS_MAX}, 131072" in assemble("grab")
    assert (
        f"CHECK (cardinality(users) BETWEEN 1 AND {RUN_GRABS_MAX})"
        in (definition_of("ledger").parts["tables"])
    )
