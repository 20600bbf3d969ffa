"""A script that fails before its first write has changed nothing, and from its first write on nothing in it
can fail.

The first is tried at every call of every script of a long history; the second by what scripts may do then:
write what they noted before. Should a write fail all the same, the shard is fenced, and what its outbox has
is the truth that it is rebuilt from.
"""

import random
import re
from collections import Counter
from typing import Any

import msgspec
import pytest
import redis
import redis.asyncio

from grabstream.lua.gate import batches
from grabstream.lua.gate.calls import GateLimits, now_ms, run_script
from grabstream.lua.gate.door import Gate
from grabstream.lua.gate.queue import OutcomeUnknown
from grabstream.lua.keys import KeySpace
from grabstream.lua.loader import assemble, load, script_names, script_path
from grabstream.models.commands import AnyCommand, Close, Grab, Load, Open
from grabstream.models.journal import Cursor
from grabstream.models.offers import PAYMENTS_KEPT_MS, CouponTerms, EnvelopeTerms
from grabstream.models.outcomes import Outcome
from grabstream.ops.settings import Settings
from grabstream.streams.relaying.ownership import OwnedShard
from tests.lua.conftest import NOW, SEALER, event_lines, grabs, opening, take_over
from tests.lua.histories.generator import TICKETS, ticket_for
from tests.lua.histories.recovered import fold
from tests.lua.histories.shop import Shop
from tests.lua.histories.twins import SHARDS, Twins
from tests.lua.interrupting import READS_LATER, WRITES, Interrupting

STEPS = 1_200
GENERATION_STEPS = 120
#: Of a script's calls the first so many are interrupted, then one in so many.
ALWAYS, ONE_IN = 25, 20
TEAR_ONE_IN = 40
#: Which scripts write nothing.
READERS = ("read_outbox", "server_epoch", "time")

_redis_call = re.compile(r"redis\.call\('(\w+)'|redis\.call\((\w+)")


def _sometimes(seed: int) -> Any:
    draw, seen = random.Random(seed), Counter[str]()

    def chosen(name: str) -> bool:
        seen[name] += 1
        return seen[name] <= ALWAYS or draw.randrange(ONE_IN) == 0

    return chosen


# -- before the first write ----------------------------------------------------------------------------------


async def test_a_script_interrupted_before_its_first_write_has_changed_nothing(servers: Settings) -> None:
    """At every call up to the first write, in a history of all that is rare; then it is carried out as if
    nothing had been.
    """
    twins, shop = Twins(), Shop(5, NOW, total=8)
    server = redis.asyncio.Redis.from_url(servers.redis_url)
    keys = KeySpace(f"interrupted{random.getrandbits(40):x}", SHARDS)
    client = Interrupting(server, _sometimes(5))
    await twins.begin_twins(client, keys, GateLimits(batch_commands_max=3, timeout_ms=30_000))
    try:
        for place in range(len(shop.names)):
            await twins.decide_both(shop.opening(place))
        await twins.decide_both(_envelopes_and_lists())
        twins.now = shop.now = twins.now + 10
        await twins.decide_both(_crowds(twins.now))
        for step in range(STEPS):
            found = shop.next({name: offer for state in twins.states for name, offer in state.offers.items()})
            if isinstance(found, int):
                twins.now = shop.now = twins.now + found
                if shop.random.random() < 0.7:
                    await twins.sweep_both()
            else:
                await twins.decide_both(found)
            if step % GENERATION_STEPS == GENERATION_STEPS - 1:
                await twins.decide_both(shop.replace(shop.random.randrange(len(shop.names))))
                twins.now = shop.now = twins.now + 10
        # So long after that what became of payments is forgotten too.
        twins.now += PAYMENTS_KEPT_MS
        await twins.sweep_both()
    finally:
        await twins.end_twins()
        await server.aclose()
    scripts = {script for script, *_ in client.interruptions}
    of_owners = {"trim", "anchor", "fence", "wipe", "lease", "apply_past"}
    assert set(script_names()) - scripts - of_owners - set(READERS) == set()
    written_first = {(script, command) for script, kind, command in client.interruptions if kind == "write"}
    assert {script for script, command in written_first if command == "XADD"} >= {
        "open", "grab", "confirm", "release", "extend", "return", "redeem", "unredeem", "amend", "load",
        "pause", "resume", "close",
        "adjust", "expire", "sweep",
    }  # fmt: skip


def _envelopes_and_lists() -> list[AnyCommand]:
    """What the shop does not have: envelopes of both kinds, an audience, tickets, baskets of two offers."""
    listed = CouponTerms(issuer="shop", total=9, audience="list", opens_at=NOW + 5, max_per_grab=2)
    by_ticket = CouponTerms(issuer="shop", total=9, audience="ticket", waiting_list=True, hold_ms=1_000)
    drawn = EnvelopeTerms(
        issuer="alice", funding="pay", asset="CNY", total=700, parts=7, draw="at_grab", seed="ab" * 16
    )
    return [
        opening("e", parts=6, seed="cd" * 16), opening("h", parts=8_001, seed="cd" * 16),
        Open(id="open-f", offer="f", terms=drawn),
        Open(id="open-l", offer="l", terms=listed),
        Load(id="load-l", offer="l", what="audience", chunk=1, chunks=1, items=("u1", "u2")),
        Open(id="open-k", offer="k", terms=by_ticket),
    ]  # fmt: skip


def _crowds(now: int) -> list[AnyCommand]:
    basket = [
        Grab(id=f"b{number}", offer=offer, user="u3", basket="b", attributes={"card": "c"})
        for number, offer in enumerate(("m:a", "m:b"))
    ]
    torn = [
        Grab(id=f"t{number}", offer="m:a", user="u4", basket="t", attributes={"card": "c"}, quantity=3)
        for number in range(4)
    ]
    tickets = [
        Grab(id=f"k{n}", offer="k", user="u1", ticket=ticket_for("u1", "k", now + 9_000, "once"))
        for n in range(2)
    ]
    listed = [Grab(id=f"l{user}", offer="l", user=user) for user in ("u1", "u2", "u3")]
    refund = [Grab(id="g", offer="e", user="u1")]
    return [
        *grabs(8),
        *grabs(5, "f"),
        *basket,
        *torn,
        *tickets,
        *listed,
        *refund,
        Close(id="close-f", offer="f"),
    ]


async def test_the_owner_s_scripts_interrupted_before_their_first_write_have_changed_nothing(
    servers: Settings,
) -> None:
    server = redis.asyncio.Redis.from_url(servers.redis_url)
    keys = KeySpace(f"interrupted{random.getrandbits(40):x}", 1)
    client = Interrupting(server)
    of_shard = keys.shard(0)
    await take_over(client, keys)
    gate = Gate(client, keys, SEALER)
    try:
        await gate.decide([opening(), *grabs(3)], "decided")
        shard = OwnedShard(client, of_shard)
        own = (await shard.raise_term(0)).ownership
        await shard.trim(own, Cursor(2, bytes(32), 1, own.term, own.owner))
        await run_script(client, "anchor", [of_shard.state], [*own.arguments, 2, "aa", 5, 1, "x", 2])
        await shard.fence(own, "why")
        assert (await shard.read_outbox(own, 2)).lines
        for worker, ms, seize in (("me", 1_000, ""), ("other", 1_000, "1"), ("other", 0, "")):
            await run_script(client, "lease", [of_shard.lease, of_shard.state], [worker, ms, seize])
        await run_script(client, "wipe", [of_shard.state, *of_shard.of_offer("e")], [*own.arguments, "why"])
        _, payments, _, state, _ = of_shard.of_campaign("m")
        past = msgspec.msgpack.encode([[(1, "m:a", 9, NOW)], [(1, "p", "m:a", "g", 2, 5, NOW, 1)]])
        await run_script(
            client, "apply_past", [of_shard.state, of_shard.past, payments, state], [*own.arguments, past]
        )
        assert (
            await server.hlen(payments) == await server.hlen(state) == await server.zcard(of_shard.past) == 1
        )
    finally:
        names = [name async for name in server.scan_iter(match=f"{keys.prefix}*")]
        await server.unlink(*names)
        await gate.close()
        await server.aclose()
    writers = {script for script, kind, _ in client.interruptions if kind == "write"}
    assert writers >= {"raise_term", "reconcile", "trim", "anchor", "fence", "lease", "wipe", "apply_past"}


# -- after it ------------------------------------------------------------------------------------------------


def test_scripts_that_decide_write_by_commit_alone() -> None:
    """What a call writes is noted, and done at its very end: after its first write nothing is read, packed or
    computed.
    """
    for name in script_names():
        text = assemble(name)
        if '@include "decide"' not in script_path(name).read_text():
            continue
        body = text
        for function in ("commit", "break_off"):
            body = body.replace(_function(text, function), "")
        written = {found[0] for found in _redis_call.findall(body)} & set(WRITES)
        # `apply` says first that the shard is incomplete.
        assert written == {"apply": {"HSET"}}.get(name, set()), (
            f"{name}: use write(…), which commit() carries out"
        )
        assert "" not in {found[0] for found in _redis_call.findall(body)}, (
            f"{name}: redis.call with a computed name"
        )
        if name not in READS_LATER:
            end = text.rstrip().splitlines()[-2:]
            ends = end == ["commit()", "return reply"] or "return finish(" in text
            assert ends, f"{name}: nothing may stand between commit() and return"


def _function(text: str, name: str) -> str:
    start = text.find(f"local function {name}(")
    return text[start : text.index("\nend\n", start) + 5] if start >= 0 else ""


def test_every_command_that_a_script_uses_is_known_to_read_or_to_write() -> None:
    reads = {
        "GET", "HGET", "HMGET", "HEXISTS", "HSCAN", "EXISTS", "GETRANGE", "INFO", "LLEN", "LRANGE",
        "SISMEMBER", "SMISMEMBER", "STRLEN",
        "TIME", "HSTRLEN",
        "XRANGE", "XREVRANGE", "ZCARD", "ZRANGE", "ZRANGEBYSCORE", "ZSCORE",
    }  # fmt: skip
    used = {found[0] for name in script_names() for found in _redis_call.findall(load(name).text)} - {""}
    noted = {
        word
        for name in script_names()
        for word in re.findall(r"write(?:_in_pieces)?\('(\w+)'", load(name).text)
    }
    assert used - reads - set(WRITES) == set()
    assert noted - set(WRITES) == set()


async def test_a_write_that_fails_after_another_fences_the_shard_until_it_is_rebuilt_from_its_events(
    servers: Settings,
) -> None:
    """No legal data can bring it about. Then as ever: nobody is answered from half a state, and no event is
    lost.
    """
    twins, shop = Twins(), Shop(8, NOW, total=8)
    client = redis.asyncio.Redis.from_url(servers.redis_url)
    keys = KeySpace(f"broken{random.getrandbits(40):x}", SHARDS)
    await twins.begin_twins(client, keys, GateLimits())
    torn: Counter[str] = Counter()
    try:
        for place in range(len(shop.names)):
            await twins.decide_both(shop.opening(place, codes=False))
        twins.now = shop.now = twins.now + 10
        for _ in range(STEPS // 3):
            found = shop.next({name: offer for state in twins.states for name, offer in state.offers.items()})
            if isinstance(found, int):
                twins.now = shop.now = twins.now + found
                await twins.sweep_both()
            elif torn[type(found[0]).__name__] < 3 and shop.random.randrange(TEAR_ONE_IN // 8) == 0:
                kind = type(found[0]).__name__
                before = sum(map(len, twins.lines))
                copies = await _torn(twins, found)
                await twins.decide_both(found)
                number = keys.shard_of_offer(found[0].offer)
                torn[kind] += sum(map(len, twins.lines)) > before
                for lines in copies:
                    assert lines == twins.lines[number]
                if copies:
                    await twins.compare_recovered(number)
            else:
                await twins.decide_both(found)
    finally:
        await twins.end_twins()
        await client.aclose()
    assert torn.keys() >= {"Grab", "Confirm", "Release", "Return", "Redeem", "Amend", "Extend"}


async def _torn(twins: Twins, commands: list[AnyCommand]) -> list[list[bytes]]:
    """The commands, on copies of the shard, with each write but the first one failing; returns the event
    lines of each copy.
    """
    number = twins.keys.shard_of_offer(commands[0].offer)
    made: list[list[bytes]] = []
    write = 1
    while True:
        write += 1
        keys = KeySpace(f"{twins.keys.prefix}-torn{write}", twins.keys.shards)
        await _copy(twins.client, twins.keys, keys)
        client = Interrupting(twins.client)
        client.fail_at_write = write
        shard = keys.shard(number)
        try:
            before = len(await event_lines(twins.client, keys, number))
            if not await _breaks(client, keys, commands, twins.now):
                return made  # it has fewer writes
            lines = await event_lines(twins.client, keys, number)
            fields = await twins.client.hmget(shard.state, ["partial", "life", "fault", "seq"])
            assert (fields[0], fields[1]) == (b"1", None)
            assert fields[2].startswith(b"a script broke off while it wrote")
            assert int(fields[3]) == len(lines)
            if len(lines) > before:
                made.append(lines)
            client.fail_at_write = 0
            assert (await _call(client, keys, commands, twins.now)).code == Outcome.fenced
        finally:
            names = [name async for name in twins.client.scan_iter(match=f"{keys.prefix}*", count=1_000)]
            await twins.client.unlink(*names)


async def _breaks(client: Any, keys: KeySpace, commands: list[AnyCommand], now: int) -> bool:
    try:
        await _call(client, keys, commands, now)
    except redis.ResponseError as error:
        if not str(error).startswith("BROKEN OFF"):
            raise
        return True
    return False


async def _call(client: Any, keys: KeySpace, commands: list[AnyCommand], now: int) -> Any:
    """One call of their script, as the gate makes it."""
    script, shard = type(commands[0]).__name__.lower(), keys.shard(keys.shard_of_offer(commands[0].offer))
    batch = batches.build(shard, script, commands, batches.Secrets(SEALER, TICKETS), now)
    arguments = (f"{shard.shard}/{keys.shards}", now_ms(), now, 10**12, "", *batch.arguments)
    return batches.decode_reply(await run_script(client, script, [*shard.deciding(), *batch.keys], arguments))


async def _copy(client: Any, source: KeySpace, target: KeySpace) -> None:
    for number in range(source.shards):
        tag = source.shard(number).tag
        async for name in client.scan_iter(match=f"{tag}:*", count=1_000):
            await client.copy(name, target.shard(number).tag + name.decode().removeprefix(tag))


async def test_an_outbox_ahead_of_its_shard_fences_it(servers: Settings) -> None:
    """An event's number was used before, so XADD refuses it: the shard's own account of itself is wrong."""
    client = redis.asyncio.Redis.from_url(servers.redis_url)
    keys = KeySpace(f"ahead{random.getrandbits(40):x}", 1)
    await take_over(client, keys)
    shard = keys.shard(0)
    gate = Gate(client, keys, SEALER, GateLimits(timeout_ms=2_000))
    try:
        await gate.decide([opening(), *grabs(2)], "decided")
        await client.hset(shard.state, "seq", 1)
        with pytest.raises(OutcomeUnknown):
            await gate.decide(grabs(1, start=2), "decided")
        assert await client.hmget(shard.state, ["partial", "life", "seq"]) == [b"1", None, b"3"]
        events = await event_lines(client, keys, 0)
        assert len(events) == 3
        rebuilt = KeySpace(f"{keys.prefix}-rebuilt", 1).shard(0)
        await fold(client, rebuilt, events, SEALER, 1)
        assert set(await client.hkeys(rebuilt.of_offer("e")[1])) == {b"u0", b"u1"}
    finally:
        names = [name async for name in client.scan_iter(match=f"{keys.prefix}*")]
        await client.unlink(*names)
        await gate.close()
        await client.aclose()
