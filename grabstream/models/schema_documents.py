"""JSON Schemas (2020-12) of every command, answer and event, and of the claims of signed texts about
payments, generated from the models: one document each, with all its references included.

A schema checks single fields. Rules about several fields (a basket cannot wait, a price needs a hold) are
checked when a command is decoded, so a command that fits its schema can still be answered `invalid`.
"""

import inspect
from typing import Any, Final, get_args

import msgspec

from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand
from grabstream.models.events import AnyEvent
from grabstream.models.payments import PaymentAnswer, PaymentQuery, PaymentToken, Receipt
from grabstream.models.refused import Refused
from grabstream.models.runs import RUN_VERSION, AnyRun
from grabstream.models.schema_ids import event_name, schema_id

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
ANSWER: Final = "answers/answer"
REFUSED: Final = "answers/refused.v1"

Schema = dict[str, Any]


def documents() -> dict[str, Schema]:
    """All schemas by name, sorted: `answers/answer`, `commands/grab`, `events/grab.granted.v1` …"""
    schemas = {
        f"commands/{tag_of(command)}": schema_of(command, tag_of(command)) for command in get_args(AnyCommand)
    }
    schemas[ANSWER] = schema_of(Answer, "answer", nulls=False)
    schemas[REFUSED] = schema_of(Refused, "refused", nulls=False)
    schemas |= _event_schemas()
    # The values of a column may be null where a grab has none.
    schemas |= {run_name(tag_of(run)): schema_of(run, f"{tag_of(run)} (run)") for run in get_args(AnyRun)}
    return _identified(schemas)


def event_documents() -> dict[str, Schema]:
    """The schemas of the values of `grab.events`, by the end of their ids: `grab.granted.v1` …"""
    return {name.removeprefix("events/"): schema for name, schema in _identified(_event_schemas()).items()}


def _event_schemas() -> dict[str, Schema]:
    return {
        event_name(tag_of(event)): schema_of(event, tag_of(event), nulls=False)
        for event in get_args(AnyEvent)
    }


def payment_documents() -> dict[str, Schema]:
    """The schemas of the claims of signed texts about payments, by name: `payments/receipt` …"""
    return _identified(
        {
            f"payments/{name}": schema_of(claims, f"payment {name}", nulls=are_read)
            for name, claims, are_read in (
                ("answer", PaymentAnswer, True), ("query", PaymentQuery, False), ("receipt", Receipt, True),
                ("token", PaymentToken, False),
            )
        }
    )  # fmt: skip


def _identified(schemas: dict[str, Schema]) -> dict[str, Schema]:
    return {name: {"$schema": DIALECT, "$id": schema_id(name), **schemas[name]} for name in sorted(schemas)}


def run_name(type_: str) -> str:
    """The name of the schema of a run, which only the journal and the audit trail have: elsewhere its grabs
    are events of the current version.
    """
    return f"journal/{type_}.v{RUN_VERSION}"


def tag_of(struct: type) -> str:
    """The `type` of a command or event."""
    return str(struct.__struct_config__.tag)  # type: ignore[attr-defined]


def schema_of(struct: type, title: str, nulls: bool = True) -> Schema:
    """The schema of a struct, with the schemas it refers to under `$defs`.

    `nulls`: whether an optional field may be null. It may be in input of grabstream; its output omits the
    field instead.
    """
    _, components = msgspec.json.schema_components([struct], ref_template="#/$defs/{name}")
    plain = {name: _plain(component, nulls) for name, component in components.items()}
    root = plain.pop(struct.__name__)
    return {**root, "title": title} | ({"$defs": dict(sorted(plain.items()))} if plain else {})


def _plain(schema: Any, nulls: bool) -> Any:
    """The schema without the line breaks of docstrings, and without null unless `nulls`."""
    if isinstance(schema, list | tuple):
        return [_plain(member, nulls) for member in schema]
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
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(docstring).split("\n\n"))
