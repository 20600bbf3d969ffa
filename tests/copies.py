"""Copies the program into a folder: the package `grabstream`, or the whole tree."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

from grabstream.workshop.services.servers import PROJECT

PACKAGE: Final = PROJECT / "grabstream"


def copy_package(folder: Path) -> None:
    """Copies the package into a folder, which is created if needed. PYTHONPATH=<folder> runs the copy."""
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))


def copy_tree(folder: Path) -> None:
    """Copies all files that git tracks or would add, with uncommitted changes, into a folder."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (PROJECT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, folder / name)
