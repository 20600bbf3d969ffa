"""The schemas in the tree: writes them from the models, says when they are stale, compares them with the last
release.

`python scripts/schemas.py` writes `schemas/`.

- `--check`: exit 1 unless `schemas/` is what the models say.
- `--compare`: exit 1 when a change since the last release breaks other people's programs.
- `--release 0.2.0`: keeps what is there now as the contract of a release.
"""

import argparse
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

from grabstream.models.events import CURRENT_VERSIONS
from grabstream.models.upcasters import UPCASTERS
from grabstream.models.upcasting import FIRST_VERSION
from grabstream.ops.schemas.asyncapi import document
from grabstream.ops.schemas.documents import documents, event_name
from grabstream.ops.schemas.releases import (
    Change,
    Contract,
    changes_between,
    last_release,
    read_release,
    verdict_of,
)

ROOT = Path(__file__).parents[1]


class Unfinished(Exception):
    """The tree lacks something that cannot be generated."""


class _Plain(yaml.SafeDumper):
    """Says everything in full: an anchor saves lines, but no reader."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def contract_of(folder: Path) -> Contract:
    """What the models say today, and the events of older versions as the tree keeps them; raises Unfinished
    when one is not there.
    """
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
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
    return Contract(dict(sorted({**documents(), **older}.items())), document(version))


def files_of(contract: Contract) -> dict[str, str]:
    """The text of every file of the tree, by its path in the folder."""
    found = {f"{name}.json": _json(schema) for name, schema in contract.schemas.items()}
    made = "# Made from the models by scripts/schemas.py.\n"
    return {
        **found,
        "asyncapi.yaml": made
        + yaml.dump(contract.asyncapi, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=140),
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def stale_files(folder: Path, wanted: dict[str, str]) -> dict[str, str]:
    """Files that are not what the models say, and what is wrong with each."""
    there = {
        str(path.relative_to(folder)): path
        for path in folder.rglob("*.*")
        if path.parent != folder / "released"
    }
    stale = {name: "is missing" for name in wanted if name not in there}
    stale |= {name: "belongs to nothing" for name in there if name not in wanted}
    stale |= {
        name: "is stale"
        for name, path in there.items()
        if name in wanted and path.read_text(encoding="utf-8") != wanted[name]
    }
    return dict(sorted(stale.items()))


def write(folder: Path, wanted: dict[str, str]) -> dict[str, str]:
    """Writes what is stale and deletes what belongs to nothing; returns what was done."""
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
    """Keeps the contract of a release; raises FileExistsError when it was kept before, since a release does
    not change.
    """
    path = folder / "released" / f"{version}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.write(_json({"version": version, "schemas": contract.schemas, "asyncapi": contract.asyncapi}))
    return path


def report(version: str, changes: list[Change]) -> str:
    """The changes for people, the worst first; what is only compatible is counted."""
    lines = []
    for change in changes:
        if change.verdict != "compatible":
            lines.append(f"  {change.verdict:<9} {change.name} {change.where}: {change.words}")
            lines += [f"            → {change.way_out}"] if change.way_out else []
    counts = {
        verdict: sum(change.verdict == verdict for change in changes)
        for verdict in ("breaking", "warning", "compatible")
    }
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "no change"
    verdict = "breaking" if verdict_of(changes) == "breaking" else "compatible"
    return "\n".join([f"schemas since {version}: {verdict} ({said})", *lines])


def main() -> int:
    """Writes, checks, compares or keeps; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="only say what is stale")
    action.add_argument("--compare", action="store_true", help="only compare with the last release")
    action.add_argument("--release", metavar="VERSION", help="keep the contract of a release")
    parser.add_argument("--since", metavar="VERSION", help="with --compare: an earlier release")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "schemas", help="where the schemas are (schemas/)"
    )
    parser.add_argument("--json", action="store_true", help="say it as JSON")
    asked = parser.parse_args()
    try:
        contract = contract_of(asked.folder)
        if asked.compare:
            return _compare(asked.folder, asked.since, contract, asked.json)
        if asked.release:
            kept = release(asked.folder, asked.release, contract)
            _say(asked.json, {"kept": kept.name}, f"schemas: {kept.name} kept")
            return 0
        wanted = files_of(contract)
        if asked.check:
            stale = stale_files(asked.folder, wanted)
            lines = [f"schemas: {name} {what}" for name, what in stale.items()]
            _say(
                asked.json,
                {"stale": stale},
                "\n".join([*lines, "`python scripts/schemas.py` writes them anew"] if lines else []),
            )
            return 1 if stale else 0
        done = write(asked.folder, wanted)
        _say(asked.json, {"done": done}, "\n".join(f"schemas: {name} {what}" for name, what in done.items()))
    except FileExistsError:
        sys.stderr.write(
            f"schemas: {asked.release} is released, and a release does not change; take the next version\n"
        )
        return 1
    except (Unfinished, OSError) as error:
        sys.stderr.write(f"schemas: {error}\n")
        return 1
    return 0


def _compare(folder: Path, since: str | None, contract: Contract, as_json: bool) -> int:
    version = since or last_release(folder / "released")
    if version is None:
        raise Unfinished(
            "nothing was released yet; `python scripts/schemas.py --release VERSION` keeps the first contract"
        )
    changes = changes_between(
        read_release(folder / "released", version),
        contract,
        {(step.type, step.from_version) for step in UPCASTERS},
    )
    verdict = verdict_of(changes)
    _say(
        as_json,
        {"since": version, "verdict": verdict, "changes": [change._asdict() for change in changes]},
        report(version, changes),
    )
    return 1 if verdict == "breaking" else 0


def _say(as_json: bool, value: dict[str, Any], words: str) -> None:
    text = json.dumps(value, ensure_ascii=False) if as_json else words
    if text:
        sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
