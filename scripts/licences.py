"""`python scripts/licences.py BILL PACKAGES`: the packages of a CycloneDX bill of materials and their
licences, as a table. What the bill does not name is read from the metadata in PACKAGES, the directory in
which they are installed. Exit code 1, with the names of the packages, if some state none.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any


def licence_of(component: Mapping[str, Any], package: Distribution | None) -> str:
    """The licence of a component: its expression, or the ids and names that it states; else what its package
    states.
    """
    found = component.get("licenses", ())
    stated = [one.get("expression") or one["license"].get("id") or one["license"]["name"] for one in found]
    names = [_name(text) for text in stated if len(text) < 200]
    return ", ".join(dict.fromkeys(names)) or (_stated_by(package) if package else "")


def _stated_by(package: Distribution) -> str:
    """The licence that the metadata of a package state, or the first line of its licence file; or nothing."""
    return next((name for text in _texts(package) if (name := _name(text)) not in ("", "UNKNOWN")), "")


def _texts(package: Distribution) -> Iterator[str]:
    stated = package.metadata
    yield from (*stated.get_all("License-Expression", ()), *stated.get_all("License", ()))
    yield from (text for text in stated.get_all("Classifier", ()) if text.startswith("License ::"))
    for file in stated.get_all("License-File", ()):
        # Before version 2.4 of the metadata, the files were not in a folder of their own.
        yield package.read_text(f"licenses/{file}") or package.read_text(file) or ""


def _name(text: str) -> str:
    """The name of a licence: the last word of a classifier, or the first line of a text."""
    return text.strip().partition("\n")[0].strip().rpartition(":: ")[2]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    """Prints the table."""
    bill, packages = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    installed = {_normal(package.name): package for package in distributions(path=[packages])}
    rows = [
        (one["name"], one["version"], licence_of(one, installed.get(_normal(one["name"]))))
        for one in bill["components"]
    ]
    lines = [f"| {name} | {version} | {licence or 'not stated'} |" for name, version, licence in sorted(rows)]
    sys.stdout.write("\n".join(["| package | version | licence |", "|---|---|---|", *lines, ""]))
    silent = [name for name, _, licence in rows if not licence]
    if silent:
        sys.stderr.write(f"no licence is stated by {', '.join(silent)}: nobody may pass them on\n")
    return int(bool(silent))


if __name__ == "__main__":
    sys.exit(main())
