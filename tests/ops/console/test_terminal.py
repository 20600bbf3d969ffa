"""What a terminal shows of texts of strangers, and what a file gets, by each way on which this program prints
them.
"""

import io
import json
import os
import pty
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TextIO

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.live import Live
from rich.text import Text

from grabstream.ops.console import output
from grabstream.ops.console.output import Output, print_json, table
from grabstream.ops.console.terminal import Terminal, guard_terminals, visible

#: The property Bidi_Control of Unicode; all of them are of the category Cf.
BIDI_CONTROLS: Final = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
CONTROLS: Final = [
    character
    for character in map(chr, range(sys.maxunicode + 1))
    if (unicodedata.category(character) in ("Cc", "Zl", "Zp") and character not in "\n\t")
    or character in BIDI_CONTROLS
]
#: All of them, each between two letters.
TITLE: Final = "a" + "a".join(CONTROLS) + "a"
SHOWN: Final = "a" + "a".join(f"\\u{ord(character):04x}" for character in CONTROLS) + "a"
#: Control characters that rich leaves out of texts.
DROPPED: Final = "\a\b\v\f\r"


def test_all_characters_that_control_a_terminal_are_escaped_and_no_others() -> None:
    assert len(CONTROLS) == 63 + len(BIDI_CONTROLS) + 2
    assert all(unicodedata.category(character) == "Cf" for character in BIDI_CONTROLS)
    for code in range(sys.maxunicode + 1):
        shown = visible(chr(code))
        assert shown == (f"\\u{code:04x}" if chr(code) in CONTROLS else chr(code)), f"U+{code:04X}"


@given(st.text(st.characters() | st.sampled_from(CONTROLS)))
def test_json_is_the_same_document(text: str) -> None:
    assert json.loads(visible(json.dumps(text, ensure_ascii=False))) == text


class Screen(io.TextIOWrapper):
    """Stands for a terminal: it has what is written to it."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", newline="")

    def isatty(self) -> bool:
        return True

    def shown(self) -> str:
        self.flush()
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode()


@contextmanager
def printing_to(stream: TextIO) -> Iterator[None]:
    """Has this process print to the stream, as the command line does when it starts with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        patch.setattr(output, "console", Output(width=5_000, color_system=None))
        guard_terminals()
        yield


WAYS: Final[dict[str, Callable[[str], Any]]] = {
    "print": print,
    "echo": click.echo,
    "echo of an error": lambda text: click.echo(text, err=True),
    "JSON": lambda text: print_json({"title": text}),
    "bytes, as replayed lines": lambda text: sys.stdout.buffer.write(text.encode()),
    "lines": lambda text: sys.stderr.writelines([text, "\n"]),
    "a line of rich": lambda text: output.console.print(text, markup=False),
    "a cell": lambda text: output.console.print(table("Title", ["title"], [[text]])),
    "a line of rich to errors": lambda text: Output(stderr=True, width=5_000).print(text, markup=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_terminal_shows_them_escaped(way: str) -> None:
    screen = Screen()
    with printing_to(screen):
        WAYS[way](TITLE)
    shown = screen.shown()
    if way == "JSON":
        assert json.loads(shown) == {"title": TITLE}
        assert not set(shown) & set(CONTROLS)
    else:
        assert SHOWN in shown


def test_texts_of_rich_are_escaped_and_its_own_sequences_pass() -> None:
    screen = Screen()
    with printing_to(screen):
        drawn = Output(width=5_000, color_system="truecolor", force_terminal=True)
        drawn.print(Text(TITLE, "red"), end="\r")
    expected = "a" + "a".join("" if c in DROPPED else f"\\u{ord(c):04x}" for c in CONTROLS) + "a"
    assert screen.shown() == f"\x1b[31m{expected}\x1b[0m\r"


def test_what_is_drawn_live_moves_the_cursor_and_texts_in_it_are_escaped() -> None:
    """rich puts its own stream in the place of standard output, around that of this program."""
    screen = Screen()
    with (
        printing_to(screen),
        Live(console=Output(color_system="standard", force_terminal=True), auto_refresh=False) as live,
    ):
        for number in range(3):
            live.update(table("Live", ["column"], [[f"{number}\x1b[2J"]]), refresh=True)
    assert "\x1b[1A" in screen.shown()
    assert "\x1b[2J" not in screen.shown()
    assert "\\u001b" not in screen.shown().replace("\\u001b[2J", ""), "its own sequences pass"


@pytest.mark.parametrize("way", WAYS)
def test_a_file_gets_the_exact_characters(tmp_path: Path, way: str) -> None:
    path = tmp_path / "printed"
    # rich leaves some out.
    title = "".join(c for c in TITLE if c not in DROPPED) if "rich" in way or "cell" in way else TITLE
    with path.open("w", encoding="utf-8", newline="") as file, printing_to(file):
        WAYS[way](title)
    printed = path.read_bytes().decode()
    if way == "JSON":
        assert json.loads(printed) == {"title": title}
        assert "\u202e" in printed
    else:
        assert title in printed


@pytest.fixture
def real_terminal() -> Iterator[tuple[io.TextIOWrapper, int]]:
    """A text stream of a terminal, and the file where what it shows can be read."""
    reader, written = pty.openpty()
    with os.fdopen(written, "w", encoding="utf-8") as stream:
        yield stream, reader
    os.close(reader)


def test_a_character_whose_bytes_come_in_two_writes(real_terminal: tuple[io.TextIOWrapper, int]) -> None:
    stream, reader = real_terminal
    terminal = Terminal(stream)
    raw = "é\u202e".encode() + b"\xff\n"
    for start in range(len(raw)):
        assert terminal.buffer.write(raw[start : start + 1]) == 1
    terminal.buffer.flush()
    assert os.read(reader, 100).decode() == "é\\u202e\\xff\r\n"
    assert (terminal.isatty(), terminal.fileno()) == (True, stream.fileno())


def test_what_is_said_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Ids of campaigns and of their offers may look like emoji, and reasons like rich's markup."""
    output.say("offer:fire:1 [red]x[/red] 'y'")
    assert capsys.readouterr().out == "offer:fire:1 [red]x[/red] 'y'\n"
