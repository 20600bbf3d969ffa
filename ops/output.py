"""Output: the same result for people (rich) and for programs (`--json`)."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

console = Console()

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of words.")


def print_json(value: Any, to_errors: bool = False) -> None:
    """One JSON document on standard output, or on standard error."""
    click.echo(json.dumps(value, indent=2, default=str, ensure_ascii=False), err=to_errors)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table; numbers stand right."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
    rows = [list(row) for row in rows]
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float) for row in rows) and bool(rows)
        made.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        made.add_row(*(f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell) for cell in row))
    return made
