"""The steps of the Dockerfile without a container engine: what they install runs as the user of the image, in
a folder where that user may write nothing.
"""

import asyncio
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from grabstream.settings import Settings
from grabstream.workshop.rehearsal.stage import take_down
from tests.support.gateways import environment_of

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
USER = 1000

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

_EVERY_MODULE = """
import importlib, pkgutil, grabstream
names = [one.name for one in pkgutil.walk_packages(grabstream.__path__, "grabstream.", onerror=print)]
for name in names:
    importlib.import_module(name)
print(len(names), *grabstream.__path__)
"""


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    with built() as folder:
        yield folder


@contextmanager
def built(**arguments: str) -> Iterator[Path]:
    """What the stage `build` of the Dockerfile makes with build arguments: its folders `venv` and `tmp`."""
    # That of the tests may be in a folder of root.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = next(filter(may_run, (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}")), None)
    assert python is not None, f"no {version} that the user {USER} may run"
    folder = Path(tempfile.mkdtemp(prefix="image"))
    try:
        for path in (folder, folder / "work"):
            path.mkdir(exist_ok=True)
            path.chmod(0o755)
        stage = DOCKERFILE.split("\nFROM ")[1].replace("\\\n", " ")
        for line in stage.splitlines():
            word, _, rest = line.partition(" ")
            if word == "COPY":
                *sources, _ = rest.split()
                for source in sources:
                    copy(ROOT / source, folder / "work" / source)
            elif word == "ARG":
                name, _, default = rest.partition("=")
                arguments.setdefault(name, default)
            elif word == "RUN":
                command = re.sub(r"(?<!\S)/(build|venv|wheels)\b", rf"{folder}/\1", rest)
                # That of the image's user may lack what puts pip into an environment.
                command = command.replace("python -m venv --without-pip", f"{python} -m venv --without-pip")
                command = re.sub(r"(?<!/)\bpython -m venv (?!-)", f"{sys.executable} -m venv ", command)
                subprocess.run(
                    ["sh", "-ec", command], cwd=folder / "work", check=True, timeout=600,
                    env=os.environ | arguments,
                )  # fmt: skip
        shutil.rmtree(folder / "work")
        (folder / "tmp").mkdir()
        shutil.chown(folder / "tmp", USER, USER)
        yield folder
    finally:
        shutil.rmtree(folder)


def may_run(python: str) -> bool:
    """Whether the user of the image can run a Python."""
    try:
        return subprocess.run([python, "-c", ""], user=USER, cwd="/", check=False).returncode == 0
    except OSError:
        return False


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


def run(image: Path, *words: str, settings: Settings | None = None, **options: Any) -> Any:
    """A process of the image: its user, a folder that it cannot write to, and no more environment."""
    environment = {"PATH": f"{image}/venv/bin:/usr/bin:/bin", "TMPDIR": f"{image}/tmp"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    if settings is not None:
        given = environment_of(settings)
        environment |= {name: value for name, value in given.items() if name.startswith("GRAB_")}
    return subprocess.Popen(
        words, cwd=image, env=environment, user=USER, group=USER, extra_groups=[],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options,
    )  # fmt: skip


def files(image: Path) -> list[Path]:
    return sorted(path for path in image.rglob("*") if path.relative_to(image).parts[0] != "tmp")


def printed(image: Path, *words: str, settings: Settings | None = None) -> str:
    process = run(image, *words, settings=settings)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    return str(text)


def test_the_image_has_all_modules_and_no_tool_that_installs(image: Path) -> None:
    count, path = printed(image, "python", "-c", _EVERY_MODULE).split()
    modules = list((ROOT / "grabstream").rglob("*.py"))
    assert int(count) == len(modules) - 1  # not the package itself
    assert Path(path).is_relative_to(image / "venv")
    assert not (image / "venv/bin/pip").exists()
    assert "grabstream" in printed(image, "grabstream", "--version")


def test_the_image_of_archives_can_export() -> None:
    with built(LOCK="requirements-archives.lock") as image:
        printed(image, "python", "-c", "import boto3, pyarrow.parquet")
        assert "s3://bucket/prefix" in printed(image, "grabstream", "export", "--help")


async def test_a_system_runs_from_the_image(image: Path, servers: Settings) -> None:
    """`init`, a worker and a gateway write nothing into the folders of the image, and stop with code 0."""
    name = f"test{secrets.token_hex(5)}"
    settings = servers.model_copy(update={"prefix": name, "schema_": name, "shards": 1})
    before = files(image)
    processes: list[Any] = []
    try:
        printed(image, "grabstream", "init", settings=settings)
        for words, says in ((("worker",), "ready"), (("gateway", "--port", "0"), "listening on")):
            processes.append(process := run(image, "grabstream", *words, settings=settings))
            line = await asyncio.to_thread(process.stdout.readline)
            assert says in line, line
        printed(image, "grabstream", "verify", settings=settings)
        for process in processes:
            process.send_signal(signal.SIGTERM)
            text, _ = await asyncio.to_thread(process.communicate, timeout=240)
            assert process.returncode == 0, text
        assert files(image) == before
    finally:
        for process in processes:
            process.kill()
            process.wait()
        await take_down(settings)
