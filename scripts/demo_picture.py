"""Draws the picture of the demo in the README (`make demo PICTURES=yes`): runs `grabstream rehearse` in a
pseudo-terminal, shows its output, and saves the screen as SVG.

`scripts/demo_picture.py docs/images/demo.svg [options of rehearse]`; without options, a small demo. Servers
must be running. The exit code is that of the demo; unless it is 0, no picture is saved.
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
#: More lines than the demo prints, so that none scrolls off the screen.
ROWS: Final = 100
SMALL: Final = (
    "--seed", "7", "--parts", "10000", "--envelopes", "8", "--small-parts", "200", "--deadline", "12",
)  # fmt: skip
#: Sequences that move the cursor or erase. All others are colours, which stay in the text.
_control = re.compile(r"\x1b\[(\d*)([AK])|\x1b\[\?\d+[hl]|([\r\n])")


def run(command: list[str]) -> tuple[str, int]:
    """Runs a command in a terminal and shows its output; returns it, and the exit code."""
    reading_end, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    running = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    output = bytearray()
    while True:
        try:
            piece = os.read(reading_end, 65_536)
        except OSError:  # Linux raises it when the other end is closed
            break
        if not piece:
            break
        output += piece
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
    os.close(reading_end)
    return output.decode(), running.wait()


def screen(output: str) -> list[str]:
    """The lines on the screen after all output, with their colours."""
    lines = [""]
    row = start = 0
    for sequence in _control.finditer(output):
        lines[row] += output[start : sequence.start()]
        start = sequence.end()
        count, action, motion = sequence.groups()
        if motion == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif action == "A":
            row = max(row - int(count or 1), 0)
        elif action == "K":
            lines[row] = ""
    lines[row] += output[start:]
    return lines


def picture(lines: list[str], title: str) -> str:
    """The lines as SVG, without the fonts that rich would load from the network."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text.from_ansi(line))
    svg = console.export_svg(title=title, theme=SVG_EXPORT_THEME, unique_id="demo")
    svg = re.sub(r"\s*@font-face \{.*?\n    \}", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code, monospace", "monospace")


def main() -> int:
    """Runs the demo and saves its picture; returns the exit code."""
    file, options = Path(sys.argv[1]), sys.argv[2:] or SMALL
    output, code = run([sys.executable, "-m", "grabstream.ops.cli", "rehearse", *options])
    if code != 0:
        return code
    lines = [line.rstrip() for line in screen(output)]
    while lines and not lines[-1]:
        lines.pop()
    file.write_text(picture(lines, "make demo"), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
