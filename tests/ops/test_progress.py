"""How the progress of long work is shown."""

import re
from io import StringIO

import pytest
from rich.console import Console

from grabstream.ops.console import progress
from grabstream.ops.console.progress import Steps


def test_without_a_terminal_a_step_is_a_line_and_then_a_line_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    output = Console(file=StringIO(), width=100)
    with Steps(output) as steps:
        steps("reading Redis")
        for done in range(0, 4_001, 500):
            steps("comparing Redis", done, 4_000)
            now += 0.6
    assert output.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "reading Redis …",
        "comparing Redis …",
        "comparing Redis: 2,000 of 4,000 events (50%)",
        "comparing Redis: 4,000 of 4,000 events (100%)",
    ]


def test_on_a_terminal_a_step_whose_end_is_known_has_a_bar() -> None:
    output = Console(file=StringIO(), width=100, force_terminal=True, color_system=None)
    with Steps(output) as steps:
        steps("reading Redis")
        steps("comparing Redis", 1_000, 4_000)
        steps._progress.refresh()
    shown = output.file.getvalue()  # type: ignore[attr-defined]
    assert "reading Redis …" in shown
    assert re.search("comparing Redis ━+.* 25%", shown)
    assert "events" not in shown
