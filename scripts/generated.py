"""Writes the files that are made from other code, most from `models/`; `--check` exits 1 if one differs.

- `grabstream/models/vocabulary/generated.py`: the pydantic models.
- `grabstream/__init__.pyi`: the public names, for type checkers.
- `grabstream/client/fields.py`: the fields of commands that methods of clients take by name.
- `grabstream/client/javascript/grabstream.d.mts`: the types of the JavaScript client, in part.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Final

from scripts import command_fields, public_names, pydantic_models

ROOT: Final = Path(__file__).parents[1]


def files() -> Iterator[tuple[str, str]]:
    """The path of each generated file in the tree, and its text. A file is to be written before the next is
    made, which may import it.
    """
    yield "grabstream/models/vocabulary/generated.py", formatted(pydantic_models.source())
    yield "grabstream/__init__.pyi", formatted(public_names.source(), "stub.pyi")
    yield "grabstream/client/fields.py", formatted(command_fields.source())
    javascript_types = import_module("scripts.javascript_types")
    name = "grabstream/client/javascript/grabstream.d.mts"
    yield name, javascript_types.written_into((ROOT / name).read_text(encoding="utf-8"))


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
    is_stale = False
    for name, text in files():
        path = asked.folder / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        is_stale = True
        if asked.check:
            sys.stderr.write(f"{name} differs from what it is made from: run `python -m scripts.generated`\n")
        else:
            path.write_text(text, encoding="utf-8")
    return 1 if asked.check and is_stale else 0


if __name__ == "__main__":
    sys.exit(main())
