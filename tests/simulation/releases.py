"""Releases side by side: the package of another tree, imported under its own name.

The sources of that tree name themselves `grabstream`; the import reads them with the other name.
"""

import importlib
import re
import subprocess
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.mutations import PROJECT

BESIDE: Final = "grabstream_beside"
#: Where a source names the package: in imports, and in texts that name a module of it.
_NAMED: Final = re.compile(rb"""(?<=from )grabstream\b|(?<=port )grabstream\b|(?<=files\(")grabstream\b""")


class Release(NamedTuple):
    """The code of a release, by the name of its package."""

    package: str

    def module(self, name: str) -> Any:
        """A module of it, such as `streams.worker`."""
        return importlib.import_module(f"{self.package}.{name}")


#: The releases of a run: worker 0 plays the first of them, worker 1 the last.
RELEASES: Final = [Release("grabstream")]


class _Loader(SourceFileLoader):
    def get_data(self, path: str) -> bytes:
        """The source, with the other name."""
        data = super().get_data(path)
        return _NAMED.sub(BESIDE.encode(), data) if path.endswith(".py") else data


class _Finder(MetaPathFinder):
    def __init__(self, tree: Path) -> None:
        self._tree = tree

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Finds modules of the other package in its tree."""
        if fullname.partition(".")[0] != BESIDE:
            return None
        place = self._tree / "grabstream" / Path(*fullname.split(".")[1:])
        if (place / "__init__.py").exists():
            file, inside = place / "__init__.py", [str(place)]
        else:
            file, inside = place.with_suffix(".py"), None
        if not file.exists():
            return None
        return spec_from_file_location(
            fullname, file, loader=_Loader(fullname, str(file)), submodule_search_locations=inside
        )


def play_beside(tree: Path) -> None:
    """From now on, one worker of each run plays the release in a tree."""
    sys.meta_path.insert(0, _Finder(tree))
    RELEASES.append(Release(BESIDE))


def unpack(commit: str, folder: Path) -> Path:
    """Writes the tree of a commit into a folder; raises ValueError where the commit is not known."""
    archive = subprocess.run(["git", "archive", commit], cwd=PROJECT, capture_output=True)
    if archive.returncode:
        raise ValueError(f"{commit}: {archive.stderr.decode().strip()}")
    folder.mkdir(parents=True)
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    return folder
