"""What is generated from the structs follows them, and so do tables that are written by hand."""

import re
from pathlib import Path
from typing import Final, get_args

import pytest

from grabstream.models import commands
from grabstream.models.answers import Answer
from grabstream.workshop.services.servers import PROJECT
from scripts import generated


def test_files_that_differ_are_found_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = dict(generated.files())
    monkeypatch.setattr(generated, "files", files.items)
    monkeypatch.setattr("sys.argv", ["generated", "--folder", str(tmp_path), "--check"])
    for name, text in files.items():
        assert text == (PROJECT / name).read_text()
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (generated.main(), capsys.readouterr().err) == (0, "")
    [first, *_, last] = files
    (tmp_path / first).write_text(files[first].replace("Grab", "Grap"))
    (tmp_path / last).unlink()
    assert generated.main() == 1
    assert capsys.readouterr().err == "".join(
        f"{name} differs from what it is made from: run `python -m scripts.generated`\n"
        for name in (first, last)
    )
    monkeypatch.setattr("sys.argv", ["generated", "--folder", str(tmp_path)])
    assert generated.main() == 0
    assert {name: (tmp_path / name).read_text() for name in files} == files


PAGE: Final = (PROJECT / "docs" / "commands.md").read_text()


def cells(head: str) -> list[list[str]]:
    """The cells of a table of docs/commands.md, by row."""
    table = PAGE.partition(f"\n{head}\n")[2].partition("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[1:]]


def test_table_of_commands_names_every_field() -> None:
    rows = cells("| command | fields in addition to `type`, `id`, `offer` | what it does |")
    named = {
        command: re.findall(r"`([a-z_]+)`", re.sub(r"\(.*?\)", "", fields))
        for names, fields, _ in rows
        for command in re.findall(r"`(\w+)`", names)
    }
    for struct in get_args(commands.AnyCommand):
        # For operators, and the user of a grab: in the text below the table.
        below = {"id", "offer", "operator", "approvals"}
        below |= {"user"} if issubclass(struct, commands.GrabCommand) else set()
        fields = [name for name in struct.__struct_fields__ if name not in below]
        assert named[str(struct.__struct_config__.tag)] == fields
    assert len(named) == len(get_args(commands.AnyCommand))


def test_table_of_answers_names_every_field() -> None:
    named = [name for row in cells("| field | meaning |") for name in re.findall(r"`(\w+)`", row[0])]
    # In the text above the table.
    assert {*named, "id", "outcome", "code", "offer"} == {*Answer.__struct_fields__}
    assert len(named) == len(set(named))
