"""Which tests check which requirement: the rows of docs/requirements.md, and the tests marked with their ids.
Requirements of performance name rows of the bench instead.

`python -m tests.requirements` prints the list.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click

from grabstream.workshop.services.servers import PROJECT

DOCUMENT = PROJECT / "docs" / "requirements.md"
_row = re.compile(r"^\| ([A-F][0-9]+) \| (.*) \|$", re.MULTILINE)
_measured = re.compile(r"^\| (P[0-9]+) \| .* \| (`.*) \|$", re.MULTILINE)


def rows() -> dict[str, str]:
    """The text of each requirement's row, by id."""
    return dict(_row.findall(DOCUMENT.read_text(encoding="utf-8")))


def measured() -> dict[str, list[str]]:
    """The rows of the bench that measure each requirement of performance, by id."""
    found = _measured.findall(DOCUMENT.read_text(encoding="utf-8"))
    return {name: re.findall(r"`([a-z0-9-]+)`", text.partition(":")[0]) for name, text in found}


def marked(folder: Path = PROJECT / "tests") -> Iterator[tuple[str, str]]:
    """Yields (requirement, test id) for every mark."""
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "pytest.mark.requirement" in text else ():
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.requirement":
                    for argument in mark.args:
                        yield ast.literal_eval(argument), f"{path.relative_to(folder.parent)}::{node.name}"


@click.command()
def main() -> None:
    """Print each requirement with its tests."""
    tests: dict[str, list[str]] = {}
    for requirement, test in marked():
        tests.setdefault(requirement, []).append(test)
    for requirement, row in rows().items():
        click.echo(f"{requirement}  {row.split(' | ')[0]}")
        for test in tests.get(requirement, ["(none: " + row.split(" | ")[-1] + ")"]):
            click.echo(f"    {test}")


if __name__ == "__main__":
    main()
