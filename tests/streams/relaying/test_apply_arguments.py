"""Plain grabs of an envelope are applied in columns; all others one by one."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from grabstream.models.events import AnyEvent, GrabGranted, OfferPaused
from grabstream.models.runs import AnyLine, GrantedRun, singles
from grabstream.streams.relaying.apply_arguments import (
    PARTS_MAX,
    Applicable,
    PlainGrabs,
    in_columns,
    last_seq,
)

RARE: tuple[dict[str, Any], ...] = (
    {"asked": (2,)}, {"attributes": ({"card": "7"},)}, {"tickets": (("t", None),)}, {"digests": ("d",)},
    {"metadata": ({"form_id": "f"},)}, {"codes": (("c",),)}, {"basket": "b"}, {"quantities": (1,)},
)  # fmt: skip


def run(seq: int, at: int, offer: str, count: int, rare: dict[str, Any], amounts: bool) -> GrantedRun:
    grabs = tuple(f"g{n}" for n in range(seq, seq + count))
    columns = {
        name: value * count if isinstance(value, tuple) and name != "basket" else value
        for name, value in rare.items()
    }
    return GrantedRun(
        v=2, shard=0, seq=seq, offer_seq=seq + 5, offer=offer, at=at, grabs=grabs,
        users=tuple(f"u{grab}" for grab in grabs), amounts=tuple(range(1, count + 1)) if amounts else (),
        asset="CNY", place=seq + 1, left=1_000 - count, **columns,
    )  # fmt: skip


def pause(seq: int, at: int, offer: str) -> OfferPaused:
    return OfferPaused(v=1, shard=0, seq=seq, offer_seq=seq, offer=offer, at=at, command="p", digest="d")


@st.composite
def histories(draw: st.DrawFn) -> list[AnyLine]:
    """Lines one after the other; now and then with a gap, as where only some offers are read."""
    seq, lines = 1, []
    for at in range(draw(st.integers(1, 12))):
        offer = draw(st.sampled_from("aab"))
        if draw(st.integers(0, 5)) == 0:
            lines.append(pause(seq, at, offer))
            seq += 1
            continue
        count = draw(st.sampled_from([1, 1, 2, 3, PARTS_MAX - 1, PARTS_MAX, PARTS_MAX + 1, 300]))
        rare = draw(st.sampled_from([{}, {}, {}, *RARE]))
        lines.append(run(seq, at, offer, count, rare, draw(st.integers(0, 4)) > 0))
        seq += count + draw(st.sampled_from([0, 0, 0, 2]))
    return lines


def in_singles(events: Sequence[Applicable]) -> list[AnyEvent]:
    """What the script makes of columns, as single events; without what columns leave out."""
    found: list[AnyEvent] = []
    for event in events:
        if not isinstance(event, PlainGrabs):
            found.append(event)
            continue
        times = [at for at, count in event.times for _ in range(count)]
        assert (event.at, event.last_seq) == (times[-1], event.seq + len(event.grabs) - 1)
        for i, (at, grab, user, amount) in enumerate(
            zip(times, event.grabs, event.users, event.amounts, strict=True)
        ):
            found.append(
                GrabGranted(
                    v=1,
                    shard=0,
                    seq=event.seq + i,
                    offer_seq=event.offer_seq + i,
                    offer=event.offer,
                    at=at,
                    command=grab,
                    grab=grab,
                    user=user,
                    quantity=1,
                    amount=amount,
                    asset="CNY",
                    place=event.place + i,
                    left=0,
                    digest="plain",
                )
            )
    return found


@given(histories(), st.integers(0, 400))
def test_columns_stand_for_the_same_events(lines: list[AnyLine], after: int) -> None:
    events = in_columns(lines, after)
    expected = [event for line in lines for event in singles(line) if event.seq > after]
    assert [one.seq for one in in_singles(events)] == [one.seq for one in expected]
    for one, of_line in zip(in_singles(events), expected, strict=True):
        if isinstance(of_line, GrabGranted) and one.left == 0:  # type: ignore[union-attr]
            of_line = GrabGranted(
                **{name: getattr(of_line, name) for name in one.__struct_fields__} | {"left": 0}
            )
        assert one == of_line
    for event in events:
        if isinstance(event, PlainGrabs):
            assert 1 <= len(event.grabs) <= PARTS_MAX
            assert last_seq(event) == event.last_seq


def test_columns_hold_what_follows_each_other_in_one_envelope() -> None:
    lines = [run(1, 7, "a", 2, {}, True), run(3, 7, "a", 1, {}, True), run(4, 9, "b", 1, {}, True)]
    first, second = in_columns(lines, 1)
    assert isinstance(first, PlainGrabs)
    assert (first.seq, first.times, first.grabs, first.place) == (2, [(7, 1), (7, 1)], ["g2", "g3"], 3)
    assert isinstance(second, PlainGrabs)
    assert (second.offer, second.seq) == ("b", 4)
