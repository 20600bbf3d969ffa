"""The Python examples of docs/replay.md, run as a reader runs them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grabstream import GrabGranted
from grabstream.models.journal import GENESIS, chain
from grabstream.settings import child_environment
from grabstream.workshop.services.servers import PROJECT
from tests.streams.replaying.histories import RecordedSystem
from tests.support.command_line import env_of

pytestmark = pytest.mark.long


def examples(page: str) -> list[str]:
    """The Python code of a page, block by block."""
    return re.findall(r"^```python\n(.*?)^```$", (PROJECT / "docs" / page).read_text(), re.M | re.S)


def run(code: str, recorded: RecordedSystem, folder: Path) -> str:
    environment = child_environment(**env_of(recorded.settings))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_examples_of_the_page_about_replays_run(recorded: RecordedSystem, tmp_path: Path) -> None:
    of_offer, with_cursor, with_lines = examples("replay.md")
    envelope = recorded.histories[2].envelope
    granted = [
        event
        for history in recorded.histories.values()
        for event in history.events
        if isinstance(event, GrabGranted)
    ]
    since_long_ago = of_offer.replace('"lunch"', repr(envelope)).replace("(2026, 11, 11", "(2020, 1, 1")
    assert run(since_long_ago, recorded, tmp_path).splitlines() == [
        f"{event.user} {event.amount}" for event in granted if event.offer == envelope
    ]
    totals: dict[str, int] = {}
    for event in granted:
        totals[event.offer] = totals.get(event.offer, 0) + event.amount
    assert json.loads(run(with_cursor, recorded, tmp_path)) == totals
    # A second run has nothing to add.
    assert json.loads(run(with_cursor, recorded, tmp_path)) == totals
    heads = [
        f"{shard} {chain(GENESIS, history.journaled)[-1].hex()}"
        for shard, history in sorted(recorded.histories.items())
    ]
    assert run(with_lines, recorded, tmp_path).splitlines() == heads
