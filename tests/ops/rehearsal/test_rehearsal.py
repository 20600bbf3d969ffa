"""The rehearsal of the envelopes: it ends with a verdict however slow the machine is, and counts users who
are too late.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from grabstream.lua.gate.gate import Gate
from grabstream.ops.connections.opening import gate_limits, key_space, open_redis, sealer
from grabstream.ops.rehearsal.crowd import attempts, envelopes
from grabstream.ops.rehearsal.run import Patience, Rehearsal, closed, open_books, until_in_books
from grabstream.ops.rehearsal.stage import CannotGoOn
from grabstream.ops.rehearsal.verdict import verdict
from grabstream.ops.settings import Settings
from tests.conftest import until
from tests.support.command_line import env_of, grabstream


def rehearse(settings: Settings, *words: str) -> dict[str, Any]:
    done = grabstream("rehearse", "--seed", "7", "--json", *words, **env_of(settings))
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert [check for check in report["checks"] if not check["passed"]] == []
    assert (done.returncode, report["passed"]) == (0, True), done.stderr
    return report


def test_the_envelope_rehearsal_passes_its_verdict(settings: Settings) -> None:
    report = rehearse(
        settings, "--parts", "2000", "--envelopes", "6", "--small-parts", "100", "--deadline", "3"
    )
    checked = {check["name"]: check["checked"] for check in report["checks"]}
    assert checked["everybody was answered, always the same"] == report["attempts"] > 2_600
    assert (
        checked["granted = parts"]
        == checked["nobody twice"]
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


@pytest.mark.nightly
def test_users_after_the_deadline_are_not_expected_to_have_parts(settings: Settings) -> None:
    """The verdict expects no part for a user who was answered `over`."""
    report = rehearse(
        settings, "--parts", "1000", "--envelopes", "0", "--small-parts", "30000", "--deadline", "1"
    )
    assert report["outcomes"]["over"] > 0
    [granted] = [check["checked"] for check in report["checks"] if check["name"] == "granted = parts"]
    assert 1_000 <= granted < 37_000


@pytest.mark.parametrize("words", [("--deadline", "0"), ("--deadline", "nan"), ("--seed", "-1")])
def test_an_impossible_number_is_refused(words: tuple[str, ...]) -> None:
    done = grabstream("rehearse", *words)
    assert done.returncode == 2
    assert f"Invalid value for '{words[0]}'" in done.stderr


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


def test_patience_ends_without_progress_and_starts_again_with_any_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1_000.0
    monkeypatch.setattr("grabstream.ops.rehearsal.run.time.monotonic", lambda: now)
    patience = Patience()
    for seen, busy in ((1, False), (2, False), (2, True), (3, False)):
        patience.observe(seen, "too early", busy)
        now += 119
    patience.observe(4, "too early")
    now += 121
    with pytest.raises(CannotGoOn, match="no progress for 120 s: 5 of 7"):
        patience.observe(4, "5 of 7")
