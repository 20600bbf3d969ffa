"""`python scripts/licences.py BILL`: the packages of a CycloneDX bill of materials and their licences, as a
table. Exit code 1, with the names of the packages, if some state none.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

#: Packages whose metadata state a licence in words, not by a name that the bill of materials takes over.
READ_BY_HAND: Final = {"protobuf": "BSD-3-Clause"}


def licence_of(component: Mapping[str, Any]) -> str:
    """The licence of a component: its expression, or the ids and names that it states."""
    found = component.get("licenses", ())
    stated = [one.get("expression") or one["license"].get("id") or one["license"]["name"] for one in found]
    names = (text.splitlines()[0].rpartition(":: ")[2] for text in stated if len(text) < 200)
    return ", ".join(dict.fromkeys(names)) or READ_BY_HAND.get(component["name"], "")


def main() -> int:
    """Prints the table."""
    bill = json.loads(Path(sys.argv[1]).read_text())
    rows = [(one["name"], one["version"], licence_of(one)) for one in bill["components"]]
    lines = [f"| {name} | {version} | {licence or 'not stated'} |" for name, version, licence in sorted(rows)]
    sys.stdout.write("\n".join(["| package | version | licence |", "|---|---|---|", *lines, ""]))
    silent = [name for name, _, licence in rows if not licence]
    if silent:
        sys.stderr.write(f"no licence is stated by {', '.join(silent)}: read it, and name it in {__file__}\n")
    return int(bool(silent))


if __name__ == "__main__":
    sys.exit(main())
