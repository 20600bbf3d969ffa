"""Texts on a terminal: control characters are shown escaped.

Titles, reasons and messages come from strangers. A file or a pipe gets their exact bytes; a terminal gets
`visible` text from every printer: standard output and standard error are wrapped once, when the command line
starts, and rich's consoles (`output.Output`), which write their own control sequences, make the texts visible
before they draw them.
"""

import codecs
import io
import sys
from typing import Any, Final, TextIO, cast

#: Control characters (category Cc) but those of the layout, `\n` and `\t`; the bidirectional controls, which
#: reorder a line (property Bidi_Control); and the separators of lines and paragraphs (categories Zl, Zp).
_ESCAPED: Final = {
    code: f"\\u{code:04x}"
    for code in (
        *(code for code in range(0x20) if chr(code) not in "\n\t"),
        *range(0x7F, 0xA0),
        *(0x061C, 0x200E, 0x200F),
        *(0x2028, 0x2029),
        *range(0x202A, 0x202F),
        *range(0x2066, 0x206A),
    )
}


def visible(text: str) -> str:
    r"""The text with `\uXXXX` in place of each character that would control a terminal. JSON remains the
    same document.
    """
    return text.translate(_ESCAPED)


class Terminal:
    """A text stream of a terminal that writes visible text; everything else is as in the stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.buffer = _TerminalBytes(stream)

    def write(self, text: str) -> int:
        """Writes the text; returns its original length in characters."""
        self._stream.write(visible(text))
        return len(text)

    def writelines(self, lines: "list[str]") -> None:
        """Writes texts one after the other."""
        for line in lines:
            self.write(line)

    @property
    def rich_proxied_file(self) -> TextIO:
        """The stream that rich writes to instead of this one: its control sequences must pass."""
        return self._stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _TerminalBytes(io.RawIOBase):
    """The bytes of UTF-8 that go to a terminal. Others are shown as `\\xXX`."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, data: Any, /) -> int:
        """Writes bytes; returns their number. An incomplete character waits for its rest."""
        written = bytes(data)
        self._stream.write(visible(self._decoder.decode(written)))
        return len(written)

    def flush(self) -> None:
        self._stream.flush()


def guard_terminals() -> None:
    """Makes this process print visible text to terminals, on standard output and standard error."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # A process without the stream has None.
        if stream is not None and not isinstance(stream, Terminal) and stream.isatty():
            setattr(sys, name, cast(TextIO, Terminal(stream)))
