"""Output: the same result for people (rich) and for programs (`--json`)."""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import IO, Any, Final, NoReturn

import click
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.table import Table
from rich.text import Text

from grabstream.ops.console.terminal import visible

#: Characters. Without a terminal, lines may be this long, so that tables do not cut ids in a pipe.
WIDTH_WITHOUT_TERMINAL: Final = 500


class _Visible:
    """What is printed, as visible text."""

    def __init__(self, printed: ConsoleRenderable) -> None:
        self._printed = printed

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._printed, options):
            # rich's own: the end of a line that is to be overwritten. It drops those of texts.
            is_own = segment.control or segment.text == "\r"
            yield segment if is_own else segment._replace(text=visible(segment.text))


class _Guard(RenderHook):
    def __init__(self, output: "Output") -> None:
        self._output = output

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Makes all output to a terminal visible text."""
        return [_Visible(one) for one in renderables] if self._output.is_seen else renderables


class Output(Console):
    """Standard output, or standard error. A line that is wider than the terminal is wrapped by the terminal,
    never cut. What a terminal shows is visible text.
    """

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        stream = sys.stderr if stderr else sys.stdout
        width = None if stream.isatty() else WIDTH_WITHOUT_TERMINAL
        super().__init__(**{"stderr": stderr, "width": width, **options})
        self.push_render_hook(_Guard(self))

    @property
    def is_seen(self) -> bool:
        """Whether people see what is printed, on a terminal or in its colours."""
        return self.is_terminal or self.file.isatty()

    @property
    def file(self) -> IO[str]:
        """The stream itself. Wrappers of the command line and rich would treat drawing as foreign text."""
        file = super().file
        while (inside := getattr(file, "rich_proxied_file", None)) is not None:
            file = inside
        return file

    @file.setter
    def file(self, new: IO[str]) -> None:
        self._file = new

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints like a Console, but without cropping."""
        if self.is_seen:
            # rich drops some control characters of texts, such as BEL.
            objects = tuple(visible(one) if isinstance(one, str) else one for one in objects)
        super().print(*objects, **{"crop": False, **options})


console = Output()
#: Prints text from outside: ids may look like rich's markup (`[x]`) or emoji (`:fire:`).
plain_console = Output(markup=False, emoji=False, highlight=False)


def say(words: str | Text) -> None:
    """Prints text as it is; the terminal wraps a long line."""
    plain_console.print(words, soft_wrap=True)


def complain(message: object) -> None:
    """Prints one line on standard error."""
    click.echo(f"grabstream: {message}", err=True)


def refuse(message: object, code: int = 1) -> NoReturn:
    """Prints one line on standard error, and ends the process with this exit code."""
    complain(message)
    sys.exit(code)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class WholeNumber(click.IntRange):
    """A number within bounds. For a text that is not a number, click would say "not a valid integer
    range".
    """

    name = "whole number"


def print_json(value: Any, to_errors: bool = False) -> None:
    """Prints one JSON document on standard output, or on standard error."""
    click.echo(json.dumps(value, indent=2, default=_plain, ensure_ascii=False), err=to_errors)


def _plain(value: Any) -> Any:
    """The JSON form of a value for which JSON has no type. psycopg returns `numeric` sums, which are
    integers, as Decimal.
    """
    return int(value) if isinstance(value, Decimal) and value == value.to_integral_value() else str(value)


class _WideTable(Table):
    """A table that becomes wider than the terminal rather than cut a word, so that ids can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Each column has a border or separator, and each cell a space on either side.
        needed = sum((column.min_width or 0) + 3 for column in self.columns) + 1
        self.width = needed if needed > options.max_width else None
        return super().__rich_console__(console, options)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table. Columns of numbers are right-aligned."""
    drawn = _WideTable(title=title, title_justify="left", title_style="bold", header_style="dim")
    rows = [list(row) for row in rows]
    written = [list(map(_cell_text, row)) for row in rows]
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float | Decimal) for row in rows) and bool(rows)
        cells = [column, *(row[index] for row in written)]
        drawn.add_column(
            column,
            justify="right" if numeric else "left",
            overflow="fold",
            # Where a cell is wrapped: rich measures it as if other separators were wrapped at, too.
            min_width=max(cell_len(word) for cell in cells for word in re.split("[ \n]", cell)),
            no_wrap=not any(" " in cell for cell in cells),
        )
    for row in written:
        drawn.add_row(*row)
    return drawn


def _cell_text(cell: object) -> str:
    if isinstance(cell, int | Decimal) and not isinstance(cell, bool):
        return f"{cell:,}"
    # Before the columns get their widths.
    return visible(str(cell)) if console.is_seen else str(cell)
