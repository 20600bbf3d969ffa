"""Adds the allowed values to the decoder's message about an invalid command: those of an enum, or the nearest
name of a field.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec

#: Names that are listed when none is near.
NAMES_LISTED_MAX: Final = 16
NAME_LENGTH_MAX: Final = 64

_parts = re.compile(r"(?P<problem>.*?)(?P<place> - at `\$\.?(?P<path>[^`]*)`)?\Z", re.DOTALL).fullmatch
_is_wrong_value = re.compile(r"Invalid (enum )?value ").match
_unknown_name = re.compile(r"Object contains unknown field `([^`]*)`\Z").match
_hinted = re.compile(
    r"(?P<problem>.*) \((?:must be one of|the nearest is|the fields are) [^()]*\)"
    r"(?P<place> - at `\$[^`]*`)?\Z",
    re.DOTALL,
).match


class _FieldWords(msgspec.Struct):
    kind: str | None = None


class _Tagged(msgspec.Struct):
    type: str | None = None
    terms: _FieldWords | None = None


_decode_tagged = msgspec.json.Decoder(_Tagged).decode


def with_what_may_be(reason: str, raw: bytes, commands: Any) -> str:
    """The reason why one of `commands`, a union of structs, could not be decoded from `raw`, with the allowed
    values; unchanged if they are unknown.
    """
    parts = _parts(reason)
    if parts is None:
        return reason
    hint = _hint_for(parts["problem"], parts["path"] or "", raw, commands)
    return f"{parts['problem']} ({hint}){parts['place'] or ''}" if hint else reason


def without_what_may_be(reason: str) -> str:
    """The reason as the decoder gave it. Values and names that it quotes may look like the addition."""
    hinted = _hinted(reason)
    return f"{hinted['problem']}{hinted['place'] or ''}" if hinted else reason


def _hint_for(problem: str, path: str, raw: bytes, commands: Any) -> str | None:
    names = [name for name in re.sub(r"\[[^][]*\]", "", path).split(".") if name]
    if _is_wrong_value(problem) and names:
        values = _values_of(_structs_at(names[:-1], None, commands), names[-1])
        return f"must be one of {', '.join(values)}" if values else None
    if unknown := _unknown_name(problem):
        structs = _structs_at(names, _tags_of(raw), commands)
        known = list(dict.fromkeys(name for struct in structs for name in fields_of(struct)))
        name = unknown[1][:NAME_LENGTH_MAX]
        if near := get_close_matches(name, known, n=1):
            return f"the nearest is {near[0]}" if near[0] != name else None
        return f"the fields are {', '.join(known)}" if 0 < len(known) <= NAMES_LISTED_MAX else None
    return None


def _tags_of(raw: bytes) -> tuple[str, ...]:
    """The type of a command and the kind of its terms, as far as they can be read."""
    try:
        tagged = _decode_tagged(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
    return tuple(filter(None, (tagged.type, tagged.terms.kind if tagged.terms else None)))


def _structs_at(names: Iterable[str], tags: tuple[str, ...] | None, commands: Any) -> list[Any]:
    """The structs that may be at a path; with `tags`, those that have one of them, if there are any."""
    found = _structs(commands)
    for depth, name in enumerate(["", *names]):
        if depth:
            found = [
                inner for struct in found if name in fields_of(struct)
                for inner in _structs(fields_of(struct)[name].type)
            ]  # fmt: skip
        tagged = [struct for struct in found if struct.__struct_config__.tag in (tags or ())]
        found = tagged or found
    return found


def _values_of(structs: Iterable[Any], name: str) -> list[str]:
    """The values that a field of the structs may have, or the tags of the structs."""
    values: dict[str, None] = {}
    for struct in structs:
        config = struct.__struct_config__
        if config.tag_field == name:
            values[str(config.tag)] = None
        elif name in fields_of(struct):
            for type_ in plain_types(fields_of(struct)[name].type):
                if get_origin(type_) is Literal:
                    values |= dict.fromkeys(map(str, get_args(type_)))
    return list(values)


@cache
def fields_of(struct: Any) -> dict[str, msgspec.structs.FieldInfo]:
    """The fields of a struct, by their names in JSON."""
    return {field.encode_name: field for field in msgspec.structs.fields(struct)}


def _structs(annotation: Any) -> list[Any]:
    return [
        type_ for type_ in plain_types(annotation)
        if isinstance(type_, type) and issubclass(type_, msgspec.Struct)
    ]  # fmt: skip


def plain_types(annotation: Any) -> list[Any]:
    """The types that an annotation allows; for a list, those of the elements."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return plain_types(get_args(annotation)[0])
    if origin in (Union, UnionType, tuple, list):
        return [plain for inner in get_args(annotation) for plain in plain_types(inner)]
    return [annotation]
