"""Files that are replaced as a whole: also after a loss of power, either the old content or the new one
exists.
"""

import os
from collections.abc import Callable
from pathlib import Path


def replace_durably(path: Path, content: bytes, part: Path, ready: Callable[[], None] = lambda: None) -> None:
    """Replaces a file, or makes it. The content is first written to `part`, a name in the same file system;
    `ready` is called just before the file gets its name. Raises OSError.
    """
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    ready()
    part.replace(path)
    sync_names(path.parent)


def sync_names(folder: Path) -> None:
    """Makes the names in a folder durable; raises OSError."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
