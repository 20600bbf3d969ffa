"""Permissions: commands of operators come by their own topic, and do not wait behind grabs."""

import asyncio
import json
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from grabstream.models.commands import Adjust, AnyCommand, Close, Confirm, Grab, Open, Pause, encode_command
from grabstream.models.entries import Entry
from grabstream.models.offers import CouponTerms
from grabstream.ops.diagnosis.examination import examine
from grabstream.ops.initialization import make_system
from grabstream.settings import Settings
from grabstream.streams.clients import started
from grabstream.streams.deciding.decoding import Pace, TopicAuthority, decode_record
from grabstream.streams.topics import Topics
from tests.conftest import until
from tests.streams.deciding.test_decoding import Record
from tests.streams.deciding.topic_records import read_all

TERMS = CouponTerms(issuer="shop", total=40_000)
MOVE = Entry(asset="CNY", debit="issuer:shop", credit="wallet:mallory", amount=5)
OPERATIONS: list[AnyCommand] = [
    Open(id="open", offer="tea", terms=TERMS),
    Pause(id="pause", offer="tea"),
    Close(id="close", offer="tea"),
    Adjust(id="adjust", offer="tea", transfers=(MOVE,), reason="greed", approved_by="mallory"),
]
OF_USERS: list[AnyCommand] = [
    Grab(id="grab", offer="tea", user="ann"),
    Confirm(id="confirm", offer="tea", grab="grab"),
]


def array(*commands: AnyCommand) -> bytes:
    return b"[" + b",".join(map(encode_command, commands)) + b"]"


@pytest.mark.parametrize("right", ["t.commands", "t.operations"])
async def test_each_command_of_an_array_is_judged_by_itself(right: str) -> None:
    ours, others = (OF_USERS, OPERATIONS) if right == "t.commands" else (OPERATIONS, OF_USERS)
    wrong = "t.operations" if right == "t.commands" else "t.commands"
    record = Record(array(ours[0], *others, *ours[1:]), topic=right)
    understood = await decode_record(record, Pace(), TopicAuthority(Topics("t")))
    assert understood.commands == ours
    assert understood.indexes == [0, *range(len(others) + 1, len(others) + len(ours))]
    assert [(answer.id, answer.outcome, answer.offer) for answer in understood.refused] == [
        (command.id, "invalid", "tea") for command in others
    ]
    assert [rejected.raw for rejected in understood.rejected] == list(map(encode_command, others))
    for answer, rejected in zip(understood.refused, understood.rejected, strict=True):
        reason = dict(rejected.headers)["reason"].decode()
        assert answer.message == reason
        assert reason.endswith(f"is not accepted from {right}; send it to {wrong}")
    assert {answer.user for answer in understood.refused} == ({"ann", None} if ours is OPERATIONS else {None})


async def test_a_refused_command_is_kept_with_the_bytes_that_were_sent() -> None:
    odd = b'{ "offer":"t\\u0065a",\t"id":"close", "type":"close"}'
    for value in (odd, b" [" + encode_command(OF_USERS[0]) + b" , " + odd + b"]", b"[" + odd + b"]"):
        understood = await decode_record(
            Record(value, topic="t.commands"), Pace(), TopicAuthority(Topics("t"))
        )
        assert [rejected.raw for rejected in understood.rejected] == [odd]
        assert [answer.id for answer in understood.refused] == ["close"]
    secret = b'{"offer":"tea" ,"id":"l","type":"load","what":"codes","chunk":1,"chunks":1,"items":["c"]}'
    understood = await decode_record(
        Record(secret, topic="t.operations"), Pace(), TopicAuthority(Topics("t"))
    )
    [rejected] = understood.rejected
    assert (rejected.raw, dict(rejected.headers)["withheld"]) == (b"", b"%d" % len(secret))


@pytest.mark.parametrize(
    "value",
    [
        b'{"type":"load","id":"l","offer":"t","what":"codes","chunk":1,"chunks":1,"items":["SECRET"]}',
        b'{"type":"load","id":"l","offer":"t","what":"codes","chunk":1,"chunks":1,"items":["SECRET"],"x":1}',
        b'{"type":"load","id":"l","offer":"t","what":"audience","chunk":1,"chunks":1,"items":["SECRET 1"]}',
        b'{"type":"load","id":"l","offer":"t","what":"codes","chunk":1,"chunks":1,"items":["SECRET", 5]}',
        b'{"type":"load","id":"l","items":["SECRET',
        b'[{"type":"grab"},{"type":"load","id":"l","items":["SECRET"]}]',
        b"[" + b'{"type":"load","id":"l","items":["SECRET"]},' * 200 + b"1]",
        b'{"type":"open","id":"o","offer":"t","terms":{"kind":"envelope","issuer":"i","funding":"f",'
        b'"asset":"CNY","total":9,"parts":3,"seed":"SECRET"}}',
        b'{"type":"open","id":"o","offer":"t","terms":{"kind":"stock","seed":"SECRET"}}',
        b'{"type":"open","id":"o","offer":"t","terms":{"kind":"envelope","issuer":"i","funding":"f",'
        b'"asset":"CNY","total":9,"parts":3,"se\\u0065d":"SECRET"}}',
        b'{"type":"load","id":"l","offer":"t","what":"codes","chunk":1,"chunks":1,'
        b'"\\u0069\\u0074e\\u006D\\u0073":["SECRET"]}',
        b"[" + b'{"type":"load","id":"l","i\\u0074ems":["SECRET"]},' * 200 + b"1]",
        '{"type":"load","id":"l","items":["SECRET"]}'.encode("utf-16"),
    ],
)  # fmt: skip
async def test_no_secret_is_copied(value: bytes) -> None:
    """Neither into `rejected`, for 90 days, nor into an answer. It is still where it was sent."""
    understood = await decode_record(Record(value, topic="t.operations"), Pace(), TopicAuthority(Topics("t")))
    assert understood.commands == []
    assert understood.rejected
    assert "SECRET" not in repr(understood).replace("\\x00", "")
    [*_, last] = understood.rejected
    assert int(dict(last.headers)["withheld"]) > 0


async def test_the_old_way_is_warned_of_once_and_leaves_operations_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    authority = TopicAuthority(Topics("t"), operations_on_commands=True)
    for _ in range(2):
        mixed = await decode_record(Record(array(*OPERATIONS, *OF_USERS)), Pace(), authority)
        assert mixed.commands == [*OPERATIONS, *OF_USERS]
    assert len([one for one in caplog.records if "GRAB_OPERATIONS_ON_COMMANDS" in one.message]) == 1
    grabs = await decode_record(Record(array(*OF_USERS), topic="t.operations"), Pace(), authority)
    assert not grabs.commands


async def send(settings: Settings, topic: str, *values: bytes) -> None:
    async with started(AIOKafkaProducer(bootstrap_servers=settings.kafka)) as producer:
        for value in values:
            await producer.send(topic, value, partition=0)
        await producer.flush()


async def outcomes(settings: Settings) -> list[tuple[str, str]]:
    """The id and the outcome of each answer."""
    records = await read_all(settings, Topics(settings.prefix).results)
    answers = [json.loads(record.value) for record in records]
    return [(answer["id"], answer["outcome"]) for answer in answers]


async def until_answered(settings: Settings, ids: Sequence[str]) -> dict[str, str]:
    async def all_of_them() -> Any:
        known = dict(await outcomes(settings))
        return known if known.keys() >= set(ids) else None

    answered: dict[str, str] = await until(all_of_them, 120, f"answers to {ids}")  # type: ignore[assignment]
    return answered


@pytest.mark.every_change("topics by authority")
async def test_an_operation_on_the_topic_of_commands_is_rejected_and_no_crowd_delays_one_on_its_own(
    system: Settings, worker: Callable[..., Any]
) -> None:
    topics, running = Topics(system.prefix), worker(system, "decide,relay")
    await send(system, topics.commands, array(*OPERATIONS), encode_command(OPERATIONS[0]))
    refused = await until_answered(system, [command.id for command in OPERATIONS])
    assert set(refused.values()) == {"invalid"}
    rejected = await read_all(system, topics.rejected)
    assert [record.value for record in rejected] == [encode_command(c) for c in (*OPERATIONS, OPERATIONS[0])]
    assert all(topics.operations in dict(record.headers)["reason"].decode() for record in rejected)
    # What was refused for its topic was not decided: the same command, where it belongs, is.
    await send(system, topics.operations, array(OPERATIONS[0], *OF_USERS))
    await until(lambda: _is_in(system, ("open", "opened")), 60, "an open offer")
    await until_answered(system, ["grab", "confirm"])
    assert not {("grab", "granted"), ("confirm", "confirmed")} & set(await outcomes(system))

    grabs = [Grab(id=f"g{n}", offer="tea", user=f"u{n}") for n in range(30_000)]
    running.process.send_signal(signal.SIGSTOP)
    try:
        await send(system, topics.commands, *(array(*grabs[n : n + 100]) for n in range(0, len(grabs), 100)))
        await send(system, topics.operations, encode_command(Close(id="end", offer="tea")))
    finally:
        running.process.send_signal(signal.SIGCONT)
    answered = await until_answered(system, ["end", grabs[-1].id])
    assert answered["end"] == "closed"
    assert answered[grabs[-1].id] == "over"


async def _is_in(settings: Settings, answer: tuple[str, str]) -> bool:
    return answer in await outcomes(settings)


@pytest.mark.long
async def test_a_system_without_the_topic_of_operations_is_upgraded_by_init(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """A worker says what is missing; after `init` the old way works while the setting allows it, and doctor
    says so.
    """
    topics = Topics(system.prefix)
    async with started(AIOKafkaAdminClient(bootstrap_servers=system.kafka)) as client:
        await client.delete_topics([topics.operations])
        await until(lambda: _is_gone(client, topics.operations), 30, "a deleted topic")
        refused = worker(system, "decide,relay")
        assert await asyncio.to_thread(refused.process.wait, 60) == 2
        assert f"topic {topics.operations} does not exist: run `grabstream init`" in refused.log.read_text()
        assert (await make_system(system)).topics == [topics.operations]
        partitions = (await client.describe_topics([topics.operations]))[0]["partitions"]
        assert len(partitions) == system.shards
    worker(system, "decide,relay", operations_on_commands="true")
    await send(system, topics.commands, encode_command(OPERATIONS[0]))
    assert (await until_answered(system, ["open"]))["open"] == "opened"
    permissive = system.model_copy(update={"operations_on_commands": True})
    found = [finding.what for _, finding in (await examine(permissive)).findings]
    assert any(f"{topics.commands} accepts commands of operators" in what for what in found)


async def _is_gone(client: AIOKafkaAdminClient, topic: str) -> bool:
    return topic not in await client.list_topics()
