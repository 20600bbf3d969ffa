"""Staged parts: the parts of a large envelope are written to Redis in pieces before the call that opens the
offer. No offer has half of its parts, and no staged parts remain.
"""

import secrets
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import cache
from typing import Any

import pytest
import redis

from grabstream.gate import calls
from grabstream.gate.calls import GateLimits
from grabstream.gate.encoding import drawing_parts
from grabstream.gate.gate import Gate
from grabstream.gate.staging import INLINE_BYTES_MAX, PIECE_BYTES, STAGED_MS, pieces
from grabstream.lua.keys import KeySpace
from grabstream.lua.running import run_script
from grabstream.lua.server import let_callers_set_time
from grabstream.models.commands import Close, Grab, Open
from grabstream.models.events import decode_event
from grabstream.models.journal import Cursor
from grabstream.models.offers import EnvelopeTerms
from grabstream.models.splitting import at_once
from grabstream.streams.relaying import apply_arguments
from grabstream.streams.relaying.ownership import OwnedShard, SteppedDown
from grabstream.streams.relaying.recovery import Position, Recovery
from tests.lua.costs.measured_shard import MeasuredShard
from tests.lua.histories.recovered import accepted, contents, differences, fold
from tests.support.shards import SEALER, event_lines, opening, take_over

#: Enough parts for two pieces.
PARTS = 24_000
SEED = "ab" * 16
MILLION = 1_000_000


def large(offer: str = "e", **terms: Any) -> Open:
    return opening(offer, **{"parts": PARTS, "law": "equal", "seed": SEED} | terms)


def parts_of(command: Open) -> bytes:
    assert isinstance(command.terms, EnvelopeTerms)
    return _drawn(command.terms, SEED)


@pytest.fixture(autouse=True)
def drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws the parts of each envelope once only: drawing takes longer than these tests."""
    for module in ("gate.encoding", "streams.relaying.apply_arguments"):
        monkeypatch.setattr(f"grabstream.{module}.drawing_parts", _drawing)


def _drawing(terms: EnvelopeTerms, seed: str) -> Generator[None, None, bytes]:
    yield
    return _drawn(terms, seed)


@cache
def _drawn(terms: EnvelopeTerms, seed: str) -> bytes:
    return at_once(drawing_parts(terms, seed))


async def staged(client: Any, keys: KeySpace) -> list[bytes]:
    return [name async for name in client.scan_iter(match=f"{keys.prefix}:*") if b":staged:" in name]


@pytest.fixture
def before(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str, Callable[[Sequence[str]], Awaitable[None]]], None]:
    """Returns a function that makes an action run before each call of a script, with the call's keys."""

    def watch(script: str, act: Callable[[Sequence[str]], Awaitable[None]]) -> None:
        real = calls.run_script

        async def run(client: Any, name: str, keys: Sequence[str], arguments: Sequence[object]) -> Any:
            if name == script:
                await act(keys)
            return await real(client, name, keys, arguments)

        monkeypatch.setattr(calls, "run_script", run)

    return watch


def test_pieces_join_to_the_whole_and_are_sent_last_first() -> None:
    for size in (1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES, INLINE_BYTES_MAX + 6):
        text = secrets.token_bytes(size)
        split = list(pieces(text))
        assert [offset for offset, _ in split] == sorted((offset for offset, _ in split), reverse=True)
        assert b"".join(piece for _, piece in reversed(split)) == text
        assert split[0][0] + len(split[0][1]) == size
        assert max(len(piece) for _, piece in split) <= PIECE_BYTES


async def test_an_envelope_of_many_parts_is_opened(make_gate: Any, client: Any, keys: KeySpace) -> None:
    """A small envelope is in the same call. The parts are those of the seed, and have no expiry."""
    gate, small = make_gate(timeout_ms=60_000), opening("e:small", seed=SEED)
    answers = await gate.decide([large("e:large"), small, large("e:other", parts=PARTS + 7)], "decided")
    assert [answer.outcome for answer in answers] == ["opened"] * 3
    shard = keys.shard(keys.shard_of_offer("e:large"))
    for command in (large("e:large"), small, large("e:other", parts=PARTS + 7)):
        assert await client.get(shard.parts(command.offer)) == parts_of(command)
        assert await client.pttl(shard.parts(command.offer)) == -1
    assert await staged(client, keys) == []
    [granted] = await gate.decide([Grab(id="g", offer="e:large", user="u")], "decided")
    assert granted.amount == int.from_bytes(parts_of(large())[:6], "big")


async def test_staged_parts_that_are_not_used_are_deleted(
    make_gate: Any, client: Any, keys: KeySpace
) -> None:
    """After a repeat, a conflicting body, another command for the same offer, and a fenced shard."""
    gate = make_gate(timeout_ms=60_000)
    await gate.decide([large()], "decided")
    [again] = await gate.decide([large()], "decided")
    assert (again.outcome, again.repeated) == ("opened", True)
    for other in (large(parts=PARTS + 1), Open(id="other", offer="e", terms=large(law="double_mean").terms)):
        [conflict] = await gate.decide([other], "decided")
        assert conflict.outcome == "conflict"
    shard = keys.shard(keys.shard_of_offer("e"))
    assert await client.get(shard.parts("e")) == parts_of(large())
    await client.hset(shard.state, "server_epoch", "another server's")
    [fenced] = await gate.decide([large("e:2")], "decided")
    assert fenced.outcome == "fenced"
    assert await staged(client, keys) == []


async def test_parts_lost_before_the_call_are_staged_again(
    make_gate: Any, client: Any, keys: KeySpace, before: Any
) -> None:
    """All parts are gone, or some, as after a server that lost its last second. A caller without patience
    gets `busy`.
    """
    gate, lost = make_gate(timeout_ms=60_000), list[str]()

    async def lose(names: Sequence[str]) -> None:
        if len(lost) < 2:
            if lost:
                await client.set(names[-1], b"x" * 600)
            else:
                await client.unlink(names[-1])
            lost.append(names[-1])

    before("open", lose)
    [busy] = await gate.decide([large()], "decided")
    assert (busy.outcome, busy.retry_at is not None) == ("busy", True)
    [answer] = await gate.decide([large()], "decided", patience_ms=5_000)
    assert (answer.outcome, answer.repeated) == ("opened", False)
    assert len(lost) == len(set(lost)) == 2
    assert await client.get(keys.shard(keys.shard_of_offer("e")).parts("e")) == parts_of(large())
    assert await staged(client, keys) == []


async def test_parts_of_an_earlier_server_epoch_are_not_used(private_redis: Any, before: Any) -> None:
    """A promoted replica may lack pieces in the middle of a value of the right length."""
    client, keys = private_redis
    gate = Gate(client, keys, SEALER, GateLimits(timeout_ms=60_000))
    promotions: list[bytes] = []

    async def promote(names: Sequence[str]) -> None:
        if not promotions:
            promotions.append(await client.replicaof("127.0.0.1", 1))
            await client.replicaof("no", "one")
            await take_over(client, keys)

    before("open", promote)
    [busy] = await gate.decide([large()], "decided")
    assert (busy.outcome, "parts" in (busy.message or "")) == ("busy", True)
    assert (await gate.decide([large()], "decided"))[0].outcome == "opened"
    await gate.close()


async def test_a_piece_is_refused_when_earlier_pieces_may_be_lost(private_redis: Any) -> None:
    client, keys = private_redis
    name = keys.shard(0).staged("token")
    server_epoch = await run_script(client, "stage", [name], [6, b"later.", "", STAGED_MS])
    assert server_epoch
    assert await run_script(client, "stage", [name], [0, b"first.", server_epoch, STAGED_MS]) == server_epoch
    assert await client.get(name) == b"first.later."
    assert 0 < await client.pttl(name) <= STAGED_MS
    await client.unlink(name)
    assert await run_script(client, "stage", [name], [0, b"first.", server_epoch, STAGED_MS]) == b""
    await client.set(name, b"first.later.")
    assert await run_script(client, "stage", [name], [0, b"first.", b"x" + server_epoch, STAGED_MS]) == b""
    assert await client.get(name) == b"first.later."


async def test_staged_parts_expire_if_their_process_dies(
    make_gate: Any, client: Any, keys: KeySpace, before: Any
) -> None:
    expiries_ms: list[int] = []

    async def read_expiries(names: Sequence[str]) -> None:
        expiries_ms.extend([await client.pttl(name) for name in await staged(client, keys)])

    before("open", read_expiries)
    await make_gate(timeout_ms=60_000).decide([large()], "decided")
    assert len(expiries_ms) == 1
    assert 0 < expiries_ms[0] <= STAGED_MS


async def test_staging_into_full_memory_is_busy_and_leaves_nothing(private_redis: Any) -> None:
    client, keys = private_redis
    gate = Gate(client, keys, SEALER, GateLimits(timeout_ms=60_000))
    await client.config_set("maxmemory", str((await client.info("memory"))["used_memory"] + 100_000))
    [busy] = await gate.decide([large()], "decided")
    assert (busy.outcome, "memory" in (busy.message or "")) == ("busy", True)
    assert (await staged(client, keys), await event_lines(client, keys, 0)) == ([], [])
    await client.config_set("maxmemory", "0")
    assert (await gate.decide([large()], "decided"))[0].outcome == "opened"
    await gate.close()


# -- recovery ------------------------------------------------------------------------------------------------


async def test_a_recovery_writes_parts_in_pieces_even_if_memory_is_full(private_redis: Any) -> None:
    client, keys = private_redis
    gate = Gate(client, keys, SEALER, GateLimits(timeout_ms=60_000))
    await gate.decide([large("a"), large("b", parts=PARTS + 1), opening("c", seed=SEED)], "decided")
    await gate.decide([Grab(id=f"g{n}", offer="a", user=f"u{n}") for n in range(3)], "decided")
    await gate.close()
    lines, live = await event_lines(client, keys, 0), await contents(client, keys.shard(0))
    shard = KeySpace("again", 1).shard(0)
    await let_callers_set_time(client, shard.state)
    await client.config_set("maxmemory", "1")
    await fold(client, shard, lines, SEALER, 1)
    recovered = await contents(client, shard)
    assert not differences(live, recovered)
    assert recovered["offer:a/parts"] == parts_of(large("a"))


async def test_a_recovery_that_stops_between_pieces_is_repeated(private_redis: Any) -> None:
    """An event whose parts are not written is not applied."""
    client, keys = private_redis
    gate = Gate(client, keys, SEALER, GateLimits(timeout_ms=60_000))
    await gate.decide([opening("c", seed=SEED), large("a")], "decided")
    await gate.close()
    lines, live = await event_lines(client, keys, 0), await contents(client, keys.shard(0))
    shard = OwnedShard(client, KeySpace("again", 1).shard(0))

    async def journal(_: Any = None) -> Any:
        yield Cursor(), accepted(lines)

    class Dies(OwnedShard):
        async def run(self, name: str, keys: list[str], ownership: Any, *arguments: object) -> Any:
            if name == "apply_parts" and arguments[0] == 0:
                raise SteppedDown("between two pieces")
            return await super().run(name, keys, ownership, *arguments)

    dies = Dies(client, shard.keys)
    ownership = (await dies.raise_term(0)).ownership
    with pytest.raises(SteppedDown):
        await Recovery(dies, SEALER).rebuild(ownership, Position("other", 0), journal)
    events = [decode_event(line) for line in lines]
    arguments_of_apply = at_once(apply_arguments.building(shard.keys, events[1:], SEALER))
    assert [len(staged_parts.parts) for staged_parts in arguments_of_apply.staged] == [6 * PARTS]
    await client.unlink(shard.keys.parts("a"))
    ownership = (await shard.raise_term(ownership.term)).ownership
    await run_script(client, "wipe", [shard.keys.state], [*ownership.arguments, "why"])
    with pytest.raises(redis.ResponseError, match="PARTS 0 bytes"):
        arguments = [*ownership.arguments, "", "", "", *arguments_of_apply.arguments]
        await run_script(client, "apply", [*shard.keys.deciding(), *arguments_of_apply.keys], arguments)
    await Recovery(shard, SEALER).rebuild(ownership, Position("other", 0), journal)
    assert not differences(live, await contents(client, shard.keys))


async def test_parts_from_a_former_owner_are_refused(private_redis: Any) -> None:
    client, keys = private_redis
    shard = keys.shard(0)
    fields = [value.decode() for value in await client.hmget(shard.state, ["term", "owner", "server_epoch"])]
    for wrong, why in (([fields[0], "stranger", fields[2]], "another owner"), (fields, "not fenced")):
        with pytest.raises(redis.ResponseError, match=f"LOST .*{why}"):
            await run_script(client, "apply_parts", [shard.state, shard.parts("e")], [*wrong, 0, b"x"])
    assert not await client.exists(shard.parts("e"))


# -- time ----------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_a_million_parts_take_no_long_call(
    private_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opens, recovers and closes such an envelope. The shortest of several repetitions counts, since other
    processes use this machine.
    """

    def ones(terms: EnvelopeTerms, seed: str) -> Generator[None, None, bytes]:
        yield
        return (1).to_bytes(6, "big") * terms.parts

    monkeypatch.setattr("grabstream.gate.encoding.drawing_parts", ones)
    monkeypatch.setattr("grabstream.streams.relaying.apply_arguments.drawing_parts", ones)
    system = MeasuredShard(private_server[1])
    await system.begin()
    terms = EnvelopeTerms(
        issuer="a", funding="f", asset="CNY", total=MILLION, parts=MILLION, law="equal", seed=SEED
    )

    async def prepare() -> None:
        pass

    async def act() -> None:
        await system.decide([Open(id=f"open-{n}", offer=f"o{n}", terms=terms) for n in range(2)])
        await fold(
            system.redis,
            KeySpace("again", 1).shard(0),
            await event_lines(system.redis, system.space, 0),
            SEALER,
            1,
        )
        answers = await system.decide([Close(id=f"close-{n}", offer=f"o{n}") for n in range(2)])
        assert {answer.outcome for answer in answers} == {"closed"}

    try:
        longest = await system.longest_of(prepare, act, 5)
    finally:
        await system.end()
    print(
        f"\n{ {name: round(took, 1) for name, took in longest.items()} } ms; slower by {system.slowness:.1f}"
    )
    assert {"stage", "open", "apply_parts", "apply", "close"} <= longest.keys()
    assert max(longest.values()) < 10 * max(2, system.slowness), longest
