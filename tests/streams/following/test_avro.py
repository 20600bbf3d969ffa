"""The sink of examples/avro_events.py: what it writes is read by its schema. A registry that runs here is not
to be had, so a server that gives ids stands in for one.
"""

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import fastavro
import pytest
from aiohttp import web
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from grabstream import CursorMoved, Fact, SinkDamaged
from grabstream.models.events import decode_event
from grabstream.projections.cursors import facts_of
from grabstream.settings import Settings
from grabstream.streams.clients import started
from grabstream.workshop.services.servers import PROJECT
from tests.support.command_line import env_of
from tests.support.web_servers import serving

EXAMPLE: Final = PROJECT / "examples" / "avro_events.py"


def example(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the example, which makes its sink at once."""
    for name, value in env_of(settings).items():
        monkeypatch.setenv(f"GRAB_{name.upper()}", value)
    names: dict[str, Any] = {"__name__": "avro_events"}
    exec(compile(EXAMPLE.read_text(), str(EXAMPLE), "exec"), names)
    return names


def golden_facts() -> list[Fact]:
    """Events of every type, of a day that is past: Kafka refuses records of times to come."""
    golden = sorted((PROJECT / "tests" / "golden" / "events").glob("*.json"))
    lines = [
        re.sub('"at":[0-9]+', '"at":1790000000000', json.loads(path.read_text())["line"]).encode()
        for path in golden
    ]
    assert len(lines) > 15
    return facts_of(lines, [b""] * len(lines), [decode_event(line) for line in lines])


@asynccontextmanager
async def registry() -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """A server that accepts every schema as number 7: its address, and the schemas by subject."""
    subjects: dict[str, Any] = {}

    async def register(request: web.Request) -> web.Response:
        subjects[request.match_info["subject"]] = json.loads((await request.json())["schema"])
        return web.json_response({"id": 7})

    application = web.Application()
    application.router.add_post("/subjects/{subject}/versions", register)
    async with serving(application, shutdown_timeout=0.1) as port:
        yield f"http://127.0.0.1:{port}", subjects


async def loaded(sink: Any) -> str | None:
    """Loads a sink, again after trouble, as `follow` does: a new topic is not known to brokers at once."""
    while True:
        try:
            cursor: str | None = await sink.load()
            return cursor
        except KafkaError as error:
            if not error.retriable:
                raise
            await asyncio.sleep(0.1)


@pytest.fixture
async def of_avro(system: Settings) -> AsyncIterator[Settings]:
    """A system whose topic of the example is deleted after the test."""
    yield system
    async with started(AIOKafkaAdminClient(bootstrap_servers=system.kafka)) as client:
        await client.delete_topics([f"{system.prefix}.events-avro"])


def test_values_are_read_by_the_schema(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every type of event; the text is kept byte for byte."""
    monkeypatch.chdir(tmp_path)
    names = example(settings, monkeypatch)
    for fact in golden_facts():
        value = names["encoded"](fact, 258)
        assert value[:5] == b"\0\0\0\1\2"
        stream = io.BytesIO(value[5:])
        found = fastavro.schemaless_reader(stream, names["_parsed"], None)
        assert not stream.read()
        event = json.loads(fact.line)
        assert found.pop("body") == fact.line.decode()
        assert round(found.pop("at").timestamp() * 1_000) == event["at"]
        assert {name: value for name, value in found.items() if value is not None} == {
            name: event[name] for name in found if name in event
        }


async def test_each_event_is_in_the_topic_through_a_load(
    of_avro: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After trouble, `load` is called again: the events that come then are written by a new producer."""
    monkeypatch.chdir(tmp_path)
    names = example(of_avro, monkeypatch)
    facts = golden_facts()
    async with registry() as (url, subjects):
        sink = names["AvroTopic"](url, tmp_path / "cursor")
        assert await loaded(sink) is None
        await sink.apply(facts[:5], None, "one")
        assert await sink.load() == "one"
        await sink.apply(facts[5:], "one", "two")
        with pytest.raises(CursorMoved):
            await sink.apply(facts[:1], "one", "three")
        await sink._producer.stop()
    topic = f"{of_avro.prefix}.events-avro"
    assert set(subjects) == {f"{topic}-value"}
    async with started(
        AIOKafkaConsumer(topic, bootstrap_servers=of_avro.kafka, auto_offset_reset="earliest")
    ) as consumer:
        got: list[bytes] = []
        while len(got) < len(facts):
            for records in (await consumer.getmany(timeout_ms=1_000)).values():
                got += [record.value for record in records]
    assert sorted(got) == sorted(names["encoded"](fact, 7) for fact in facts)


async def test_a_topic_with_too_few_partitions_is_named(
    of_avro: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with registry() as (url, _):
        first = example(of_avro, monkeypatch)["AvroTopic"](url, tmp_path / "cursor")
        await loaded(first)
        await first._producer.stop()
        monkeypatch.setenv("GRAB_SHARDS", str(of_avro.shards + 1))
        sink = example(of_avro.model_copy(update={"shards": of_avro.shards + 1}), monkeypatch)["AvroTopic"]
        with pytest.raises(SinkDamaged, match=f"has {of_avro.shards} partitions, not one for each shard"):
            await sink(url, tmp_path / "cursor").load()
