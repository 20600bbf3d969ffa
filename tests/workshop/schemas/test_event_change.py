"""An event is changed in a copy of this tree, after a made-up release, by the steps and the code of
docs/events.md.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.copies import copy_package

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
CLASS_TEXT, UPCASTER_TEXT = (re.sub(r"^    ", "", text, flags=re.MULTILINE) for text in re.findall(
    r"^    ```python\n(.*?)^    ```$", (ROOT / "docs" / "events.md").read_text(), re.DOTALL | re.MULTILINE
))  # fmt: skip
OLD_CLASS = re.compile(r"class GrabRedeemed\(.*?\n    digest: str\n", re.DOTALL)


class Tree:
    """A copy of the files that the steps need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        copy_package(folder)
        for name in ("scripts", "schemas", "tests/golden"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)

    def raise_version(self) -> None:
        events = self.folder / "grabstream" / "models" / "events.py"
        text, count = OLD_CLASS.subn(lambda _: CLASS_TEXT, events.read_text())
        assert count == 1
        events.write_text(text)

    def write_upcaster(self) -> None:
        upcasters = self.folder / "grabstream" / "models" / "upcasters.py"
        text, count = re.subn(
            r"^UPCASTERS: .*\Z",
            lambda _: UPCASTER_TEXT,
            upcasters.read_text(),
            flags=re.DOTALL | re.MULTILINE,
        )
        assert count == 1
        upcasters.write_text(text.replace("import Upcaster\n", "import Document, Upcaster\n"))

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, *command],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )

    def decode(self) -> subprocess.CompletedProcess[str]:
        """Decodes an event of the first version."""
        line = json.loads((self.folder / "tests/golden/events/grab.redeemed.v1.json").read_text())["line"]
        code = (
            "import sys; from grabstream.models.events import decode_event as decode; e = "
            "decode(sys.argv[1].encode())"
        )
        return self.run("-c", f"{code}; print(type(e).__name__, e.v, e.receipt)", line)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    made = Tree(tmp_path)
    released = made.run("scripts/schemas.py", "--release", "0.0.1")
    assert released.returncode == 0, released.stderr
    return made


@pytest.mark.nightly
def test_the_steps_of_the_page_lead_to_a_compatible_tree(tree: Tree) -> None:
    tree.raise_version()
    ended = tree.decode()
    assert ended.returncode != 0
    assert "grab.redeemed: no upcaster from v1 to v2, although v2 is written now" in ended.stderr

    tree.write_upcaster()
    assert tree.decode().stdout == "GrabRedeemed 2 o-1\n"

    stale = tree.run("scripts/schemas.py", "--check", "--json")
    assert json.loads(stale.stdout)["stale"] == {
        "asyncapi.yaml": "is stale",
        "events/grab.redeemed.v2.json": "is missing",
    }
    assert tree.run("scripts/schemas.py").returncode == 0
    assert (tree.folder / "schemas/events/grab.redeemed.v1.json").read_text() == (
        ROOT / "schemas/events/grab.redeemed.v1.json"
    ).read_text()
    compared = tree.run("scripts/schemas.py", "--compare")
    assert compared.returncode == 0
    assert (
        "warning   events/grab.redeemed $.v: v1 → v2: readers of the journal and of the events topic must "
        "know both" in compared.stdout
    )

    # The schema of the old version must stay: readers still need it.
    (tree.folder / "schemas/events/grab.redeemed.v1.json").unlink()
    ended = tree.run("scripts/schemas.py", "--check")
    assert ended.returncode == 1
    assert "grab.redeemed is at v2; keep the schema of v1" in ended.stderr


def test_a_changed_event_without_a_new_version_breaks_readers(tree: Tree) -> None:
    tree.raise_version()
    events = tree.folder / "grabstream" / "models" / "events.py"
    events.write_text(
        events.read_text().replace(
            "class GrabRedeemed(_GrabEvent[Literal[2]]", "class GrabRedeemed(_GrabEvent[V1]"
        )
    )
    compared = tree.run("scripts/schemas.py", "--compare")
    assert compared.returncode == 1
    assert "breaking  events/grab.redeemed.v1 $.order: field removed" in compared.stdout
    assert "→ raise its version and write an upcaster (docs/events.md)" in compared.stdout
