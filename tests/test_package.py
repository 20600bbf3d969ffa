"""One package: a stranger's `models` stays the stranger's, and a wheel holds all that runs."""

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
import venv
from collections.abc import Iterator
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement

import grabstream
from grabstream.extras import SERVER_MODULES
from grabstream.workshop.services.servers import PROJECT
from tests.copies import copy_tree


def test_no_file_is_a_symbolic_link() -> None:
    """A folder with two paths is a module with two names."""
    listed = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=PROJECT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert len(listed) > 500
    assert [line for line in listed if line.startswith("120000 ")] == []


def begun_with(source: str) -> list[tuple[int, str | None]]:
    """(line, first argument) of every program of Python that a source text begins; None: it is no literal."""
    begun = []
    for node in ast.walk(ast.parse(source)):
        words = getattr(node, "elts", None) or getattr(node, "args", None)
        for place, word in enumerate(words if isinstance(words, list) else ()):
            if ast.unparse(word) == "sys.executable":
                first = words[place + 1] if place + 1 < len(words) else None
                begun.append((word.lineno, getattr(first, "value", None)))
    return begun


def test_own_processes_import_no_modules_of_their_working_directory() -> None:
    """They have the credentials of the system: `-P` keeps the directory out of the search path."""
    sources = {file: file.read_text() for file in (PROJECT / "grabstream").rglob("*.py")}
    begun = [(str(file), *one) for file, source in sources.items() for one in begun_with(source)]
    assert len(begun) == sum(source.count("sys.executable") for source in sources.values()) >= 4
    assert [one for one in begun if one[-1] != "-P"] == []
    broken = 'run(\n    [\n        sys.executable,\n        "-m", "grabstream.ops.cli",\n    ]\n)'
    assert [*begun_with(broken), *begun_with('run(sys.executable, "-P", words)')] == [(3, "-m"), (1, "-P")]


PYPROJECT: Final = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]


def typed_names() -> Iterator[tuple[str, str, str]]:
    """(name, module, name in the module) of every public name that type checkers see."""
    for line in ast.parse((PROJECT / "grabstream" / "__init__.pyi").read_text()).body:
        if isinstance(line, ast.ImportFrom):
            for alias in line.names:
                yield alias.asname or alias.name, str(line.module), alias.name


def test_public_names_are_those_that_type_checkers_see() -> None:
    typed = {name: (module, there) for name, module, there in typed_names()}
    assert sorted(typed) == grabstream.__all__
    assert set(grabstream.__all__) <= set(dir(grabstream))
    for name, (module, there) in typed.items():
        assert getattr(grabstream, name) is getattr(importlib.import_module(module), there)
    with pytest.raises(AttributeError, match="no attribute 'Grap'"):
        _ = grabstream.Grap


def modules_after(code: str) -> set[str]:
    """The modules that a new process has loaded after running the code."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        cwd=PROJECT,
        check=True,
        capture_output=True,
        text=True,
        timeout=200,
    )
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_else() -> None:
    loaded = modules_after("import grabstream")
    assert {name for name in loaded if name.startswith("grabstream")} == {"grabstream", "grabstream.extras"}
    standard = {*sys.stdlib_module_names, "grabstream", "__main__"}
    # What an environment loads automatically (.pth files of an editable install) is there without us, too.
    new = loaded - modules_after("pass")
    assert {name for name in new if name.partition(".")[0] not in standard} == set()


def test_names_for_a_service_load_nothing_of_the_server_extra() -> None:
    names = "Grab, Confirm, EnvelopeTerms, encode_command, decode_answer, decode_event, load_settings"
    loaded = modules_after(f"from grabstream import {names}\nload_settings")
    assert not SERVER_MODULES & loaded
    assert "grabstream.models.commands" in loaded


def distributions(requirements: list[str]) -> set[str]:
    """The installed distributions that these requirements and theirs name, in normal form."""
    known: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        requirement = waiting.pop()
        for extra in requirement.extras or {""}:
            waiting += [
                further
                for line in distribution(requirement.name).requires or []
                if (further := Requirement(line)).marker is None or further.marker.evaluate({"extra": extra})
                if normal(further.name) not in known
            ]
        known.add(normal(requirement.name))
    return known


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_extras_names_all_modules_of_the_server_extra() -> None:
    """`grabstream.extras` names the modules, pyproject.toml the distributions."""
    base = distributions(PYPROJECT["dependencies"])
    extra = PYPROJECT["optional-dependencies"]["server"]
    owners = {
        module: {normal(one) for one in names}
        for module, names in packages_distributions().items()
        if module in SERVER_MODULES
    }
    assert set(owners) == SERVER_MODULES
    named = {normal(Requirement(line).name) for line in extra} | {"hiredis"}
    # A namespace that the distributions of its dependencies share.
    owners["opentelemetry"] &= named
    assert set.union(*owners.values()) == named
    assert not set.union(*owners.values()) & base


PIP: Final = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
[SITE_PACKAGES] = [Path(path) for path in sys.path if path.endswith("site-packages")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the present tree."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    copy_tree(tree)
    words = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(tree)]
    subprocess.run([*PIP, *words], check=True, capture_output=True, timeout=220)
    [wheel] = folder.glob("grabstream-*.whl")
    return wheel


def environment(folder: Path, wheel: Path) -> tuple[Path, Path]:
    """Installs the wheel into an empty environment; its Python and its site-packages."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    subprocess.run(
        [*PIP, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)],
        check=True,
        capture_output=True,
    )
    [packages] = folder.glob("lib/python*/site-packages")
    return python, packages


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, next to a stranger's package `models`. What the wheel depends on is that
    of this environment.
    """
    python, packages = environment(tmp_path_factory.mktemp("wheel") / "environment", wheel)
    (packages / "models.py").write_text("OURS = False\n")
    # After the wheel's own folder: an editable install of this tree is found by a hook of its site-packages,
    # which is not run here.
    (packages / "dependencies.pth").write_text(f"{SITE_PACKAGES}\n")
    return python


@pytest.fixture(scope="module")
def service(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and its base dependencies only, linked from this environment."""
    python, packages = environment(tmp_path_factory.mktemp("service") / "environment", wheel)
    for name in distributions(PYPROJECT["dependencies"]):
        for path in distribution(name).files or ():
            first = path.parts[0]
            if first not in ("..", "__pycache__") and not (packages / first).exists():
                (packages / first).symlink_to(SITE_PACKAGES / first)
    return python


@pytest.mark.long
def test_wheel_works_beside_another_package_named_models(installed: Path, tmp_path: Path) -> None:
    code = (
        "import models, grabstream.models.commands as ours, grabstream.lua.loader as loader, "
        "grabstream.projections.database.migrate\n"
        "from importlib.resources import files\n"
        "print(models.OURS, len(loader.load('grab').text) > 10_000, "
        "files('grabstream').joinpath('py.typed').is_file())\n"
        "print(files('grabstream.projections.definitions').joinpath('cursors.sql').is_file(), "
        "files('grabstream.workshop.services').joinpath('kafka.pom.xml').is_file(), "
        "files('grabstream.projections.migrations').joinpath('0001_system.sql').is_file())\n"
        "print('site-packages' in ours.__file__ and 'environment' in ours.__file__)\n"
    )
    done = subprocess.run(
        [str(installed), "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert (done.stdout.split(), done.stderr) == (["False", *["True"] * 6], "")


@pytest.mark.long
def test_wheel_has_the_command_line(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(installed.parent / "grabstream"), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, "rebuild" in done.stdout) == (0, True)


def install_lines() -> list[str]:
    """The command lines of docs/clients.md, "Install"."""
    section = (
        (PROJECT / "docs" / "clients.md").read_text().partition("\n## Install\n")[2].partition("\n## ")[0]
    )
    [block] = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return [line.partition("#")[0].strip() for line in block.splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("number", range(5))
def test_each_line_of_the_documents_installs_the_package(wheel: Path, tmp_path: Path, number: int) -> None:
    """In its own environment. What the package depends on, and builds with, comes from this one."""
    lines = install_lines()
    assert len(lines) == 5
    tree = wheel.parent / "tree"
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    [packages] = folder.glob("lib/python*/site-packages")
    # Read after the folder that pip installs into; an editable install of this tree is a .pth file there,
    # which is not run here.
    (packages / "dependencies.pth").write_text(f"{SITE_PACKAGES}\n")
    python = str(folder / "bin" / "python")
    pip = (*PIP, "--python", python, "install", "--no-index", "--no-build-isolation")
    if lines[number].startswith("pip install 'grabstream["):
        subprocess.run([*pip, "--no-deps", str(wheel)], check=True, capture_output=True)
    line = (
        lines[number]
        .replace("/path/to/grabstream", str(tree))
        .replace("grabstream-0.1.0-py3-none-any.whl", str(wheel))
    )
    program, verb, *words = shlex.split(line)
    assert (program, verb) == ("pip", "install")
    done = subprocess.run([*pip, *words], cwd=tree, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = subprocess.run(
        # -I: a PYTHONPATH of the caller does not count.
        [python, "-I", "-c", "import grabstream as g; print(g.__file__, g.Client, g.KafkaClient)"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (found.stdout.split(" ")[0], found.stderr) == (str(packages / "grabstream" / "__init__.py"), "")


def test_no_page_installs_from_a_registry_that_lacks_the_package() -> None:
    """grabstream is not published: only where it is installed does its name suffice."""
    pages = [PROJECT / "README.md", PROJECT / "examples" / "README.md", *(PROJECT / "docs").glob("*.md")]
    found = [
        f"{page.name}: {line}"
        for page in pages
        for line in page.read_text().splitlines()
        if re.search(r"pip install '?grabstream(\[|\b(?!-))", line) and "when it is installed" not in line
    ]
    assert found == []


SERVES: Final = """
import importlib.util, sys
from grabstream import Answer, Grab, Outcome, decode_answer, decode_event, encode_command, load_settings
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
print(*map(importlib.util.find_spec, ("redis", "faust", "psycopg")))
print(encode_command(Grab(id="g-1", offer="lunch", user="bob")).decode())
print(decode_answer(b'{"id": "g-1", "outcome": "granted", "code": 0}').outcome, Outcome.granted.positive)
settings = load_settings()
print(settings.kafka, settings.prefix)
for name in ("open_gate", "Projection", "read_events"):
    try:
        getattr(importlib.import_module("grabstream"), name)
    except ImportError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.long
def test_service_needs_the_base_dependencies_only(service: Path, tmp_path: Path) -> None:
    environ = {"GRAB_KAFKA": "kafka:9092", "GRAB_REDIS_URL": "redis://r/0", "GRAB_POSTGRES": "host=p"}
    done = subprocess.run(
        [str(service), "-c", SERVES], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "None None None",
        '{"type":"grab","id":"g-1","offer":"lunch","user":"bob"}',
        "granted True",
        "kafka:9092 grab",
    ]
    for name, line in zip(("open_gate", "Projection", "read_events"), lines[4:], strict=True):
        assert re.fullmatch(
            rf"MissingExtra grabstream\.{name} needs the extra `server` \(\w+ is not installed\): "
            r"pip install 'grabstream\[server\]'",
            line,
        )


@pytest.mark.long
def test_command_line_names_the_extra_that_it_needs(service: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(service.parent / "grabstream"), "status"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        r"grabstream: the command line needs the extra `server` \(\w+ is not installed\): "
        r"pip install 'grabstream\[server\]'\n",
        done.stderr,
    )


PUBLIC_MODULES: Final = {"grabstream.vocabulary"}


def example_files(folder: Path) -> list[str]:
    """Every Python program of the pages and of examples/, as files. The cells of a notebook become one
    function.
    """
    folder.mkdir()
    for page in ("README", "docs/clients", "docs/commands", "docs/user-projections", "docs/replay"):
        blocks = re.findall(
            r"^```python\n(.*?)^```", (PROJECT / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL
        )
        for number, block in enumerate(blocks):
            (folder / f"{Path(page).stem.lower().replace('-', '_')}_{number}.py").write_text(block)
    for name in ("service.py", "replay_job.py", "points/points.py"):
        (folder / Path(name).name).write_text((PROJECT / "examples" / name).read_text())
    for notebook in (PROJECT / "examples").glob("*.ipynb"):
        found = json.loads(notebook.read_text())
        code = "\n".join("".join(one["source"]) for one in found["cells"] if one["cell_type"] == "code")
        (folder / f"{notebook.stem}.py").write_text(
            f"async def notebook() -> None:\n{textwrap.indent(code, '    ')}\n"
        )
    return sorted(path.name for path in folder.iterdir())


def test_examples_use_public_names_only(tmp_path: Path) -> None:
    names = example_files(tmp_path / "stranger")
    for name in names:
        tree = ast.parse((tmp_path / "stranger" / name).read_text())
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        modules |= {one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
        assert {str(one) for one in modules if str(one).startswith("grabstream.")} <= PUBLIC_MODULES, name


def strict(python: Path, folder: Path, names: list[str]) -> str:
    """The output of `mypy --strict` in another project, without the settings of this tree."""
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python)]
    done = subprocess.run(
        [*command, "--config-file", "", "--cache-dir", str(folder / ".cache"), *names],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=230,
    )
    return done.stdout + done.stderr


@pytest.mark.long
def test_every_example_passes_the_type_check_of_another_project(installed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stranger"
    names = example_files(folder)
    assert {"notebook.py", "points.py", "user_projections_0.py", "readme_0.py", "service.py"} <= set(names)
    (folder / "wrong.py").write_text(
        "from grabstream import Grab, load_settings, open_gate\n"
        "async def main() -> str:\n"
        "    async with open_gate(load_settings()) as gate:\n"
        "        [answer] = await gate.decide([Grab(id='g', offer='o', user=5)])\n"
        "    return answer.code\n"
    )
    said = strict(installed, folder, [*names, "wrong.py"]).splitlines()
    assert [line.partition(": ")[0] for line in said[:-1]] == ["wrong.py:4", "wrong.py:5"], said
    assert said[0].endswith("[arg-type]")
    assert said[1].endswith("[return-value]")
    assert said[-1] == f"Found 2 errors in 1 file (checked {len(names) + 1} source files)"


@pytest.mark.nightly
def test_service_passes_the_type_check_with_the_base_dependencies(service: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stranger"
    example_files(folder)
    names = ["service.py", "clients_0.py", "clients_1.py", "clients_2.py"]
    assert strict(service, folder, names) == "Success: no issues found in 4 source files\n"
