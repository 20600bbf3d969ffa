"""JSON Schemas (2020-12) of every command, answer and event, made from the models: one document each, with
all that it refers to.

Each says what one field says by itself. What ties fields together (a basket cannot wait, a price needs a
hold) is checked at the door and said in the models' words; a command that fits its schema can still be
answered `invalid`.
"""

import inspect
from typing import Any, Final, get_args

import msgspec

from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand
from grabstream.models.events import CURRENT_VERSIONS, AnyEvent

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
ANSWER: Final = "answers/answer"

Schema = dict[str, Any]


def documents() -> dict[str, Schema]:
    """All schemas by name: `commands/grab`, `answers/answer`, `events/grab.granted.v1` …, in order of their
    names.
    """
    found = {
        f"commands/{tag_of(command)}": schema_of(command, tag_of(command)) for command in get_args(AnyCommand)
    }
    found[ANSWER] = schema_of(Answer, "answer", nulls=False)
    found |= {
        event_name(tag_of(event)): schema_of(event, tag_of(event), nulls=False)
        for event in get_args(AnyEvent)
    }
    return {
        name: {"$schema": DIALECT, "$id": f"urn:grabstream:{name.replace('/', ':')}", **found[name]}
        for name in sorted(found)
    }


def event_name(type_: str, version: int | None = None) -> str:
    """What the schema of an event is called; without a version it is the current one."""
    return f"events/{type_}.v{version or CURRENT_VERSIONS[type_]}"


def tag_of(struct: type) -> str:
    """The `type` of a command or event."""
    return str(struct.__struct_config__.tag)  # type: ignore[attr-defined]


def schema_of(struct: type, title: str, nulls: bool = True) -> Schema:
    """The schema of one struct, with the ones it refers to under `$defs`.

    `nulls`: whether a field that may be left out may as well be null. It may in what we read; what we write
    has no null in it.
    """
    _, components = msgspec.json.schema_components([struct], ref_template="#/$defs/{name}")
    plain = {name: _plain(component, nulls) for name, component in components.items()}
    root = plain.pop(struct.__name__)
    return {**root, "title": title} | ({"$defs": dict(sorted(plain.items()))} if plain else {})


def _plain(schema: Any, nulls: bool) -> Any:
    """The same without the line breaks of docstrings, and without null where it is not meant."""
    if isinstance(schema, list | tuple):
        return [_plain(one, nulls) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if not nulls and schema.get("anyOf", [])[1:] == [{"type": "null"}]:
        rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
        return _plain({**schema["anyOf"][0], **rest}, nulls)
    return {
        key: _paragraphs(value) if key == "description" and isinstance(value, str) else _plain(value, nulls)
        for key, value in schema.items()
    }


def _paragraphs(docstring: str) -> str:
    """The text without indentation and without the line breaks inside its paragraphs."""
    return "\n\n".join(" ".join(one.split()) for one in inspect.cleandoc(docstring).split("\n\n"))
