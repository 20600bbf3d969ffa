"""The types of the JavaScript client that follow from the models: outcomes, answers, terms, documents, and
the fields of commands and questions. They are between two lines of `client/javascript/grabstream.d.mts`; the
rest after them is written by hand.
"""

import re
import textwrap
from typing import Any, Final, get_args

import msgspec

from grabstream.client.exchange import ServedAnswer
from grabstream.gateway.operations import AFTER, OPERATIONS
from grabstream.models import answers, offers
from grabstream.models.outcomes import OUTCOME_NAMES, Outcome
from grabstream.models.vocabulary.documents import DOCUMENTS
from scripts.command_fields import FIELDS

BEGINS: Final = "// Made from the models by `python -m scripts.generated`, up to the line of dashes.\n"
ENDS: Final = f"\n// {'-' * 107}\n"
WIDTH: Final = 110

#: The documents of the questions that the client has methods for, by operation, and the names of their types
#: where they are not those of the documents.
_QUESTIONS: Final = ("offers", "offer", "offer_grabs", "user_balances", "user_grabs", "user_transfers")
_NAMES: Final = {"OfferSummary": "Offer"}
#: Types of fields that their schemas do not give. A number would round large sums of amounts, from 2^53.
_TYPES: Final = {
    ("Balance", "available"): "number | bigint",
    ("Balance", "held"): "number | bigint",
    ("OfferDetail", "terms"): "Terms",
}

Schema = dict[str, Any]


def written_into(text: str) -> str:
    """The file with its generated part replaced. Raises ValueError when it lacks one of the two lines."""
    before, begins, rest = text.partition(BEGINS)
    _, ends, after = rest.partition(ENDS)
    if not ends:
        raise ValueError(f"grabstream.d.mts: must contain {BEGINS!r} and after it {ENDS!r}")
    return before + begins + source() + ends + after


def source() -> str:
    """The generated part."""
    parts = [_comment(Outcome.__doc__ or "", "") + _union("Outcome", map(repr, OUTCOME_NAMES.values()))]
    structs = [answers.Answer, *get_args(offers.Terms), offers.Changes]
    _, components = msgspec.json.schema_components(structs, ref_template="{name}")
    served = ServedAnswer.model_json_schema()
    for name in ServedAnswer.__annotations__:
        components["Answer"]["properties"][name] = served["properties"][name]
    parts += [_interface(name, schema) for name, schema in sorted(components.items())]
    parts.append(_union("Terms", (struct.__name__ for struct in get_args(offers.Terms))))
    for name, (struct, given) in FIELDS.items():
        _, components = msgspec.json.schema_components([struct], ref_template="{name}")
        parts.append(_interface(name, _without(components[struct.__name__], given)))
    documents: dict[str, Schema] = {}
    for operation in _QUESTIONS:
        schema = DOCUMENTS[operation].model_json_schema(mode="serialization", ref_template="{model}")
        documents |= {**schema.pop("$defs", {}), DOCUMENTS[operation].__name__: schema}
    parts += [_interface(name, schema) for name, schema in sorted(documents.items())]
    parts += _questions()
    return "\n".join(["", *parts])


def _without(schema: Schema, names: frozenset[str]) -> Schema:
    fields = {name: field for name, field in schema["properties"].items() if name not in names | {"type"}}
    return {**schema, "properties": fields}


def _questions() -> list[str]:
    """What questions may ask in addition to a page and an event to wait for."""
    found = []
    for operation in OPERATIONS:
        own = [one for one in operation.parameters if one.name not in ("limit", "cursor", AFTER.name)]
        if operation.name in _QUESTIONS and own:
            lines = []
            for parameter in own:
                kind = " | ".join(map(repr, parameter.choices)) if parameter.choices else "string"
                lines += [_comment(parameter.meaning, "  "), f"  {parameter.name}?: {kind}\n"]
            name = "".join(word.title() for word in operation.name.split("_"))
            found.append(f"export interface {name}Asked extends PageAsked {{\n{''.join(lines)}}}\n")
    return found


def _union(name: str, members: Any) -> str:
    words = textwrap.fill(" | ".join(members), WIDTH - 4, break_on_hyphens=False)
    # A member of a list that continues begins its line with the bar.
    lines = re.sub(r" \|\n", "\n| ", words)
    return f"export type {name} =\n  | " + lines.replace("\n", "\n  ") + "\n"


def _interface(name: str, schema: Schema) -> str:
    required = {*schema.get("required", ()), *(schema["properties"].keys() & {"kind"})}
    lines = []
    for field, field_schema in schema["properties"].items():
        kind = _TYPES.get((name, field)) or _type(field_schema)
        lines += [
            _comment(field_schema.get("description", ""), "  "),
            f"  {field}{'' if field in required else '?'}: {kind}\n",
        ]
    described = _comment(schema.get("description", ""), "")
    return f"{described}export interface {_NAMES.get(name, name)} {{\n{''.join(lines)}}}\n"


def _type(schema: Schema) -> str:
    """The type of a value of a schema."""
    if "$ref" in schema:
        return str(_NAMES.get(schema["$ref"], schema["$ref"]))
    if "anyOf" in schema:
        return " | ".join(_type(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        if values == list(OUTCOME_NAMES.values()):
            return "Outcome"
        return "number" if isinstance(values[0], int) else " | ".join(map(repr, values))
    if schema["type"] == "array":
        member = _type(schema["items"])
        return f"({member})[]" if "|" in member else f"{member}[]"
    if schema["type"] == "object":
        members = schema.get("additionalProperties")
        return f"Record<string, {_type(members) if isinstance(members, dict) else 'unknown'}>"
    return {"integer": "number"}.get(schema["type"], schema["type"])


def _comment(words: str, indent: str) -> str:
    """Words as a comment of documentation; nothing without words."""
    text = " ".join(words.split())
    if not text:
        return ""
    if len(text) + len(indent) + 7 <= WIDTH:
        return f"{indent}/** {text} */\n"
    lines = textwrap.wrap(text, WIDTH - len(indent) - 7, break_on_hyphens=False)
    return f"{indent}/** " + f"\n{indent} *  ".join(lines) + " */\n"
