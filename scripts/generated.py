"""Writes the files that follow from the structs of `models/`; `--check` exits 1 if one differs.

- `models/vocabulary/generated.py`: the pydantic models.
- `grabstream/__init__.pyi`: the public names, for type checkers.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Final

from scripts import public_names, pydantic_models

ROOT: Final = Path(__file__).parents[1]


def files() -> dict[str, str]:
    """The text of each generated file, by its path in the tree."""
    return {
        "models/vocabulary/generated.py": formatted(pydantic_models.source()),
        "grabstream/__init__.pyi": formatted(public_names.source(), "stub.pyi"),
    }


def formatted(python: str, name: str = "module.py") -> str:
    """Python in the format of the tree, with its imports in order."""
    for words in (("check", "--select", "I", "--fix"), ("format",)):
        command = [sys.executable, "-m", "ruff", *words, "--quiet", "--stdin-filename", name, "-"]
        python = subprocess.run(
            command, cwd=ROOT, input=python, check=True, capture_output=True, text=True
        ).stdout
    return python


def main() -> int:
    """Writes or checks the files; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only print the files that differ")
    parser.add_argument("--folder", type=Path, default=ROOT, help="the tree (this one)")
    asked = parser.parse_args()
    stale = {
        name: text
        for name, text in files().items()
        if not (asked.folder / name).is_file() or (asked.folder / name).read_text(encoding="utf-8") != text
    }
    for name, text in stale.items():
        if asked.check:
            sys.stderr.write(f"{name} differs from models/: run `python -m scripts.generated`\n")
        else:
            (asked.folder / name).write_text(text, encoding="utf-8")
    return 1 if asked.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
