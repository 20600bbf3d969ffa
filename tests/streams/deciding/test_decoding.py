"""Records of the commands topic that are not valid or very large: decoding takes bounded time, makes a
bounded number of rejections, and keeps all bytes. First without servers, then through a topic and a worker.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaTimeoutError, MessageSizeTooLargeError
from hypothesis import given, settings
from hypothesis import strategies as st

from grabstream.gate.batches import checked_batch, plain_batch
from grabstream.models.bounds import (
    ARRAY_COMMANDS_MAX,
    COMMAND_BYTES_MAX,
    REASON_BYTES_MAX,
    RECORD_BYTES_MAX,
    REJECTED_OF_ARRAY_MAX,
    REJECTED_PIECE_BYTES_MAX,
)
from grabstream.models.commands import ITEMS_MAX, Load, Undecodable, decode_commands
from grabstream.settings import Settings
from grabstream.streams import topics as topics_module
from grabstream.streams.clients import started
from grabstream.streams.deciding import decoding
from grabstream.streams.deciding.decoding import Pace, Rejected, TopicAuthority, Understood, decode_record
from grabstream.streams.topics import COMPRESSION, Topics, create_topics, make_topics, retention_ms
from tests.conftest import examples, until
from tests.streams.deciding.topic_records import read_all

AUTHORITY = TopicAuthority(Topics("t"))


class Record(NamedTuple):
    """A record as the Kafka consumer returns it."""

    value: bytes
    key: bytes | None = None
    topic: str = "t.commands"
    partition: int = 3
    offset: int = 17


def grab(id: str, **rest: Any) -> dict[str, Any]:
    return {"type": "grab", "id": id, "offer": "o", "user": "u", **rest}


def encode(value: Any) -> bytes:
    return json.dumps(value).encode()


def zeros(count: int) -> bytes:
    return b"[" + b"0," * (count - 1) + b"0]"


async def understood(value: bytes, key: bytes | None = None) -> Understood:
    return await decode_record(Record(value, key), Pace(), AUTHORITY)


def rejoined(rejected: Sequence[Rejected], part: bytes | None = None) -> list[bytes]:
    """The original bytes of rejected commands or keys, rejoined from their pieces."""
    pieces = [piece for piece in rejected if dict(piece.headers).get("part") == part]
    return [
        b"".join(piece.raw for piece in of_index)
        for _, of_index in groupby(pieces, lambda piece: dict(piece.headers)["index"])
    ]


BAD_RECORDS = {
    "a long user": encode(grab("long-user", user="u" * 2_200_000)),
    "a long name of a field": encode(grab("long-name", **{"x" * 100_000: 1})),
    "a control character in a name": encode(grab("control", attributes={"\0" * 30: "x"})),
    "garbage": b"\xff\x00\x1b" * (RECORD_BYTES_MAX // 3 - 200),
    "zeros": zeros(500_000),
    "few zeros": zeros(ARRAY_COMMANDS_MAX),
    "too many commands": encode([grab(f"g{n}") for n in range(ARRAY_COMMANDS_MAX + 1)]),
    "brackets": b"[" * 1_000_000,
    "braces": b'{"a":' * 200_000,
    "halves of pairs": b'["' + b"\\ud800" * (RECORD_BYTES_MAX // 6 - 100) + b'"',
    "a text without end": b'["' + b'\\"' * 1_000_000,
    "a command above the bound": encode(grab("wide", attributes={f"a{n}": "x" * 60 for n in range(2_000)})),
}


#: Records near plain grabs; some would be, or would hide, another command, if they were joined to others.
_PLAIN = b'{"type":"grab","id":"a","offer":"o","user":"u"}'
NEAR_PLAIN = (
    _PLAIN,
    b'{"type": "grab", "id": "b", "offer": "p", "user": "u"}',
    b'{"user":"u","offer":"o","id":"c","type":"grab"}',
    _PLAIN + b"," + _PLAIN,
    _PLAIN + b",",
    b" " + _PLAIN,
    b'{"type":"grab","id":"a","offer":"o","user":"}',
    b'{","type":"grab","id":"a","offer":"o"}',
    b'{"type":"grab","id":"a","offer":"o","user":"u","attributes":{}',
    b'{"type":"grab","id":"a","attributes":{"offer":"o","user":"u"}}',
    b'{"type":"grab","id":"a","id":"o","user":"u"}',
    b'{"type":"grab","id":"a","offer":"o","user":"u","wait":true}',
    b'{"type":"grab","id":"a","offer":"o","quantity":"u"}',
    b'{"type":"grab","id":"sweep","offer":"o","user":"u"}',
    b'{"type":"grab","id":"a","offer":"o","user":"\\u0075"}',
    b'{"type":"grab","id":"a","offer":"o","user":"\xff"}',
    b'{"type":"grab","id":"a","offer":"o","user":"a b"}',
    b'{"type":"grab","id":"a","offer":"o","user":""}',
    b'{"type":"grab","id":"' + b"a" * 65 + b'","offer":"o","user":"u"}',
    b'{"type":"grab","id":"' + b"a" * 500 + b'","offer":"o","user":"u"}',
    b'{"type":"release","id":"a","offer":"o","grab":"g"}',
    b'{"type":"release","id":""type":"grab"","grab":"g"}',
    b"[" + _PLAIN + b"," + _PLAIN + b"]",
    # What one command is, or two, when records are joined.
    b'{"type":"grab","id":"a","offer":"o"',
    b'"user":"u"}',
    b'{"type":"grab","id":"a"},\r{"offer":"o","user":"u"}',
    _PLAIN + b",\r" + _PLAIN,
    b'{"type":"grab","id":"a",\r"offer":"o","user":"u"}',
    b'{"type":"grab","id":"a","offer":"o","user":"\r"}',
    b"{}",
    b"",
)


async def _of_each(records: Sequence[Record]) -> list[tuple[Any, ...]]:
    return [tuple(await decode_record(record, Pace(), AUTHORITY)) for record in records]


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(st.sampled_from(NEAR_PLAIN), max_size=8), st.integers(1, 3))
def test_records_that_are_decoded_together_are_what_each_is_alone(values: list[bytes], most: int) -> None:
    records = [Record(value, offset=offset) for offset, value in enumerate(values)]
    together: list[tuple[Any, ...]] = []
    parts: list[Record] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "RUN_RECORDS_MAX", most)
        for of_run, grabs in decoding.plain_groups(records):
            parts += of_run
            if grabs:
                # A gate that is told so does not check them again.
                assert (plain := plain_batch(grabs)) is not None
                assert set(checked_batch(grabs).offers) == set(plain.offers)
                together += [([grab], [0], [], []) for grab in grabs]
            else:
                together += asyncio.run(_of_each(of_run))
    assert parts == records
    assert together == asyncio.run(_of_each(records))


def test_plain_grabs_of_records_are_decoded_together() -> None:
    """Also of several offers; a record of another kind ends the run, and none is read twice."""
    values = [_PLAIN.replace(b'"a"', b'"a%d"' % number) for number in range(600)]
    values[500] = b'{"type":"release","id":"a","offer":"o","grab":"g"}'
    values[3] = values[3].replace(b'"o"', b'"p"')
    runs = list(decoding.plain_groups([Record(value) for value in values]))
    assert [(len(records), len(grabs)) for records, grabs in runs] == [
        (256, 256), (244, 244), (1, 0), (11, 11), (88, 88),
    ]  # fmt: skip
    assert [grab.id for _, grabs in runs for grab in grabs] == [f"a{n}" for n in range(600) if n != 500]


@pytest.mark.long
@pytest.mark.parametrize("name", BAD_RECORDS)
async def test_an_undecodable_record_is_rejected_once_with_all_its_bytes(name: str) -> None:
    value = BAD_RECORDS[name]
    result = await understood(value, b"key")
    assert result.commands == []
    assert rejoined(result.rejected) == [value]
    assert len(result.rejected) == max(-(-len(value) // REJECTED_PIECE_BYTES_MAX), 1)
    for piece in result.rejected:
        headers = dict(piece.headers)
        assert 0 < len(headers["reason"]) <= REASON_BYTES_MAX
        assert headers["reason"].decode().isprintable()
        assert (piece.key, headers["topic"], headers["partition"], headers["offset"]) == (
            b"key",
            b"t.commands",
            b"3",
            b"17",
        )
    assert all(
        answer.message is not None and len(answer.message.encode()) <= REASON_BYTES_MAX
        for answer in result.refused
    )


@pytest.mark.parametrize(
    ("name", "id"),
    [("a long user", "long-user"), ("a long name of a field", "long-name"), ("control", "control")],
)
async def test_a_command_above_a_bound_is_answered_invalid(name: str, id: str) -> None:
    value = BAD_RECORDS.get(name) or BAD_RECORDS["a control character in a name"]
    result = await understood(value)
    assert [(answer.id, answer.outcome) for answer in result.refused] == [(id, "invalid")]


@pytest.mark.parametrize(
    ("fields", "offer", "user"),
    [
        (b'"id":"i","offer":5,"user":"u"', None, "u"),
        (b'"id":"i","offer":["o"],"user":"u"', None, "u"),
        (b'"offer":{"a":1},"id":"i","user":"u"', None, "u"),
        (b'"id":"i","offer":"o","user":1e400', "o", None),
        (b'"id":"i","offer":"o","user":-1', "o", None),
        (b'"id":"i","offer":"o","user":' + b"1" * 5_000, "o", None),
        (b'"id":"i","offer":"o","user":"\xff"', "o", None),
        (b'"id":"i","offer":"o","user":"\\ud800"', "o", None),
        (b'"id":"i","offer":"o","user":"u","x":"\\ud800"', "o", "u"),
        (b'"id":"i","offer":"o","user":"u","metadata":{"a":"\xff"}', "o", "u"),
        (b'"id":"x","id":"i","offer":1e400,"user":"u"', None, "u"),
        (b'"id":"i","offer":5,"user":1e400,"x":"' + b"x" * COMMAND_BYTES_MAX + b'"', None, None),
    ],
)
async def test_a_command_whose_id_can_be_read_is_answered(
    fields: bytes, offer: str | None, user: str | None
) -> None:
    """Whatever its other fields are: each is read separately."""
    value = b'{"type":"grab",' + fields + b"}"
    result = await understood(value)
    [answer] = result.refused
    assert (answer.id, answer.outcome, answer.offer, answer.user) == ("i", "invalid", offer, user)
    assert rejoined(result.rejected) == [value]


@pytest.mark.parametrize(
    "value",
    [
        b'{"type":"grab","id":5}', b'{"type":"grab","id":"\xff"}', b'{"type":"grab","id":"\\ud800"}',
        b'{"id":"i"', b'{"id":"i"}}', b'{"id":"i","x":NaN}', b'"id"', b'{"id":"a","id":5}',
        b'{"x":{"id":"i"}}',
    ],
)  # fmt: skip
async def test_a_record_without_a_readable_id_is_only_kept(value: bytes) -> None:
    result = await understood(value)
    assert (result.refused, rejoined(result.rejected)) == ([], [value])


@pytest.mark.long
@pytest.mark.parametrize("name", BAD_RECORDS)
async def test_decoding_a_bad_record_does_not_block_other_tasks(name: str) -> None:
    gaps = [0.0]

    async def tick() -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            gaps.append(time.thread_time() - before)
            before = time.thread_time()

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    pace, longest = Pace(), []
    for _ in range(3):
        gaps.clear()
        await decode_record(Record(BAD_RECORDS[name]), pace, AUTHORITY)
        await asyncio.sleep(0)
        longest.append(max(gaps))
    ticking.cancel()
    # CPU time, since the machine may be busy. The bound leaves room for a slow processor. What blocks does so
    # each time; a collection of all objects of the test process does not.
    assert min(longest) < 0.3


async def test_decoding_a_long_array_does_not_block_other_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    # However fast the machine decodes.
    monkeypatch.setattr(decoding, "SLICE_SECONDS", 0.000_1)
    value = encode([grab(f"g{n}") for n in range(ARRAY_COMMANDS_MAX)])
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    result = await understood(value)
    counting.cancel()
    assert len(result.commands) == ARRAY_COMMANDS_MAX
    assert turns >= 2


async def test_half_of_a_surrogate_pair_spoils_its_command_only() -> None:
    """JSON may have such an escape, and no text can: the array is separated, and the others are decided."""
    bad = b'{"type": "grab", "id": "bad", "offer": "o", "user": "\\uD83d", "x": ["\\ude00\\ud83d"]}'
    first, last = encode(grab("first", metadata={"smile": "\\ud83d"})), encode(grab("last"))
    pair = encode(grab("pair")).replace(b'"pair"', b'"pair", "metadata": {"smile": "\\ud83d\\ude00"}')
    result = await understood(b" [" + b" ,\n".join([first, bad, b"[[1]]", pair, last]) + b"] ")
    assert [command.id for command in result.commands] == ["first", "pair", "last"]
    assert [getattr(command, "metadata", None) for command in result.commands] == [
        {"smile": "\\ud83d"},
        {"smile": "😀"},
        None,
    ]
    assert result.indexes == [0, 3, 4]
    assert [(answer.id, answer.outcome) for answer in result.refused] == [("bad", "invalid")]
    assert [rejected.raw for rejected in result.rejected] == [bad, b"[[1]]"]


async def test_few_bad_commands_are_rejected_singly_and_many_as_a_whole_array() -> None:
    bad = [{"type": "grab", "id": f"b{n}"} for n in range(REJECTED_OF_ARRAY_MAX)]
    few = await understood(encode([*bad, grab("good")]))
    assert [command.id for command in few.commands] == ["good"]
    assert rejoined(few.rejected) == [encode(command) for command in bad]
    value = encode([*bad, {"type": "grab", "id": "one-more"}, grab("good")])
    many = await understood(value)
    assert [command.id for command in many.commands] == ["good"]
    assert rejoined(many.rejected) == [value]
    assert dict(many.rejected[0].headers)["reason"].startswith(b"101 of 102 commands; the first: ")
    assert len(many.refused) == REJECTED_OF_ARRAY_MAX + 1


async def test_a_long_key_is_rejected_in_pieces() -> None:
    key = bytes(range(256)) * 12_000
    result = await understood(b"nonsense", key)
    assert rejoined(result.rejected) == [b"nonsense"]
    assert rejoined(result.rejected, b"key") == [key]
    assert all(key.startswith(piece.key or b"-") for piece in result.rejected)


# -- with a worker -------------------------------------------------------------------------------------------


def producing(settings: Settings, **options: Any) -> AIOKafkaProducer:
    return AIOKafkaProducer(
        bootstrap_servers=settings.kafka, acks="all", max_request_size=64 * 1024 * 1024, **options
    )


@pytest.mark.every_change("no input ends a process")
async def test_a_decider_survives_bad_records_and_keeps_every_byte(
    system: Settings, worker: Callable[..., Any]
) -> None:
    running = worker(system, "decide,relay")
    topics = Topics(system.prefix)
    values = [*BAD_RECORDS.values(), b"x" * (RECORD_BYTES_MAX - 100)]
    key = b"k" * 3_000_000
    async with started(producing(system)) as producer:
        for value in values:
            await producer.send_and_wait(topics.commands, value, partition=0)
        await producer.send_and_wait(topics.commands, b"beside a long key", key, partition=0)
        await producer.send_and_wait(topics.commands, encode(grab("after")), partition=0)

    async def answered() -> Any:
        answers = [json.loads(record.value) for record in await read_all(system, topics.results)]
        return answers if any(answer["id"] == "after" for answer in answers) else None

    answers = await until(answered, 90, "the answer to the command after them")
    assert running.process.poll() is None
    assert {answer["id"]: answer["outcome"] for answer in answers} == {
        "long-user": "invalid", "long-name": "invalid", "control": "invalid", "wide": "invalid",
        "after": "no_such_offer",
    }  # fmt: skip
    whole: dict[tuple[bytes, bytes, bytes | None], bytes] = {}
    for record in await read_all(system, topics.rejected):
        headers = dict(record.headers)
        source = (headers["offset"], headers["index"], headers.get("part"))
        whole[source] = whole.get(source, b"") + record.value
    by_offset = {int(offset): value for (offset, _, part), value in whole.items() if part is None}
    assert [by_offset[offset] for offset in range(len(values) + 1)] == [*values, b"beside a long key"]
    assert [value for (_, _, part), value in whole.items() if part == b"key"] == [key]


@pytest.mark.long
async def test_the_broker_refuses_a_batch_that_is_too_large_uncompressed(system: Settings) -> None:
    """A consumer decompresses a whole batch: a record of zeros would need a thousand times its size."""
    topics = Topics(system.prefix)
    async with started(
        producing(system, compression_type="gzip", max_batch_size=64 * 1024 * 1024, linger_ms=200)
    ) as producer:
        with pytest.raises(MessageSizeTooLargeError):
            await producer.send_and_wait(topics.commands, bytes(16 * 1024 * 1024), partition=0)
        sent = await asyncio.gather(
            *[await producer.send(topics.commands, bytes(3 * 1024 * 1024), partition=1) for _ in range(4)],
            return_exceptions=True,
        )
        assert any(isinstance(result, MessageSizeTooLargeError) for result in sent)
        await producer.send_and_wait(topics.commands, encode(grab("a")), partition=0)
    for record in await read_all(system, topics.commands):
        assert len(record.value) <= RECORD_BYTES_MAX


async def test_a_topic_that_brokers_never_know_is_an_error_of_kafka(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has an exit code and a text, unlike a bare TimeoutError."""
    monkeypatch.setattr(topics_module, "TOPIC_SECONDS_MAX", 0.3)
    monkeypatch.setattr(topics_module, "_is_usable", lambda described, is_new: False)
    name = f"{settings.prefix}.late"
    try:
        with pytest.raises(KafkaTimeoutError, match="brokers do not know a topic that was created"):
            await make_topics(settings.kafka, [NewTopic(name, 1, 1)])
    finally:
        async with started(AIOKafkaAdminClient(bootstrap_servers=settings.kafka)) as client:
            await client.delete_topics([name])


async def test_init_bounds_a_topic_of_an_older_release(settings: Settings) -> None:
    """Its other settings stay as they were."""
    topics = Topics(settings.prefix)
    old = NewTopic(topics.commands, settings.shards, 1, topic_configs={"retention.ms": "123456789"})
    await make_topics(settings.kafka, [old])
    async with started(AIOKafkaAdminClient(bootstrap_servers=settings.kafka)) as client:
        try:
            await create_topics(settings.kafka, topics, settings.shards)

            async def bounded() -> bool:
                [described] = await client.describe_configs(
                    [ConfigResource(ConfigResourceType.TOPIC, topics.commands)]
                )
                entries = {entry[0]: entry[1] for entry in described.resources[0][4]}
                return (entries["retention.ms"], entries["compression.type"]) == ("123456789", COMPRESSION)

            await until(bounded, 10, "the topic's settings")
        finally:
            await client.delete_topics(list(topics_of(topics)))


def topics_of(topics: Topics) -> tuple[str, ...]:
    return tuple(retention_ms(topics))


def test_a_command_is_decoded_up_to_its_bound_in_bytes() -> None:
    head = encode(
        {"type": "load", "id": "l", "offer": "o", "what": "codes", "chunk": 1, "chunks": 1, "items": []}
    )[:-3]
    codes = [f"{n:03}" + "x" * 120 for n in range(ITEMS_MAX // 2)]
    body = head + encode(codes).replace(b", ", b",") + b"}"
    padded = body + b" " * (COMMAND_BYTES_MAX - len(body))
    assert [type(one) for one in decode_commands(padded)] == [Load]
    [bad] = decode_commands(padded + b" ")
    assert isinstance(bad, Undecodable)
    assert f"at most {COMMAND_BYTES_MAX} bytes" in bad.reason
    assert bad.id == "l"
