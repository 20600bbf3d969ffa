"""Recovers a shard's events into other, empty keys, and compares the contents of both shards key by key."""

import random
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from grabstream.crypto.sealing import Sealer
from grabstream.lua.keys import STAGED, ShardKeys
from grabstream.lua.packed_values import offer_of_answer, unpacked
from grabstream.lua.running import run_script
from grabstream.lua.server import let_callers_set_time
from grabstream.models.calendar import opens_next
from grabstream.models.journal import GENESIS, Accepted, Cursor, chain
from grabstream.models.offers import PAYMENTS_KNOWN_MS
from grabstream.models.runs import decode_line
from grabstream.streams.relaying.ownership import OwnedShard
from grabstream.streams.relaying.recovery import Position, Recovery
from tests.support.runs import as_lines

#: Keys that do not follow from the journal: refusals and their counts, the outbox, the lease, the cursors of
#: cleaning. Nor do those that begin with STAGED.
LEFT_OUT = ("refusals", "refusal_order", "demand", "outbox", "lease", "cleaning")
#: RETIRE_AGAIN_MS of lua/sweeping/sweep.lua.
POSTPONED_MS = 60_000

_unpack = msgspec.msgpack.Decoder().decode


def accepted(events: Sequence[bytes]) -> list[Accepted]:
    """The lines of events from seq 1 on, as a reader of the journal accepts them."""
    lines = as_lines(events)
    return [
        Accepted(decode_line(line).last_seq, line, hash_)
        for line, hash_ in zip(lines, chain(GENESIS, lines), strict=True)
    ]


async def fold(
    client: Any,
    keys: ShardKeys,
    lines: Sequence[bytes],
    sealer: Sealer,
    shards: int,
    cut: random.Random | None = None,
) -> None:
    """Recovers an empty shard from these events; with `cut`, in random steps. Callers may name the time."""
    if not await client.hexists(keys.state, "seq"):
        await let_callers_set_time(client, keys.state)
    shard = OwnedShard(client, keys)
    events = accepted(lines)
    ownership = (await shard.raise_term(0)).ownership
    recovery = Recovery(shard, sealer)

    async def journal(upto: int) -> AsyncGenerator[tuple[Cursor, Sequence[Accepted]], None]:
        at = 0
        while at < upto:
            size = cut.choice((1, 7, 300)) if cut else 1_000
            yield Cursor(), events[at : min(at + size, upto)]
            at += size

    end = len(events)
    stops = sorted({cut.randint(0, end) for _ in range(3)} | {end}) if cut else [end]
    last_seqs = [0, *(event.seq for event in events)]
    await recovery.rebuild(ownership, Position("other", 0), lambda base: journal(stops[0]))
    for before, after in pairwise(stops):
        await recovery.catch_up(ownership, Position("behind", last_seqs[before]), journal(after))
    await run_script(client, "reconcile", [keys.state], (*ownership.arguments, last_seqs[end], shards))


async def contents(client: Any, keys: ShardKeys, now_ms: int | None = None) -> dict[str, Any]:
    """The contents of a shard in Redis that count at `now_ms` (default: the time of its last event), by key
    name without the tag. Packed values are unpacked.
    """
    values: dict[str, Any] = {}
    async for key in client.scan_iter(match=f"{keys.tag}:*", count=1_000):
        name = key.decode().removeprefix(f"{keys.tag}:")
        if name not in LEFT_OUT and not name.startswith(STAGED):
            values[name] = await _value(client, key, name)
    values["shard"] = {field: values["shard"].get(field, b"0") for field in ("seq", "time")}
    now = int(values["shard"]["time"]) if now_ms is None else now_ms
    _drop_postponed_due_times(values)
    _replace_missed_openings(values, now)
    return _without_retired_offers(values, now)


def _without_retired_offers(values: dict[str, Any], now_ms: int) -> dict[str, Any]:
    """The values without records of retired offers, which may or may not be deleted already."""
    retired = {name.decode() for name in values.get("retired", ())}
    known = {name.decode() for name, at in values.get("past", {}).items() if now_ms < at + PAYMENTS_KNOWN_MS}
    values["past"] = {name: at for name, at in values.get("past", {}).items() if name.decode() in known}
    for name, fields in values.items():
        campaign, _, part = name.removeprefix("campaign:").partition("/")
        if not name.startswith("campaign:"):
            continue
        if part == "answers":
            values[name] = {
                field: record
                for field, record in fields.items()
                if _offer_of(record, campaign) not in retired
            }
        elif part == "payments":
            values[name] = {
                field: record for field, record in fields.items() if record[0] not in retired - known
            }
        elif part == "state":
            values[name] = {
                field: value
                for field, value in fields.items()
                if field.partition("/")[2] not in retired - known
            }
    return {name: value for name, value in values.items() if value}


def _offer_of(record: Any, campaign: str) -> str:
    return str(record[1][0]) if isinstance(record, tuple) else offer_of_answer(record, campaign)


def _drop_postponed_due_times(values: dict[str, Any]) -> None:
    """Drops the due times of closed offers with holds, which the sweeper postpones without an event."""
    for name in list(values.get("due", {})):
        offer = values[f"offer:{name.decode()}"]
        if offer["state"] == b"closed" and offer.get("held", b"0") != b"0":
            del values["due"][name]


def _replace_missed_openings(values: dict[str, Any], now_ms: int) -> None:
    """Replaces the due times that have come of open offers with hours by the times at which they serve next.
    If the sweeper comes late, outside the hours, it waits for the next opening, without an event.
    """
    for name, due in values.get("due", {}).items():
        offer = values[f"offer:{name.decode()}"]
        hours, offsets = (offer["rules"].get(field, ()) for field in ("hours", "offsets"))
        if offer["state"] == b"open" and hours and due <= now_ms:
            serves_next = opens_next(hours, offsets, now_ms) or now_ms
            values["due"][name] = min(serves_next, int(offer["closes_at"]))


def align_postponed_due_times(live: dict[str, Any], folded: dict[str, Any], now_ms: int) -> None:
    """Replaces the due times to which the sweeper postponed closed offers, whose holds have ended since, by
    the due times that a fold of the events has.
    """
    folded_due = folded.get("due", {})
    for name, due in live.get("due", {}).items():
        is_closed = live[f"offer:{name.decode()}"]["state"] == b"closed"
        if is_closed and folded_due.get(name, now_ms) < min(now_ms, due) and due <= now_ms + POSTPONED_MS:
            live["due"][name] = folded_due[name]


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


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """The differences between the contents of two shards, one line each."""
    lines = []
    for name in sorted(first.keys() | second.keys()):
        first_value, second_value = first.get(name), second.get(name)
        if isinstance(first_value, dict) and isinstance(second_value, dict):
            lines += [
                f"{name} {field!r}: {first_value.get(field)!r} / {second_value.get(field)!r}"
                for field in first_value.keys() | second_value.keys()
                if first_value.get(field) != second_value.get(field)
            ]
        elif first_value != second_value:
            lines.append(f"{name}: {first_value!r} / {second_value!r}")
    return lines
