"""Prints the table of all fields of an offer, generated from the models.

`--check docs/commands.md` compares the table in that file, `--write docs/commands.md` writes it there.
"""

import argparse
import re
import sys
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from grabstream.models.identifiers import ID_PATTERN
from grabstream.models.offers import Terms

BEGINS = "<!-- offer fields -->"
ENDS = "<!-- /offer fields -->"
HEAD = ("field", "kinds", "type", "default", "meaning")
KINDS: dict[str, type[msgspec.Struct]] = {
    str(struct.__struct_config__.tag): struct for struct in get_args(Terms)
}


class Incomplete(Exception):
    """A field has no description, or a file has no markers. The message names it and the remedy."""


def fields_table() -> str:
    """The table in Markdown. Raises Incomplete with the names of fields that have no description."""
    rows, undescribed = [_kind_row()], []
    kinds_of: dict[tuple[str, str, str, str], list[str]] = {}
    for kind, struct in KINDS.items():
        for field in msgspec.structs.fields(struct):
            meaning = _meaning(field.type)
            if not meaning:
                undescribed.append(f"{struct.__name__}.{field.encode_name}")
            kinds_of.setdefault(
                (field.encode_name, _type(field.encode_name, field.type), _default(field), meaning), []
            ).append(kind)
    if undescribed:
        raise Incomplete(
            f"no description in models/offers.py: {', '.join(undescribed)}; give each a Meta(description=…)"
        )
    # Fields of all kinds come first.
    for (name, type_, default, meaning), kinds in sorted(
        kinds_of.items(), key=lambda item: len(item[1]) < len(KINDS)
    ):
        rows.append(
            (f"`{name}`", "all" if len(kinds) == len(KINDS) else ", ".join(kinds), type_, default, meaning)
        )
    lines = [HEAD, ("---",) * len(HEAD), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _kind_row() -> tuple[str, ...]:
    """The row of `kind`, which is a tag and not a field of the structs. Its meanings are the first lines of
    the structs' docstrings.
    """
    lines = {
        kind: (struct.__doc__ or "").strip().partition("\n")[0].rstrip(".") for kind, struct in KINDS.items()
    }
    lines = {kind: re.sub(f"^{kind}s?: ", "", line, flags=re.IGNORECASE) for kind, line in lines.items()}
    if undocumented := [KINDS[kind].__name__ for kind, line in lines.items() if not line]:
        raise Incomplete(
            f"no docstring in models/offers.py: {', '.join(undocumented)}; its first line defines the kind"
        )
    meaning = "; ".join(f"`{kind}`: {line[0].lower()}{line[1:]}" for kind, line in lines.items())
    return ("`kind`", "all", _choices(KINDS), "required", meaning)


def _meaning(annotation: Any) -> str:
    """The outermost description of a field; inner ones describe its type."""
    descriptions = [
        meta.description
        for meta in getattr(annotation, "__metadata__", ())
        if isinstance(meta, msgspec.Meta) and meta.description
    ]
    return " ".join(descriptions[-1].split()) if descriptions else ""


def _type(name: str, annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        if {"pattern": ID_PATTERN} in (
            meta.extra_json_schema for meta in arguments[1:] if isinstance(meta, msgspec.Meta)
        ):
            return "id"
        return _type(name, arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(_type(name, member) for member in arguments if member is not type(None))
    if origin is tuple:
        return f"list of {arguments[0].__name__.lower().rstrip('s')}s"
    if origin is Literal:
        return _choices(arguments)
    if annotation is int:
        # By convention, names of points in time end with _at or _until, names of durations with _ms.
        return (
            "time, ms"
            if name.endswith(("_at", "_until"))
            else "duration, ms"
            if name.endswith("_ms")
            else "integer"
        )
    return {str: "text", bool: "true or false"}.get(annotation) or annotation.__name__


def _choices(values: Any) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return (
        "–"
        if default is None or default in ((), "")
        else f"`{msgspec.json.encode(default).decode().strip(chr(34))}`"
    )


def _around(text: str, name: str) -> tuple[str, str, str]:
    """A file's text before, between and after the markers."""
    parts = re.fullmatch(f"(.*{re.escape(BEGINS)})(.*)({re.escape(ENDS)}.*)", text, re.DOTALL)
    if parts is None or text.count(BEGINS) != 1 or text.count(ENDS) != 1:
        raise Incomplete(
            f"{name}: must contain {BEGINS} and after it {ENDS}, once each, around the table of offer fields"
        )
    return parts[1], parts[2], parts[3]


def main() -> int:
    """Prints, checks or writes the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--check",
        metavar="FILE",
        type=Path,
        help="exit 1 if the table between the markers of FILE differs",
    )
    action.add_argument(
        "--write", metavar="FILE", type=Path, help="write the table between the markers of FILE"
    )
    asked = parser.parse_args()
    file: Path | None = asked.check or asked.write
    try:
        table = fields_table()
        if file is None:
            sys.stdout.write(table)
            return 0
        # Without blank lines on both sides, Markdown would take the table for a part of the comment.
        wanted = f"\n\n{table}\n"
        before, between, after = _around(file.read_text(encoding="utf-8"), file.name)
    except (Incomplete, OSError) as error:
        sys.stderr.write(f"offer fields: {error}\n")
        return 1
    if asked.write:
        file.write_text(before + wanted + after, encoding="utf-8")
    elif between != wanted:
        missing = next((line for line in table.splitlines() if line not in between.splitlines()), None)
        none_missing = "no line is missing: there are surplus lines, or lines in another order"
        sys.stderr.write(
            f"offer fields: {file}: the table differs from models/offers.py; "
            f"`python scripts/offer_fields.py --write {file}` writes it\n"
            f"  {f'first missing line: {missing}' if missing else none_missing}\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
