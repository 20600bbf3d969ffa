"""The options of a replay are recorded with its output, and it is continued with the same filters only:
files, topics, and those of older releases.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from grabstream.connections.identity import find_journal
from grabstream.ops.commands.rebuild.replay import replay as replay_verb
from grabstream.ops.formats.replay_request import request
from grabstream.settings import Settings, child_environment
from grabstream.streams.clients import started
from grabstream.streams.history.chunks import Point
from grabstream.streams.replaying.filters import (
    FILTERS_BYTES_MAX,
    FILTERS_HEADER,
    Filters,
    decode_filters,
    difference,
    filters_of,
)
from grabstream.streams.replaying.selection import Wanted
from grabstream.streams.topics import make_topics
from tests.conftest import until
from tests.streams.replaying.histories import RecordedSystem
from tests.streams.replaying.test_replay import records
from tests.support.command_line import env_of, grabstream


async def journal_of(recorded: RecordedSystem) -> str:
    """Kafka's id of its journal."""
    found = await find_journal(recorded.settings)
    assert found is not None
    return found.id


@pytest.mark.long
async def test_a_file_continues_with_the_same_filters_only(recorded: RecordedSystem, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    offer, other = recorded.histories[2].envelope, recorded.histories[2].names[0]
    into = ("--into", f"file:{file}")
    done = recorded.replay(*into, "--offer", offer, "--until", "200")
    assert done.returncode == 0, done.stderr
    lines = file.read_bytes()
    assert lines
    for more in ((), ("--dry-run",)):
        done = recorded.replay(*into, "--continue", "--offer", other, *more)
        assert done.returncode == 1
        said = f"{file} was written with --offer {offer}, not with --offer {other}: continue with the options"
        assert said in done.stderr
        assert file.read_bytes() == lines
    done = recorded.replay(*into, "--continue", "--offer", offer, "--source", "audit", "--rate", "100000")
    assert (done.returncode, done.stderr) == (0, "")
    assert file.read_text().splitlines() == [
        line for line in recorded.lines(2) if json.loads(line)["offer"] == offer
    ]


@pytest.mark.long
async def test_a_file_gets_shards_that_it_lacks(recorded: RecordedSystem, tmp_path: Path) -> None:
    """Also where the new ones begin elsewhere; then each of them continues from its own beginning only."""
    file = tmp_path / "lines"
    into = ("--into", f"file:{file}", "--continue")
    assert recorded.replay(*into, "--from", "2:5", "--until", "2:200", "--shard", "2").returncode == 0
    done = recorded.replay(*into, "--from", "5:9", "--shard", "5")
    assert (done.returncode, done.stderr) == (0, "")
    done = recorded.replay(*into, "--from", "2:5", "--from", "5:8")
    assert (done.returncode, "with --from 5:9, not with --from 5:8" in done.stderr) == (1, True), done.stderr
    done = recorded.replay(*into, "--from", "2:5", "--from", "5:9")
    assert (done.returncode, done.stderr) == (0, "")
    expected = [*recorded.between(2, 5), *recorded.between(5, 9)]
    assert sorted(file.read_text().splitlines()) == sorted(expected)


async def test_a_file_without_a_record_continues_with_a_warning(
    recorded: RecordedSystem, tmp_path: Path
) -> None:
    """As releases before have written it. What it is continued with is recorded; another text is refused."""
    file, record = tmp_path / "lines", tmp_path / "lines.replay"
    into = ("--into", f"file:{file}", "--continue", "--shard", "2")
    file.write_text("".join(f"{line}\n" for line in recorded.between(2, 1, 10)))
    done = recorded.replay(*into, "--until", "2:20")
    assert (done.returncode, "does not record the --offer" in done.stderr) == (0, True), done.stderr
    journal = await journal_of(recorded)
    assert decode_filters(record.read_bytes()) == Filters(recorded.settings.prefix, journal)
    record.write_text("{}")
    done = recorded.replay(*into)
    assert (done.returncode, f"{record} is not a record of a replay" in done.stderr) == (1, True), done.stderr
    assert file.read_text().splitlines() == recorded.between(2, 1, 20)
    # A removed file is started with other filters, if its record is one.
    file.unlink()
    record.write_bytes(msgspec.json.encode(Filters(recorded.settings.prefix, journal)))
    assert recorded.replay(*into, "--user", "u1").returncode == 0
    assert decode_filters(record.read_bytes()) == Filters(recorded.settings.prefix, journal, users="u1")


@pytest.mark.long
async def test_a_file_that_has_the_name_of_a_record_is_not_overwritten(
    recorded: RecordedSystem, tmp_path: Path
) -> None:
    """It may have the lines of another replay."""
    other = tmp_path / "lunch.replay"
    bounds = ("--until", "2:20", "--shard", "2")
    assert recorded.replay("--into", f"file:{other}", *bounds).returncode == 0
    for more in ((), ("--continue",), ("--dry-run",)):
        done = recorded.replay("--into", f"file:{tmp_path / 'lunch'}", *bounds, *more)
        assert (done.returncode, f"{other} is not a record of a replay" in done.stderr) == (1, True), done
        assert other.read_text().splitlines() == recorded.between(2, 1, 20)
        assert not (tmp_path / "lunch").exists()


@pytest.mark.long
async def test_a_file_continues_from_the_same_journal_only(recorded: RecordedSystem, tmp_path: Path) -> None:
    """Two systems may have one prefix, on other brokers. A record without a journal is completed."""
    file, record = tmp_path / "lines", tmp_path / "lines.replay"
    into = ("--into", f"file:{file}", "--continue", "--shard", "2")
    assert recorded.replay(*into, "--until", "2:20").returncode == 0
    prefix, journal = recorded.settings.prefix, await journal_of(recorded)
    assert decode_filters(record.read_bytes()) == Filters(prefix, journal)
    record.write_bytes(msgspec.json.encode(Filters(prefix, "0" * 32)))
    done = recorded.replay(*into, "--until", "2:40")
    said = f"{file} was written with journal {'0' * 32}, not with journal {journal}: continue with"
    assert (done.returncode, said in done.stderr) == (1, True), done.stderr
    assert file.read_text().splitlines() == recorded.between(2, 1, 20)
    record.write_bytes(msgspec.json.encode(Filters(prefix)))
    done = recorded.replay(*into, "--until", "2:40")
    assert (done.returncode, f"{file} does not record the journal" in done.stderr) == (0, True), done
    assert file.read_text().splitlines() == recorded.between(2, 1, 40)
    assert decode_filters(record.read_bytes()) == Filters(prefix, journal)


async def test_the_journal_is_recorded_without_postgresql(recorded: RecordedSystem, tmp_path: Path) -> None:
    """Kafka knows it, too."""
    away = {**env_of(recorded.settings), "postgres": "postgresql://127.0.0.1:1/x"}
    words = ("--into", f"file:{tmp_path / 'lines'}", "--shard", "2", "--until", "2:5")
    done = grabstream("replay", *words, **away)
    assert done.returncode == 0, done.stderr
    filters = decode_filters((tmp_path / "lines.replay").read_bytes())
    assert filters == Filters(recorded.settings.prefix, await journal_of(recorded))


@pytest.mark.long
async def test_a_topic_continues_with_the_same_filters_only(recorded: RecordedSystem, topic: str) -> None:
    """The first record of each partition names them, and no other one does."""
    into = ("--into", f"topic:{topic}")
    done = recorded.replay(*into, "--user", "u1", "--until", "2:200", "--shard", "2")
    assert done.returncode == 0, done.stderr
    before = await records(recorded.settings, topic)
    assert before
    # Another shard is not a way around it.
    done = recorded.replay(*into, "--continue", "--user", "u2", "--shard", "5")
    said = f"topic {topic} was written with --user u1, not with --user u2: continue with the options"
    assert (done.returncode, said in done.stderr) == (1, True), done.stderr
    assert len(await records(recorded.settings, topic)) == len(before)
    done = recorded.replay(*into, "--continue", "--user", "u1")
    assert (done.returncode, done.stderr) == (0, "")
    written = await records(recorded.settings, topic)
    assert {record.partition for record in written} == {2, 5}
    for shard in (2, 5):
        first, *rest = [record for record in written if record.partition == shard]
        assert decode_filters(dict(first.headers)[FILTERS_HEADER]).users == "u1"
        assert all(FILTERS_HEADER not in dict(record.headers) for record in rest)


@pytest.mark.long
async def test_a_topic_to_which_another_replay_was_appended_is_not_continued(
    recorded: RecordedSystem, topic: str
) -> None:
    """The last event in a partition is one of the second replay: the first one is missing before it."""
    offer, other = recorded.histories[2].envelope, recorded.histories[2].names[0]
    into = ("--into", f"topic:{topic}")
    assert recorded.replay(*into, "--offer", offer, "--until", "200").returncode == 0
    begun = len(await records(recorded.settings, topic))
    assert begun
    done = recorded.replay(*into, "--append", "--offer", other)
    assert done.returncode == 0, done.stderr
    written = await records(recorded.settings, topic)
    assert len(written) > begun + 10
    for record in written[begun:]:
        assert decode_filters(dict(record.headers)[FILTERS_HEADER]).offers == other
    for asked, said in ((offer, other), (other, offer)):
        for more in (("--dry-run",), ()):
            done = recorded.replay(*into, "--continue", "--offer", asked, *more)
            differs = f"topic {topic} was written with --offer {said}, not with --offer {asked}"
            assert (done.returncode, differs in done.stderr) == (1, True), done.stderr
    assert len(await records(recorded.settings, topic)) == len(written)


@pytest.mark.long
async def test_a_topic_to_which_the_same_replay_was_appended_is_continued(
    recorded: RecordedSystem, topic: str
) -> None:
    """Where its partition was empty, the first record has the header, and no other one does."""
    into = ("--into", f"topic:{topic}")
    for words in (("--until", "2:20"), ("--append", "--until", "2:15"), ("--continue", "--until", "2:30")):
        done = recorded.replay(*into, "--shard", "2", *words)
        assert (done.returncode, done.stderr) == (0, ""), done
    written = await records(recorded.settings, topic)
    lines = recorded.singles(2)
    assert [record.value.decode() for record in written] == [*lines[:20], *lines[:15], *lines[15:30]]
    has_header = [FILTERS_HEADER in dict(record.headers) for record in written]
    assert has_header == [True, *[False] * 19, *[True] * 15, *[False] * 15]
    assert recorded.replay(*into, "--append", "--until", "5:4", "--shard", "5").returncode == 0
    of_5 = [record for record in await records(recorded.settings, topic) if record.partition == 5]
    assert [FILTERS_HEADER in dict(record.headers) for record in of_5] == [True, False, False, False]


@pytest.mark.long
async def test_an_append_that_was_stopped_says_how_to_append_the_rest(
    recorded: RecordedSystem, topic: str
) -> None:
    """Not with --continue, which --append excludes."""
    command = [sys.executable, "-m", "grabstream.ops.cli", "replay", "--into", f"topic:{topic}", "--append"]
    running = subprocess.Popen(
        [*command, "--rate", "1"], env=child_environment(**env_of(recorded.settings)), stderr=subprocess.PIPE
    )
    client = AIOKafkaAdminClient(bootstrap_servers=recorded.settings.kafka)
    async with started(client):

        async def exists() -> bool:
            return topic in await client.list_topics()

        await until(exists, 60, "the topic")

    async def has_records() -> bool:
        return bool(await records(recorded.settings, topic))

    await until(has_records, 60, "the first records")
    running.send_signal(signal.SIGINT)
    await until(lambda: running.poll() is not None, 60, "the end")
    assert running.stderr is not None
    said = running.stderr.read().decode()
    assert (running.returncode, "repeat the command, with --from" in said) == (130, True), said
    assert "--continue" not in said


async def test_a_topic_without_a_record_continues_with_a_warning(
    recorded: RecordedSystem, topic: str
) -> None:
    """As releases before have written it. A header that no replay has written is refused."""
    await make_topics(recorded.settings.kafka, [NewTopic(topic, num_partitions=8, replication_factor=1)])
    into = ("--into", f"topic:{topic}", "--continue", "--shard", "2")
    async with started(AIOKafkaProducer(bootstrap_servers=recorded.settings.kafka, acks="all")) as producer:
        await producer.send_and_wait(topic, b"{}", partition=5, headers=[("ce_id", b"5-1")])
        done = recorded.replay(*into, "--until", "2:3")
        assert (done.returncode, "does not record the --offer" in done.stderr) == (0, True), done.stderr
        headers = [("ce_id", b"3-1"), (FILTERS_HEADER, b"mine")]
        await producer.send_and_wait(topic, b"{}", partition=3, headers=headers)
    done = recorded.replay(*into)
    assert (done.returncode, "a header replay that no replay has written" in done.stderr) == (1, True)
    assert len(await records(recorded.settings, topic)) == 5


# -- what differs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ("--offer a", "", "with --offer a, not without --offer"),
        ("", "--offer a", "without --offer, not with --offer a"),
        ("--offer b --offer a", "--offer a", "with --offer a, b, not with --offer a"),
        ("--offer a", "--offer a --user u", "without --user, not with --user u"),
        ("--shard 2", "--from 2:9", "without --from, not with --from 2:9"),
        ("--from 2:9", "--from 2:9 --from 2027-01-15T08:00Z --shard 2", None),
        (
            "--from 2027-01-15T08:00Z",
            "--from 2:9",
            "with --from 2027-01-15T08:00:00.000Z, not with --from 2:9",
        ),
        ("--from 1800000000000", "--from 2027-01-15T09:00+01:00", None),
        ("--from 2:1", "", None),
        ("--offer a --offer b", "--offer b --offer a --source audit --until 2027-01-01", None),
        ("--shard 2", "--shard 2 --shard 3", None),
    ],
)
def test_filters_differ_where_other_events_are_written(before: str, now: str, said: str | None) -> None:
    found = difference(filters_by(before), filters_by(now), [2])
    assert found == (said and f"was written {said}")


def filters_by(words: str) -> Filters:
    """Those of `grabstream replay` with these options."""
    found = replay_verb.make_context("replay", ["--into", "-", *words.split()]).params
    points = {name: found[name] for name in ("first", "last", "shards", "offers", "users")}
    settings = Settings(prefix="grab", shards=8)
    return request(settings, found["source"], **points).filters(settings)


def test_many_names_are_recorded_as_their_digest() -> None:
    names = tuple(f"offer-{number:03}" for number in range(21))
    few, many = filters_of("grab", "", Wanted(names[:20]), {}), filters_of("grab", "", Wanted(names), {})
    assert few.offers.startswith("offer-000, offer-001, ")
    assert many.offers.startswith("21 names, SHA-256 ")
    other = filters_of("grab", "", Wanted((*names[:20], "another")), {})
    assert "not with --offer 21 names, SHA-256 " in (difference(many, other, []) or "")
    assert difference(many, filters_of("grab", "", Wanted(names), {}), []) is None


def test_another_system_is_another_replay() -> None:
    ours, theirs = filters_of("grab", "a1", Wanted(), {}), filters_of("test", "b2", Wanted(), {})
    assert difference(ours, theirs, []) == "was written with GRAB_PREFIX grab, not with GRAB_PREFIX test"
    elsewhere, unknown = filters_of("grab", "b2", Wanted(), {}), filters_of("grab", "", Wanted(), {})
    assert difference(ours, elsewhere, []) == "was written with journal a1, not with journal b2"
    assert difference(ours, unknown, []) is difference(unknown, ours, []) is None


def test_the_first_event_of_a_shard_is_its_beginning() -> None:
    first = {1: Point(seq=1), 2: Point(seq=7), 3: Point(at=1_800_000_000_000)}
    filters = filters_of("grab", "a1", Wanted(), first)
    assert filters.first == {2: "2:7", 3: "2027-01-15T08:00:00.000Z"}
    assert decode_filters(filters.shard_record(2)) == Filters("grab", "a1", first={2: "2:7"})


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"[]", b'{"prefix":"p","more":1}', b" " * (FILTERS_BYTES_MAX + 1)]
)
def test_another_text_is_not_a_record(text: bytes) -> None:
    with pytest.raises(ValueError):
        decode_filters(text)
