"""Generates the schemas in `schemas/` from the models, and compares them with the last release.

`python scripts/schemas.py` writes `schemas/`.

- `--check`: exit 1 if `schemas/` differs from the models.
- `--compare`: exit 1 if a change since the last release breaks programs of senders or readers. Before the
  first release there is nothing to compare with.
- `--release 0.2.0`: stores the current schemas as the contract of a release.
"""

import argparse
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

from grabstream.gateway import openapi
from grabstream.models.events import CURRENT_VERSIONS
from grabstream.models.schema_documents import documents, payment_documents
from grabstream.models.schema_ids import event_name
from grabstream.models.upcasters import UPCASTERS
from grabstream.models.upcasting import FIRST_VERSION
from grabstream.workshop.schemas.asyncapi import document
from grabstream.workshop.schemas.releases import (
    Contract,
    SchemaChange,
    changes_between,
    last_release,
    read_release,
    verdict_of,
)

ROOT = Path(__file__).parents[1]


class Unfinished(Exception):
    """The tree lacks a file that cannot be generated."""


class _Plain(yaml.SafeDumper):
    """Writes repeated values in full: YAML anchors save lines, but are hard to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def contract_of(folder: Path) -> Contract:
    """The schemas of the models, and those of older event versions, which are stored in the tree. Raises
    Unfinished if one is missing.
    """
    older: dict[str, Any] = {}
    for type_, current in CURRENT_VERSIONS.items():
        for number in range(FIRST_VERSION, current):
            name = event_name(type_, number)
            path = folder / f"{name}.json"
            if not path.is_file():
                raise Unfinished(
                    f"{path.name}: {type_} is at v{current}; keep the schema of v{number}, take it from the "
                    "last release"
                )
            older[name] = json.loads(path.read_text(encoding="utf-8"))
    schemas = {**documents(), **payment_documents(), **older}
    version = version_of_tree()
    return Contract(dict(sorted(schemas.items())), document(version), openapi.document(version))


def version_of_tree() -> str:
    """The version in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def files_of(contract: Contract) -> dict[str, str]:
    """The text of every schema file, by its path in the folder."""
    schema_files = {f"{name}.json": _json(schema) for name, schema in contract.schemas.items()}
    head = "# Made from the models by scripts/schemas.py.\n"
    return {
        **schema_files,
        "openapi.json": _json(contract.openapi),
        "asyncapi.yaml": head
        + yaml.dump(contract.asyncapi, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=140),
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def stale_files(folder: Path, wanted: dict[str, str]) -> dict[str, str]:
    """Files that differ from the models, and how, by path."""
    existing = {
        str(path.relative_to(folder)): path
        for path in folder.rglob("*.*")
        if path.parent != folder / "released"
    }
    stale = {name: "is missing" for name in wanted if name not in existing}
    stale |= {name: "belongs to nothing" for name in existing if name not in wanted}
    stale |= {
        name: "is stale"
        for name, path in existing.items()
        if name in wanted and path.read_text(encoding="utf-8") != wanted[name]
    }
    return dict(sorted(stale.items()))


def write(folder: Path, wanted: dict[str, str]) -> dict[str, str]:
    """Writes stale files and deletes files without a model; returns the actions, by path."""
    done = {}
    for name in stale_files(folder, wanted):
        path = folder / name
        if name in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[name], encoding="utf-8")
        else:
            path.unlink()
        done[name] = "written" if name in wanted else "deleted"
    return done


def release(folder: Path, version: str, contract: Contract) -> Path:
    """Stores the contract of a release; returns its file. Raises FileExistsError if the release is stored
    already, since a release never changes.
    """
    path = folder / "released" / f"{version}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.write(_json({"version": version} | contract._asdict()))
    return path


def report(version: str, changes: list[SchemaChange]) -> str:
    """The changes as text, the worst first; compatible changes are only counted."""
    lines = []
    for change in changes:
        if change.verdict != "compatible":
            lines.append(f"  {change.verdict:<9} {change.name} {change.where}: {change.words}")
            lines += [f"            → {change.way_out}"] if change.way_out else []
    counts = {
        verdict: sum(change.verdict == verdict for change in changes)
        for verdict in ("breaking", "warning", "compatible")
    }
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "no change"
    verdict = "breaking" if verdict_of(changes) == "breaking" else "compatible"
    return "\n".join([f"schemas since {version}: {verdict} ({summary})", *lines])


def main() -> int:
    """Writes, checks, compares or stores the schemas; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="only print stale files")
    action.add_argument("--compare", action="store_true", help="only compare with the last release")
    action.add_argument("--release", metavar="VERSION", help="store the contract of a release")
    parser.add_argument("--since", metavar="VERSION", help="with --compare: an earlier release")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "schemas", help="where the schemas are (schemas/)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    try:
        contract = contract_of(asked.folder)
        if asked.compare:
            return _compare(asked.folder, asked.since, contract, asked.json)
        if asked.release:
            stored = release(asked.folder, asked.release, contract)
            _print(asked.json, {"kept": stored.name}, f"schemas: {stored.name} stored")
            return 0
        wanted = files_of(contract)
        if asked.check:
            stale = stale_files(asked.folder, wanted)
            lines = [f"schemas: {name} {what}" for name, what in stale.items()]
            _print(
                asked.json,
                {"stale": stale},
                "\n".join([*lines, "`python scripts/schemas.py` writes them"] if lines else []),
            )
            return 1 if stale else 0
        done = write(asked.folder, wanted)
        _print(
            asked.json, {"done": done}, "\n".join(f"schemas: {name} {what}" for name, what in done.items())
        )
    except FileExistsError:
        sys.stderr.write(
            f"schemas: {asked.release} is released, and a release never changes; use the next version\n"
        )
        return 1
    except (Unfinished, OSError) as error:
        sys.stderr.write(f"schemas: {error}\n")
        return 1
    return 0


def _compare(folder: Path, since: str | None, contract: Contract, as_json: bool) -> int:
    version = since or last_release(folder / "released")
    if version is None:
        nothing = {"since": None, "verdict": "compatible", "changes": []}
        _print(as_json, nothing, "schemas: nothing is released yet, so there is nothing to compare with")
        return 0
    changes = changes_between(
        read_release(folder / "released", version),
        contract,
        {(step.type, step.from_version) for step in UPCASTERS},
    )
    verdict = verdict_of(changes)
    _print(
        as_json,
        {"since": version, "verdict": verdict, "changes": [change._asdict() for change in changes]},
        report(version, changes),
    )
    return 1 if verdict == "breaking" else 0


def _print(as_json: bool, value: dict[str, Any], words: str) -> None:
    text = json.dumps(value, ensure_ascii=False) if as_json else words
    if text:
        sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
