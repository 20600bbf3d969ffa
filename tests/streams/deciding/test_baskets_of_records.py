"""A basket in a record is refused as a whole if one of its grabs cannot be decoded, or if its grabs are in
several shards.
"""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from grabstream.models.bounds import COMMAND_BYTES_MAX, REJECTED_OF_ARRAY_MAX
from grabstream.models.identifiers import shard_of
from grabstream.streams.deciding.decoding import Pace, TopicAuthority, Understood, decode_record
from grabstream.streams.topics import Topics


async def _understood(*commands: Any) -> Understood:
    record = SimpleNamespace(
        topic="t.commands", partition=0, offset=7, key=None, value=json.dumps(commands).encode()
    )
    return await decode_record(record, Pace(), TopicAuthority(Topics("t")))


def _grab(id: str, offer: str, user: Any = "ann", basket: Any = "B", **more: Any) -> dict[str, Any]:
    return {"type": "grab", "id": id, "offer": offer, "user": user, "basket": basket} | more


@pytest.mark.parametrize(
    "second",
    [
        _grab("g-2", "sale:b", user="no id"),
        _grab("g-2", "sale:b", quantity=0),
        _grab("g-2", "sale:b", wait=True),
        _grab("g-2", "sale:b", unknown=1),
        {"type": "grab", "offer": "sale:b", "basket": "B"},
        {"type": "release", "id": "g-2", "offer": "sale:b", "grab": "g", "basket": "B"},
        _grab("g-1", "sale:a"),
        _grab("g-2", "other:b"),
    ],
    ids=["user", "quantity", "wait", "unknown field", "no id", "not a grab", "same grab", "another campaign"],
)
async def test_a_basket_with_a_bad_grab_is_refused_as_a_whole(second: dict[str, Any]) -> None:
    understood = await _understood(_grab("g-1", "sale:a"), second, _grab("g-3", "sale:c", basket=None))
    assert [command.id for command in understood.commands] == ["g-3"]
    assert understood.indexes == [2]
    refused = [answer for answer in understood.refused if answer.id == "g-1"]
    assert refused
    assert {answer.outcome for answer in refused} == {"invalid"}
    assert any((answer.message or "").startswith("basket: ") for answer in refused)


async def test_an_escaped_field_name_basket_is_recognised() -> None:
    raw = (
        b'[{"type":"grab","id":"g-1","offer":"a","user":"ann","basket":"B"},{"type":"grab","id":"g-2",'
        b'"offer":"a","b\\u0061sket":"B"}]'
    )
    understood = await decode_record(
        SimpleNamespace(topic="t.commands", partition=0, offset=1, key=None, value=raw),
        Pace(),
        TopicAuthority(Topics("t")),
    )
    assert understood.commands == []


@pytest.mark.parametrize(
    "fields",
    [
        b'"basket":"B","basket":1e400',
        b'"basket":"B","basket":"C"',
        b'"b\\u0061sket":"B","basket":null',
        b'"basket":"B","quantity":1e400',
        b'"basket":"B","metadata":{"a":"\xff"}',
        b'"basket":"B","basket":"C","x":"' + b"x" * COMMAND_BYTES_MAX + b'"',
        b'"basket":"B","basket":"C","x":' + b"[" * 900 + b"]" * 900,
    ],
    ids=range(7),
)
async def test_every_name_of_a_basket_counts(fields: bytes) -> None:
    """Also in a grab that cannot be decoded, whichever of its values a reader would take."""
    raw = (
        b'[{"type":"grab","id":"g-1","offer":"a","user":"ann","basket":"B"},'
        b'{"type":"grab","id":"g-2","offer":"a","user":"bob",' + fields + b"}]"
    )
    record = SimpleNamespace(topic="t.commands", partition=0, offset=1, key=None, value=raw)
    understood = await decode_record(record, Pace(), TopicAuthority(Topics("t")))
    assert understood.commands == []
    assert {answer.id for answer in understood.refused} >= {"g-1"}


async def test_a_basket_across_shards_is_refused() -> None:
    offers = [next(name for name in map(str, range(99)) if shard_of(name, 2) == shard) for shard in (0, 1)]
    understood = await _understood(*[_grab(f"g-{offer}", offer) for offer in offers])
    assert understood.commands == []
    assert {answer.outcome for answer in understood.refused} == {"invalid"}
    assert len(understood.rejected) == 2


async def test_the_bytes_of_all_grabs_of_a_refused_basket_are_kept_as_they_were_sent() -> None:
    good = b'{"offer":"a", "type":"grab","id":"g-1","user":"ann","basket":"B"}'
    bad = b'{"type":"grab","id":"g-2","offer":"a","user":"ann","basket":"B","quantity":0}'
    raw = b"[" + good + b"," + bad + b"]"
    record = SimpleNamespace(topic="t.commands", partition=0, offset=1, key=None, value=raw)
    understood = await decode_record(record, Pace(), TopicAuthority(Topics("t")))
    assert [kept.raw for kept in understood.rejected] == [good, bad]
    assert [dict(kept.headers)["index"] for kept in understood.rejected] == [b"0", b"1"]
    assert [(answer.id, answer.outcome) for answer in understood.refused] == [
        ("g-1", "invalid"), ("g-2", "invalid"),
    ]  # fmt: skip


async def test_a_basket_interrupted_by_another_command_is_refused() -> None:
    other = {"type": "release", "id": "c", "offer": "elsewhere", "grab": "g"}
    understood = await _understood(_grab("g-1", "sale:a"), other, _grab("g-2", "sale:b"))
    assert [command.id for command in understood.commands] == ["c"]


async def test_baskets_without_a_bad_grab_are_decided() -> None:
    grabs = [
        _grab("g-1", "sale:a"),
        _grab("g-2", "sale:b"),
        _grab("g-3", "sale:b", basket="C"),
        _grab("g-4", "sale:b", user="", basket="D"),
    ]
    understood = await _understood(*grabs)
    assert [command.id for command in understood.commands] == ["g-1", "g-2", "g-3"]


async def test_a_basket_is_refused_also_when_many_commands_of_its_record_are_bad() -> None:
    understood = await _understood(
        _grab("g", "sale:a"), *[_grab(f"b-{n}", "sale:a", user=n) for n in range(REJECTED_OF_ARRAY_MAX + 1)]
    )
    assert understood.commands == []
    assert len(understood.rejected) == 1
    assert len(understood.refused) == REJECTED_OF_ARRAY_MAX + 2
