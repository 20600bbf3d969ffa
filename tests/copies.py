"""Copies the program into a folder: the package `grabstream` with its rooms, or the whole tree."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

from grabstream.ops.services.servers import PROJECT

PACKAGE: Final = PROJECT / "grabstream"
#: The folders of the tree that are imported as `grabstream.<room>`.
ROOMS: Final = tuple(sorted(path.name for path in PACKAGE.iterdir() if path.is_symlink()))


def copy_package(folder: Path) -> None:
    """Copies the package and its rooms into a folder, which is created if needed. PYTHONPATH=<folder> runs
    the copy.
    """
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (PACKAGE.name, *ROOMS):
        shutil.copytree(PROJECT / name, folder / name, symlinks=True, ignore=ignored)


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
        # The package has symbolic links to its rooms. They are copied as links.
        if (PROJECT / name).is_file() or (PROJECT / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, folder / name, follow_symlinks=False)
