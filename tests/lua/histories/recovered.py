"""Whether a recovery gives the state that deciding gave: a shard's events applied to keys of their own, and
both compared key by key.
"""

import random
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from grabstream.lua.gate.calls import run_script
from grabstream.lua.gate.sealing import Sealer
from grabstream.lua.keys import ShardKeys
from grabstream.lua.records import offer_of_answer, unpacked
from grabstream.models.journal import GENESIS, Accepted, Cursor, chain
from grabstream.models.offers import PAYMENTS_KNOWN_MS
from grabstream.streams.relaying.ownership import OwnedShard
from grabstream.streams.relaying.recovery import Position, Recovery

#: What is no state of the journal: refusals and their counts, what is not yet journaled, who relays, how far
#: cleaning is.
LEFT_OUT = ("refusals", "refusal_order", "demand", "outbox", "lease", "cleaning")

_unpack = msgspec.msgpack.Decoder().decode


def accepted(lines: Sequence[bytes]) -> list[Accepted]:
    """Event lines from seq 1 on, as a reader of the journal accepts them."""
    return [
        Accepted(seq, line, hash_)
        for seq, (line, hash_) in enumerate(zip(lines, chain(GENESIS, lines), strict=True), 1)
    ]


async def fold(
    client: Any,
    keys: ShardKeys,
    lines: Sequence[bytes],
    sealer: Sealer,
    shards: int,
    cut: random.Random | None = None,
) -> None:
    """Makes the state of these events in an empty shard, as a recovery does; `cut` breaks it off and goes on
    at random places.
    """
    shard = OwnedShard(client, keys)
    events = accepted(lines)
    own = (await shard.raise_term(0)).ownership
    recovery = Recovery(shard, sealer)

    async def journal(upto: int) -> AsyncGenerator[tuple[Cursor, Sequence[Accepted]], None]:
        at = 0
        while at < upto:
            size = cut.choice((1, 7, 300)) if cut else 1_000
            yield Cursor(), events[at : min(at + size, upto)]
            at += size

    end = len(events)
    stops = sorted({cut.randint(0, end) for _ in range(3)} | {end}) if cut else [end]
    await recovery.rebuild(own, Position("other", 0), lambda base: journal(stops[0]))
    for before, after in pairwise(stops):
        await recovery.catch_up(own, Position("behind", before), journal(after))
    await run_script(client, "reconcile", [keys.state], (*own.arguments, end, shards))


async def contents(client: Any, keys: ShardKeys, now_ms: int | None = None) -> dict[str, Any]:
    """Everything a shard has in Redis that counts at a time (its last event's, if absent), by the key's name
    behind its tag; what is packed is unpacked.
    """
    found: dict[str, Any] = {}
    async for key in client.scan_iter(match=f"{keys.tag}:*", count=1_000):
        name = key.decode().removeprefix(f"{keys.tag}:")
        if name not in LEFT_OUT:
            found[name] = await _value(client, key, name)
    found["shard"] = {field: found["shard"].get(field, b"0") for field in ("seq", "time")}
    _forgive_what_the_sweeper_postponed(found)
    return _without_what_is_forgotten(found, int(found["shard"]["time"]) if now_ms is None else now_ms)


def _without_what_is_forgotten(found: dict[str, Any], now_ms: int) -> dict[str, Any]:
    """Records of offers that have retired, whether they are deleted already or not."""
    retired = {name.decode() for name in found.get("retired", ())}
    known = {name.decode() for name, at in found.get("past", {}).items() if now_ms < at + PAYMENTS_KNOWN_MS}
    found["past"] = {name: at for name, at in found.get("past", {}).items() if name.decode() in known}
    for name, kept in found.items():
        campaign, _, what = name.removeprefix("campaign:").partition("/")
        if not name.startswith("campaign:"):
            continue
        if what == "answers":
            found[name] = {
                field: record for field, record in kept.items() if _offer_of(record, campaign) not in retired
            }
        elif what == "payments":
            found[name] = {
                field: record for field, record in kept.items() if record[0] not in retired - known
            }
        elif what == "state":
            found[name] = {
                field: value
                for field, value in kept.items()
                if field.partition("/")[2] not in retired - known
            }
    return {name: value for name, value in found.items() if value}


def _offer_of(record: Any, campaign: str) -> str:
    return str(record[1][0]) if isinstance(record, tuple) else offer_of_answer(record, campaign)


def _forgive_what_the_sweeper_postponed(found: dict[str, Any]) -> None:
    """A closed offer with holds is looked at again and again; when next, no event says."""
    for name in list(found.get("due", {})):
        offer = found[f"offer:{name.decode()}"]
        if offer["state"] == b"closed" and offer.get("held", b"0") != b"0":
            del found["due"][name]


async def _value(client: Any, key: bytes, name: str) -> Any:
    kind = (await client.type(key)).decode()
    if kind == "hash":
        fields = await client.hgetall(key)
        last = name.rsplit("/", 1)[-1]
        if last == "answers":
            return {field: unpacked(record) for field, record in fields.items()}
        if last in ("grabs", "payments"):
            return {field: _unpack(record) for field, record in fields.items()}
        named = {field.decode(): value for field, value in fields.items()}
        return named | {
            field: _unpack(named[field])
            for field in ("rules", "loads")
            if name.startswith("offer:") and field in named
        }
    if kind == "zset":
        return dict(await client.zrange(key, 0, -1, withscores=True))
    if kind == "set":
        return set(await client.smembers(key))
    return await client.lrange(key, 0, -1) if kind == "list" else await client.get(key)


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What two shards' contents have different, a line each."""
    lines = []
    for name in sorted(one.keys() | other.keys()):
        a, b = one.get(name), other.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += [
                f"{name} {field!r}: {a.get(field)!r} / {b.get(field)!r}"
                for field in a.keys() | b.keys()
                if a.get(field) != b.get(field)
            ]
        elif a != b:
            lines.append(f"{name}: {a!r} / {b!r}")
    return lines
