"""Progress of long work, on standard error."""

import time
from typing import Final

from rich.console import Console

LINE_EVERY_SECONDS: Final = 2.0
TERMINAL_EVERY_SECONDS: Final = 0.1


class ProgressLine:
    """A line that is written over on a terminal, else one every few seconds."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._step = ""
        self._shown = 0.0

    def __call__(self, what: str, step: str, done: int = 0, total: int = 0, rate: float = 0.0) -> None:
        """Shows how far it is, not too often: events done (of `total`, where that is known) at a rate a second."""
        now = time.monotonic()
        terminal = self._console.is_terminal
        if step == self._step and now - self._shown < (TERMINAL_EVERY_SECONDS if terminal else LINE_EVERY_SECONDS):
            return
        self._step, self._shown = step, now
        words = f"{what}: {step}"
        if total:
            words += f" {done:,} of {total:,} events ({done / total:.0%})"
        elif done:
            words += f" {done:,} events"
        if rate:
            words += f", {rate:,.0f} a second"
            words += f", {(total - done) / rate:,.0f} s left" if total else ""
        self._console.print(words, end="\r" if terminal else "\n", markup=False)
