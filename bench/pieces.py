"""Coupons and stock: grabs under three limits, hold and confirm, and the expiry of many holds; and decisions
with ten million grabs stored (row 8).
"""

import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import redis

from bench import classic
from bench.deciding import LIMITS, answered_lists
from bench.stage import envelope, grabs, private_redis, server_seconds, taken_over_gate
from grabstream.gate.calls import now_ms
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.commands import Confirm, Open
from grabstream.models.offers import CouponTerms, Limit, StockTerms
from grabstream.streams.deciding.sweeper import Sweeper

HOLD_MS = 60_000

#: A hand-written script with three counters: the total, the total of a user, and the total of a user per day.
CLASSIC_LIMITS = """
local day = KEYS[3] .. ':' .. math.floor(redis.call('time')[1] / 86400)
if tonumber(redis.call('hget', KEYS[1], 'taken') or 0) >= tonumber(ARGV[2]) then return 3 end
if tonumber(redis.call('hget', KEYS[2], ARGV[1]) or 0) >= tonumber(ARGV[3]) then return 2 end
if tonumber(redis.call('hget', day, ARGV[1]) or 0) >= tonumber(ARGV[4]) then return 1 end
redis.call('hincrby', KEYS[1], 'taken', 1)
redis.call('hincrby', KEYS[2], ARGV[1], 1)
redis.call('hincrby', day, ARGV[1], 1)
return 0
"""

#: A reconstruction, from a description, of what a public article on coupons shows: three keys, a command a
#: line, and 0 (got it), 1 (limit of the day), 2 (limit of the user) or 3 (none left) as answers.
ARTICLE_LIMITS = """
local taken = redis.call('get', KEYS[1])
if taken and tonumber(taken) >= tonumber(ARGV[1]) then
  return 3
end
local taken_by_user = redis.call('get', KEYS[2])
if taken_by_user and tonumber(taken_by_user) >= tonumber(ARGV[2]) then
  return 2
end
local taken_today = redis.call('get', KEYS[3])
if taken_today and tonumber(taken_today) >= tonumber(ARGV[3]) then
  return 1
end
redis.call('incr', KEYS[1])
redis.call('incr', KEYS[2])
redis.call('incr', KEYS[3])
return 0
"""
PER_USER, PER_DAY = 5, 2


def coupons(count: int) -> Open:
    """A coupon with three limits: its total, units per user, and units per user and day."""
    limits = (Limit("user", "offer", PER_USER), Limit("user", "day", PER_DAY))
    return Open(
        id="open-c",
        offer="c",
        terms=CouponTerms(issuer="bench", total=count, limits=limits, timezone="Asia/Shanghai"),
    )


def stock(count: int) -> Open:
    """Stock whose units are held until they are paid."""
    terms = StockTerms(issuer="bench", total=count, price=100, currency="CNY", hold_ms=HOLD_MS)
    return Open(id="open-s", offer="s", terms=terms)


async def limits(runs: int, count: int) -> dict[str, Any]:
    """Row `limits`: grabs per second under three limits, against a hand-written script with the same counters
    in pipelines of 32.
    """
    more = (str(count), str(PER_USER), str(PER_DAY))

    def by_hand(port: int, sha: str) -> "subprocess.Popen[str]":
        return classic.pipelined(port, sha, count, 32, more=more)

    return await _coupons_against(CLASSIC_LIMITS, by_hand, runs, count)


async def coupon(runs: int, count: int) -> dict[str, Any]:
    """Row `coupon`: the same, against ARTICLE_LIMITS in pipelines of 32. That script makes no event, gives a
    repeated request a second coupon, and never begins a new day. (The one described counts what a user took
    under the id of the coupon, so all users share one limit; here each has a counter, or nearly all calls
    would be refusals. An expiry of counters is left out, which makes it faster.)
    """
    user = classic.random_user(32)
    keys = ("coupon:c:taken", f"coupon:c:user:{user}", f"coupon:c:day:{user}")

    def by_hand(port: int, sha: str) -> "subprocess.Popen[str]":
        call = ("EVALSHA", sha, "3", *keys, str(count), str(PER_USER), str(PER_DAY))
        return classic.benchmarked(port, count, call)

    return await _coupons_against(ARTICLE_LIMITS, by_hand, runs, count)


async def _coupons_against(
    script: str, by_hand: Callable[[int, str], "subprocess.Popen[str]"], runs: int, count: int
) -> dict[str, Any]:
    """Grabs per second of coupons by a gate, and by a script that redis-benchmark calls; and what both take
    of the thread of Redis.
    """
    ours, theirs = [], []
    spent: dict[str, list[float]] = {"ours": [], "classic": []}
    with private_redis() as port:
        plain = redis.Redis(port=port)
        for _ in range(runs):
            gate, client = await taken_over_gate(port, LIMITS)
            await gate.decide([coupons(count)], "decided", timeout_ms=60_000)
            before = server_seconds(plain)
            ours.append(await answered_lists(gate, grabs("c", count)))
            spent["ours"].append(server_seconds(plain) - before)
            await gate.close()
            await client.aclose()
            plain.flushall()
            sha = str(plain.script_load(script))
            before = server_seconds(plain)
            theirs.append(classic.rate_of(by_hand(port, sha)))
            spent["classic"].append(server_seconds(plain) - before)
            plain.flushall()
    redis_us = {name: f"{statistics.median(one) / count * 1e6:.1f}" for name, one in spent.items()}
    profile = {"thread of Redis, µs a grab": redis_us}
    return {"ours": ours, "theirs": theirs, "unit": "grabs/s", "profile": profile}


async def holds(runs: int, count: int) -> dict[str, Any]:
    """Row `holds`: holds with payment per second, against grabs of an envelope by the same gate."""
    ours, theirs = [], []
    with private_redis() as port:
        for _ in range(runs):
            gate, client = await taken_over_gate(port, LIMITS)
            await gate.decide([stock(count), envelope("e", count)], "decided", timeout_ms=60_000)
            began = time.perf_counter()
            await answered_lists(gate, grabs("s", count))
            await answered_lists(gate, [payment(number) for number in range(count)])
            ours.append(count / (time.perf_counter() - began))
            theirs.append(await answered_lists(gate, grabs("e", count)))
            await gate.close()
            await client.aclose()
    return {"ours": ours, "theirs": theirs, "unit": "pairs/s"}


def payment(number: int) -> Confirm:
    """The payment of a grab of `grabs("s", …)`."""
    return Confirm(
        id=f"p{number:031d}",
        offer="s",
        grab=f"g{number:031d}",
        payment=f"pay{number}",
        paid=100,
        currency="CNY",
    )


async def expiry(runs: int, count: int) -> dict[str, Any]:
    """Row `expiry`: holds with one deadline that a sweeper ends per second, against the holds that the gate
    made per second.
    """
    ours, theirs = [], []
    with private_redis() as port:
        for _ in range(runs):
            now = [now_ms()]
            gate, client = await taken_over_gate(port, LIMITS, clock=lambda now=now: now[0])
            await gate.decide([stock(count)], "decided", timeout_ms=60_000)
            theirs.append(await answered_lists(gate, grabs("s", count)))
            keys = KeySpace("bench", 8)
            sweeper = Sweeper(client, keys.shard(keys.shard_of_offer("s")), keys.shards, 10**9)
            began = time.perf_counter()
            ended = await sweeper.sweep(now[0] + HOLD_MS)
            ours.append(count / (time.perf_counter() - began))
            assert ended == count, ended
            await gate.close()
            await client.aclose()
    return {"ours": ours, "theirs": theirs, "unit": "holds/s"}


async def beside_many(runs: int, many: int, part: int = 100_000) -> dict[str, Any]:
    """Row 8: microseconds of Redis per grab with `many` stored grabs, against a thousand."""
    ours, theirs = [], []
    with private_redis() as port:
        plain = redis.Redis(port=port)
        gate, client = await taken_over_gate(port, LIMITS)
        await _fill(gate, plain, "first", 1_000)
        for run in range(runs):
            theirs.append(await _cost(gate, plain, f"few-{run}", part))
        for number, start in enumerate(range(0, many, 1_000_000)):
            await _fill(gate, plain, f"kept-{number}", min(1_000_000, many - start))
        for run in range(runs):
            ours.append(await _cost(gate, plain, f"many-{run}", part))
        await gate.close()
        await client.aclose()
    return {"ours": ours, "theirs": theirs, "unit": "µs/grab"}


async def _fill(gate: Gate, plain: "redis.Redis", offer: str, count: int) -> None:
    await gate.decide([envelope(offer, count)], "decided", timeout_ms=120_000)
    for start in range(0, count, 100_000):
        await answered_lists(gate, grabs(offer, min(100_000, count - start), start=start))
        _empty_outboxes(plain)


def _empty_outboxes(plain: "redis.Redis") -> None:
    for key in plain.scan_iter(match="*:outbox", count=1_000):
        plain.xtrim(key, maxlen=0, approximate=False)


async def _cost(gate: Gate, plain: "redis.Redis", offer: str, count: int) -> float:
    await gate.decide([envelope(offer, count)], "decided", timeout_ms=120_000)
    before = server_seconds(plain)
    await answered_lists(gate, grabs(offer, count))
    spent = server_seconds(plain) - before
    _empty_outboxes(plain)
    return spent / count * 1e6
