"""The display of a rehearsal: a live table with a row per stage in a terminal, else a line every few
seconds.
"""

import time
from collections import deque

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from grabstream.ops.console.output import console
from grabstream.workshop.rehearsal.run import Doors, RehearsalProgress

RATE_OVER_SECONDS = 2.0
PLAIN_EVERY_SECONDS = 3.0


class Display:
    """Shows done, left, rate and lag of every stage. Use it as a context manager, and call `show`
    repeatedly.
    """

    def __init__(self, events_expected: int) -> None:
        self._events_expected = events_expected
        self._live = (
            Live(console=console, refresh_per_second=8, transient=False) if console.is_terminal else None
        )
        self._history: dict[str, deque[tuple[float, int]]] = {}
        self._printed_at = 0.0

    def __enter__(self) -> "Display":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, doors: Doors, progress: RehearsalProgress) -> None:
        """Shows the current numbers."""
        answered = sum(doors.answered.values())
        stages = [
            ("sent", sum(doors.sent.values()), doors.total, 0),
            ("answered", answered, doors.total, sum(doors.sent.values()) - answered),
            ("decided", progress.decided, self._events_expected, 0),
            ("journaled", progress.journaled, self._events_expected, progress.decided - progress.journaled),
            *(
                (name, seq, self._events_expected, progress.journaled - seq)
                for name, seq in progress.read_models.items()
            ),
        ]
        phase = doors.phase.name if doors.phases else "opening"
        rows = [(name, done, total, lag, self._rate(name, done)) for name, done, total, lag in stages]
        if self._live:
            self._live.update(_table(phase, rows))
        elif time.monotonic() - self._printed_at > PLAIN_EVERY_SECONDS:
            self._printed_at = time.monotonic()
            console.print(
                f"{phase}:  "
                + "  ".join(f"{name} {done:,} ({rate:,.0f}/s)" for name, done, _, _, rate in rows),
                highlight=False,
                soft_wrap=True,
            )

    def _rate(self, name: str, done: int) -> float:
        history = self._history.setdefault(name, deque())
        now = time.monotonic()
        history.append((now, done))
        while now - history[0][0] > RATE_OVER_SECONDS:
            history.popleft()
        seconds = now - history[0][0]
        return (done - history[0][1]) / seconds if seconds > RATE_OVER_SECONDS / 4 else 0.0


def _table(phase: str, rows: list[tuple[str, int, int, int, float]]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column, justify in (
        ("stage", "left"),
        (phase, "left"),
        ("done", "right"),
        ("left", "right"),
        ("per second", "right"),
        ("lag", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for name, done, total, lag, rate in rows:
        left = max(total - done, 0)
        # rich draws an unfinished bar in the red of errors.
        bar = ProgressBar(
            total=max(total, 1), completed=min(done, total), width=32, complete_style="cyan",
            finished_style="green",
        )  # fmt: skip
        table.add_row(name, bar, f"{done:,}", f"{left:,}", f"{rate:,.0f}", f"{max(lag, 0):,}")
    return table
