"""Prints the table of all fields of an offer, from the models.

`--check docs/commands.md` compares it, `--write docs/commands.md` writes it there.
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
    """Fields without a meaning, or a file without markers: `str(error)` says which, and what to do."""


def fields_table() -> str:
    """The table in Markdown; raises Incomplete, naming the fields, when the models do not say what they
    mean.
    """
    rows, nameless = [_kind_row()], []
    kinds_of: dict[tuple[str, str, str, str], list[str]] = {}
    for kind, struct in KINDS.items():
        for field in msgspec.structs.fields(struct):
            meaning = _meaning(field.type)
            if not meaning:
                nameless.append(f"{struct.__name__}.{field.encode_name}")
            kinds_of.setdefault(
                (field.encode_name, _type(field.encode_name, field.type), _default(field), meaning), []
            ).append(kind)
    if nameless:
        raise Incomplete(
            f"no description in models/offers.py: {', '.join(nameless)}; give each a Meta(description=…)"
        )
    # What all kinds have comes first, whatever kind the models name first.
    for (name, type_, default, meaning), kinds in sorted(
        kinds_of.items(), key=lambda item: len(item[1]) < len(KINDS)
    ):
        rows.append(
            (f"`{name}`", "all" if len(kinds) == len(KINDS) else ", ".join(kinds), type_, default, meaning)
        )
    lines = [HEAD, ("---",) * len(HEAD), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _kind_row() -> tuple[str, ...]:
    """The tag is no field of the structs; what a kind is, its struct's first line says."""
    said = {
        kind: (struct.__doc__ or "").strip().partition("\n")[0].rstrip(".") for kind, struct in KINDS.items()
    }
    said = {kind: re.sub(f"^{kind}s?: ", "", line, flags=re.IGNORECASE) for kind, line in said.items()}
    if silent := [KINDS[kind].__name__ for kind, line in said.items() if not line]:
        raise Incomplete(
            f"no docstring in models/offers.py: {', '.join(silent)}; its first line says what the kind is"
        )
    meaning = "; ".join(f"`{kind}`: {line[0].lower()}{line[1:]}" for kind, line in said.items())
    return ("`kind`", "all", _choices(KINDS), "required", meaning)


def _meaning(annotation: Any) -> str:
    """The outermost description: what stands inside is of the type, not of the field."""
    said = [
        one.description
        for one in getattr(annotation, "__metadata__", ())
        if isinstance(one, msgspec.Meta) and one.description
    ]
    return " ".join(said[-1].split()) if said else ""


def _type(name: str, annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        if {"pattern": ID_PATTERN} in (
            one.extra_json_schema for one in arguments[1:] if isinstance(one, msgspec.Meta)
        ):
            return "id"
        return _type(name, arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(_type(name, one) for one in arguments if one is not type(None))
    if origin is tuple:
        return f"list of {arguments[0].__name__.lower().rstrip('s')}s"
    if origin is Literal:
        return _choices(arguments)
    if annotation is int:
        # By the contract's convention: points in time end with _at or _until, lengths of time with _ms.
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
    found = re.fullmatch(f"(.*{re.escape(BEGINS)})(.*)({re.escape(ENDS)}.*)", text, re.DOTALL)
    if found is None or text.count(BEGINS) != 1 or text.count(ENDS) != 1:
        raise Incomplete(
            f"{name}: must have {BEGINS} and after it {ENDS}, once each, where the table of offer fields "
            "belongs"
        )
    return found[1], found[2], found[3]


def main() -> int:
    """Prints, checks or writes; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--check",
        metavar="FILE",
        type=Path,
        help="exit 1 unless the table between the markers of FILE is this one",
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
        # A blank line on both sides, or Markdown takes the table for a part of the comment.
        wanted = f"\n\n{table}\n"
        before, between, after = _around(file.read_text(encoding="utf-8"), file.name)
    except (Incomplete, OSError) as error:
        sys.stderr.write(f"offer fields: {error}\n")
        return 1
    if asked.write:
        file.write_text(before + wanted + after, encoding="utf-8")
    elif between != wanted:
        lost = next((line for line in table.splitlines() if line not in between.splitlines()), None)
        none_lost = "no line is missing: some are too many, or in another order"
        sys.stderr.write(
            f"offer fields: {file}: the table is not that of models/offers.py; "
            f"`python scripts/offer_fields.py --write {file}` mends it\n"
            f"  {f'first line that is missing there: {lost}' if lost else none_lost}\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
