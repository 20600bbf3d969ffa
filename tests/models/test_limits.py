"""docs/limits.md agrees with the code."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_page_of_bounds_agrees_with_the_code(tmp_path: Path) -> None:
    def limits(*arguments: str) -> int:
        return subprocess.run(
            [sys.executable, "scripts/limits.py", *arguments], cwd=ROOT, timeout=240
        ).returncode

    assert limits("--check", "docs/limits.md") == 0
    changed = tmp_path / "limits.md"
    changed.write_text((ROOT / "docs/limits.md").read_text().replace("128 KiB", "129 KiB"))
    assert limits("--check", str(changed)) == 1
