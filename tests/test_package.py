"""One package: every module has one name, a stranger's `models` stays the stranger's, and a wheel holds all
that runs.
"""

import ast
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from grabstream.ops.services.servers import PROJECT
from tests.package import ROOMS

NAMES_MODULES_TWICE = """
import importlib, pkgutil, sys
import grabstream
for module in pkgutil.walk_packages(grabstream.__path__, "grabstream."):
    if not module.name.endswith((".__main__", "streams.app")):
        importlib.import_module(module.name)
files = {}
for name, module in list(sys.modules.items()):
    if file := getattr(module, "__file__", None):
        files.setdefault(__import__("os").path.realpath(file), set()).add(name)
rooms = set(%r)
twice = [sorted(names) for names in files.values() if len(names) > 1]
print(sorted(names for names in twice if any("grabstream" in name for name in names)))
print(sorted(name for name in sys.modules if name.split(".")[0] in rooms))
"""


def test_every_room_is_a_relative_link() -> None:
    assert ROOMS == ("lua", "models", "ops", "projections", "streams")
    assert {name: str((PROJECT / "grabstream" / name).readlink()) for name in ROOMS} == {
        name: f"../{name}" for name in ROOMS
    }


def bare_imports(text: str) -> list[int]:
    """The lines that import a room as a package of its own."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        found += [node.lineno for name in names if name.split(".")[0] in ROOMS]
    return found


def test_no_file_imports_a_room_by_its_bare_name() -> None:
    """Tests run in the root of the tree, where a bare name would be found, as a second module with types of
    its own.
    """
    assert bare_imports(
        "import models\nfrom lua.gate import Gate\nimport grabstream.models\nfrom . import lua"
    ) == [1, 2]
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=PROJECT, check=True, capture_output=True, text=True
    ).stdout.split()
    assert len(listed) > 200
    assert {name: lines for name in listed if (lines := bare_imports((PROJECT / name).read_text()))} == {}


def test_no_module_is_loaded_under_two_names() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NAMES_MODULES_TWICE % (ROOMS,)],
        cwd=PROJECT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["[]", "[]"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, beside a stranger's package `models`. What the wheel depends on is that
    of this environment.
    """
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(PROJECT), str(tree)], check=True)
    for name in subprocess.run(
        ["git", "ls-files", "--modified", "--others", "--exclude-standard"],
        cwd=PROJECT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines():
        source, target = PROJECT / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        elif source.exists():
            target.write_bytes(source.read_bytes())
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    words = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(tree)]
    subprocess.run([*pip, *words], check=True, capture_output=True, timeout=120)
    venv.create(folder / "environment", with_pip=False)
    python = folder / "environment" / "bin" / "python"
    [wheel] = folder.glob("grabstream-*.whl")
    subprocess.run(
        [*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)],
        check=True,
        capture_output=True,
    )
    [packages] = (folder / "environment").glob("lib/python*/site-packages")
    (packages / "models.py").write_text("OURS = False\n")
    # After the wheel's own folder: an editable install of this tree is found by a hook of its site-packages,
    # which is not run here.
    [dependencies] = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text(f"{dependencies}\n")
    return python


def test_the_wheel_works_beside_a_stranger_s_models(installed: Path, tmp_path: Path) -> None:
    code = (
        "import models, grabstream.models.commands as ours, grabstream.lua.loader as loader, "
        "grabstream.projections.database.migrate\n"
        "from importlib.resources import files\n"
        "print(models.OURS, len(loader.load('grab').text) > 10_000, "
        "files('grabstream').joinpath('py.typed').is_file())\n"
        "print(files('grabstream.projections.definitions').joinpath('cursors.sql').is_file(), "
        "files('grabstream.ops.kafka').joinpath('pom.xml').is_file(), "
        "len(list(files('grabstream.projections.migrations').iterdir())) > 9)\n"
        "print('site-packages' in ours.__file__ and 'environment' in ours.__file__)\n"
    )
    done = subprocess.run(
        [str(installed), "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.split(), done.stderr) == (["False", *["True"] * 6], "")


def test_the_wheel_has_the_command_line(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(installed.parent / "grabstream"), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, "rebuild" in done.stdout) == (0, True)
