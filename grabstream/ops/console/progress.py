"""Progress of long work: events done, rate, remaining time."""

import sys
import time
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from grabstream.models.bounds import counted
from grabstream.ops.console.output import Output

LINE_EVERY_SECONDS: Final = 2.0
TERMINAL_EVERY_SECONDS: Final = 0.1


def bar() -> BarColumn:
    """A bar in cyan, and green when finished. rich draws an unfinished bar in the red of errors."""
    return BarColumn(complete_style="cyan", finished_style="green", pulse_style="cyan")


class ProgressLine:
    """A progress line that is overwritten on a terminal; otherwise a new line every few seconds."""

    def __init__(self) -> None:
        self._console = Output(stderr=True, highlight=False)
        self._step = ""
        self._shown = 0.0

    def __call__(
        self, what: str, step: str, done: int = 0, total: int = 0, rate: float = 0.0, more: str = ""
    ) -> None:
        """Shows the progress of `what`, not too often: its step, events done (of `total`, if known), events
        per second, and `more`.
        """
        now = time.monotonic()
        terminal = self._console.is_terminal
        if step == self._step and now - self._shown < (
            TERMINAL_EVERY_SECONDS if terminal else LINE_EVERY_SECONDS
        ):
            return
        self._step, self._shown = step, now
        words = f"{what}: {step}"
        if total:
            words += f" {done:,} of {counted(total, 'events')} ({done / total:.0%})"
        elif done:
            words += f" {counted(done, 'events')}"
        if rate:
            words += f", {rate:,.0f} a second"
            words += f", {(total - done) / rate:,.0f} s left" if total else ""
        words += f", {more}" if more else ""
        self._console.print(words, end="\r" if terminal else "\n", markup=False)


class Steps:
    """The steps of long work, each with a line on `output`. A step whose end is known has a bar on a
    terminal, else a line every few seconds. Use it as a context manager.
    """

    def __init__(self, output: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            bar(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=output, transient=True, disable=not output.is_terminal)
        self._task = self._progress.add_task("", visible=False)
        self._step = ""
        self._shown = 0.0

    def __enter__(self) -> "Steps":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, step: str, done: int = 0, total: int = 0) -> None:
        """Shows a step and its progress in events."""
        output, now = self._progress.console, time.monotonic()
        if step != self._step:
            self._step, self._shown = step, now
            output.print(f"[dim]{step} …[/]", highlight=False)
            self._progress.reset(self._task, description=step)
        self._progress.update(self._task, completed=done, total=total or None, visible=total > 0)
        if total and not output.is_terminal and now - self._shown >= LINE_EVERY_SECONDS:
            self._shown = now
            output.print(
                f"[dim]{step}: {done:,} of {counted(total, 'events')} ({done / total:.0%})[/]",
                highlight=False,
            )


class _EventRate(ProgressColumn):
    """Events so far, and events per second."""

    def render(self, task: Task) -> Text:
        events = task.fields["events"]
        rate = events / task.elapsed if task.elapsed else 0
        return Text(f"{counted(events, 'events')}, {rate:,.0f}/s")


class ReadingBar:
    """A bar for reading `units` of a source. Use it as a context manager, and call it with the (units,
    events) read since the last call.
    """

    def __init__(self, what: str, units: int = 0) -> None:
        columns = (
            TextColumn("{task.description}"),
            bar(),
            TextColumn("{task.percentage:>3.0f}%"),
            _EventRate(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(
            *columns, console=Output(stderr=True), transient=True, disable=not sys.stderr.isatty()
        )
        self._task = self._progress.add_task(what, total=units, events=0)
        self._units = units
        self._events = 0

    def __enter__(self) -> "ReadingBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def expect(self, units: int) -> None:
        """Adds units to be read."""
        self._units += units
        self._progress.update(self._task, total=self._units)

    def __call__(self, units: int, events: int) -> None:
        """Advances the bar."""
        self._events += events
        self._progress.update(self._task, advance=units, events=self._events)
