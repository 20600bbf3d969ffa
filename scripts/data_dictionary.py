"""Generates docs/data.md, the dictionary of the views, and the picture of its entities, from
`projections/definitions/dictionary.py`; `--check FILE` compares them, `--write FILE` writes them.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from grabstream.projections.definitions.dictionary import VIEWS, Column

PICTURE: Final = "images/data.svg"
#: Title and introduction of the views of each source.
SOURCES: Final = {
    "balances": (
        "Offers, grabs, payments, balances",
        "From the read model `balances`: the state now, after every event that it has read.",
    ),
    "ledger": ("Ledger", "From the read model `ledger`: double-entry books."),
    "audit": ("Events", "From the read model `audit`: the journal, in PostgreSQL."),
    "gates": ("Refusals", "Refusals are not events. They are counted, and no rebuild restores them."),
    "report": (
        "Reports",
        "Over several read models. While one of them lags behind another (`cursors`), a report may have\n"
        "numbers of two times.",
    ),
    "system": ("The system itself", "Progress of read models and the verifier; records set aside."),
}


class Box(NamedTuple):
    """An entity of the picture: its view, its corner in pixels, and the columns that are shown."""

    view: str
    x: int
    y: int
    columns: str


class Line(NamedTuple):
    """A relation of the picture: from a box to another, the text, and how many rows each end has."""

    start: str
    end: str
    text: str
    many: str


WIDTH, ROW, HEAD = 190, 18, 26
PAGE_WIDTH, PAGE_HEIGHT = 810, 570
#: The colours of images/flow.svg.
STYLE: Final = """<style>
  .page { fill: #ffffff; stroke: #d0d7de }
  .box { fill: #f6f8fa; stroke: #57606a; stroke-width: 1.4 }
  .head { fill: #ddf4ff; stroke: #57606a; stroke-width: 1.4 }
  .line { fill: none; stroke: #57606a; stroke-width: 1.6 }
  text { font: 12px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .key { font-weight: 600 }
  .note { fill: #57606a }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; stroke: #30363d }
    .box { fill: #161b22; stroke: #8b949e }
    .head { fill: #12283d; stroke: #8b949e }
    .line { stroke: #8b949e }
    text { fill: #e6edf3 } .note { fill: #8b949e }
  }
</style>"""
BOXES: Final = (
    Box("offers", 20, 20, "offer campaign kind state opens_time units terms"),
    Box("grabs", 310, 20, "offer user_id grab state quantity place at_time"),
    Box("payments", 600, 20, "shard seq offer grab amount state"),
    Box("balances", 600, 205, "user_id asset available held"),
    Box("demand", 20, 205, "offer outcome second refusals"),
    Box("audit", 310, 235, "shard seq offer type body hash"),
    Box("transfers", 310, 415, "shard seq leg debit credit amount"),
    Box("accounts", 600, 415, "account asset posted"),
)
LINES: Final = (
    Line("offers", "grabs", "offer", "1 : n"),
    Line("grabs", "payments", "offer, grab", "1 : n"),
    Line("offers", "demand", "offer", "1 : n"),
    Line("grabs", "audit", "shard, seq", "n : 1"),
    Line("audit", "transfers", "shard, seq", "1 : n"),
    Line("transfers", "accounts", "debit, credit", "n : 1"),
    Line("grabs", "balances", "user_id", "n : 1"),
)


def picture() -> str:
    """The picture as SVG."""
    boxes = {box.view: box for box in BOXES}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PAGE_WIDTH} {PAGE_HEIGHT}" role="img" '
        'aria-labelledby="title">',
        '<title id="title">The views that other people\'s questions start from, and what joins them</title>',
        STYLE,
        f'<rect class="page" x="0.5" y="0.5" width="{PAGE_WIDTH - 1}" height="{PAGE_HEIGHT - 1}" rx="8"/>',
        *(part for line in LINES for part in _line(boxes[line.start], boxes[line.end], line)),
        *(part for box in BOXES for part in _box(box)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _height(box: Box) -> int:
    return HEAD + ROW * len(box.columns.split()) + 6


def _box(box: Box) -> Iterator[str]:
    view = VIEWS[box.view]
    yield f'<rect class="box" x="{box.x}" y="{box.y}" width="{WIDTH}" height="{_height(box)}" rx="4"/>'
    yield f'<rect class="head" x="{box.x}" y="{box.y}" width="{WIDTH}" height="{HEAD}" rx="4"/>'
    yield f'<text x="{box.x + 10}" y="{box.y + 18}" class="key">{box.view}</text>'
    for number, name in enumerate(box.columns.split()):
        y = box.y + HEAD + ROW * number + 15
        key = ' class="key"' if name in view.key else ""
        yield f'<text x="{box.x + 10}" y="{y}"{key}>{name}</text>'
        yield (
            f'<text x="{box.x + WIDTH - 10}" y="{y}" text-anchor="end" class="note">'
            f"{view.columns[name].type}</text>"
        )


def _line(start: Box, end: Box, line: Line) -> Iterator[str]:
    if abs(start.x - end.x) < WIDTH:  # one above the other
        x = start.x + WIDTH // 2
        y1, y2 = start.y + _height(start), end.y
        yield f'<path d="M{x} {y1}V{y2}" class="line"/>'
        yield f'<text x="{x + 8}" y="{(y1 + y2) // 2 + 4}" class="note">{line.text} ({line.many})</text>'
        return
    x1, x2 = start.x + WIDTH, end.x
    y1, y2 = start.y + 60, end.y + 60
    middle = (x1 + x2) // 2
    yield f'<path d="M{x1} {y1}H{middle}V{y2}H{x2}" class="line"/>'
    y = y1 - 6 if y1 == y2 else y2 - 6
    anchor = middle if y1 == y2 else middle + 6
    place = ' text-anchor="middle"' if y1 == y2 else ""
    yield f'<text x="{anchor}" y="{y - 12}"{place} class="note">{line.text}</text>'
    yield f'<text x="{anchor}" y="{y}"{place} class="note">{line.many}</text>'


def document() -> str:
    """The page."""
    page = f"""# Data dictionary

The views of the schema `GRAB_SCHEMA`, which keep their names when the tables behind them are rebuilt. The
same texts are comments in the database (`\\d+ offers` in psql; the column descriptions of a tool).
`python scripts/data_dictionary.py --write docs/data.md` generates this page; `make lint` compares.
[Tables and views](storage.md#tables-and-views) says which queries have an index.

![Offers have grabs, grabs have payments; a line of the audit trail has transfers]({PICTURE})

**Times.** A time has two columns, an integer and a `timestamptz`: `at` and `at_time`, `deadline_at` and
`deadline_time`, `second` and `second_time`. Integers are exact, as in events; `timestamptz` is for people. A
time that never comes is NULL in `…_time`. Compare with either: `at_time >= '2026-11-20 10:00+08'`.

**Amounts.** Money is in minor units (cents). An `amount` counts its `asset`: minor units if the asset is
money, pieces otherwise. Columns named `…_amount` in `offers` and `grabs` count money only, and are NULL for
pieces; `…_units` count parts or pieces.

**Keys.** The columns that name a row are bold. `(shard, seq)` names an event.
"""
    for source, (title, introduction) in SOURCES.items():
        page += f"\n## {title}\n\n{introduction}\n"
        for name, view in VIEWS.items():
            if view.source == source:
                page += (
                    f"\n### {name}\n\n{_wrapped(view.text)}\n\n| column | type | meaning |\n|---|---|---|\n"
                )
                page += "".join(_row(column, view.columns[column], view.key) for column in view.columns)
    return page


def _row(name: str, column: Column, key: tuple[str, ...]) -> str:
    shown = f"**`{name}`**" if name in key else f"`{name}`"
    values = "; ".join(f"`{value}`: {meaning}" for value, meaning in column.values.items())
    text = f"{column.text} {values}" if values else column.text
    return f"| {shown} | {column.type} | {text.replace('|', chr(92) + '|')} |\n"


def _wrapped(text: str) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > 105:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def main() -> int:
    """Prints, checks or writes the page and its picture; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", metavar="FILE", type=Path, help="exit 1 unless FILE agrees with the code")
    action.add_argument("--write", metavar="FILE", type=Path, help="write FILE and its picture")
    asked = parser.parse_args()
    file: Path | None = asked.check or asked.write
    if file is None:
        sys.stdout.write(document())
        return 0
    for path, text in ((file, document()), (file.parent / PICTURE, picture())):
        if asked.write:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.stderr.write(
                f"data dictionary: {path} differs from the code; run `python scripts/data_dictionary.py "
                f"--write {file}`\n"
            )
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
