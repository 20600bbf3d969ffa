"""Node.js, which some tests need: absent, they fail in CI, and are skipped elsewhere."""

import os
import shutil

import pytest


def need_node(what: str) -> None:
    """Fails or skips the test without Node.js and npm; `what` needs them."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        if os.environ.get("CI"):
            pytest.fail(f"no Node.js, which {what} needs", pytrace=False)
        pytest.skip("no Node.js")
