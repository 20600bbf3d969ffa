"""Logs: as JSON, one object a line; and quiet while a server is away."""

import asyncio
import json
import logging
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from grabstream.ops.console.json_log import JsonLines
from grabstream.ops.console.quiet import PERIOD_SECONDS, Repeats
from grabstream.settings import Settings
from grabstream.workshop.services import LocalServices
from tests.conftest import make_system, until
from tests.metrics.scraping import ask, port_of, scrape
from tests.support.gateways import environment_of

#: How long Kafka is away.
AWAY_SECONDS = 25.0
#: Lines of one logger in that time: an outage is logged once, by each role that meets it at most twice.
LINES_OF_LOGGER_MAX = 25
LINES_MAX = 60


@contextmanager
def running(
    settings: Settings, file: Path, *words: str, **overrides: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the command line as an operator starts it, without -v."""
    with file.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "grabstream.ops.cli", *words],
            env=environment_of(settings, **overrides),
            stdout=output,
            stderr=output,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def lines_of(log: Path) -> list[dict[str, Any]]:
    """The lines of a log, each of which must be a JSON object; the last one may be half written."""
    return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.fixture
async def private(private_services: LocalServices, settings: Settings) -> Settings:
    """A system on servers that may be killed."""
    on_private_servers = settings.model_copy(update=private_services.environment())
    await make_system(on_private_servers)
    return on_private_servers


@pytest.mark.nightly
@pytest.mark.parametrize("words", [("worker",), ("-v", "worker")])
async def test_a_worker_without_kafka_says_so_once_in_json_and_is_not_ready(
    private: Settings, private_services: LocalServices, tmp_path: Path, words: Sequence[str]
) -> None:
    log = tmp_path / "worker.log"
    with running(private, log, *words, log="json", metrics_listen="127.0.0.1:0") as process:
        port = port_of(log)
        await until(lambda: ask(port, "/health/ready")[0] == 200, 60, "ready")
        # All shards are taken over a while after the worker is ready.
        await until(lambda: f"took over 0 to {private.shards - 1}" in log.read_text(), 60, "takeovers")
        started = lines_of(log)
        assert sum(line["message"].startswith("ready: ") for line in started) == 1
        await asyncio.to_thread(private_services.kafka.kill)
        await until(lambda: ask(port, "/health/ready")[0] == 503, 30, "the outage")
        assert ask(port, "/health/ready")[1]["servers"]["kafka"] == "does not answer"
        assert ask(port, "/health/live")[0] == 200
        scraped = scrape(port)
        assert scraped.value("grabstream_server_up", server="kafka") == scraped.value("grabstream_ready") == 0
        assert scraped.total("grabstream_unread_parts_total") == 0
        # The time is the subject: a loop that logs shows only while it runs.
        await asyncio.sleep(AWAY_SECONDS)
        during = lines_of(log)[len(started) :]
        await asyncio.to_thread(private_services.kafka.start)
        await until(lambda: ask(port, "/health/ready")[0] == 200, 60, "ready again")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30) == 0
    assert lines_of(log)[-1]["message"].startswith("stopped: SIGTERM; ")
    counts = Counter(line["logger"] for line in during)
    assert counts["grabstream.worker"] == 1, during
    assert max(counts.values()) <= LINES_OF_LOGGER_MAX, counts
    assert counts.total() <= LINES_MAX, counts
    if "-v" not in words:
        assert not [name for name in counts if not name.startswith("grabstream")], counts


def test_a_place_in_a_library_is_heard_twice_a_minute_and_says_how_often_it_was_not() -> None:
    now = 0.0
    repeats = Repeats(lambda: now)

    def heard(name: str, message: str, line: int = 7) -> str | None:
        record = logging.LogRecord(name, logging.ERROR, "client.py", line, message, ("x",), None)
        return record.getMessage() if repeats.filter(record) else None

    assert [heard("aiokafka", "cannot reach %s") for _ in range(5)] == ["cannot reach x"] * 2 + [None] * 3
    assert heard("aiokafka", "something else of %s", 8) == "something else of x"
    assert [heard("grabstream.worker", "ours %s") for _ in range(5)] == ["ours x"] * 5
    now = PERIOD_SECONDS
    assert heard("aiokafka", "cannot reach %s") == "cannot reach x (3 more in the 60 s before)"
    assert heard("aiokafka", "cannot reach %s") == "cannot reach x"
    assert heard("aiokafka", "cannot reach %s") is None


def test_a_line_of_json_holds_what_a_record_says() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f.py", 1, "%s “é”\n", ("y",), sys.exc_info())
    text = JsonLines().format(record)
    line = json.loads(text)
    assert "\n" not in text
    assert (line["level"], line["logger"], line["message"]) == ("ERROR", "x", "y “é”\n")
    assert line["exception"].endswith("ValueError: a\nb")
    assert line["at"].endswith("+00:00")


@pytest.mark.long
def test_errors_that_end_a_process_are_json_too(servers: Settings, tmp_path: Path) -> None:
    """A worker of a system that does not exist; before its settings are read, its log is text."""
    log = tmp_path / "worker.log"
    nobody = servers.model_copy(update={"schema_": "nobody", "prefix": "nobody"})
    with running(nobody, log, "worker", log="json") as process:
        assert process.wait(60) == 2
    last = lines_of(log)[-1]
    assert (last["level"], last["logger"]) == ("CRITICAL", "grabstream")
    assert "grabstream init" in last["message"]
    with running(nobody, log, "worker", log="yaml") as process:
        assert process.wait(60) == 2
    assert "GRAB_LOG: " in log.read_text().splitlines()[-1]


def test_an_unknown_error_of_a_process_is_json() -> None:
    program = (
        "import logging; logging.basicConfig(); from grabstream.ops.console.json_log import log_as_json; "
        "log_as_json(); import threading, warnings; warnings.warn('w'); "
        "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join(); [][1]"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    warned, thread, process = (json.loads(line) for line in done.stderr.splitlines())
    assert warned["logger"] == "py.warnings"
    assert "ZeroDivisionError" in thread["exception"]
    assert "IndexError" in process["exception"]
    assert done.returncode == 1
