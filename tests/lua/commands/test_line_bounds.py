"""No accepted command makes an event line above its bound: commands at all their bounds together, on real Lua
and by the rules.

A command above a bound is `invalid`, its message names the bound, and it changes nothing. The other commands
of its list are executed.
"""

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from hashlib import sha1
from typing import Any, NamedTuple

import pytest
import redis.asyncio
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from grabstream.lua.keys import KeySpace
from grabstream.lua.loader import Script, assemble, load
from grabstream.models import bounds
from grabstream.models.bounds import (
    BASKET_GRABS_KNOWN_MAX,
    BASKET_GRABS_MAX,
    CODES_PER_GRAB_MAX,
    COMMAND_BYTES_MAX,
    EVENT_LINE_BYTES_MAX,
    HOURS_SPANS_MAX,
    RECORD_BYTES_MAX,
)
from grabstream.models.commands import (
    ATTRIBUTES_MAX,
    ITEMS_MAX,
    METADATA_BYTES_MAX,
    TRANSFERS_MAX,
    Adjust,
    Amend,
    AnyCommand,
    Confirm,
    Grab,
    Load,
    Open,
    Return,
    check,
    encode_command,
    encode_metadata,
    in_chunks,
)
from grabstream.models.entries import Entry
from grabstream.models.money import AMOUNT_MAX, Invalid
from grabstream.models.offers import (
    HOURS_MAX,
    LIMITS_MAX,
    LINE_LENGTH_MAX,
    TIME_MS_MAX,
    Changes,
    CouponTerms,
    EnvelopeTerms,
    Hours,
    Limit,
    StockTerms,
)
from grabstream.models.rules import settling
from grabstream.settings import Settings
from grabstream.streams.relaying.blocks import BLOCK_BYTES_MAX, blocks_of
from tests.conftest import examples
from tests.lua.histories.scene import HOUR, Scene, coupon, stock
from tests.support.plain_scripts import use_plain_scripts
from tests.support.shards import NOW

#: Number of partial payments of one grab: the event of its return has them all.
PAYMENTS = 100
#: Zones whose offset changes often: the event of an opening has all these offsets.
ZONES = ("UTC", "Africa/Casablanca", "Europe/Berlin", "Australia/Lord_Howe", "Asia/Gaza")


class Sizes(NamedTuple):
    """Sizes of everything that has a bound."""

    ids: int
    text: str
    text_length: int
    code_length: int
    codes: int
    attributes: int
    limits: int
    spans: int
    zone: str
    payments: int
    transfers: int
    metadata: int


LARGEST = Sizes(
    64, "\\", LINE_LENGTH_MAX, LINE_LENGTH_MAX, CODES_PER_GRAB_MAX, ATTRIBUTES_MAX, LIMITS_MAX,
    HOURS_SPANS_MAX, ZONES[1],
    PAYMENTS - 1, TRANSFERS_MAX, METADATA_BYTES_MAX,
)  # fmt: skip


def near(most: int, least: int = 1) -> st.SearchStrategy[int]:
    """Numbers from `least` to `most`, often at the bounds."""
    return st.one_of(st.sampled_from((least, most - 1, most)), st.integers(least, most))


sizes = st.builds(
    Sizes, near(64, 20), st.sampled_from(("\\", '"', "x", "é", "中", "🧧", "\u200f")),
    near(LINE_LENGTH_MAX, 0), near(LINE_LENGTH_MAX, 8),
    near(CODES_PER_GRAB_MAX), near(ATTRIBUTES_MAX), near(LIMITS_MAX), near(HOURS_SPANS_MAX),
    st.sampled_from(ZONES),
    near(PAYMENTS - 1), near(TRANSFERS_MAX), near(METADATA_BYTES_MAX, 8),
)  # fmt: skip


def at_bounds(size: Sizes) -> list[list[AnyCommand]]:
    """Lists, to be sent in this order, of all commands that can be large, with these sizes."""
    numbers = iter(range(10**6))

    def id() -> str:
        return f"c{next(numbers)}-".ljust(size.ids, "x")

    def text(most: int = LINE_LENGTH_MAX) -> str:
        return (size.text * size.text_length)[:most]

    coupons, sale, money = (name.ljust(size.ids, "x") for name in ("c", "s", "e"))
    names = [f"a{n}".ljust(size.ids, "y") for n in range(size.attributes)]
    limits = tuple(Limit(name, "offer", AMOUNT_MAX) for name in names[: size.limits])
    spans = [(n // 10, n % 10) for n in range(size.spans)]
    days = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
    hours = tuple(Hours((days[day],), f"{2 * part:02}:00", f"{2 * part + 1:02}:59") for day, part in spans)[
        :HOURS_MAX
    ]
    codes = tuple(
        # No code ends with a blank, as which U+2028 counts.
        f"{n:05}" + (size.text * size.code_length)[: size.code_length - 6] + "!"
        for n in range(3 * size.codes)
    )
    common: dict[str, Any] = {
        "issuer": id(),
        "title": text(),
        "timezone": size.zone,
        "limits": limits,
        "retire_after_ms": TIME_MS_MAX,
    }
    attributes = {name: name for name in names}
    of_text = len(encode_metadata({"a": size.text})) - len(encode_metadata({"a": ""}))
    metadata = {"a": size.text * ((size.metadata - len(encode_metadata({"a": ""}))) // of_text)}
    chunks = in_chunks("codes", codes)
    users = in_chunks("audience", [f"u{n}".ljust(64, "u") for n in range(ITEMS_MAX + 1)])
    opening: list[AnyCommand] = [
        Open(
            id=id(), offer=coupons, operator=id(),
            terms=CouponTerms(total=len(codes), codes=True, max_per_grab=size.codes, hours=hours,
            valid_until=TIME_MS_MAX, **common),
        ),
        Open(id=id(), offer="l".ljust(size.ids, "x"), operator=id(),
        terms=coupon(9, audience="list", opens_at=NOW + HOUR)),
        Open(
            id=id(), offer=sale, operator=id(),
            terms=StockTerms(
                total=AMOUNT_MAX, max_per_grab=1_000, price=10**10, currency="CNY", hold_ms=HOUR,
                late="grace", grace_ms=HOUR,
                extensions=999, waiting_list=True, return_restores=True, asset="sku:" + "x" * size.ids,
                **common,
            ),
        ),
        Open(
            id=id(), offer=money, operator=id(),
            terms=EnvelopeTerms(
                issuer=id(), title=text(), funding=id(), asset="CNY", total=AMOUNT_MAX, parts=20,
                law="bounded", max=AMOUNT_MAX,
                seed="ab" * 64, hours=hours, timezone=size.zone,
            ),
        ),
    ]  # fmt: skip
    loads: list[AnyCommand] = [
        Load(id=id(), offer=coupons, operator=id(), what="codes", chunk=n, chunks=len(chunks), items=items)
        for n, items in enumerate(chunks, 1)
    ]
    loads += [
        Load(
            id=id(),
            offer=opening[1].offer,
            operator=id(),
            what="audience",
            chunk=n,
            chunks=len(users),
            items=items,
        )
        for n, items in enumerate(users, 1)
    ]
    takers: list[AnyCommand] = [
        Grab(
            id=id(),
            offer=coupons,
            user=id(),
            quantity=size.codes,
            attributes=attributes,
            metadata=metadata,
            basket=name * size.ids,
        )
        for name in "ab"
    ]
    held = Grab(id=id(), offer=sale, user=id(), quantity=1_000, attributes=attributes, metadata=metadata)
    payments: list[AnyCommand] = [
        Confirm(id=id(), offer=sale, grab=held.id, payment=id(), paid=10**10, currency="CNY", quantity=1)
        for _ in range(size.payments)
    ]
    transfers = tuple(
        Entry(
            "sku:" + "x" * 64,
            "issuer:" + f"i{n}".ljust(size.ids, "i"),
            "wallet:" + f"w{n}".ljust(size.ids, "w"),
            AMOUNT_MAX,
        )
        for n in range(size.transfers)
    )
    changed = Changes(
        title=text(), total=AMOUNT_MAX, limits=limits, max_per_grab=999, price=10**10, hold_ms=HOUR,
        extensions=999, late="grace",
        grace_ms=HOUR, return_restores=True, valid_until=TIME_MS_MAX,
    )  # fmt: skip
    return [
        opening, loads, takers, [held], payments,
        [
            Confirm(id=id(), offer=sale, grab=held.id, payment=id(), paid=(1_000 - size.payments) * 10**10,
            currency="CNY"),
            Return(id=id(), offer=sale, grab=held.id, reason=text()),
            Return(id=id(), offer=coupons, grab=takers[0].id, reason=text()),
            Adjust(id=id(), offer=money, operator=id(), transfers=transfers, reason=text() or "-",
            approved_by=id()),
            Amend(id=id(), offer=sale, operator=id(), changes=changed),
            Grab(id=id(), offer=money, user=id(), attributes=attributes, metadata=metadata),
        ],
    ]  # fmt: skip


async def play(connect: Any, lists: Sequence[Sequence[AnyCommand]]) -> tuple[Counter[str], list[bytes]]:
    """Decides the lists by Lua and by the rules; returns counts of `<command> <outcome>`, and event lines."""
    scene = Scene()
    await scene.begin(connect, KeySpace(f"lines{secrets.token_hex(5)}", 2))
    outcomes: Counter[str] = Counter()
    try:
        for commands in lists:
            for command in commands:
                assert len(encode_command(command)) <= COMMAND_BYTES_MAX
            answers = await scene.decide_both(commands)
            outcomes.update(
                f"{type(c).__name__.lower()} {a.outcome}" for c, a in zip(commands, answers, strict=True)
            )
        lines = await scene.all_lines()
    finally:
        await scene.end_twins()
    return outcomes, lines


def check_lines(lines: Sequence[bytes]) -> None:
    assert max(map(len, lines)) <= EVENT_LINE_BYTES_MAX
    for block in blocks_of([[(line, 1)] for line in lines], 1_000):
        assert len(b"\n".join(text for text, _ in block)) <= BLOCK_BYTES_MAX < RECORD_BYTES_MAX


@pytest.mark.timeout(600)
@hypothesis_settings(max_examples=examples(25), deadline=None)
@given(size=sizes)
@example(size=LARGEST)
@example(size=LARGEST._replace(text="🧧"))
@pytest.mark.every_change("every event fits into a record")
def test_no_accepted_command_makes_a_line_above_its_bound(servers: Settings, size: Sizes) -> None:
    async def run() -> None:
        client = redis.asyncio.Redis.from_url(servers.redis_url)
        try:
            outcomes, lines = await play(client, at_bounds(size))
        finally:
            await client.aclose()
        check_lines(lines)
        if size == LARGEST:
            assert max(map(len, lines)) > EVENT_LINE_BYTES_MAX // 3
            # The commands of the largest sizes were executed, so the test checks their lines.
            assert outcomes["confirm confirmed"] == PAYMENTS
            assert {name for name in outcomes if name.split()[1] not in POSITIVE} <= {"grab not_open_yet"}

    asyncio.run(run())


POSITIVE = ("opened", "loaded", "granted", "held", "confirmed", "returned", "adjusted", "amended")


async def test_codes_of_a_grab_are_bounded_by_open_amend_and_load(scene: Scene) -> None:
    """Codes can be loaded even if the terms do not ask for them, and `max_per_grab` amended before that."""
    above = CODES_PER_GRAB_MAX + 1
    with pytest.raises(Invalid, match=r"max_per_grab: at most 100"):
        check(Open(id="o", offer="o", terms=coupon(above, codes=True, max_per_grab=above)))
    await scene.open(coupon(above, codes=True, max_per_grab=1), "awaits")
    refused = await scene.amend(max_per_grab=above)
    assert (refused.outcome, refused.message) == (
        "invalid",
        "changes.max_per_grab: at most 100 where grabs get codes",
    )
    await scene.open(coupon(above, opens_at=NOW + 5, max_per_grab=above), "may-get")
    load: dict[str, Any] = {
        "what": "codes",
        "chunk": 1,
        "chunks": 1,
        "items": tuple(f"code{n}" for n in range(above)),
    }
    refused = await scene.do(Load, **load)
    assert (refused.outcome, refused.message) == (
        "invalid",
        "what: max_per_grab must be at most 100 where grabs get codes",
    )
    assert (await scene.amend(max_per_grab=CODES_PER_GRAB_MAX)).outcome == "amended"
    assert (await scene.do(Load, **load)).outcome == "loaded"
    assert (await scene.amend(max_per_grab=above)).outcome == "invalid"
    scene.now = NOW + 5
    assert (await scene.grab("ann", CODES_PER_GRAB_MAX)).outcome == "granted"


@pytest.mark.parametrize("text", ["x", '"', "🧧"])
def test_in_chunks_makes_chunks_that_load_accepts(text: str) -> None:
    for length, count in ((8, 2_500), (200, 3_000), (120, 2_500)):
        codes = [f"{n:05}" + text * (length - 5) for n in range(count)]
        chunks = in_chunks("codes", codes)
        assert [code for chunk in chunks for code in chunk] == codes
        for chunk in chunks:
            check(
                Load(
                    id="x" * 64,
                    offer="y" * 64,
                    operator="z" * 64,
                    what="codes",
                    chunk=1,
                    chunks=10**5,
                    items=chunk,
                )
            )
    assert [len(chunk) for chunk in in_chunks("codes", [f"{n:012}" for n in range(2_500)])] == [
        1_000,
        1_000,
        500,
    ]
    with pytest.raises(Invalid, match="load fewer at once"):
        check(
            Load(
                id="x",
                offer="y",
                what="codes",
                chunk=1,
                chunks=1,
                items=tuple(f"{n:05}" + text * 195 for n in range(ITEMS_MAX)),
            )
        )


def test_spans_of_hours_are_bounded_however_they_are_written() -> None:
    day = ("mon",) * 900_000
    with pytest.raises(Invalid, match="each once"):
        check(Open(id="i", offer="o", terms=stock(1, hours=(Hours(weekdays=day),))))  # type: ignore[arg-type]
    each = tuple(
        Hours(from_=f"{n // 60:02}:{n % 60:02}", until=f"{n // 60:02}:{n % 60 + 1:02}")
        for n in range(0, 20, 2)
    )
    with pytest.raises(Invalid, match=f"at most {HOURS_SPANS_MAX} spans in a week, these make 70"):
        check(Open(id="i", offer="o", terms=stock(1, hours=each)))
    touching = tuple(
        Hours(from_=f"{n // 60:02}:{n % 60:02}", until=f"{n // 60:02}:{n % 60 + 1:02}") for n in range(50)
    )
    check(Open(id="i", offer="o", terms=stock(1, hours=touching)))


async def test_a_basket_is_bounded_and_an_earlier_larger_basket_keeps_its_answer(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier releases accepted larger baskets; their repeats get the first answer, whatever the bound is."""

    def basket(name: str, count: int) -> list[AnyCommand]:
        return [Grab(id=f"{name}{n}", offer=f"b:{n % 3}", user=f"u{n}", basket=name) for n in range(count)]

    for n in range(3):
        await scene.open(stock(100), f"b:{n}")
    assert {answer.outcome for answer in await scene.decide_both(basket("x", BASKET_GRABS_MAX))} == {
        "granted"
    }
    for count in (BASKET_GRABS_MAX + 1, BASKET_GRABS_KNOWN_MAX):
        answers = await scene.decide_both(basket("y", count))
        assert {answer.outcome for answer in answers} == {"invalid"}
        assert f"at most {BASKET_GRABS_MAX} grabs" in (answers[0].message or "")
    [answer, *_] = await scene.gate.decide(basket("z", BASKET_GRABS_KNOWN_MAX + 1), "decided")
    assert (answer.outcome, f"at most {BASKET_GRABS_MAX} grabs" in (answer.message or "")) == (
        "invalid",
        True,
    )
    with monkeypatch.context() as patch:
        patch.setattr("grabstream.models.rules.grabbing.BASKET_GRABS_MAX", BASKET_GRABS_KNOWN_MAX)
        patch.setattr("grabstream.lua.loader.load", lambda name: _with_larger_baskets(name))
        use_plain_scripts(patch)
        assert {
            answer.outcome for answer in await scene.decide_both(basket("y", BASKET_GRABS_KNOWN_MAX))
        } == {"granted"}
    repeats = await scene.decide_both(basket("y", BASKET_GRABS_KNOWN_MAX))
    assert {(answer.outcome, answer.repeated) for answer in repeats} == {("granted", True)}


def _with_larger_baskets(name: str) -> Script:
    text = assemble(name).replace(
        f"basket_grabs = {BASKET_GRABS_MAX}", f"basket_grabs = {BASKET_GRABS_KNOWN_MAX}"
    )
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())


@pytest.mark.long
async def test_refusals_of_unknown_offers_are_counted_as_one_offer(scene: Scene) -> None:
    """Otherwise a sender of invented ids could fill a hash in Redis and a table in PostgreSQL."""
    for number in range(300):
        assert (await scene.do(Grab, offer=f"invented{number}", user="ann")).outcome == "no_such_offer"
    fields = [
        name
        for number in range(scene.keys.shards)
        for name in await scene.client.hkeys(scene.keys.shard(number).demand)
    ]
    assert {field.split(b":", 1)[1] for field in fields} == {b"24:*"}
    assert len(fields) <= scene.keys.shards


def test_the_scripts_have_the_bounds_of_the_models() -> None:
    text = load("grab").text
    in_lua = dict(re.findall(r"(\w+) = (\d+)", re.search(r"local BOUNDS = \{(.*?)\n\}", text, re.DOTALL)[1]))  # type: ignore[index]
    assert (int(in_lua["event_line_bytes"]), int(in_lua["codes_per_grab"])) == (
        EVENT_LINE_BYTES_MAX,
        CODES_PER_GRAB_MAX,
    )
    assert int(in_lua["basket_grabs"]) == BASKET_GRABS_MAX
    assert f"at most {bounds.CODES_PER_GRAB_MAX} where" in text
    text = load("confirm").text
    assert f"local PAYMENTS_MAX = {settling.PAYMENTS_MAX}\n" in text
    assert f"local COUNTED_MAX = {settling.COUNTED_MAX}\n" in text
