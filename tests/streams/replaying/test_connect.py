"""The recipe for Kafka Connect of docs/recipes.md: Connect's own worker with the file sink of Kafka, started
as the page says. Starting a worker takes half a minute, so this is played at night.
"""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grabstream.settings import Settings
from grabstream.streams.projecting.projector import CatchUp
from grabstream.streams.topics import Topics
from grabstream.workshop.services import free_ports
from grabstream.workshop.services.servers import PROJECT, kafka_version
from tests.conftest import until
from tests.support.projecting import (
    EVENTS,
    LINES,
    SHARD,
    JournalWriter,
    catching_up,
    journal,  # noqa: F401 - a fixture
)

SERVICES = PROJECT / ".services"
MAIN = "org.apache.kafka.connect.cli.ConnectStandalone"


def file_sink() -> Path:
    """The folder with the connector, which Maven fetches once: from its own store, if it has it."""
    version = kafka_version()
    folder = SERVICES / f"connect-file-{version}"
    if list(folder.glob("*.jar")):
        return folder
    said = ""
    for words in (("-o",), ()):
        fetch = ["mvn", "-q", "-B", *words, "dependency:copy", f"-DoutputDirectory={folder}"]
        fetch.append(f"-Dartifact=org.apache.kafka:connect-file:{version}")
        done = subprocess.run(fetch, capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            return folder
        said = (done.stdout + done.stderr).strip()[-300:]
    pytest.skip(f"Maven has no connect-file: {said}")


def properties(first: str) -> str:
    """The file of the page whose first line begins so."""
    found = re.findall(r"```properties\n(.*?)```", (PROJECT / "docs" / "recipes.md").read_text(), re.DOTALL)
    [text] = [text for text in found if text.startswith(first)]
    return str(text)


@contextmanager
def connect(settings: Settings, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A worker of Connect in a folder, with the files of the page."""
    worker = properties("bootstrap.servers").replace("HOST:PORT", settings.kafka)
    worker = worker.replace("/opt/kafka/libs", str(file_sink())).replace("8083", str(free_ports(1)[0]))
    (folder / "connect.properties").write_text(worker)
    sink = properties("name=").replace("grab.events", Topics(settings.prefix).events)
    (folder / "events-to-file.properties").write_text(sink)
    jars = SERVICES / f"kafka-{kafka_version()}"
    words = ["java", "-Xmx256m", "-XX:TieredStopAtLevel=1", "-cp", f"{jars}/*:{file_sink()}/*", MAIN]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*words, "connect.properties", "events-to-file.properties"], cwd=folder, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.mark.nightly
async def test_connect_writes_all_events_to_a_file(
    system: Settings, journal: JournalWriter, tmp_path: Path
) -> None:
    """Also those that come while it runs; each line is an event, byte for byte."""
    file = tmp_path / "events.ndjson"

    def written() -> set[bytes]:
        return set(file.read_bytes().splitlines()) if file.exists() else set()

    await journal.marker(1, "a")
    await journal.block(LINES, 1, 20)
    async with catching_up(system, "events") as [projector]:
        with connect(system, tmp_path) as process:
            for last in (20, 30):
                if last == 30:
                    await journal.block(LINES, 21, last)
                    await projector.put(CatchUp(SHARD))
                await until(
                    lambda: written() == set(EVENTS[:last]) or process.poll() is not None,  # noqa: B023
                    120, f"{last} lines",
                )  # fmt: skip
                assert process.poll() is None, (tmp_path / "log").read_text()
