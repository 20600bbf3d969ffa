"""The work of a call does not grow with the number of offers of its campaign: each command is decided with
few and with many other offers, open, closed and retired. The Redis commands that its script calls, the number
of their arguments and the size of their replies must be the same.

What a script computes, it has from arguments and replies. So if these do not grow, its work does not grow,
as long as it only calls commands whose own work is bounded by arguments and reply, or grows with the
logarithm of the size of a key (`BOUNDED`).
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha1
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import pytest

from grabstream.lua import loader
from grabstream.models.commands import (
    Amend,
    AnyCommand,
    Close,
    Confirm,
    Extend,
    Grab,
    Open,
    Pause,
    Redeem,
    Release,
    Resume,
    Return,
    Unredeem,
)  # fmt: skip
from grabstream.models.offers import Changes, CouponTerms, EnvelopeTerms, Limit, StockTerms, Terms
from tests.lua.costs.measured_shard import MeasuredShard
from tests.support.plain_scripts import use_plain_scripts

HOLD_MS: Final = 3_600_000
CLOSES_MS: Final = 5_000
#: Other offers of the campaign, of each state.
FEW, MANY = 2, 100
#: A reply may have a few bytes more, because numbers in it have more digits.
BYTES_MORE: Final = 64
# fmt: off
BOUNDED: Final = frozenset((
    "EXISTS", "GETRANGE", "HDEL", "HEXISTS", "HGET", "HGETALL", "HINCRBY", "HMGET", "HSET", "HSTRLEN",
    "INFO", "LLEN", "LPOP", "LRANGE", "RPUSH", "SADD", "SET", "SISMEMBER", "SMISMEMBER", "SREM", "STRLEN",
    "TIME", "UNLINK", "XADD", "ZADD", "ZCARD", "ZRANGE", "ZRANGEBYSCORE", "ZREM", "ZSCORE",
))
# fmt: on
LOAD_OFFERS: Final = "local function load_offers(names, campaign_of, campaign_names)"

#: Put before a script, whose text follows as a function: stores, for each call of Redis, its name, the number
#: of its arguments, and the values and bytes of its reply.
_COUNTING: Final = """
local plain_redis, work = redis, {}
local function size_of(reply)
  if type(reply) == 'string' then return 1, #reply end
  if type(reply) ~= 'table' then return 1, 8 end
  local values, bytes = 0, 0
  for _, value in pairs(reply) do
    local more_values, more_bytes = size_of(value)
    values, bytes = values + more_values, bytes + more_bytes
  end
  return values, bytes
end
local redis = setmetatable({call = function(name, ...)
  local reply = plain_redis.call(name, ...)
  local values, bytes = size_of(reply)
  work[#work + 1] = {name, select('#', ...), values, bytes}
  return reply
end}, {__index = plain_redis})
local results = (function()
"""
_COUNTED: Final = """
end)()
plain_redis.call('RPUSH', 'work', cjson.encode(work))
return results
"""


class RedisCall(NamedTuple):
    """What a script called."""

    name: str
    arguments: int
    reply_values: int
    reply_bytes: int


@cache
def counting(name: str, change: Callable[[str], str]) -> loader.Script:
    """A script, changed, that stores what it calls in the list `work`; one that may not write, as it is."""
    text = change(loader.assemble(name))
    first, _, rest = text.partition("\n")
    if "no-writes" not in first:
        text = f"{first}\n{_COUNTING}{rest}{_COUNTED}"
    return loader.Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())


def unchanged(text: str) -> str:
    """The text of a script as it is."""
    return text


@contextmanager
def counting_scripts(change: Callable[[str], str] = unchanged) -> Iterator[None]:
    """Within it, scripts store what they call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "load", lambda name: counting(name, change))
        use_plain_scripts(patch)
        yield


def envelope(parts: int = 10, **rest: Any) -> EnvelopeTerms:
    return EnvelopeTerms(
        issuer="i", funding="f", asset="CNY", total=parts * 10, parts=parts, law="equal", **rest
    )


def coupons(**rest: Any) -> CouponTerms:
    limits = (Limit("user", "day", 5, "campaign"), Limit("user", "offer", 3))
    return CouponTerms(issuer="i", total=100, limits=limits, return_restores=True, **rest)


def stock(hold_ms: int = HOLD_MS, **rest: Any) -> StockTerms:
    limits = (Limit("user", "day", 9, "campaign"), Limit("user", "offer", 9))
    return StockTerms(
        issuer="i", total=3, price=5, currency="CNY", hold_ms=hold_ms, waiting_list=True, extensions=2,
        limits=limits, **rest,
    )  # fmt: skip


def payment(number: int, offer: str, grab: str) -> Confirm:
    return Confirm(
        id=f"pay{number}", offer=offer, grab=grab, payment=f"payment{number}", paid=5, currency="CNY"
    )


def steps() -> dict[str, list[AnyCommand]]:
    """Each kind of command once, by its name; each list is a call."""
    every = {
        "open": Open(id="open-new", offer="c:new", terms=coupons()),
        "grab of an envelope": Grab(id="e1", offer="c:envelope", user="ann"),
        "its repeat": Grab(id="e1", offer="c:envelope", user="ann"),
        "second grab of a user": Grab(id="e2", offer="c:envelope", user="ann"),
        "grab of coupons": Grab(id="k1", offer="c:coupons", user="ann"),
        "redeem": Redeem(id="redeem", offer="c:coupons", grab="k1", order="o1"),
        "unredeem": Unredeem(id="unredeem", offer="c:coupons", grab="k1", order="o1"),
        "return": Return(id="return", offer="c:coupons", grab="k1"),
        "hold": Grab(id="s1", offer="c:stock", user="ann"),
        "second hold": Grab(id="s2", offer="c:stock", user="ben"),
        "third hold": Grab(id="s3", offer="c:stock", user="cat"),
        "grab that waits": Grab(id="s4", offer="c:stock", user="dan", wait=True),
        "extend": Extend(id="extend", offer="c:stock", grab="s1"),
        "confirm": payment(1, "c:stock", "s1"),
        "release, which serves the queue": Release(id="release", offer="c:stock", grab="s2"),
        "payment of an unknown grab": payment(2, "c:stock", "unknown"),
        "payment for a retired offer": payment(3, "c:retired0", "retired0-g"),
        "grab of an unknown offer": Grab(id="x", offer="c:unknown", user="ann"),
        "grab of a retired offer": Grab(id="y", offer="c:retired0", user="ann"),
        "amend": Amend(id="amend", offer="c:stock", changes=Changes(total=4)),
        "pause": Pause(id="pause", offer="c:stock"),
        "resume": Resume(id="resume", offer="c:stock"),
        "close": Close(id="close", offer="c:envelope"),
    }
    return {
        **{name: [command] for name, command in every.items()},
        "hundred grabs of an envelope": [Grab(id=f"h{n}", offer="c:large", user=f"u{n}") for n in range(100)],
        "hundred grabs of coupons": [Grab(id=f"l{n}", offer="c:new", user=f"u{n}") for n in range(100)],
    }


async def fill_campaign(shard: MeasuredShard, others: int) -> None:
    """Opens `others` offers of the campaign that stay, that close, and that retire, each with a grab."""
    commands: list[AnyCommand] = []
    for n in range(others):
        for name, terms in (
            (f"retired{n}", stock(retire_after_ms=1)), (f"closed{n}", coupons()), (f"open{n}", coupons()),
            (f"held{n}", stock(hold_ms=9 * HOLD_MS)), (f"envelope{n}", envelope()),
        ):  # fmt: skip
            commands.append(Open(id=f"open-{name}", offer=f"c:{name}", terms=terms))
            commands.append(Grab(id=f"{name}-g", offer=f"c:{name}", user=f"user{n}"))
        commands.append(payment(1_000 + n, f"c:retired{n}", f"retired{n}-g"))
        commands += [Close(id=f"close-{name}", offer=f"c:{name}") for name in (f"retired{n}", f"closed{n}")]
    # One call after the other: the commands of a step name offers that the step before has opened.
    for start in range(0, len(commands), 60):
        await shard.decide(commands[start : start + 60])
    shard.now += 10
    assert await shard.sweeper.sweep(shard.now) == others
    await shard.sweeper.clean(shard.now)
    terms: dict[str, Terms] = {
        "envelope": envelope(retire_after_ms=1),
        "large": envelope(parts=200),
        "coupons": coupons(),
        "stock": stock(),
        "closing": envelope(closes_at=shard.now + CLOSES_MS),
    }
    await shard.decide(
        [Open(id=f"open-{name}", offer=f"c:{name}", terms=of_offer) for name, of_offer in terms.items()]
    )


async def work_of(
    shard: MeasuredShard, others: int, change: Callable[[str], str] = unchanged
) -> dict[str, list[list[RedisCall]]]:
    """What each call of each step calls, with a number of other offers of each state."""
    await shard.gate.close()
    await shard.begin()
    await fill_campaign(shard, others)
    work = {}

    async def keep(name: str) -> None:
        raw = await shard.redis.lrange("work", 0, -1)
        await shard.redis.delete("work")
        work[name] = [[RedisCall(*call) for call in json.loads(of_call)] for of_call in raw]

    with counting_scripts(change):
        for name, commands in steps().items():
            answers = await shard.decide(commands)
            assert "invalid" not in {answer.outcome for answer in answers}, (name, answers)
            await keep(name)
        shard.now += CLOSES_MS
        assert await shard.sweeper.close_due(shard.now) == 2
        await keep("an offer closes, another one retires")
        shard.now += HOLD_MS
        assert await shard.sweeper.expire_holds(shard.now) == 2
        await keep("holds end")
    return work


def grown(few: dict[str, list[list[RedisCall]]], many: dict[str, list[list[RedisCall]]]) -> list[str]:
    """The steps whose work is not the same with few offers and with many, in words."""
    return [
        f"{name}: {of_few} beside few, {of_many} beside many"
        for name in few
        for call_few, call_many in zip_longest(few[name], many[name], fillvalue=[])
        for of_few, of_many in zip_longest(call_few, call_many)
        if of_few is None
        or of_many is None
        or of_few[:3] != of_many[:3]
        or of_many.reply_bytes > of_few.reply_bytes + BYTES_MORE
    ]


@pytest.mark.long
async def test_no_command_costs_more_beside_more_offers_of_its_campaign(system: MeasuredShard) -> None:
    few, many = [await work_of(system, others) for others in (FEW, MANY)]
    assert all(any(calls) for calls in few.values()), "each step calls Redis"
    assert grown(few, many) == []
    called = {call.name for calls in many.values() for of_call in calls for call in of_call}
    assert called <= BOUNDED


@pytest.mark.long
@pytest.mark.parametrize(
    "growing",
    [
        "redis.call('HGETALL', KEYS[SHARD_KEYS + OFFER_KEYS * #names + 4])",
        "for _, name in ipairs(redis.call('ZRANGE', KEYS[6], 0, -1)) do redis.call('EXISTS', name) end",
    ],
)
async def test_work_that_grows_is_noticed(system: MeasuredShard, growing: str) -> None:
    """The first reads all records of a campaign's past, the second asks for each offer that is due once."""

    def change(text: str) -> str:
        return text.replace(LOAD_OFFERS, f"{LOAD_OFFERS}\n  {growing}")

    assert LOAD_OFFERS in loader.load("grab").text
    few, many = [await work_of(system, others, change) for others in (FEW, 10 * FEW)]
    assert grown(few, many)
