"""Checks docs/bounds.md, the page of all bounds: exits 1 unless every number that names a constant equals it,
every constant that must be in the page is there, and so is the row of every numeric setting.

A number names its constant in a comment after it: `4 MiB<!-- models.bounds.RECORD_BYTES_MAX -->`, or
`2,500<!-- lua/includes/cost.lua:call_max -->`.
"""

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final, get_args

from annotated_types import Ge, Gt, Le

from grabstream.settings import SECRETS, Settings

ROOT: Final = Path(__file__).parents[1]
#: The modules of which every bound (`…_MAX`) must be in the page.
WHOLE: Final = (
    "gateway.bounds", "models.bounds", "models.commands", "models.identifiers", "models.money",
    "models.offers", "models.payments",
)  # fmt: skip
#: The meaning of a unit: counts, bytes, and milliseconds.
UNITS: Final = {
    "": 1, "bytes": 1, "KiB": 1024, "MiB": 1024**2,
    "ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "days": 24 * 3_600_000,
}  # fmt: skip
_named = re.compile(r"(?:([\d,.]+)(?: ([A-Za-z]+))?|permanent)?<!-- (\S+) -->")


def constant(name: str) -> Any:
    """The value of `module.NAME`, `module.NAME.member` or `file.lua:name`. Raises LookupError, ImportError or
    AttributeError if there is none.
    """
    file, _, local = name.partition(":")
    if local:
        text = (ROOT / "grabstream" / file).read_text(encoding="utf-8")
        return int(re.findall(rf"\b{local} = (\d+)", text)[0])
    module, _, word = re.sub(r"\.(?=[A-Z])", " ", name, count=1).partition(" ")
    value: Any = import_module(f"grabstream.{module}")
    for member in word.split("."):
        value = value[member] if isinstance(value, dict) else getattr(value, member)
    return value


def must_be_named() -> Iterator[str]:
    """The constants that the page must name: those that the modules define, not those that they import."""
    for module in WHOLE:
        text = Path(import_module(f"grabstream.{module}").__file__ or "").read_text(encoding="utf-8")
        yield from (f"{module}.{word}" for word in re.findall(r"^([A-Z]\w*_MAX)\b", text, re.MULTILINE))


def setting_rows() -> Iterator[str]:
    """The row of each numeric setting: its name, range and default."""
    for name, field in Settings.model_fields.items():
        if name in SECRETS or not {int, float} & {field.annotation, *get_args(field.annotation)}:
            continue
        signs = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"))
        within = (f"{s} {getattr(m, w):,}" for m in field.metadata for t, w, s in signs if isinstance(m, t))
        default = "–" if field.default is None else f"{field.default:,}"
        yield f"| `GRAB_{name.upper()}` | {', '.join(within)} | {default} |"


def problems(page: str) -> Iterator[str]:
    """The errors of the page, a sentence each."""
    named = set()
    for number, unit, name in _named.findall(page):
        named.add(name)
        try:
            value = constant(name) * (1000 if "SECONDS" in name else 1)
        except (AttributeError, ImportError, LookupError, OSError) as error:
            yield f"{name}: no such constant ({error!r})"
            continue
        if unit not in UNITS or value != (float(number.replace(",", "")) * UNITS[unit] if number else -1):
            yield f"{name} is {constant(name)!r}, and the page says {number or 'permanent'} {unit}".rstrip()
    yield from (f"{name} is not in the page" for name in must_be_named() if name not in named)
    wanted, lines = set(setting_rows()), {line for line in page.splitlines() if line.startswith("| `GRAB_")}
    yield from (f"this row is missing: {row}" for row in sorted(wanted - lines))
    yield from (f"this row has no numeric setting: {row}" for row in sorted(lines - wanted))


if __name__ == "__main__":
    wrong = list(problems((ROOT / "docs/bounds.md").read_text(encoding="utf-8")))
    sys.exit("\n".join(f"docs/bounds.md: {sentence}" for sentence in wrong) or None)
