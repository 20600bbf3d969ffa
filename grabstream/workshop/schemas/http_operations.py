"""What changed in the operations over HTTP since a release: each operation of an OpenAPI document as JSON
Schemas, one of its request, which grabstream reads, and one of each response, which it writes.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from grabstream.workshop.schemas.compatibility import Direction, Schema

_METHODS: Final = ("delete", "get", "patch", "post", "put")
_COMPONENTS: Final = "#/components/schemas/"


class Operation(NamedTuple):
    """One operation: its request, with parameters and body as fields; its responses, by `<status> <media
    type>`; and who may use it, as `<scheme> <scope>`.
    """

    request: Schema
    responses: Mapping[str, Schema]
    allowed: frozenset[str]


class Compared(NamedTuple):
    """Two schemas of a request or a response, and the direction in which they are compared."""

    name: str
    old: Schema
    new: Schema
    direction: Direction


class Noted(NamedTuple):
    """A part that was removed or added, and whether that breaks other programs."""

    name: str
    words: str
    is_breaking: bool


def changes_of_operations(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Compared | Noted]:
    """What has to be compared, and what was removed or added, between two OpenAPI documents."""
    olds, news = _operations(old), _operations(new)
    for name, was in olds.items():
        if name not in news:
            yield Noted(name, "the operation was removed", is_breaking=True)
            continue
        now = news[name]
        yield Compared(f"{name}/request", was.request, now.request, "reads")
        for response, schema in was.responses.items():
            if response in now.responses:
                yield Compared(f"{name}/{response}", schema, now.responses[response], "writes")
            elif response.startswith("2"):
                yield Noted(f"{name}/{response}", "the response was removed", is_breaking=True)
        for caller in sorted(was.allowed - now.allowed):
            yield Noted(name, f"{caller} may not use it any more", is_breaking=True)
    for name in sorted(news.keys() - olds.keys()):
        yield Noted(name, "a new operation", is_breaking=False)


def _operations(document: Mapping[str, Any]) -> dict[str, Operation]:
    """The operations of a document, by `http/<method> <path>`."""
    definitions = {
        name: _referring_to_definitions(schema) for name, schema in document["components"]["schemas"].items()
    }
    return {
        f"http/{method} {path}": _operation(described, definitions)
        for path, methods in document["paths"].items()
        for method, described in methods.items()
        if method in _METHODS
    }


def _operation(described: Mapping[str, Any], definitions: Schema) -> Operation:
    fields, required = dict[str, Schema](), list[str]()
    for parameter in described.get("parameters", ()):
        field = f"{parameter['in']} {parameter['name']}"
        fields[field] = _referring_to_definitions(parameter["schema"])
        required += [field] if parameter.get("required") else []
    if body := described.get("requestBody"):
        fields |= {f"body {kind}": schema for kind, schema in _contents(body).items()}
        required += [f"body {kind}" for kind in body["content"] if body.get("required")]
    responses = {
        f"{status} {kind}": {"$defs": definitions, **schema}
        for status, response in described["responses"].items()
        for kind, schema in (_contents(response) or {"without a body": {}}).items()
    }
    allowed = {
        f"{scheme} {scope}".strip()
        for alternative in described.get("security", ())
        for scheme, scopes in alternative.items()
        for scope in scopes or ("",)
    }
    request = {"type": "object", "properties": fields, "required": required, "$defs": definitions}
    return Operation(request, responses, frozenset(allowed))


def _contents(described: Mapping[str, Any]) -> dict[str, Schema]:
    return {
        kind: _referring_to_definitions(content.get("schema", {}))
        for kind, content in described.get("content", {}).items()
    }


def _referring_to_definitions(schema: Any) -> Any:
    """A schema whose references lead to `$defs`, as in the other schemas."""
    if isinstance(schema, list):
        return [_referring_to_definitions(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        word: f"#/$defs/{value.removeprefix(_COMPONENTS)}"
        if word == "$ref" and isinstance(value, str)
        else _referring_to_definitions(value)
        for word, value in schema.items()
    }
