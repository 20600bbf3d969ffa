"""A script that fails before its first write has changed nothing; after its first write a script does nothing
that can fail.

The first is tested by interrupting every script of a long history at each of its calls of Redis up to the
first write. The second is tested on the text of the scripts: after the first write they only write what they
noted before. If a write fails nevertheless, the shard is fenced and rebuilt from its journaled events and its
outbox.
"""

import random
import re
from collections import Counter
from typing import Any

import msgspec
import pytest
import redis
import redis.asyncio

from grabstream.connections.opening import cancellable
from grabstream.gate import encoding
from grabstream.gate.batches import batch_of
from grabstream.gate.calls import GateLimits, now_ms
from grabstream.gate.drawing import in_slices
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.lua.loader import assemble, load, script_names, script_path
from grabstream.lua.running import run_script
from grabstream.models.commands import AnyCommand, Close, Grab, Load, Open
from grabstream.models.journal import Cursor
from grabstream.models.offers import PAYMENTS_KEPT_MS, CouponTerms, EnvelopeTerms
from grabstream.models.outcomes import Outcome, OutcomeUnknown
from grabstream.settings import Settings
from grabstream.streams.relaying.leases import pass_lease, request_lease
from grabstream.streams.relaying.ownership import OwnedShard
from grabstream.streams.relaying.shares import Worker
from tests.conftest import NIGHTLY
from tests.lua.histories.recovered import fold
from tests.lua.histories.shop import Shop
from tests.lua.histories.strategies import TICKETS, ticket_for
from tests.lua.histories.twins import SHARDS, Twins
from tests.lua.interrupting_client import READS_LATER, WRITES, InterruptingClient
from tests.support.shards import NOW, SEALER, event_lines, grabs, opening, take_over

STEPS, TORN_STEPS = (1_200, 1_200) if NIGHTLY else (400, 400)
GENERATION_STEPS = 120
#: The first ALWAYS calls of each script are interrupted, then one call in ONE_IN.
ALWAYS, ONE_IN = 25 if NIGHTLY else 10, 20
TEAR_ONE_IN = 40
#: Leases last longer than the test, however slow the machine is.
LEASE_MS = 600_000
#: Scripts that write nothing.
READERS = ("due", "read_outbox", "server_epoch", "time")

_redis_call = re.compile(r"redis\.call\('(\w+)'|redis\.call\((\w+)")


def _sometimes(seed: int) -> Any:
    """Returns a function that chooses, by script name, which script calls to interrupt."""
    draw, seen = random.Random(seed), Counter[str]()

    def chosen(name: str) -> bool:
        seen[name] += 1
        return seen[name] <= ALWAYS or draw.randrange(ONE_IN) == 0

    return chosen


# -- before the first write ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_script_interrupted_before_its_first_write_has_changed_nothing(servers: Settings) -> None:
    """Interrupts at every call of Redis up to the first write, in a history with many rare cases. Afterwards
    the script is executed as if it had not been interrupted.
    """
    twins, shop = Twins(), Shop(5, NOW, total=8)
    server = cancellable(redis.asyncio.Redis.from_url(servers.redis_url))
    keys = KeySpace(f"interrupted{random.getrandbits(40):x}", SHARDS)
    client = InterruptingClient(server, _sometimes(5))
    await twins.begin_twins(client, keys, GateLimits(batch_commands_max=3, timeout_ms=30_000))
    try:
        for index in range(len(shop.names)):
            await twins.decide_both(shop.opening(index))
        await twins.decide_both(_envelopes_and_lists())
        twins.now = shop.now = twins.now + 10
        await twins.decide_both(_crowds(twins.now))
        for step in range(STEPS):
            commands_or_ms = shop.next(
                {name: offer for state in twins.states for name, offer in state.offers.items()}
            )
            if isinstance(commands_or_ms, int):
                twins.now = shop.now = twins.now + commands_or_ms
                if shop.random.random() < 0.7:
                    await twins.sweep_both()
            else:
                await twins.decide_both(commands_or_ms)
            if step % GENERATION_STEPS == GENERATION_STEPS - 1:
                await twins.decide_both(shop.replace(shop.random.randrange(len(shop.names))))
                twins.now = shop.now = twins.now + 10
        # After this time the payments of retired offers are forgotten too.
        twins.now += PAYMENTS_KEPT_MS
        await twins.sweep_both()
    finally:
        await twins.end_twins()
        await server.aclose()
    scripts = {script for script, *_ in client.interruptions}
    of_owners = {"trim", "anchor", "fence", "wipe", "lease", "pass_lease", "apply_past"}
    assert set(script_names()) - scripts - of_owners - set(READERS) == set()
    written_first = {(script, command) for script, kind, command in client.interruptions if kind == "write"}
    assert {script for script, command in written_first if command == "XADD"} >= {
        "open", "grab", "confirm", "release", "extend", "return", "redeem", "unredeem", "amend", "load",
        "pause", "resume", "close",
        "adjust", "expire", "sweep",
    }  # fmt: skip


def _envelopes_and_lists() -> list[AnyCommand]:
    """Offers that the shop does not have: envelopes of both ways to draw, an audience list, tickets."""
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
    """Grabs of these offers, a basket of two offers, and a basket of which not all can be granted."""
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


async def test_owner_scripts_interrupted_before_their_first_write_have_changed_nothing(
    servers: Settings,
) -> None:
    server = cancellable(redis.asyncio.Redis.from_url(servers.redis_url))
    keys = KeySpace(f"interrupted{random.getrandbits(40):x}", 1)
    client = InterruptingClient(server)
    of_shard = keys.shard(0)
    await take_over(client, keys)
    gate = Gate(client, keys, SEALER)
    try:
        await gate.decide([opening(), *grabs(3)], "decided")
        shard = OwnedShard(client, of_shard)
        ownership = (await shard.raise_term(0)).ownership
        await shard.trim(ownership, Cursor(1, bytes(32), 1, ownership.term, ownership.owner))
        await run_script(client, "anchor", [of_shard.state], [*ownership.arguments, 1, "aa", 5, 1, "x", 1])
        await shard.fence(ownership, "why")
        assert (await shard.read_outbox(ownership, 1)).lines
        for worker, ms, seize in (("me", LEASE_MS, False), ("other", LEASE_MS, True), ("other", 0, False)):
            await request_lease(client, of_shard, worker, ms, seize, Worker(3))
        await request_lease(client, of_shard, "me", LEASE_MS)
        await request_lease(client, of_shard, "other", LEASE_MS, about=Worker(0))
        assert await pass_lease(client, of_shard, "me", "other", LEASE_MS)
        await run_script(
            client, "wipe", [of_shard.state, *of_shard.offer_keys("e")], [*ownership.arguments, "why", 4, 2]
        )
        _, payments, _, state, _ = of_shard.campaign_keys("m")
        past = msgspec.msgpack.encode([[(1, "m:a", 9, NOW)], [(1, "p", "m:a", "g", 2, 5, NOW, 1, 0, "", "")]])
        await run_script(
            client,
            "apply_past",
            [of_shard.state, of_shard.past, payments, state],
            [*ownership.arguments, past],
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
    assert writers >= {
        "raise_term", "reconcile", "trim", "anchor", "fence", "lease", "pass_lease", "wipe", "apply_past",
    }  # fmt: skip


# -- after the first write -----------------------------------------------------------------------------------


def test_deciding_scripts_write_only_in_commit() -> None:
    """Scripts note their writes, and execute them at the very end. After the first write they read, pack and
    compute nothing.
    """
    for name in script_names():
        text = assemble(name)
        if '@include "decide"' not in script_path(name).read_text():
            continue
        body = text
        for function in ("commit", "break_off", "fence_damaged"):
            body = body.replace(_function(text, function), "")
        writes = {call[0] for call in _redis_call.findall(body)} & set(WRITES)
        # `apply` first marks the shard as incomplete.
        assert writes == {"apply": {"HSET"}}.get(name, set()), (
            f"{name}: use write(…); commit() carries it out"
        )
        assert "" not in {call[0] for call in _redis_call.findall(body)}, (
            f"{name}: redis.call with a computed name"
        )
        if name not in READS_LATER:
            end = text.rstrip().splitlines()[-2:]
            ends = end == ["commit()", "return reply"] or "return finish(" in text
            assert ends, f"{name}: nothing may stand between commit() and return"


def _function(text: str, name: str) -> str:
    found = re.search(rf"^( *)(?:local )?function {name}\(.*?^\1end\n", text, re.MULTILINE | re.DOTALL)
    return found[0] if found else ""


def test_every_redis_command_in_a_script_is_listed_as_a_read_or_a_write() -> None:
    reads = {
        "GET", "HGET", "HGETALL", "HMGET", "HEXISTS", "HLEN", "HSCAN", "EXISTS", "GETRANGE", "INFO", "LLEN",
        "LRANGE", "SCAN",
        "SISMEMBER", "SMISMEMBER", "STRLEN",
        "TIME", "HSTRLEN", "TYPE", "PTTL",
        "XRANGE", "XREVRANGE", "ZCARD", "ZRANGE", "ZRANGEBYSCORE", "ZSCORE",
    }  # fmt: skip
    used = {call[0] for name in script_names() for call in _redis_call.findall(load(name).text)} - {""}
    noted = {
        command
        for name in script_names()
        for command in re.findall(r"write(?:_in_pieces)?\('(\w+)'", load(name).text)
    }
    assert used - reads - set(WRITES) == set()
    assert noted - set(WRITES) == set()


@pytest.mark.long
async def test_a_failed_write_after_another_write_fences_the_shard_until_a_rebuild(
    servers: Settings,
) -> None:
    """No legal data can cause this. If it happens, no answer is given from a half-written state, and no event
    is lost.
    """
    twins, shop = Twins(), Shop(8, NOW, total=8)
    client = cancellable(redis.asyncio.Redis.from_url(servers.redis_url))
    keys = KeySpace(f"broken{random.getrandbits(40):x}", SHARDS)
    await twins.begin_twins(client, keys, GateLimits(timeout_ms=30_000))
    torn: Counter[str] = Counter()
    try:
        for index in range(len(shop.names)):
            await twins.decide_both(shop.opening(index, codes=False))
        twins.now = shop.now = twins.now + 10
        for _ in range(TORN_STEPS):
            commands_or_ms = shop.next(
                {name: offer for state in twins.states for name, offer in state.offers.items()}
            )
            if isinstance(commands_or_ms, int):
                twins.now = shop.now = twins.now + commands_or_ms
                await twins.sweep_both()
            elif torn[type(commands_or_ms[0]).__name__] < 3 and shop.random.randrange(TEAR_ONE_IN // 8) == 0:
                kind = type(commands_or_ms[0]).__name__
                before = sum(map(len, twins.lines))
                copies = await _torn(twins, commands_or_ms)
                await twins.decide_both(commands_or_ms)
                number = keys.shard_of_offer(commands_or_ms[0].offer)
                torn[kind] += sum(map(len, twins.lines)) > before
                for lines in copies:
                    assert lines == twins.lines[number]
                if copies:
                    await twins.compare_recovered(number)
            else:
                await twins.decide_both(commands_or_ms)
    finally:
        await twins.end_twins()
        await client.aclose()
    assert torn.keys() >= {"Grab", "Confirm", "Release", "Return", "Redeem", "Amend", "Extend"}


async def _torn(twins: Twins, commands: list[AnyCommand]) -> list[list[bytes]]:
    """Sends the commands on copies of the shard: on each copy another write fails, from the second on.
    Returns the event lines of the copies that have new events.
    """
    number = twins.keys.shard_of_offer(commands[0].offer)
    lines_of_copies: list[list[bytes]] = []
    write = 1
    while True:
        write += 1
        keys = KeySpace(f"{twins.keys.prefix}-torn{write}", twins.keys.shards)
        await _copy(twins.client, twins.keys, keys)
        client = InterruptingClient(twins.client)
        client.fail_at_write = write
        shard = keys.shard(number)
        try:
            before = len(await event_lines(twins.client, keys, number))
            if not await _breaks(client, keys, commands, twins.now):
                return lines_of_copies  # the script has fewer writes
            lines = await event_lines(twins.client, keys, number)
            fields = await twins.client.hmget(shard.state, ["partial", "server_epoch", "fault", "seq"])
            assert (fields[0], fields[1]) == (b"1", None)
            assert fields[2].startswith(b"a script failed while it wrote")
            assert int(fields[3]) == len(lines)
            if len(lines) > before:
                lines_of_copies.append(lines)
            client.fail_at_write = 0
            assert (await _call(client, keys, commands, twins.now)).code == Outcome.fenced
        finally:
            names = [name async for name in twins.client.scan_iter(match=f"{keys.prefix}*", count=1_000)]
            await twins.client.unlink(*names)


async def _breaks(client: Any, keys: KeySpace, commands: list[AnyCommand], now: int) -> bool:
    """Whether the script breaks off during the call."""
    try:
        await _call(client, keys, commands, now)
    except redis.ResponseError as error:
        if not str(error).startswith("BROKEN OFF"):
            raise
        return True
    return False


async def _call(client: Any, keys: KeySpace, commands: list[AnyCommand], now: int) -> Any:
    """Makes one call of the commands' script, as the gate makes it; returns the decoded reply."""
    script, shard = type(commands[0]).__name__.lower(), keys.shard(keys.shard_of_offer(commands[0].offer))
    secrets = encoding.Secrets(SEALER, TICKETS)
    if script == "open":
        opens = [command for command in commands if isinstance(command, Open)]
        call = await in_slices(encoding.building_open(shard, opens, secrets, now))
    else:
        call = encoding.build(shard, batch_of(commands), secrets)
    arguments = (f"{shard.shard}/{keys.shards}", now_ms(), now, 10**12, "", *call.arguments)
    return encoding.decode_reply(await run_script(client, script, [*shard.deciding(), *call.keys], arguments))


async def _copy(client: Any, source: KeySpace, target: KeySpace) -> None:
    """Copies all keys of one system to the names of another."""
    for number in range(source.shards):
        tag = source.shard(number).tag
        async for name in client.scan_iter(match=f"{tag}:*", count=1_000):
            await client.copy(name, target.shard(number).tag + name.decode().removeprefix(tag))


@pytest.mark.long
async def test_a_shard_whose_outbox_is_ahead_of_its_state_is_fenced(servers: Settings) -> None:
    """XADD refuses an event whose seq was used before: the seq stored in the shard's state is wrong."""
    client = cancellable(redis.asyncio.Redis.from_url(servers.redis_url))
    keys = KeySpace(f"ahead{random.getrandbits(40):x}", 1)
    await take_over(client, keys)
    shard = keys.shard(0)
    gate = Gate(client, keys, SEALER, GateLimits(timeout_ms=2_000))
    try:
        await gate.decide([opening(), *grabs(2)], "decided")
        await client.hset(shard.state, "seq", 1)
        with pytest.raises(OutcomeUnknown):
            await gate.decide(grabs(1, start=2), "decided")
        assert await client.hmget(shard.state, ["partial", "server_epoch", "seq"]) == [b"1", None, b"3"]
        events = await event_lines(client, keys, 0)
        assert len(events) == 3
        rebuilt = KeySpace(f"{keys.prefix}-rebuilt", 1).shard(0)
        await fold(client, rebuilt, events, SEALER, 1)
        assert set(await client.hkeys(rebuilt.offer_keys("e")[1])) == {b"u0", b"u1"}
    finally:
        names = [name async for name in client.scan_iter(match=f"{keys.prefix}*")]
        await client.unlink(*names)
        await gate.close()
        await client.aclose()
