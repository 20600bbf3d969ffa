"""Progress of long work on standard error: how far, how fast, how long still. Only where that is a terminal."""

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class _Rate(ProgressColumn):
    """Events so far, and how many a second."""

    def render(self, task: Task) -> Text:
        events = task.fields["events"]
        rate = events / task.elapsed if task.elapsed else 0
        return Text(f"{events:,} events, {rate:,.0f}/s")


class Reading:
    """A bar for reading `units` of a source. As a context; call it with (units, events) done since the last call."""

    def __init__(self, what: str, units: int = 0) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), _Rate(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self._task = self._progress.add_task(what, total=units, events=0)
        self._units = units
        self._events = 0

    def __enter__(self) -> "Reading":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def expect(self, units: int) -> None:
        """Says that so many units more are to be read."""
        self._units += units
        self._progress.update(self._task, total=self._units)

    def __call__(self, units: int, events: int) -> None:
        """Moves the bar on."""
        self._events += events
        self._progress.update(self._task, advance=units, events=self._events)
