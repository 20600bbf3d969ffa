"""Which tests hold which requirement: rows of docs/requirements.md, and tests that are marked with their ids.

`python -m tests.requirements` prints the list.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click

from grabstream.ops.services.servers import PROJECT

DOCUMENT = PROJECT / "docs" / "requirements.md"
#: A row that says so needs no test yet.
WAITS = "waits for "
_row = re.compile(r"^\| ([A-F][0-9]+) \| (.*) \|$", re.MULTILINE)


def rows() -> dict[str, str]:
    """What stands beside each id."""
    return dict(_row.findall(DOCUMENT.read_text(encoding="utf-8")))


def marked(folder: Path = PROJECT / "tests") -> Iterator[tuple[str, str]]:
    """(requirement, id of a test) for every mark."""
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.requirement":
                    for one in mark.args:
                        yield ast.literal_eval(one), f"{path.relative_to(folder.parent)}::{node.name}"


@click.command()
def main() -> None:
    """Print each requirement with its tests."""
    tests: dict[str, list[str]] = {}
    for requirement, test in marked():
        tests.setdefault(requirement, []).append(test)
    for requirement, words in rows().items():
        click.echo(f"{requirement}  {words.split(' | ')[0]}")
        for test in tests.get(requirement, ["(none: " + words.split(" | ")[-1] + ")"]):
            click.echo(f"    {test}")


if __name__ == "__main__":
    main()
