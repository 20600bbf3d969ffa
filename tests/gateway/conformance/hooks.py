"""What Schemathesis does otherwise for this document; it imports this module in its own process."""

import json
import re
from typing import Any

import schemathesis

#: A message of a stream: where it begins, and an event with its position.
_is_message = re.compile(
    r"(?:retry: [0-9]+\n|: \n)?id: [0-9.-]+\n(?:event: (?P<type>[a-z.]+)\ndata: (?P<text>.+)\n)?\Z"
).match
#: Words of a refusal that contradict the document: by it, the body has no such error.
_CONTRADICTS = re.compile(r"unknown field|missing required|Expected `|cannot be read|must match")


@schemathesis.hook
def map_query(context: schemathesis.HookContext, query: Any) -> Any:
    """Streams resume from their beginning: a position of another stream cannot be resumed."""
    if (
        isinstance(query, dict)
        and context.operation.path.endswith("/events")
        and _is_positive_text(query.get("after"), r"[0-9]{1,4}-[0-9]{1,16}|0")
    ):
        query["after"] = "0"
    return query


def _is_positive_text(value: Any, pattern: str) -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """Integers are written without a fraction, as the document says; JSON Schema cannot say it."""
    if isinstance(body, dict):
        return {name: map_body(context, value) for name, value in body.items()}
    if isinstance(body, list):
        return [map_body(context, value) for value in body]
    return int(body) if isinstance(body, float) and body.is_integer() else body


@schemathesis.check
def refused_by_a_rule(
    context: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """A request that fits the document is refused only by a rule, and the refusal names a field."""
    if case.meta is None or not case.meta.generation.mode.is_positive or response.status_code != 400:
        return
    problem = response.json()
    detail = problem["detail"]
    assert problem.get("field"), f"no field is named: {detail}"
    assert not _CONTRADICTS.search(detail), f"the document allows it: {detail}"


@schemathesis.check
def streams_have_events(
    context: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """A stream has messages with a position; an event is JSON of the type that its message names."""
    if response.headers.get("content-type") != ["text/event-stream"]:
        return
    messages = response.content.decode().split("\n\n")[:-1]
    assert messages, "a stream begins with its position"
    for message in messages:
        found = _is_message(f"{message}\n")
        assert found, f"no message of a stream: {message}"
        if found["text"] is not None:
            event = json.loads(found["text"])
            assert event.get("type", "reset") == found["type"], f"another type: {message}"
