"""Workers report their roles and troubles in Redis; `doctor` and `status` show it, and no finding advises to
start what runs.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from grabstream.connections import worker_reports
from grabstream.connections.opening import key_space
from grabstream.connections.worker_reports import (
    OLD_MS,
    REPORT_MS_MAX,
    ReportedTrouble,
    WorkerReport,
    keep_reporting,
    read_reports,
    report_of,
)
from grabstream.gate.calls import now_ms
from grabstream.ops.commands.read.status import read
from grabstream.ops.diagnosis.examination import examine
from grabstream.settings import Settings
from grabstream.streams import clients
from tests.conftest import Worker, until
from tests.support.diagnosis import findings_of

CHECK = "workers make progress"
REFUSED = "TopicAuthorizationFailedError: grab.results"


async def report(redis_client: Any, settings: Settings, name: str, roles: str, *troubles: Any) -> None:
    """What a worker says; troubles are (where, for how many seconds, words)."""
    now = now_ms()
    reported = [
        ReportedTrouble(where, now - (seconds + 5) * 1000, seconds, words)
        for where, seconds, words in troubles
    ]
    text = msgspec.json.encode(WorkerReport(now, roles.split(","), reported))
    await redis_client.hset(key_space(settings).workers, name, text)


async def test_a_worker_reports_its_troubles_until_it_ends(
    settings: Settings, redis_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, stop = key_space(settings).workers, asyncio.Event()
    troubles = clients.Troubles()
    monkeypatch.setattr(clients, "TROUBLES", troubles)
    monkeypatch.setattr(worker_reports, "TROUBLES", troubles)
    await redis_client.hset(key, "gone", msgspec.json.encode(WorkerReport(now_ms() - OLD_MS - 1, [], [])))
    await redis_client.hset(key, "of somebody else", "no report")
    trouble = clients.Trouble(logging.getLogger("test"), "deciding")
    trouble.note(REFUSED)
    reporting = asyncio.create_task(keep_reporting(redis_client, key, ["relay", "decide"], stop))

    async def reports() -> dict[str, WorkerReport]:
        return await read_reports(redis_client, key, now_ms())

    await until(reports, 20, "the report")
    [(name, found)] = (await reports()).items()
    assert found.roles == ["decide", "relay"]
    assert [(one.where, one.words) for one in found.troubles] == [("deciding", REFUSED)]
    assert set(await redis_client.hkeys(key)) == {name.encode(), b"of somebody else"}
    stop.set()
    await reporting
    assert await redis_client.hkeys(key) == [b"of somebody else"]


def test_a_report_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    troubles = clients.Troubles()
    monkeypatch.setattr(clients, "TROUBLES", troubles)
    monkeypatch.setattr(worker_reports, "TROUBLES", troubles)
    many = [clients.Trouble(logging.getLogger("test"), f"shard {number}") for number in range(200)]
    for trouble in many:
        trouble.note("x" * 100_000)
    assert len(json.dumps(msgspec.to_builtins(report_of(["relay"], 0)))) < 16_384


async def test_lasting_trouble_of_a_worker_is_a_finding(system: Settings, redis_client: Any) -> None:
    shards = [(f"shard {number}", 61, "no space left") for number in (0, 1)]
    await report(
        redis_client, system, "w1", "decide,relay", ("deciding", 3_600, REFUSED), *shards, ("new", 59, "away")
    )
    first, second = findings_of(await examine(system), CHECK)
    assert (first.severity, first.what) == ("stuck", f"worker w1: deciding: {REFUSED}")
    assert first.since is not None
    assert abs(now_ms() - 3_600_000 - first.since) < 30_000
    assert second.what == "worker w1: shard 0, shard 1: no space left", "one cause is one finding"
    workers = (await read(system))["workers"]
    assert workers["w1"]["roles"] == ["decide", "relay"]
    assert workers["w1"]["troubles"][0]["words"] == REFUSED
    # A worker that is gone has none.
    later = await examine(system, lambda: now_ms() + REPORT_MS_MAX + 1_000)
    assert findings_of(later, CHECK) == []


async def test_nobody_is_told_to_start_a_role_that_runs(system: Settings, redis_client: Any) -> None:
    async def commands() -> set[str]:
        examination = await examine(system)
        return {one.command for check in ("commands are read", "shards are relayed")
                for one in findings_of(examination, check)}  # fmt: skip

    assert await commands() == {"grabstream worker --roles decide", "grabstream worker --roles relay,sweep"}
    await report(redis_client, system, "w1", "decide", ("deciding", 1, REFUSED))
    await report(redis_client, system, "w2", "relay")
    decide, relay = sorted(await commands())
    assert decide == f"do not start another worker: w1 has decide; its last error: w1: deciding: {REFUSED}"
    assert relay == "grabstream worker --roles relay,sweep", "nobody plays both"
    await report(redis_client, system, "w3", "relay,sweep")
    assert (
        "do not start another worker: w3 has relay,sweep; it reports no error: read its log"
        in await commands()
    )


@pytest.mark.long
async def test_a_worker_process_reports_itself_while_it_runs(
    system: Settings, worker: Callable[..., Worker]
) -> None:
    running = worker(system, "decide")

    async def roles() -> list[list[str]]:
        return [report["roles"] for report in (await read(system))["workers"].values()]

    async def reported() -> bool:
        return await roles() == [["decide"]]

    await until(reported, 60, "the report")
    assert running.stop() == 0
    assert await roles() == []
