"""The function library: it is loaded only by a takeover and `init`, lives next to those of other releases,
and nothing that a call makes survives the call.
"""

import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import ResponseError

from grabstream.connections.libraries import field_of
from grabstream.gate.gate import Gate
from grabstream.lua import running
from grabstream.lua.keys import KeySpace, shard_key_from
from grabstream.lua.library import (
    MISSING,
    Library,
    LibraryMissing,
    assemble_library,
    library,
    missing_or_unusable,
    provide,
)
from grabstream.lua.loader import SCRIPTS, BadScript, script_names, script_path
from grabstream.lua.running import run_script
from grabstream.lua.server import raise_term
from grabstream.models.commands import Grab, Load, Open
from grabstream.models.offers import CouponTerms, StockTerms
from tests.support.shards import NOW, SEALER, event_lines, grabs, opening, take_over

#: Values of includes that are not marked, and may differ after a call: what they hold ends with the process.
LASTING = {"run_id"}


async def decide(gate: Gate, *commands: Any) -> list[str]:
    return [answer.outcome for answer in await gate.decide(commands, "decided")]


# -- the text ------------------------------------------------------------------------------------------------


async def test_every_script_is_a_function_with_its_flags(private_redis: Any) -> None:
    client, _ = private_redis
    [listed] = await client.function_list(library().name)
    functions = {
        field_of(entry, "name").decode(): {flag.decode() for flag in field_of(entry, "flags")}
        for entry in field_of(listed, "functions")
    }
    expected = {}
    for name in script_names():
        first = script_path(name).read_text().partition("\n")[0]
        expected[library().functions[name]] = set(first.partition("flags=")[2].split(",")) - {""}
    assert functions == expected


def changed_copy(folder: Path, file: str, before: str, after: str) -> Library:
    """The library of a copy of the scripts, in which a file is changed."""
    shutil.copytree(SCRIPTS, folder, ignore=lambda _, names: [name for name in names if name.endswith("py")])
    path = folder / file
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    return assemble_library(folder)


@pytest.mark.parametrize(
    ("file", "before", "after", "reason"),
    [
        ("includes/undo.lua", "local undo_log\n", "local function f() end\n", "must stand before one line"),
        ("commands/pause.lua", "return carry", "--- @each_call\nreturn carry", "pause: @each_call stands in"),
        ("commands/pause.lua", "#!lua flags=allow-oom", "#!lua name=x", "pause: the first line is not"),
    ],
)
def test_a_wrong_mark_is_refused(tmp_path: Path, file: str, before: str, after: str, reason: str) -> None:
    with pytest.raises(BadScript, match=reason):
        changed_copy(tmp_path / "lua", file, before, after)


# -- nothing survives a call ---------------------------------------------------------------------------------


def with_dump(folder: Path, file: str = "", before: str = "", after: str = "") -> Library:
    """The library, perhaps with a change, and with functions `…_dump_<n>` that return every value that the
    includes hold, but for functions and for what is marked.
    """
    made = changed_copy(folder, file, before, after) if file else assemble_library()
    wrapper = re.search(
        r"^local function each_call\(body\)\n  return function\(keys, arguments\)\n    (.*) = ",
        made.text,
        re.M,
    )
    assert wrapper is not None
    includes = made.text[: wrapper.start()]
    names = [
        name.strip()
        for listed in re.findall(r"^local ([\w, ]+?)(?: =.*)?$", includes, re.M)
        for name in listed.split(",")
    ]
    kept = [name for name in names if name not in {*wrapper[1].split(", "), *LASTING}]
    assert {"COST", "CODE", "BOUNDS"} <= set(kept)
    dumps = ""
    for number in range(0, len(kept), 40):  # a function reaches at most 60 of them
        values = "; ".join(
            f"if type({name}) ~= 'function' then r.{name} = {name} end" for name in kept[number : number + 40]
        )
        dumps += (
            f"redis.register_function{{function_name = '{made.name}_dump_{number // 40}', "
            f"callback = function() local r = {{}} {values} return cjson.encode(r) end}}\n"
        )
    return made._replace(text=made.text + dumps)


async def dumped(client: Any, made: Library) -> list[bytes]:
    return [
        await client.execute_command("FCALL", f"{made.name}_dump_{number}", 0)
        for number in range(made.text.count("_dump_"))
    ]


async def play_with_errors(client: Any, keys: KeySpace, check: Callable[[], Awaitable[None]]) -> list[str]:
    """Calls that succeed, that are refused, and that raise in the middle: in a basket, and with writes noted.
    Returns the outcomes of all; those of what raises are `invalid`. `check` is called after each step.
    """
    shard, gate = keys.shard(0), Gate(client, keys, SEALER, clock=lambda: NOW)
    coupons = CouponTerms(issuer="i", total=4, codes=True, opens_at=NOW - 1)
    outcomes = await decide(
        gate,
        opening("e", 5),
        Open(id="oc", offer="c", terms=coupons),
        Load(id="l", offer="c", what="codes", chunk=1, chunks=1, items=tuple("abcd")),
        Open(id="os", offer="s", terms=StockTerms(issuer="i", total=50, hold_ms=60_000)),
        *grabs(3),
        Grab(id="x", offer="none", user="u"),
    )
    await check()
    basket = [Grab(id=f"b{n}", offer="c", user=f"u{n}", basket="b") for n in range(2)]
    codes = shard.offer_keys("c")[4]
    await client.rename(codes, f"{codes}kept")
    await client.set(codes, "a string")
    outcomes += await decide(gate, *basket)
    await check()
    await client.rename(f"{codes}kept", codes)
    # The outbox and all else is noted, then reading the order of refusals raises.
    await client.rename(shard.refusal_order, f"{shard.refusal_order}kept")
    await client.set(shard.refusal_order, "a string")
    outcomes += await decide(gate, Grab(id="y", offer="s", user="v"), Grab(id="z", offer="none", user="v"))
    await check()
    await client.rename(f"{shard.refusal_order}kept", shard.refusal_order)
    many = [Grab(id=f"m{n}", offer="s", user=f"u{n}") for n in range(20)]
    outcomes += await decide(gate, *many)
    outcomes += await decide(gate, *basket)
    await check()
    await gate.close()
    return outcomes


async def test_a_call_leaves_nothing_to_the_next_one(
    private_redis: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that raises: neither noted writes, nor cost, nor what a basket would undo, nor a constant."""
    client, keys = private_redis
    made = with_dump(tmp_path / "unused")
    monkeypatch.setattr(running, "library", lambda: made)
    await client.execute_command("FUNCTION", "FLUSH")
    await client.execute_command("FUNCTION", "LOAD", made.text)
    before = await dumped(client, made)

    async def check() -> None:
        assert await dumped(client, made) == before

    with_functions = await play_with_errors(client, keys, check)
    lines = await event_lines(client, keys, 0)
    # The same as plain scripts, each of which begins with nothing.
    await client.flushdb()
    await take_over(client, keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "is_plain", lambda redis, state: True)
        assert await play_with_errors(client, keys, check) == with_functions
    plain = await event_lines(client, keys, 0)
    assert [_timeless(line) for line in lines] == [_timeless(line) for line in plain]


def _timeless(line: bytes) -> bytes:
    return re.sub(
        rb'"(at|opens_at|closes_at|deadline_at|sealed_seed|seed|seed_sha256|amount|codes)":("[^"]*"|\[[^]]*\]|\d+)',
        rb'"\1":0',
        line,
    )


# -- where it is missing -------------------------------------------------------------------------------------


async def test_a_gate_without_the_library_is_fenced_until_a_takeover_loads_it(private_redis: Any) -> None:
    client, keys = private_redis
    gate = Gate(client, keys, SEALER)
    assert await decide(gate, opening()) == ["opened"]
    await client.execute_command("FUNCTION", "FLUSH")
    [answer] = await gate.decide(grabs(1), "decided")
    assert (answer.outcome, answer.retry_at is not None) == ("fenced", True)
    assert library().name in (answer.message or "")
    assert "cmdstat_evalsha" not in await client.info("commandstats")
    state = keys.shard(0).state
    assert await missing_or_unusable(client, state) == MISSING
    with pytest.raises(LibraryMissing):
        await run_script(client, "read_outbox", [state, keys.shard(0).outbox], [1, "test", "", 1, 1])
    # A request only for the time, or for a lease, does not load it.
    assert int(await run_script(client, "time", [state], [])) > 0
    assert await missing_or_unusable(client, state) == MISSING
    await raise_term(client, state, 0, "next")
    assert await decide(gate, *grabs(1)) == ["granted"]
    await gate.close()


async def test_a_takeover_loads_it_and_an_earlier_call_does_not(private_server: Any) -> None:
    client = redis.asyncio.Redis(port=private_server[1])
    state = KeySpace("own", 1).shard(0).state
    assert int(await run_script(client, "time", [state], [])) > 0
    assert await missing_or_unusable(client, state) == MISSING
    await raise_term(client, state, 0, "first")
    assert await missing_or_unusable(client, state) == ""
    await client.aclose()


# -- where functions cannot be used --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forbidden", "reason"),
    [
        (("-function|load",), "'function|load'"),
        (("-fcall", "-function"), "'fcall'"),
    ],
)
async def test_the_owner_says_that_it_may_not_load_the_library(
    private_redis: Any, forbidden: tuple[str, ...], reason: str
) -> None:
    """Then gates of the shard run plain scripts, also those that might use functions."""
    client, keys = private_redis
    state = keys.shard(0).state
    gate = Gate(client, keys, SEALER)
    assert await decide(gate, opening()) == ["opened"]
    await client.execute_command("FUNCTION", "FLUSH")
    await client.execute_command("ACL", "SETUSER", "owner", "on", "nopass", "~*", "&*", "+@all", *forbidden)
    owner = redis.asyncio.Redis(
        port=client.connection_pool.connection_kwargs["port"], username="owner", password="x"
    )
    _, plain = await raise_term(owner, state, 0, "owner")
    assert reason in plain
    assert await client.hget(state, "plain") == plain.encode()
    assert await decide(gate, *grabs(2)) == ["granted", "granted"]
    # The shard is wiped and rebuilt: what its owner said stays.
    term, epoch = (
        (await client.hget(state, "term")).decode(),
        (await client.hget(state, "server_epoch")).decode(),
    )
    await run_script(owner, "wipe", [state], [term, "owner", epoch, "a test", 4, 2])
    assert await client.hget(state, "plain") == plain.encode()
    # An owner that may load it takes that back, and the gate uses functions after a time.
    await raise_term(client, state, 0, "next")
    assert await client.hget(state, "plain") is None
    assert await missing_or_unusable(client, state) == ""
    await owner.aclose()
    await gate.close()


async def test_a_gate_that_may_not_call_functions_runs_plain_scripts(private_redis: Any) -> None:
    client, keys = private_redis
    await client.execute_command("ACL", "SETUSER", "default", "-fcall")
    gate = Gate(client, keys, SEALER)
    assert await decide(gate, opening(), *grabs(2)) == ["opened", "granted", "granted"]
    stats = await client.info("commandstats")
    assert stats["cmdstat_fcall"]["rejected_calls"] == 1  # it does not try with every call
    await client.execute_command("ACL", "SETUSER", "default", "+@all")
    await gate.close()


async def test_a_full_memory_does_not_stop_an_owner_without_library(private_redis: Any) -> None:
    """FUNCTION LOAD is refused then, but what makes room must continue."""
    client, keys = private_redis
    state = keys.shard(0).state
    gate = Gate(client, keys, SEALER)
    assert await decide(gate, opening("e", 5), *grabs(2)) == ["opened", "granted", "granted"]
    await client.execute_command("FUNCTION", "FLUSH")
    await client.config_set("maxmemory", 1)
    [answer] = await gate.decide(grabs(1, start=7), "decided")
    assert answer.outcome == "fenced"
    (term, epoch, *_), plain = await raise_term(client, state, 0, "owner")
    assert "memory" in plain
    trim = [term, "owner", epoch, 3, "aa", 1, "channel", term, "owner", 0]
    assert (await run_script(client, "trim", [state, keys.shard(0).outbox], trim))[0] == b"3"
    assert (await gate.decide(grabs(1, start=7), "decided"))[0].outcome == "busy"
    await client.config_set("maxmemory", 0)
    assert await provide(client, state) == ""
    assert await decide(gate, *grabs(1, start=7)) == ["granted"]
    await gate.close()


async def test_an_error_of_a_function_s_key_is_not_taken_for_a_missing_permission(private_redis: Any) -> None:
    client, keys = private_redis
    assert not running.why_unusable(ResponseError("this user has no permissions to access one of the keys"))
    assert not running.why_unusable(ResponseError("unknown command 'EVALSHA', with args beginning with: "))
    assert running.why_unusable(ResponseError("unknown command `FCALL`, with args beginning with: `x`"))
    state = keys.shard(0).state
    await client.set(state, "a string")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await run_script(client, "raise_term", [state], [0, "x"])
    assert not running.is_plain(client, state)
    await client.delete(state)


def test_the_shard_of_a_key_is_known_from_its_tag() -> None:
    shard = KeySpace("p", 3).shard(2)
    for key in (
        *shard.deciding(),
        shard.lease,
        shard.present,
        *shard.offer_keys("a:b"),
        *shard.campaign_keys("a"),
    ):
        assert shard_key_from(key) == shard.state


# -- releases side by side -----------------------------------------------------------------------------------


async def test_two_releases_decide_the_same_shard_with_their_libraries(
    private_redis: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takeover loads its own and leaves the other; the answers name which decided."""
    client, keys = private_redis
    newer = changed_copy(tmp_path / "lua", "includes/cost.lua", "call_max = 2500", "call_max = 2400")
    assert newer.name != library().name
    gate = Gate(client, keys, SEALER)
    assert await decide(gate, opening("e", 10)) == ["opened"]
    for release in (newer, library(), newer):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(running, "library", lambda release=release: release)
            patch.setattr("grabstream.lua.library.library", lambda release=release: release)
            await raise_term(client, keys.shard(0).state, 0, "owner")
            number = len(await event_lines(client, keys, 0))
            assert await decide(gate, *grabs(1, start=number)) == ["granted"]
    names = {field_of(entry, "library_name").decode() for entry in await client.function_list()}
    assert names == {newer.name, library().name}
    assert "cmdstat_evalsha" not in await client.info("commandstats")
    await gate.close()
