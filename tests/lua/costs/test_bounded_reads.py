"""What a call reads from Redis is bounded in bytes, for offers of every kind and whatever is sent about them:
a read that many commands share must not be one of many large records.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from grabstream.models.bounds import CALL_READ_BYTES_MAX
from grabstream.models.commands import (
    Adjust,
    Amend,
    AnyCommand,
    Close,
    Confirm,
    Grab,
    Open,
    Pause,
    Release,
    Resume,
    Return,
)
from grabstream.models.offers import Changes, CouponTerms, EnvelopeTerms, Limit, StockTerms, Terms
from tests.conftest import examples
from tests.lua.costs import bytes_read
from tests.lua.costs.bytes_read import ReadBytes, counting_bytes
from tests.lua.costs.longest_texts import ATTRIBUTES, ENTRIES, METADATA, codes, loads
from tests.lua.costs.measured_shard import MeasuredShard
from tests.lua.histories.recovered import fold
from tests.support.shards import SEALER, event_lines

#: Records that are read together with others are not longer than what is read ahead of confirmations.
SHARED_BYTES_MAX: Final = 32_768
HOUR: Final = 3_600_000
YEAR: Final = 366 * 24 * HOUR
LIMITS: Final = tuple(
    Limit(by, per, 10**6)  # type: ignore[arg-type]
    for by in list(ATTRIBUTES)[:2] for per in ("offer", "hour", "day", "week")
)  # fmt: skip
#: So many grabs of a hundred codes, whose answers and records are longer than any others.
WITH_CODES: Final = 17


def check_bounded(calls: Sequence[ReadBytes]) -> None:
    for counter in ("bytes", "shared"):
        assert any(getattr(call, counter) for call in calls), f"{counter}: the counter counts nothing"
    assert max(call.bytes for call in calls) <= CALL_READ_BYTES_MAX, max(calls, key=lambda call: call.bytes)
    assert max(call.shared for call in calls) <= SHARED_BYTES_MAX, max(calls, key=lambda call: call.shared)


@pytest.mark.parametrize("dead", ["bytes = bytes + read", "shared = math.max(shared, texts_of(reply[i]))"])
async def test_a_counter_that_counts_nothing_is_noticed(
    system: MeasuredShard, monkeypatch: pytest.MonkeyPatch, dead: str
) -> None:
    grabs = [Grab(id=f"g{number}", offer="o", user="ann") for number in range(9)]
    await system.decide([Open(id="o", offer="o", terms=StockTerms(issuer="i", total=9)), *grabs])
    await system.decide(grabs)
    with counting_bytes(system) as calls:
        await system.decide(grabs)
    check_bounded(calls)
    assert dead in bytes_read._COUNTING
    monkeypatch.setattr(bytes_read, "_COUNTING", bytes_read._COUNTING.replace(dead, ""))
    monkeypatch.setattr(bytes_read, "counting", bytes_read.counting.__wrapped__)
    with counting_bytes(system) as calls:
        await system.decide(grabs)
    with pytest.raises(AssertionError, match="the counter counts nothing"):
        check_bounded(calls)


def named(kind: str, number: int) -> str:
    return f"{kind}{number}".ljust(64, "x")


async def test_confirmations_under_ids_whose_answers_have_codes_are_read_one_by_one(
    system: MeasuredShard,
) -> None:
    """The codes are of another offer of the campaign."""
    with_codes = CouponTerms(issuer="i", total=100 * WITH_CODES, codes=True, max_per_grab=100, hold_ms=YEAR)
    held = StockTerms(issuer="i", total=100, hold_ms=YEAR)
    await system.decide(
        [Open(id="c", offer="c:codes", terms=with_codes), *loads("c:codes", "codes", codes(100 * WITH_CODES))]
    )
    await system.decide([Open(id="h", offer="c:held", terms=held)])
    grabs = [f"g{number}" for number in range(WITH_CODES)]
    await system.decide([Grab(id=grab, offer="c:codes", user=grab, quantity=100) for grab in grabs])
    await system.decide([Grab(id=grab, offer="c:held", user=grab) for grab in grabs])
    confirmed = await system.decide([Confirm(id=grab, offer="c:codes", grab=grab) for grab in grabs])
    assert {answer.outcome for answer in confirmed} == {"confirmed"}
    with counting_bytes(system) as calls:
        refused = await system.decide([Confirm(id=grab, offer="c:held", grab=grab) for grab in grabs])
    assert {answer.outcome for answer in refused} == {"conflict"}
    check_bounded(calls)


@pytest.mark.long
async def test_confirmations_of_grabs_with_long_records_are_read_one_by_one(system: MeasuredShard) -> None:
    """Units that were paid late, one in each hour, count in a hundred windows."""
    terms = StockTerms(
        issuer="i",
        total=10**6,
        hold_ms=1,
        late="retake",
        max_per_grab=200,
        limits=LIMITS,
        closes_at=system.now + YEAR,
    )
    grabs = [f"g{number}" for number in range(20)]
    await system.decide([Open(id="o", offer="o", terms=terms)])
    await system.decide(
        [Grab(id=grab, offer="o", user=grab, quantity=200, attributes=ATTRIBUTES) for grab in grabs]
    )
    for hour in range(99):
        system.now += HOUR
        answers = await system.decide(
            [Confirm(id=f"{grab}-{hour}", offer="o", grab=grab, quantity=1) for grab in grabs]
        )
        assert {answer.outcome for answer in answers} == {"confirmed"}
    assert await system.redis.hstrlen(system.keys.offer("o") + "/grabs", "g0") > 100_000
    with counting_bytes(system) as calls:
        answers = await system.decide([Confirm(id=f"{grab}-", offer="o", grab=grab) for grab in grabs])
    assert {answer.outcome for answer in answers} == {"confirmed"}
    check_bounded(calls)


# -- whatever is sent ----------------------------------------------------------------------------------------

HELD: Final[dict[str, Any]] = {"hold_ms": HOUR, "late": "retake", "extensions": 9}
#: The offers of one campaign, and one of another. All but the envelope have the longest answers or records.
OFFERS: Final[dict[str, Terms]] = {
    "c:envelope": EnvelopeTerms(issuer="i", funding="f", asset="CNY", total=10**6, parts=1_000),
    "c:codes": CouponTerms(issuer="i", total=400, codes=True, max_per_grab=100),
    # Codes that the terms do not ask for are loaded too, before it opens.
    "c:loaded": CouponTerms(issuer="i", total=400, max_per_grab=100, **HELD),
    "c:waiting": StockTerms(issuer="i", total=20, max_per_grab=10, limits=LIMITS, waiting_list=True, **HELD),
    "c:limits": StockTerms(issuer="i", total=10**6, max_per_grab=100, limits=LIMITS, **HELD),
    "d": StockTerms(issuer="i", total=10**6, max_per_grab=100),
}


def steps(draw: random.Random) -> Iterator[dict[str, Any]]:
    """Steps of a `Sender`."""
    for _ in range(20):
        kind = draw.choices(("grab", "settle", "operate", "pass"), (7, 8, 2, 1))[0]
        # The earlier list whose ids are sent again, about this offer or (None) about that of the list.
        lists = {"offer": draw.choice((None, None, None, *OFFERS)), "again": draw.choice((None, *range(8)))}
        if kind == "grab":
            plain = {"quantity": 1, "is_rich": False, "wait": False, "is_basket": False}
            other = {
                "quantity": draw.choice((1, 10, 100)), "is_rich": draw.random() < 0.7,
                "wait": draw.random() < 0.7, "is_basket": draw.random() < 0.3,
            }  # fmt: skip
            count, users = draw.choice((17, 17, 120, 600)), draw.choice("uuv")
            yield {"does": kind, **lists, "count": count, "users": users, **draw.choice((plain, other))}
        elif kind == "settle":
            kind = draw.choice((Confirm, Confirm, Confirm, Release, Return))
            yield {"does": kind, **lists, "count": draw.choice((17, 120))}
        elif kind == "operate":
            yield {"does": draw.choice((Adjust, Amend, Pause, Resume, Close)), **lists, "count": 17}
        else:
            yield {"does": "pass", "ms": draw.choice((1, HOUR, HOUR, 8 * 24 * HOUR))}


class Sender:
    """Sends lists of commands: under new ids, or under those of an earlier list."""

    def __init__(self, system: MeasuredShard) -> None:
        self._system = system
        self._lists: list[tuple[str, list[str]]] = []
        #: For each offer.
        self._grabs: dict[str, list[str]] = {name: [] for name in OFFERS}

    async def open(self) -> None:
        opens_at = self._system.now + 1_000
        for name, terms in OFFERS.items():
            later = {} if name != "c:loaded" else {"opens_at": opens_at}
            await self._system.decide([Open(id=f"open-{name}", offer=name, terms=_with(terms, **later))])
            if isinstance(terms, CouponTerms):
                await self._system.decide(loads(name, "codes", codes(terms.total)))
        self._system.now = opens_at
        for name, quantity in (("c:loaded", 100), ("c:codes", 100), ("c:limits", 1), ("c:waiting", 10)):
            await self._grab(name, None, 17, quantity, OFFERS[name].limits == LIMITS, True, "u", False)
        await self._about(Confirm, "c:loaded", None, 17)
        state = await self._system.redis.hmget(self._system.keys.offer("c:loaded"), ["held", "units_left"])
        assert state == [b"0", b"0"]
        assert await self._system.redis.zcard(self._system.keys.offer("c:waiting") + "/queue") == 15

    async def step(self, does: Any, **drawn: Any) -> None:
        if does == "pass":
            self._system.now += drawn["ms"]
            await self._system.sweeper.sweep(self._system.now)
            await self._system.sweeper.clean(self._system.now)
        elif does == "grab":
            await self._grab(**drawn)
        else:
            await self._about(does, **drawn)

    def _named(self, offer: str | None, count: int, again: int | None) -> tuple[str, list[str]]:
        """The offer and the ids of a list."""
        of, ids = ("d", []) if again is None else self._lists[again % len(self._lists)]
        first = sum(len(ids) for _, ids in self._lists)
        named_list = (
            offer or of,
            ids[:count] or [named("n", number) for number in range(first, first + count)],
        )
        self._lists.append(named_list)
        return named_list

    async def _grab(
        self, offer: str | None, again: int | None, count: int, quantity: int, is_rich: bool, wait: bool,
        users: str, is_basket: bool,
    ) -> None:  # fmt: skip
        offer, ids = self._named(offer, min(count, 10) if is_basket else count, again)
        self._grabs[offer] += ids
        more: dict[str, Any] = {"attributes": ATTRIBUTES, "metadata": METADATA} if is_rich else {}
        if is_basket:
            more["basket"] = ids[0]
        await self._send(
            [
                Grab(id=id, offer=offer, user=named(users, number), quantity=quantity, wait=wait, **more)
                for number, id in enumerate(ids)
            ]
        )

    async def _about(self, kind: Any, offer: str | None, again: int | None, count: int) -> None:
        offer, ids = self._named(offer, count, again)
        grabs = self._grabs[offer][-count:] or ["none"]
        fields: dict[Any, Any] = {
            Confirm: {}, Return: {}, Release: {}, Pause: {}, Resume: {}, Close: {},
            Amend: {"changes": Changes(limits=(), total=30) if offer == "c:waiting" else Changes(limits=())},
            Adjust: {"transfers": ENTRIES, "reason": "r" * 200, "approved_by": "b" * 64},
        }  # fmt: skip
        await self._send(
            [
                kind(
                    id=id,
                    offer=offer,
                    **({"grab": grabs[number % len(grabs)]} if kind in (Confirm, Release, Return) else {}),
                    **fields[kind],
                )
                for number, id in enumerate(ids)
            ]
        )

    async def _send(self, commands: list[AnyCommand]) -> None:
        answers = await self._system.decide(commands)
        assert len(answers) == len(commands)


def _with(terms: Terms, **changes: Any) -> Terms:
    return type(terms)(**{name: getattr(terms, name) for name in terms.__struct_fields__} | changes)


async def _play(port: int, draw: random.Random) -> None:
    system = MeasuredShard(port)
    try:
        await system.begin()
        with counting_bytes(system) as calls:
            sender = Sender(system)
            await sender.open()
            for step in steps(draw):
                await sender.step(**step)
            if draw.random() < 0.3:
                space = type(system.space)("fold", 1)
                await fold(
                    system.redis, space.shard(0), await event_lines(system.redis, system.space, 0), SEALER, 1
                )
        check_bounded(calls)
    finally:
        await system.end()


@pytest.mark.timeout(900)
@hypothesis_settings(
    max_examples=examples(20), deadline=None, suppress_health_check=(HealthCheck.function_scoped_fixture,)
)
@given(seed=st.integers(0, 2**63))
def test_what_a_call_reads_is_bounded(private_server: Any, seed: int) -> None:
    """With the longest codes, limits and metadata, and ids that are used again for other commands, by others,
    and for other offers.
    """
    asyncio.run(_play(private_server[1], random.Random(seed)))
