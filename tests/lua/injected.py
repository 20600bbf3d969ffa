"""Errors in scripts, for tests: a command whose id has `poison` in it raises before the first write of its call, or after it."""

from functools import cache
from hashlib import sha1
from typing import Literal

import pytest

from lua import loader

_BEFORE = "local function append_events(call)\n"
_RAISE = "  for _, line in ipairs(call.lines) do if string.find(line, 'poison', 1, true) then error('injected') end end\n"
_WRITTEN = "      done = i\n"
_RAISE_AT = """
      if i == %d and writes[1][1] == 'XADD' then
        for _, word in ipairs(writes[1]) do if string.find(word, 'poison', 1, true) then error('injected') end end
      end
"""

Where = Literal["before", "between", "after"]


def inject(monkeypatch: pytest.MonkeyPatch, where: Where) -> None:
    """From here on the scripts of this process raise: before the first write, between the outbox and the shard's seq, or after both."""
    original = loader.load

    @cache
    def load(name: str) -> loader.Script:
        text = original(name).text
        if _BEFORE in text:
            assert _WRITTEN in text
            at = {"between": 1, "after": 2}.get(where)
            text = text.replace(_WRITTEN, _WRITTEN + _RAISE_AT % at) if at else text.replace(_BEFORE, _BEFORE + _RAISE)
        return loader.Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())

    monkeypatch.setattr(loader, "load", load)
