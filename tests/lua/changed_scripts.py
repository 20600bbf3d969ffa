"""Changed scripts: scripts that raise for commands whose id has `undecidable`, have other bounds, or lack a
period of limits.
"""

from collections.abc import Callable
from functools import cache
from hashlib import sha1
from typing import Literal

import pytest

from grabstream.lua import loader
from grabstream.models.bounds import EVENT_LINE_BYTES_MAX
from tests.support.plain_scripts import use_plain_scripts

_BEFORE = "local function append_events(call)\n  end_run(call)\n"
_RAISE = (
    "  for _, line in ipairs(call.lines) do if string.find(line, 'undecidable', 1, true) then "
    "error('injected') end end\n"
)
_LINE_BOUND = f"event_line_bytes = {EVENT_LINE_BYTES_MAX},"
_DUE_BOUND = "* (offer.rules.price or 0) > AMOUNT_MAX then"
_LETTERS = "PERIODS, LETTERS = {'day', 'hour', 'offer', 'week'}, {'d', 'h', 'o', 'w'}"
_WRITTEN = "      done = i\n"
_RAISE_AT = """
      if i == %d and writes[1][1] == 'XADD' then
        for _, word in ipairs(writes[1]) do
            if string.find(word, 'undecidable', 1, true) then error('injected') end
        end
      end
"""

Where = Literal["before", "between", "after"]


def inject(monkeypatch: pytest.MonkeyPatch, where: Where) -> None:
    """Makes the scripts of this process raise for commands whose id contains `undecidable`: before the call's
    first write, between the write of the outbox and that of the shard's seq, or after both.
    """
    at = {"between": 1, "after": 2}.get(where)

    def injected(text: str) -> str:
        assert _WRITTEN in text
        return (
            text.replace(_WRITTEN, _WRITTEN + _RAISE_AT % at)
            if at
            else text.replace(_BEFORE, _BEFORE + _RAISE)
        )

    _replace(monkeypatch, injected)


def bound_lines(monkeypatch: pytest.MonkeyPatch, bytes_max: int) -> None:
    """Makes the scripts of this process refuse event lines longer than `bytes_max`."""

    def bounded(text: str) -> str:
        assert _LINE_BOUND in text
        return text.replace(_LINE_BOUND, f"event_line_bytes = {bytes_max},")

    _replace(monkeypatch, bounded)


def sell_at_any_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the scripts of this process accept any price × quantity."""
    assert _DUE_BOUND in loader.load("grab").text
    _replace(monkeypatch, lambda text: text.replace(_DUE_BOUND, "> math.huge then"))


def forget_weeks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the scripts of this process compute windows of weeks, but have no letter for their counters."""
    assert _LETTERS in loader.load("grab").text
    others = "PERIODS, LETTERS = {'day', 'hour', 'offer'}, {'d', 'h', 'o'}"
    _replace(monkeypatch, lambda text: text.replace(_LETTERS, others))


def _replace(monkeypatch: pytest.MonkeyPatch, change: Callable[[str], str]) -> None:
    original = loader.load

    @cache
    def load(name: str) -> loader.Script:
        text = original(name).text
        text = change(text) if _BEFORE in text else text
        return loader.Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())

    monkeypatch.setattr(loader, "load", load)
    use_plain_scripts(monkeypatch)
