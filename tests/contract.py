"""The schemas of the tree, read by somebody else's validator: whether what is sent and answered fits them."""

import gzip
import json
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from aiokafka import AIOKafkaConsumer, TopicPartition
from jsonschema import Draft7Validator, Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from grabstream.models.answers import Answer, encode_answer
from grabstream.models.commands import AnyCommand, encode_command
from grabstream.ops.settings import Settings

SCHEMAS = Path(__file__).parents[1] / "schemas"
ASYNCAPI = yaml.safe_load((SCHEMAS / "asyncapi.yaml").read_text())
#: AsyncAPI's own JSON Schema, from the package @asyncapi/specs 6.11.1, unchanged (Apache-2.0, AsyncAPI
#: Initiative).
ASYNCAPI_SCHEMA = Path(__file__).parent / "golden" / "asyncapi" / "3.0.0.json.gz"
BASE = "urn:tree:"
_registry = Registry(
    retrieve=lambda uri: Resource(json.loads((SCHEMAS / uri.removeprefix(BASE)).read_text()), DRAFT202012)
)


@cache
def schema_named(name: str) -> Draft202012Validator:
    """The validator of `commands/grab`, `answers/answer`, `events/grab.granted.v1` …"""
    return Draft202012Validator(json.loads((SCHEMAS / f"{name}.json").read_text()))


def problems(name: str, value: Any) -> list[str]:
    """What does not fit, with its place."""
    return [f"{error.json_path}: {error.message}" for error in schema_named(name).iter_errors(value)]


def check_events(lines: Iterable[bytes]) -> Counter[str]:
    """Every line fits the schema of its type and version; how many there were of each type."""
    found: Counter[str] = Counter()
    for line in lines:
        event = json.loads(line)
        found[event["type"]] += 1
        assert not problems(f"events/{event['type']}.v{event['v']}", event), line
    return found


def check_answered(answered: Iterable[tuple[AnyCommand, Answer]]) -> tuple[Counter[str], Counter[str]]:
    """Every answer fits, and every command that a script has decided; how many there were of each type and
    outcome.
    """
    commands: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for command, answer in answered:
        outcomes[answer.outcome] += 1
        assert not problems("answers/answer", json.loads(encode_answer(answer))), answer
        # A script too says `invalid`, of what is right by itself but not in this place.
        said = json.loads(encode_command(command))
        commands[said["type"]] += 1
        assert answer.outcome == "invalid" or not problems(f"commands/{said['type']}", said), command
    return commands, outcomes


def asyncapi_problems(document: Any) -> list[str]:
    """What AsyncAPI itself says about a document."""
    schema = json.loads(gzip.decompress(ASYNCAPI_SCHEMA.read_bytes()))
    return [f"{error.json_path}: {error.message}" for error in Draft7Validator(schema).iter_errors(document)]


@cache
def _part(message: str, part: str) -> Draft202012Validator:
    """The validator of a message's payload or headers; references to files are those of the tree."""
    return Draft202012Validator(
        _based(ASYNCAPI["components"]["messages"][message][part]["schema"]), registry=_registry
    )


def _based(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: f"{BASE}{value.removeprefix('./')}" if key == "$ref" else _based(value)
            for key, value in schema.items()
        }
    return [_based(one) for one in schema] if isinstance(schema, list) else schema


def _misfits(message: str, key: bytes | None, value: bytes, headers: dict[str, str]) -> list[str]:
    """Why a record is not this message; nothing when it is."""
    said = ASYNCAPI["components"]["messages"][message]
    is_json = "contentType" not in said
    try:
        payload = json.loads(value) if is_json else value.decode(errors="replace")
    except ValueError as error:
        return [f"no JSON: {error}"]
    found = [error.message for error in _part(message, "payload").iter_errors(payload)]
    if "headers" in said:
        found += [error.message for error in _part(message, "headers").iter_errors(headers)]
    wanted = said["bindings"]["kafka"].get("key")
    if wanted:
        found += [error.message for error in Draft202012Validator(wanted).iter_errors((key or b"").decode())]
    return found


async def check_topics(settings: Settings) -> dict[str, Counter[str]]:
    """Every record of every topic is one of the messages that the document has for it; how many of each there
    were.

    What stands in `rejected` was no command, so as many records of `commands` may fit nothing.
    """
    found: dict[str, Counter[str]] = {}
    consumer = AIOKafkaConsumer(
        bootstrap_servers=settings.kafka, auto_offset_reset="earliest", enable_auto_commit=False
    )
    await consumer.start()
    try:
        for channel, said in ASYNCAPI["channels"].items():
            topic = said["address"].replace("{prefix}", settings.prefix)
            partitions = [
                TopicPartition(topic, number) for number in range(said["bindings"]["kafka"]["partitions"])
            ]
            records = await _records(consumer, partitions)
            assert consumer.partitions_for_topic(topic) == {partition.partition for partition in partitions}
            found[channel] = Counter()
            for record in records:
                headers = {name: value.decode() for name, value in record.headers}
                misfits = {
                    message: _misfits(message, record.key, record.value, headers)
                    for message in said["messages"]
                }
                fitting = [message for message, reasons in misfits.items() if not reasons]
                assert len(fitting) == 1 or channel == "commands", (record, misfits)
                found[channel][fitting[0] if fitting else "nothing"] += 1
                if fitting == ["block"]:
                    check_events(record.value.split(b"\n"))
    finally:
        await consumer.stop()
    return found


async def _records(consumer: Any, partitions: list[TopicPartition]) -> list[Any]:
    consumer.assign(partitions)
    ends = await consumer.end_offsets(partitions)
    left = {partition for partition, end in ends.items() if end}
    found: list[Any] = []
    await consumer.seek_to_beginning(*partitions)
    while left:
        for partition, records in (await consumer.getmany(timeout_ms=200)).items():
            found += records
            if records[-1].offset + 1 >= ends[partition]:
                left.discard(partition)
    return found
