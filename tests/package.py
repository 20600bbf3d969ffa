"""The package `grabstream` as it lies in the tree: a folder with a link to each room."""

import shutil
from pathlib import Path
from typing import Final

from grabstream.ops.services.servers import PROJECT

PACKAGE: Final = PROJECT / "grabstream"
#: The folders of the tree that are imported as `grabstream.<room>`.
ROOMS: Final = tuple(sorted(path.name for path in PACKAGE.iterdir() if path.is_symlink()))


def copy_of_the_package(folder: Path) -> None:
    """Copies the package and its rooms into a folder, made when it is missing; PYTHONPATH=<folder> runs the
    copy.
    """
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (PACKAGE.name, *ROOMS):
        shutil.copytree(PROJECT / name, folder / name, symlinks=True, ignore=ignored)
