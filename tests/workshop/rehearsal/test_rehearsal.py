"""The rehearsal of the envelopes: it ends with a verdict however slow the machine is, and counts users who
are too late.
"""

import asyncio
import json
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaTimeoutError

from grabstream.connections.identity import find_journal
from grabstream.connections.opening import gate_limits, key_space, open_redis, sealer
from grabstream.gate.gate import Gate
from grabstream.models.commands import Grab
from grabstream.settings import Settings, child_environment
from grabstream.workshop.commands import services
from grabstream.workshop.rehearsal import run, stage
from grabstream.workshop.rehearsal.crowd import attempts, envelopes
from grabstream.workshop.rehearsal.phases import Phase
from grabstream.workshop.rehearsal.run import Rehearsal, closed, open_books, until_in_books
from grabstream.workshop.rehearsal.stage import CannotGoOn, Patience, Stage
from grabstream.workshop.rehearsal.verdict import verdict
from tests.conftest import until
from tests.support.command_line import env_of, grabstream


def rehearse(settings: Settings, *words: str) -> dict[str, Any]:
    done = grabstream("rehearse", "--seed", "7", "--json", *words, **env_of(settings))
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert [check for check in report["checks"] if not check["passed"]] == []
    assert (done.returncode, report["passed"]) == (0, True), done.stderr
    return report


@pytest.mark.every_change("the command of the README that shows everything")
def test_the_envelope_rehearsal_passes_its_verdict(settings: Settings) -> None:
    report = rehearse(
        settings, "--parts", "2000", "--envelopes", "6", "--small-parts", "100", "--deadline", "3"
    )
    checked = {check["name"]: check["checked"] for check in report["checks"]}
    assert checked["every command was answered, repeats identically"] == report["attempts"] > 2_600
    assert (
        checked["granted = parts"]
        == checked["no user twice"]
        == checked["every acknowledged grant is in the books"]
    )
    # On a slow machine, some users arrive after the deadline of their envelope.
    assert 2_600 <= checked["granted = parts"] <= 2_720
    assert checked["granted = parts"] == 2_720 or report["outcomes"]["over"] > 0
    assert {
        "chain of every shard",
        "audit bytes = journal",
        "no account below 0",
        "Redis = fold of the journal",
    } <= checked.keys()
    assert report["seconds_to_books"] > 3, "two envelopes close 3 s after the crowd has started"
    phases = report["phases"]
    assert list(phases) == ["calibration", "steady", "rush"]
    assert sum(phase["attempts"] for phase in phases.values()) == report["attempts"]
    for phase in phases.values():
        assert set(phase["latency_ms"]) == {"topic", "gate", "http"}, "the crowd comes through all doors"
    assert phases["steady"]["offered_per_second"] > 0
    assert phases["rush"]["attempts"] > report["attempts"] / 2


@pytest.mark.nightly
def test_users_after_the_deadline_are_not_expected_to_have_parts(settings: Settings) -> None:
    """The verdict expects no part for a user who was answered `over`."""
    report = rehearse(
        settings, "--parts", "1000", "--envelopes", "0", "--small-parts", "30000", "--deadline", "1"
    )
    assert report["outcomes"]["over"] > 0
    [granted] = [check["checked"] for check in report["checks"] if check["name"] == "granted = parts"]
    assert 1_000 <= granted < 37_000


@pytest.mark.long
async def test_it_can_be_watched_while_it_runs(settings: Settings) -> None:
    words = ("--parts", "300", "--envelopes", "0", "--small-parts", "20", "--deadline", "2")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "grabstream.ops.cli", "rehearse", *words, stdout=asyncio.subprocess.PIPE,
        env=child_environment(**env_of(settings)),
    )  # fmt: skip
    assert process.stdout is not None
    try:
        while (found := re.search(rb"verdict: (\S+) .*: (\S+)\)", await process.stdout.readline())) is None:
            assert not process.stdout.at_eof()
        async with aiohttp.ClientSession() as session:
            for address in found.groups():
                async with session.get(address.decode()) as page:
                    assert page.status == 200
                    assert page.headers["content-type"] == "text/html; charset=utf-8"
        rest = await process.stdout.read()
        assert await process.wait() == 0, rest
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", int(found[1].split(b":")[2].strip(b"/")))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_up_says_where_the_page_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gateway:
        port = gateway.getsockname()[1]
        monkeypatch.setattr(services, "GATEWAY_PORT", port)
        assert services.where_the_page_is() == f"The live page: http://127.0.0.1:{port}/"
    assert services.where_the_page_is().startswith("Start the gateway for the live page: ")


@pytest.mark.parametrize("words", [("--deadline", "0"), ("--deadline", "nan"), ("--seed", "-1")])
def test_an_impossible_number_is_refused(words: tuple[str, ...]) -> None:
    done = grabstream("rehearse", *words)
    assert done.returncode == 2
    assert f"Invalid value for '{words[0]}'" in done.stderr


@pytest.mark.long
async def test_the_deadline_counts_from_when_workers_answer(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """The workers start while the rehearsal waits for them, and take longer to start than its deadline."""
    chosen = envelopes(7, 200, 2, 50, 1_000)
    redis = open_redis(system)
    gate = Gate(redis, key_space(system), sealer(system), gate_limits(system))
    gate.start()
    rehearsal = Rehearsal(system, gate, chosen, attempts(7, chosen), 7)
    ready = asyncio.create_task(rehearsal.until_ready())
    try:
        worker(system, "decide,relay,sweep")
        worker(system, "project,publish")
        await ready
        assert rehearsal.partitions_ready == system.shards
        assert rehearsal.deadline_at_ms == rehearsal.began == 0, (
            "no deadline counts before the workers answer"
        )
        await rehearsal.open()
        await rehearsal.crowd()
        async with await open_books(system) as books:

            async def all_closed() -> bool:
                return await closed(books) == len(chosen)

            await until(all_closed, 60, "the close of all envelopes")
            await until_in_books(redis, key_space(system), books, lambda: None)
            checks = await verdict(books, chosen, rehearsal.doors)
        assert {check.name: check.problems for check in checks if not check.passed} == {}
    finally:
        ready.cancel()
        await gate.close()
        await redis.aclose()


def test_the_best_second_of_a_phase_is_any_second_of_it() -> None:
    phase = Phase("rush", began=100.0)
    for now, answers in ((100.05, 3), (100.55, 20), (101.45, 30), (101.75, 5), (103.0, 40)):
        for _ in range(answers):
            phase.count(now)
    phase.ended = 104.0
    assert phase.best_second() == 50
    numbers = phase.numbers()
    assert (numbers["attempts"], numbers["seconds"], numbers["per_second"]) == (98, 4.0, 24.5)


async def test_steady_users_come_whether_others_are_answered_or_not(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The open loop: as many are sent while no user is answered, and a latency counts from when a user was
    due. The calibration is a closed loop: a caller who is not answered sends no more.
    """
    chosen = envelopes(7, 2_000, 0, 1, 1_000)
    rehearsal = Rehearsal(settings, cast("Gate", None), chosen, attempts(7, chosen), 7)
    waiting: list[float] = []
    answered = asyncio.Event()

    async def attempt(door: str, grab: Grab, due: float, producer: Any) -> None:
        waiting.append(due)
        if answered.is_set():
            await asyncio.sleep(0)
        elif rehearsal.doors.phase.name == "calibration":
            assert len(waiting) <= run.CALIBRATION_CALLERS
            if len(waiting) == run.CALIBRATION_CALLERS:
                answered.set()
            await answered.wait()
        else:
            if len(waiting) == steady_max:
                answered.set()
            await answered.wait()
        rehearsal.doors.phase.count(time.monotonic())

    async def booked() -> None:
        """Nothing was decided."""

    monkeypatch.setattr(rehearsal, "_attempt", attempt)
    monkeypatch.setattr(rehearsal, "_until_booked", booked)
    early, rush = rehearsal._split()
    everybody = len(early) + len(rush)
    assert everybody == rehearsal.doors.total
    assert not {grab.offer for _, grab in early} & {one.offer for one in chosen if one.deadline_ms}
    served = await rehearsal._calibrate(early, cast("Any", None))
    assert served > 0
    assert len(waiting) == int(everybody * run.CALIBRATION_SHARE)
    waiting.clear()
    answered.clear()
    steady_max = int(everybody * run.STEADY_SHARE)
    await rehearsal._steady(early, 5_000, cast("Any", None))
    assert len(waiting) == steady_max, "nobody was answered before all had come"
    assert waiting == sorted(waiting)
    assert 0.7 < (waiting[-1] - waiting[0]) / (steady_max / 5_000) < 1.4, "the rate that was asked for"


def test_patience_ends_without_progress_and_starts_again_with_any_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1_000.0
    monkeypatch.setattr("grabstream.workshop.rehearsal.stage.time.monotonic", lambda: now)
    patience = Patience()
    for seen, busy in ((1, False), (2, False), (2, True), (3, False)):
        for _ in range(100):
            patience.observe(seen, "too early", busy)
            now += 2.9
    for _ in range(100):
        patience.observe(4, "too early")
        now += 3
    # A machine that was asleep: the time without a check hardly counts.
    patience.observe(5, "too early")
    now += 10_000
    for _ in range(60):
        patience.observe(5, "too early")
        now += 5
    with pytest.raises(CannotGoOn, match="no progress for 300 s: 5 of 7"):
        patience.observe(5, "5 of 7")


async def test_a_gateway_that_does_not_listen_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stage, "STILL_SECONDS", 0.2)
    (tmp_path / "gateway.log").write_bytes(b"starting")
    with pytest.raises(CannotGoOn, match="the gateway does not listen: see .*all.log"):
        await Stage({}, tmp_path / "all.log", tmp_path / "gateway.log").gateway_port()


@pytest.mark.long
@pytest.mark.parametrize("failures", [2, 3])
async def test_a_system_that_cannot_be_removed_changes_no_verdict(
    failures: int, settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:  # fmt: skip
    """What one server does not remove, the others do."""
    calls = []
    delete_topics = AIOKafkaAdminClient.delete_topics

    async def delete_late(client: AIOKafkaAdminClient, names: list[str]) -> Any:
        calls.append(names)
        if len(calls) <= failures:
            raise KafkaTimeoutError("a broker that is slow")
        return await delete_topics(client, names)

    with monkeypatch.context() as patch:
        patch.setattr(AIOKafkaAdminClient, "delete_topics", delete_late)
        patch.setattr(stage, "REMOVAL_PAUSE_SECONDS", 0.01)
        async with stage.set_up(settings, tmp_path / "log", False, ()):
            assert await left_of(settings) == {"topics", "schema", "keys"}
    assert len(calls) == 3
    if failures == 3:
        said = f"the topics of the rehearsal, with the prefix and schema {settings.prefix}, are not removed"
        assert said in caplog.text
        assert await left_of(settings) == {"topics"}
        await stage.take_down(settings)
    else:
        assert "not removed" not in caplog.text
    await until_removed(settings)


async def left_of(settings: Settings) -> set[str]:
    """What there is of a system."""
    left = set()
    if await find_journal(settings):
        left.add("topics")
    async with await open_books(settings) as books:
        names = await books.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (settings.schema_,))
        left |= {"schema"} if await names.fetchone() else set()
    redis = open_redis(settings)
    left |= {"keys" async for _ in redis.scan_iter(match=f"{settings.prefix}:*")}
    await redis.aclose()
    return left


async def until_removed(settings: Settings) -> None:
    """Brokers answer before they have deleted the topics."""

    async def removed() -> bool:
        return not await left_of(settings)

    await until(removed, 60, "the system is removed")
