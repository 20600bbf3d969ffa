"""Checks the pages: long lines (also of comments in SQL), broken links, and names of files or documents that
do not exist.
"""

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
PACKAGE: Final = ROOT / "grabstream"
#: Documents that are older than the tree and not in it. Their content is in docs/.
ELSEWHERE: Final = re.compile(r"\b(DESIGN|CONTRACT|REQUIREMENTS|PITFALLS)\b|\barticles? 0\d\d\b")
SUFFIXES: Final = (".md", ".py", ".lua", ".sql", ".toml", ".yaml", ".yml", ".sh", "Makefile", "Dockerfile")

_link = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_rooms = "client|models|runtime|lua|streams|projections|gateway|ops|workshop"
_folders = f"{_rooms}|tests|scripts|schemas|grabstream"
_path = re.compile(rf"`((?:{_folders})/[\w./-]*)`")
_page = re.compile(r"(?<![\w/])docs/([a-z0-9-]+\.md)(#[a-z0-9-]+)?")


def tracked() -> list[Path]:
    """The files of the tree, including those that are not added to git yet."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.splitlines()]
    return [path for path in paths if path.is_file()]


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yields (number, line) for the lines of a page that are neither code nor rows of a table."""
    code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and not line.startswith("|"):
            yield number, line


def comments(file: Path) -> Iterator[tuple[int, str]]:
    """Yields (number, line) for the lines of a file of SQL that are comments."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("-- "):
            yield number, line


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = [line.lstrip("# ") for _, line in prose(page) if line.startswith("#")]
    return {slugify(re.sub(r"[`*]", "", heading), "-") for heading in headings}


def wrong_links(page: Path) -> Iterator[str]:
    """Broken links of a page in the root folder. Links within docs/ are checked when the site is built."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        for target in _link.findall(line):
            if target.startswith(("http://", "https://")):
                continue
            name, _, anchor = target.partition("#")
            linked = page.parent / name if name else page
            if not linked.exists():
                yield f"{page.relative_to(ROOT)}:{number}: {target}: no such file"
            elif anchor and anchor not in anchors(linked):
                yield f"{page.relative_to(ROOT)}:{number}: {target}: no such heading"


def wrong_names(file: Path) -> Iterator[str]:
    """Names in a file of pages in docs/ that do not exist, and of documents that are not in the tree."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        for name, anchor in _page.findall(line):
            page = ROOT / "docs" / name
            if not page.is_file() or (anchor and anchor[1:] not in anchors(page)):
                yield f"{file.relative_to(ROOT)}:{number}: docs/{name}{anchor} does not exist"
        if document := ELSEWHERE.search(line):
            yield f"{file.relative_to(ROOT)}:{number}: {document[0]} is not in the tree: name a page of docs/"


def wrong_paths(page: Path) -> Iterator[str]:
    """Names in a page of files and folders that do not exist. Those of the package are named without its
    folder.
    """
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        for name in _path.findall(line):
            if not ((ROOT / name).exists() or (PACKAGE / name).exists()):
                yield f"{page.relative_to(ROOT)}:{number}: {name} does not exist"


def site() -> bool:
    """Builds the site and prints warnings; returns whether there were none."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        try:
            build(load_config(str(ROOT / "mkdocs.yml"), site_dir=folder))
        except Abort as error:
            sys.stderr.write(f"{error}\n")
            return False
    return True


def main() -> int:
    """Prints all problems; returns the exit code."""
    files = tracked()
    pages = [file for file in files if file.suffix == ".md"]
    texts = [(page, prose(page)) for page in pages]
    texts += [(file, comments(file)) for file in files if file.suffix == ".sql"]
    problems = [
        f"{file.relative_to(ROOT)}:{number}: {len(line)} characters, at most {LINE_LENGTH_MAX}"
        for file, lines in texts
        for number, line in lines
        if len(line) > LINE_LENGTH_MAX
    ]
    problems += [problem for page in pages if page.parent == ROOT for problem in wrong_links(page)]
    # The change log names files of earlier releases.
    problems += [problem for page in pages if page.name != "CHANGELOG.md" for problem in wrong_paths(page)]
    problems += [
        problem
        for file in files
        if file.name.endswith(SUFFIXES) and file != Path(__file__).resolve()
        for problem in wrong_names(file)
    ]
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return 0 if site() and not problems else 1


if __name__ == "__main__":
    sys.exit(main())
