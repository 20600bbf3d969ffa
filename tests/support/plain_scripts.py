"""Plain scripts in place of functions, for tests that change the text of a script, or count its calls."""

import pytest

from grabstream.lua import running


def use_plain_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process run every script as a plain script, as where functions cannot be used."""
    monkeypatch.setattr(running, "is_plain", lambda redis, state: True)
