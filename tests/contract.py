"""Validates commands, answers, events and records against the JSON Schemas in `schemas/`, with the
`jsonschema` library.
"""

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
from grabstream.models.runs import is_run
from grabstream.settings import Settings

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
    """The validator of a schema file: `commands/grab`, `answers/answer`, `events/grab.granted.v1`."""
    return Draft202012Validator(json.loads((SCHEMAS / f"{name}.json").read_text()))


def problems(name: str, value: Any) -> list[str]:
    """The violations of a schema, each with its JSON path."""
    return [f"{error.json_path}: {error.message}" for error in schema_named(name).iter_errors(value)]


def check_events(lines: Iterable[bytes]) -> Counter[str]:
    """Asserts that every line is valid for its type and version; returns the number of events by type."""
    types: Counter[str] = Counter()
    for line in lines:
        event = json.loads(line)
        types[event["type"]] += 1
        folder = "journal" if is_run(line) else "events"
        assert not problems(f"{folder}/{event['type']}.v{event['v']}", event), line
    return types


def check_answered(answered: Iterable[tuple[AnyCommand, Answer]]) -> tuple[Counter[str], Counter[str]]:
    """Asserts that every answer is valid, and every command whose answer is not `invalid`; returns the number
    of commands of each type and of answers with each outcome.
    """
    commands: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for command, answer in answered:
        outcomes[answer.outcome] += 1
        assert not problems("answers/answer", json.loads(encode_answer(answer))), answer
        # A script answers `invalid` also to a valid command that does not suit the state.
        sent = json.loads(encode_command(command))
        commands[sent["type"]] += 1
        assert answer.outcome == "invalid" or not problems(f"commands/{sent['type']}", sent), command
    return commands, outcomes


def asyncapi_problems(document: Any) -> list[str]:
    """The violations of AsyncAPI's own JSON Schema in a document."""
    schema = json.loads(gzip.decompress(ASYNCAPI_SCHEMA.read_bytes()))
    return [f"{error.json_path}: {error.message}" for error in Draft7Validator(schema).iter_errors(document)]


@cache
def _part(message: str, part: str) -> Draft202012Validator:
    """The validator of a message's payload or headers; references lead to the files in `schemas/`."""
    return Draft202012Validator(
        _based(ASYNCAPI["components"]["messages"][message][part]["schema"]), registry=_registry
    )


def _based(schema: Any) -> Any:
    """A schema whose references to files begin with `BASE`."""
    if isinstance(schema, dict):
        return {
            key: f"{BASE}{value.removeprefix('./')}" if key == "$ref" else _based(value)
            for key, value in schema.items()
        }
    return [_based(item) for item in schema] if isinstance(schema, list) else schema


def _misfits(message: str, key: bytes | None, value: bytes, headers: dict[str, str]) -> list[str]:
    """The reasons why a record is not this message; empty if it is."""
    definition = ASYNCAPI["components"]["messages"][message]
    is_json = "contentType" not in definition
    try:
        payload = json.loads(value) if is_json else value.decode(errors="replace")
    except ValueError as error:
        return [f"no JSON: {error}"]
    reasons = [error.message for error in _part(message, "payload").iter_errors(payload)]
    if "headers" in definition:
        reasons += [error.message for error in _part(message, "headers").iter_errors(headers)]
    key_schema = definition["bindings"]["kafka"].get("key")
    if key_schema:
        key_errors = Draft202012Validator(key_schema).iter_errors((key or b"").decode())
        reasons += [error.message for error in key_errors]
    return reasons


async def check_topics(settings: Settings) -> dict[str, Counter[str]]:
    """Asserts that every record of every topic is exactly one of the messages that asyncapi.yaml names for
    that topic; returns the number of records of each message, by channel.

    Records of `commands` may be none of the messages: those records are copied to `rejected`.
    """
    counts: dict[str, Counter[str]] = {}
    consumer = AIOKafkaConsumer(
        bootstrap_servers=settings.kafka, auto_offset_reset="earliest", enable_auto_commit=False
    )
    await consumer.start()
    try:
        for channel, definition in ASYNCAPI["channels"].items():
            if channel == "refusals" and not settings.refusals_topic:
                continue
            topic = definition["address"].replace("{prefix}", settings.prefix)
            partition_count = definition["bindings"]["kafka"]["partitions"]
            partitions = [TopicPartition(topic, number) for number in range(partition_count)]
            records = await _records(consumer, partitions)
            assert consumer.partitions_for_topic(topic) == {partition.partition for partition in partitions}
            counts[channel] = Counter()
            for record in records:
                headers = {name: value.decode() for name, value in record.headers}
                misfits = {
                    message: _misfits(message, record.key, record.value, headers)
                    for message in definition["messages"]
                }
                fitting = [message for message, reasons in misfits.items() if not reasons]
                assert len(fitting) == 1 or channel == "commands", (record, misfits)
                counts[channel][fitting[0] if fitting else "nothing"] += 1
                if fitting == ["block"]:
                    check_events(record.value.split(b"\n"))
    finally:
        await consumer.stop()
    return counts


async def _records(consumer: Any, partitions: list[TopicPartition]) -> list[Any]:
    """All records of the partitions."""
    consumer.assign(partitions)
    ends = await consumer.end_offsets(partitions)
    unread = {partition for partition, end in ends.items() if end}
    all_records: list[Any] = []
    await consumer.seek_to_beginning(*partitions)
    while unread:
        for partition, records in (await consumer.getmany(timeout_ms=200)).items():
            all_records += records
            if records[-1].offset + 1 >= ends[partition]:
                unread.discard(partition)
    return all_records
