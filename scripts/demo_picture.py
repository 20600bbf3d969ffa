"""Draws the picture of the demo in the README: runs `grabstream rehearse` in a terminal of its own, and saves
the screen as SVG.

`scripts/demo_picture.py docs/images/demo.svg [options of rehearse]`. Servers must be running. The exit code
is that of the demo.
"""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

COLUMNS: Final = 100
#: More than the demo prints, so that nothing leaves the screen.
ROWS: Final = 100
#: What moves the cursor or erases: the other sequences are colours, which stay in the text.
_control = re.compile(r"\x1b\[(\d*)([AK])|\x1b\[\?\d+[hl]|([\r\n])")


def run(command: list[str]) -> tuple[str, int]:
    """What a command writes to a terminal, and its exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    running = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = bytearray()
    while True:
        try:
            piece = os.read(ours, 65_536)
        except OSError:  # Linux says so when the other side is closed
            break
        if not piece:
            break
        written += piece
    os.close(ours)
    return written.decode(), running.wait()


def screen(written: str) -> list[str]:
    """The lines that stand on the screen in the end, with their colours."""
    lines = [""]
    row = start = 0
    for found in _control.finditer(written):
        lines[row] += written[start : found.start()]
        start = found.end()
        count, action, motion = found.groups()
        if motion == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif action == "A":
            row = max(row - int(count or 1), 0)
        elif action == "K":
            lines[row] = ""
    lines[row] += written[start:]
    return lines


def picture(lines: list[str], title: str) -> str:
    """The lines as SVG, without the fonts that rich would load from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text.from_ansi(line), no_wrap=True)
    drawn = console.export_svg(title=title, theme=SVG_EXPORT_THEME, unique_id="demo")
    drawn = re.sub(r"\s*@font-face \{.*?\n    \}", "", drawn, flags=re.DOTALL)
    return drawn.replace("Fira Code, monospace", "monospace")


def main() -> int:
    """Runs, draws and saves; the exit code."""
    file, options = Path(sys.argv[1]), sys.argv[2:]
    written, code = run([sys.executable, "-m", "grabstream.ops.cli", "rehearse", *options])
    lines = [line.rstrip() for line in screen(written)]
    while lines and not lines[-1]:
        lines.pop()
    file.write_text(picture(lines, "make demo"), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
