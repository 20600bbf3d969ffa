"""Entries of the outbox do not divide what was decided together (streams/relaying/blocks.py).

With the bounds of a call, an entry of 1,000 lines or 128 KiB seldom ends within a call: here it has three
lines.
"""

from hashlib import sha1
from typing import Any

import pytest

from grabstream.lua.keys import KeySpace
from grabstream.lua.loader import Script, assemble
from grabstream.models.commands import AnyCommand, Grab, Open, Release
from grabstream.models.offers import CouponTerms, StockTerms
from grabstream.models.runs import decode_line, is_run
from grabstream.streams.relaying.blocks import ENTRY_BYTES_MAX, blocks_of
from grabstream.streams.relaying.ownership import OutboxLine, OwnedShard
from tests.lua.costs.longest_texts import ATTRIBUTES, codes, loads
from tests.support.plain_scripts import use_plain_scripts
from tests.support.shards import NOW, grabs, opening

ENTRY_LINES = 3
#: Of the columns of a run, and of what separates them (lua/includes/runs.lua).
RUN_BYTES_MAX = 131_072 + 1_000


def _with_short_entries(name: str) -> Script:
    text = assemble(name).replace("entry_lines = 1000", f"entry_lines = {ENTRY_LINES}")
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())


def stock(offer: str, **terms: Any) -> Open:
    return Open(id=f"open-{offer}", offer=offer, terms=StockTerms(issuer="i", **terms))


def basket(name: str) -> list[AnyCommand]:
    """Two grabs of two offers, so that they are not a run."""
    return [
        Grab(id=f"{name}-{n}", offer=offer, user=f"{name}-{n}", basket=name)
        for n, offer in enumerate(("o", "o:2"))
    ]


QUEUE = {"total": 9, "hold_ms": 60_000, "waiting_list": True, "max_per_grab": 9}


@pytest.mark.parametrize(
    ("before", "commands", "sizes"),
    [
        (
            [stock("o", total=100), stock("o:2", total=100)],
            [*basket("a"), *basket("b"), *basket("c"), Grab(id="g", offer="o", user="g")],
            [4, 3],
        ),
        (
            [
                stock("o", **QUEUE),
                *(Grab(id=f"h{n}", offer="o", user=f"h{n}", quantity=3) for n in range(3)),
                *(Grab(id=f"w{n}", offer="o", user=f"w{n}", wait=True) for n in range(9)),
            ],
            # What each release serves is a run.
            [Release(id=f"r{n}", offer="o", grab=f"h{n}") for n in range(3)],
            [4, 2],
        ),
        # The grabs of each envelope are a run.
        (
            [opening(offer, 3) for offer in ("o", "o:2", "o:3")],
            [grab for offer in ("o", "o:2", "o:3") for grab in grabs(3, offer)],
            [4, 2],
        ),
    ],
    ids=["baskets", "queue", "drained envelope"],
)
async def test_an_entry_does_not_divide_a_decision(
    client: Any,
    keys: KeySpace,
    make_gate: Any,
    monkeypatch: pytest.MonkeyPatch,
    before: list[AnyCommand],
    commands: list[AnyCommand],
    sizes: list[int],
) -> None:
    gate = make_gate()
    await gate.decide(before, "decided")
    outbox = keys.shard(keys.shard_of_offer("o")).outbox
    await client.xtrim(outbox, maxlen=0)
    monkeypatch.setattr("grabstream.lua.loader.load", _with_short_entries)
    use_plain_scripts(monkeypatch)
    answers = await gate.decide(commands, "decided")
    assert all(answer.positive for answer in answers)
    entries = await client.eval("return redis.call('XRANGE', KEYS[1], '-', '+')", 1, outbox)
    assert [len(fields) // 2 for _, fields in entries] == sizes


async def read_entries(client: Any, keys: KeySpace, after_seq: int = 0) -> list[list[OutboxLine]]:
    """The entries of the outbox of offer `o` after a seq, read as the shard's relay does."""
    shard = OwnedShard(client, keys.shard(keys.shard_of_offer("o")))
    ownership = (await shard.raise_term(0)).ownership
    entries: list[list[OutboxLine]] = []
    while read := (await shard.read_outbox(ownership, after_seq)).entries:
        entries += read
        after_seq += sum(seqs for entry in read for _, seqs in entry)
    return entries


async def test_the_relay_reads_where_entries_end(client: Any, keys: KeySpace, make_gate: Any) -> None:
    gate = make_gate()
    of_both = [stock("o", total=100), stock("o:2", total=100)]
    for commands in (of_both, basket("a"), [*basket("b"), *basket("c")]):
        await gate.decide(commands, "decided")
    entries = await read_entries(client, keys)
    assert list(map(len, entries)) == [2, 2, 4]
    # For an entry whose first events another program journaled, the rest keeps its end.
    assert await read_entries(client, keys, 3) == [entries[1][1:], entries[2]]
    assert await read_entries(client, keys, 4) == entries[2:]
    assert await read_entries(client, keys, 8) == []


async def test_a_seq_within_a_run_is_a_hole(client: Any, keys: KeySpace, make_gate: Any) -> None:
    gate = make_gate()
    await gate.decide([stock("o", total=100)], "decided")
    await gate.decide([Grab(id=f"g{n}", offer="o", user=f"u{n}") for n in range(5)], "decided")
    await gate.decide([Grab(id="g", offer="o", user="g")], "decided")
    [_, [(run, seqs)], last] = await read_entries(client, keys)
    assert (decode_line(run).seqs, seqs, len(last)) == (5, 5, 1)
    assert await read_entries(client, keys, 6) == [last]
    assert [await read_entries(client, keys, seq) for seq in (2, 5)] == [[], []]


async def test_a_record_does_not_divide_baskets_that_look_alike(
    client: Any, keys: KeySpace, make_gate: Any
) -> None:
    """The shard's clock stands still, as on a promoted server with an earlier clock, and all baskets have one
    name.
    """
    gate = make_gate(now=[NOW])
    # Grabs of two offers in turn are not runs.
    offers = ("o", "o:2")
    await gate.decide([stock(offer, total=10**6) for offer in offers], "decided")
    singles = [Grab(id=f"g{n}", offer=offers[n % 2], user=f"u{n}") for n in range(904)]
    for at in range(0, len(singles), 452):
        await gate.decide(singles[at : at + 452], "decided")
    for number in range(20):
        cart = [
            Grab(id=f"{number}.{n}", offer=offers[n % 2], user=f"{number}.{n}", basket="cart")
            for n in range(10)
        ]
        assert {answer.outcome for answer in await gate.decide(cart, "decided")} == {"granted"}
    entries = await read_entries(client, keys)
    blocks = blocks_of(entries, 1_000)
    assert [line for block in blocks for line in block] == [line for entry in entries for line in entry]
    assert list(map(len, blocks)) == [996, 110]


async def test_the_longest_entry(client: Any, keys: KeySpace, make_gate: Any) -> None:
    """Grabs of up to 128 KiB, and a basket with the most codes, which are the longest."""
    gate = make_gate()
    terms = CouponTerms(issuer="i", total=100, codes=True, max_per_grab=100)
    await gate.decide([Open(id="open-codes", offer="o:codes", terms=terms)], "decided")
    await gate.decide([stock("o", total=10**6)], "decided")
    for load in loads("o:codes", "codes", codes(100)):
        await gate.decide([load], "decided")
    single = [Grab(id=f"g{n}", offer="o", user=f"u{n}", attributes=ATTRIBUTES) for n in range(90)]
    cart = [
        Grab(
            id=f"b{n}", offer="o:codes" if n else "o", user=f"b{n}", basket="b", attributes=ATTRIBUTES,
            quantity=92 if n == 9 else 1,
        )
        for n in range(10)
    ]  # fmt: skip
    answers = await gate.decide([*single, *cart], "decided")
    assert {answer.outcome for answer in answers} == {"granted"}
    longest = max(sum(len(text) for text, _ in entry) for entry in await read_entries(client, keys))
    assert 150_000 < longest < ENTRY_BYTES_MAX // 4


async def test_a_run_ends_before_its_line_is_long(client: Any, keys: KeySpace, make_gate: Any) -> None:
    gate = make_gate()
    terms = CouponTerms(issuer="i", total=150, codes=True, max_per_grab=100)
    await gate.decide([Open(id="open-codes", offer="o:codes", terms=terms)], "decided")
    for load in loads("o:codes", "codes", codes(150)):
        await gate.decide([load], "decided")
    crowd = [Grab(id=f"g{n}", offer="o:codes", user=f"u{n}", quantity=q) for n, q in enumerate((50, 50, 50))]
    assert {answer.outcome for answer in await gate.decide(crowd, "decided")} == {"granted"}
    lines = [text for entry in await read_entries(client, keys) for text, _ in entry if is_run(text)]
    assert [decode_line(text).seqs for text in lines] == [2, 1]
    assert 60_000 < max(map(len, lines)) <= RUN_BYTES_MAX < sum(map(len, lines))
