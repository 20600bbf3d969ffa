"""Checks the pages: long lines, broken links, references to documents that are not in the tree."""

import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from markdown.extensions.toc import slugify
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

LINE_LENGTH_MAX: Final = 110
ROOT: Final = Path(__file__).parent.parent
#: Documents that were written before the tree was, and are not in it. What they say stands in docs/.
ELSEWHERE: Final = re.compile(r"\b(DESIGN|CONTRACT|REQUIREMENTS|PITFALLS)\b|\barticles? 0\d\d\b")
SUFFIXES: Final = (".md", ".py", ".lua", ".sql", ".toml", ".yaml", ".yml", ".sh", "Makefile", "Dockerfile")

_link = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_path = re.compile(r"`((?:models|lua|streams|projections|ops|tests|scripts|schemas|grabstream)/[\w./-]*)`")
_page = re.compile(r"(?<![\w/])docs/([a-z0-9-]+\.md)(#[a-z0-9-]+)?")


def tracked() -> list[Path]:
    """The files of the tree, those that are not added yet, too."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.splitlines()]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of a page that are neither code nor rows of a table."""
    code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and not line.startswith("|"):
            yield number, line


def anchors(page: Path) -> set[str]:
    """What links can point at in a page: its headings."""
    headings = [line.lstrip("# ") for _, line in prose(page) if line.startswith("#")]
    return {slugify(re.sub(r"[`*]", "", heading), "-") for heading in headings}


def wrong_links(page: Path) -> Iterator[str]:
    """Links of a page in the root that lead nowhere. Those inside docs/ are checked by the site."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        for target in _link.findall(line):
            if target.startswith(("http://", "https://")):
                continue
            name, _, anchor = target.partition("#")
            there = page.parent / name if name else page
            if not there.exists():
                yield f"{page.relative_to(ROOT)}:{number}: {target}: no such file"
            elif anchor and anchor not in anchors(there):
                yield f"{page.relative_to(ROOT)}:{number}: {target}: no such heading"


def wrong_names(file: Path) -> Iterator[str]:
    """Pages of docs/ that a file names and that are not there, and documents that are not in the tree."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        for name, anchor in _page.findall(line):
            page = ROOT / "docs" / name
            if not page.is_file() or (anchor and anchor[1:] not in anchors(page)):
                yield f"{file.relative_to(ROOT)}:{number}: docs/{name}{anchor} is not there"
        if found := ELSEWHERE.search(line):
            yield f"{file.relative_to(ROOT)}:{number}: {found[0]} is not in the tree: name a page of docs/"


def wrong_paths(page: Path) -> Iterator[str]:
    """Files and folders that a page names and that are not there."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        for name in _path.findall(line):
            if not (ROOT / name).exists():
                yield f"{page.relative_to(ROOT)}:{number}: {name} is not there"


def site() -> bool:
    """Whether the site can be built without a warning; prints the warnings."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        try:
            build(load_config(str(ROOT / "mkdocs.yml"), site_dir=folder))
        except Abort as error:
            sys.stderr.write(f"{error}\n")
            return False
    return True


def main() -> int:
    """Prints what is wrong; the exit code."""
    files = tracked()
    pages = [file for file in files if file.suffix == ".md"]
    wrong = [
        f"{page.relative_to(ROOT)}:{number}: {len(line)} characters, at most {LINE_LENGTH_MAX}"
        for page in pages
        for number, line in prose(page)
        if len(line) > LINE_LENGTH_MAX
    ]
    wrong += [one for page in pages if page.parent == ROOT for one in wrong_links(page)]
    # The change log names what was there at its time.
    wrong += [one for page in pages if page.name != "CHANGELOG.md" for one in wrong_paths(page)]
    wrong += [
        one
        for file in files
        if file.name.endswith(SUFFIXES) and file != Path(__file__).resolve()
        for one in wrong_names(file)
    ]
    sys.stderr.writelines(f"{one}\n" for one in wrong)
    return 0 if site() and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
