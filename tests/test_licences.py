"""The table of licences of a release: every package of the images has one."""

import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from grabstream.workshop.services.servers import PROJECT


def table_of(
    components: list[dict[str, Any]], folder: Path, packages: Path | str
) -> "subprocess.CompletedProcess[str]":
    bill = folder / "bill.json"
    bill.write_text(json.dumps({"components": components}))
    program = [sys.executable, str(PROJECT / "scripts" / "licences.py"), str(bill), str(packages)]
    return subprocess.run(program, capture_output=True, text=True)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.long
def test_every_package_of_the_images_states_its_licence(tmp_path: Path) -> None:
    made, lock = tmp_path / "environment.json", (PROJECT / "requirements-archives.lock").read_text()
    maker = Path(sys.executable).with_name("cyclonedx-py")
    subprocess.run([maker, "environment", "--of", "JSON", "-o", made, sys.executable], check=True)
    names = set(map(normal, re.findall(r"^([\w.-]+)==", lock, re.MULTILINE)))
    found = [one for one in json.loads(made.read_text())["components"] if normal(one["name"]) in names]
    assert len(found) == len(names)
    done = table_of(found, tmp_path, sysconfig.get_path("purelib"))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_licence_that_only_the_metadata_name_is_read_there(tmp_path: Path) -> None:
    """The bill of materials takes over only what it knows."""
    stated = {
        "expression": "License-Expression: MIT OR Apache-2.0",
        "words": "License: 3-Clause BSD License",
        "classified": "License: UNKNOWN\nClassifier: License :: OSI Approved :: MIT License",
        "filed": "License: UNKNOWN\nLicense-File: LICENSE",
    }
    for name, lines in stated.items():
        package = tmp_path / f"{name}-1.dist-info"
        (package / "licenses").mkdir(parents=True)
        (package / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1\n{lines}\n")
        (package / "licenses" / "LICENSE").write_text("\n  ISC License\n\nCopyright\n")
    done = table_of([{"name": name, "version": "1"} for name in stated], tmp_path, tmp_path)
    assert (done.returncode, done.stdout.splitlines()[2:]) == (0, [
        "| classified | 1 | MIT License |",
        "| expression | 1 | MIT OR Apache-2.0 |",
        "| filed | 1 | ISC License |",
        "| words | 1 | 3-Clause BSD License |",
    ]), done.stderr  # fmt: skip


def test_a_package_without_a_licence_is_named(tmp_path: Path) -> None:
    free = {"name": "free", "version": "1", "licenses": [{"license": {"id": "MIT"}}]}
    done = table_of([free, {"name": "silent", "version": "2"}], tmp_path, tmp_path)
    assert "| silent | 2 | not stated |" in done.stdout
    assert (done.returncode, "no licence is stated by silent" in done.stderr) == (1, True)
