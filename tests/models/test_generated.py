"""What is generated from the structs follows them, and `--check` finds a file that does not."""

import shutil
from pathlib import Path

import pytest

from scripts import generated


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The generated files in a folder of their own."""
    for name, _ in generated.files():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(generated.ROOT / name, tmp_path / name)
    monkeypatch.setattr("sys.argv", ["generated", "--folder", str(tmp_path), "--check"])
    return tmp_path


@pytest.mark.parametrize("name", sorted(dict(generated.files())))
def test_file_that_differs_is_found_and_written(
    tree: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generated.main() == 0
    text = (tree / name).read_text()
    (tree / name).write_text(text.replace("Grab", "Grap"))
    assert generated.main() == 1
    assert capsys.readouterr().err == f"{name} differs from models/: run `python -m scripts.generated`\n"
    monkeypatch.setattr("sys.argv", ["generated", "--folder", str(tree)])
    assert generated.main() == 0
    assert (tree / name).read_text() == text
