"""The verdict about a change of the schemas: one case per line, first of single schemas, then of whole
contracts compared with a release.
"""

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grabstream.workshop.schemas.compatibility import differences
from grabstream.workshop.schemas.releases import Contract, changes_between, verdict_of
from tests.contract import ASYNCAPI, SCHEMAS

ROOT = Path(__file__).parents[3]

TEXT, INTEGER, NUMBER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "null"}


def struct(required: str = "", closed: bool = False, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split()} | (
        {"additionalProperties": False} if closed else {}
    )


def either(*alternatives: Any, **more: Any) -> dict[str, Any]:
    return {"anyOf": list(alternatives), **more}


def tagged(*kinds: str) -> dict[str, Any]:
    """A union of structs, tagged by `kind`."""
    refs = [{"$ref": f"#/$defs/{kind}"} for kind in kinds]
    defs = {kind: struct("kind", kind={"enum": [kind]}) for kind in kinds}
    return {**struct("a", a=either(*refs, discriminator={"propertyName": "kind"})), "$defs": defs}


def referring(**definition: Any) -> dict[str, Any]:
    return {**struct("a", a={"type": "array", "items": {"$ref": "#/$defs/A"}}), "$defs": {"A": definition}}


def mapping(values: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values}


def members(*members: Any) -> dict[str, Any]:
    return {"type": "array", "prefixItems": list(members), "items": False}


A = struct("a", a=TEXT)

#: The old schema, the new schema, where the difference is, its kind, and its verdicts in the directions
#: `reads` and `writes`.
CASES = [
    (A, {**A, "title": "b", "description": "c"}, None, None, None, None),
    (A, struct("a", a=TEXT, b=TEXT), "$.b", "field added", "compatible", "compatible"),
    (A, struct("a b", a=TEXT, b=TEXT), "$.b", "required field added", "breaking", "compatible"),
    (struct("a", a=TEXT, b=TEXT), A, "$.b", "field removed", "breaking", "breaking"),
    (struct("a b", a=TEXT, b=TEXT), A, "$.b", "field removed", "breaking", "breaking"),
    (struct("", a=TEXT), A, "$.a", "became required", "breaking", "compatible"),
    (A, struct("", a=TEXT), "$.a", "became optional", "compatible", "breaking"),
    (struct("", a={**INTEGER, "default": 1}), struct("", a={**INTEGER, "default": 2}), "$.a",
    "default changed", "breaking", "breaking"),
    (struct("", a={**INTEGER, "default": 1}), struct("", a=INTEGER), "$.a", "default changed", "breaking",
    "breaking"),
    (A, struct("a", a=INTEGER), "$.a", "type changed", "breaking", "breaking"),
    (struct("a", a=INTEGER), struct("a", a=NUMBER), "$.a", "widened", "compatible", "breaking"),
    (struct("a", a=NUMBER), struct("a", a=INTEGER), "$.a", "narrowed", "breaking", "compatible"),
    (A, struct("a", a=either(TEXT, NULL)), "$.a", "widened", "compatible", "breaking"),
    (struct("a", a=either(TEXT, NULL)), A, "$.a", "narrowed", "breaking", "compatible"),
    (struct("a", a=either(TEXT, NULL)), struct("a", a=either(INTEGER, NULL)), "$.a", "type changed",
    "breaking", "breaking"),
    (struct("a", a={"enum": ["x"]}), struct("a", a={"enum": ["y", "x"]}), "$.a", "value added", "compatible",
    "warning"),
    (struct("a", a={"enum": ["x", "y"]}), struct("a", a={"enum": ["y"]}), "$.a", "value removed", "breaking",
    "compatible"),
    (struct("a", a={"enum": ["x", "y"]}), struct("a", a={"enum": ["y", "x"]}), None, None, None, None),
    (A, struct("a", a={"enum": ["x"]}), "$.a", "narrowed", "breaking", "compatible"),
    (struct("a", a={"enum": ["x"]}), A, "$.a", "widened", "compatible", "breaking"),
    (struct("a", a={"const": "1"}), struct("a", a={"const": "2"}), "$.a", "type changed", "breaking",
    "breaking"),
    (A, struct("a", a={**TEXT, "maxLength": 9}), "$.a", "narrowed", "breaking", "compatible"),
    (struct("a", a={**TEXT, "maxLength": 9}), struct("a", a={**TEXT, "maxLength": 10}), "$.a", "widened",
    "compatible", "breaking"),
    (struct("a", a={**TEXT, "maxLength": 9}), A, "$.a", "widened", "compatible", "breaking"),
    (struct("a", a={**INTEGER, "minimum": 0}), struct("a", a={**INTEGER, "minimum": 1}), "$.a", "narrowed",
    "breaking", "compatible"),
    (struct("a", a={**INTEGER, "minimum": 1}), struct("a", a={**INTEGER, "minimum": 0}), "$.a", "widened",
    "compatible", "breaking"),
    (A, struct("a", a={**TEXT, "pattern": "^x$"}), "$.a", "narrowed", "breaking", "compatible"),
    (struct("a", a={**TEXT, "pattern": "^x$"}), A, "$.a", "widened", "compatible", "breaking"),
    (struct("a", a={**TEXT, "pattern": "x"}), struct("a", a={**TEXT, "pattern": "y"}), "$.a",
    "cannot be "
    "compared",
    "breaking",
    "breaking"),
    (A, struct("a", closed=True, a=TEXT), "$", "unknown fields are refused", "breaking", "compatible"),
    (struct("a", closed=True, a=TEXT), A, "$", "unknown fields are allowed", "compatible", "compatible"),
    (referring(**A), referring(**struct("a b", a=TEXT, b=TEXT)), "$.a[].b", "required field added",
    "breaking", "compatible"),
    (referring(**A), {**struct("a", a={"type": "array", "items": A})}, None, None, None, None),
    (tagged("x", "y"), tagged("x", "y", "z"), "$.a", "alternative added", "compatible", "warning"),
    (tagged("x", "y", "z"), tagged("x", "y"), "$.a", "alternative removed", "breaking", "compatible"),
    (struct("a", a=mapping(TEXT)), struct("a", a=mapping(INTEGER)), "$.a.*", "type changed", "breaking",
    "breaking"),
    (struct("a", a=members(TEXT, TEXT)), struct("a", a=members(TEXT, INTEGER)), "$.a[1]", "type changed",
    "breaking", "breaking"),
    (struct("a", a=members(TEXT)), struct("a", a=members(TEXT, TEXT)), "$.a", "type changed", "breaking",
    "breaking"),
    (A, struct("a", a={**TEXT, "multipleOf": 3}), "$.a", "cannot be compared", "breaking", "breaking"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "where", "kind", "reads", "writes"), CASES)
def test_the_verdict_about_a_difference(
    old: dict[str, Any],
    new: dict[str, Any],
    where: str | None,
    kind: str | None,
    reads: str | None,
    writes: str | None,
) -> None:
    assert differences(old, old) == []
    assert differences(new, new) == []
    found = differences(old, new)
    if kind is None:
        assert found == []
        return
    assert (found[0].where, found[0].kind) == (where, kind)
    assert (found[0].verdict("reads"), found[0].verdict("writes")) == (reads, writes)


# -- whole contracts -----------------------------------------------------------------------------------------

#: A made-up release: the schemas of the tree.
RELEASED = Contract(
    {
        str(path.relative_to(SCHEMAS).with_suffix("")): json.loads(path.read_text())
        for folder in ("answers", "commands", "events", "journal", "payments")
        for path in sorted((SCHEMAS / folder).glob("*.json"))
    },
    ASYNCAPI,
    json.loads((SCHEMAS / "openapi.json").read_text()),
)
GRANTED, RELEASED_V1 = "events/grab.granted.v1", "events/grab.released.v1"
GRANTED_RUN = "journal/grab.granted.v2"


def changed(name: str, **properties: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Changes properties of a schema; None removes a property."""

    def change(schemas: dict[str, Any], asyncapi: dict[str, Any]) -> None:
        for field, value in properties.items():
            if value is None:
                del schemas[name]["properties"][field]
                schemas[name]["required"] = [one for one in schemas[name]["required"] if one != field]
            else:
                schemas[name]["properties"][field] = value

    return change


def required(name: str, field: str, yes: bool = True) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(schemas: dict[str, Any], asyncapi: dict[str, Any]) -> None:
        schemas[name]["properties"].setdefault(field, TEXT)
        others = [one for one in schemas[name]["required"] if one != field]
        schemas[name]["required"] = [*others, field] if yes else others

    return change


def gone(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda schemas, asyncapi: schemas.pop(name)


def come(name: str, like: str, keep: bool = True) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Adds a copy of a schema under another name; without `keep`, renames the schema."""

    def change(schemas: dict[str, Any], asyncapi: dict[str, Any]) -> None:
        schemas[name] = copy.deepcopy(schemas[like])
        if not keep:
            del schemas[like]

    return change


def topic(
    name: str, change: Callable[[dict[str, Any]], Any]
) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda schemas, asyncapi: change(asyncapi["channels"][name])


def message(
    name: str, change: Callable[[dict[str, Any]], Any]
) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda schemas, asyncapi: change(asyncapi["components"]["messages"][name])


#: The change since the release, the upcasters that exist, the verdict, and name and text of the worst change.
CONTRACTS: list[tuple[Callable[[dict[str, Any], dict[str, Any]], Any], set[tuple[str, int]], str, str,
    str]] = [
    (lambda schemas, asyncapi: None, set(), "compatible", "", ""),
    (changed("commands/grab", channel=TEXT), set(), "compatible", "commands/grab", "field added"),
    (required("commands/grab", "channel"), set(), "breaking", "commands/grab", "required field added"),
    (required("commands/confirm", "payment"), set(), "breaking", "commands/confirm", "became required"),
    (required("commands/redeem", "order", False), set(), "compatible", "commands/redeem", "became optional"),
    (changed("commands/grab", wait=None), set(), "breaking", "commands/grab", "field removed"),
    (changed("commands/load", what={"enum": ["codes"]}), set(), "breaking", "commands/load",
    "value removed: "
    "'audience'"),
    (changed("commands/load", what={"enum": ["codes", "audience", "seats"]}), set(), "compatible",
    "commands/load", "value added"),
    (changed("commands/grab", quantity={**INTEGER, "minimum": 1, "maximum": 9, "default": 1}), set(),
    "breaking", "commands/grab",
     "narrowed: maximum 10000000000000 → 9"),
    (gone("commands/extend"), set(), "breaking", "commands/extend", "the command was removed"),
    (come("commands/seize", "commands/grab"), set(), "compatible", "commands/seize", "a new command"),
    (changed("answers/answer", place=None), set(), "breaking", "answers/answer", "field removed"),
    (changed("answers/answer", queue=INTEGER), set(), "compatible", "answers/answer", "field added"),
    (required("answers/answer", "at"), set(), "compatible", "answers/answer", "became required"),
    (required("answers/answer", "code", False), set(), "breaking", "answers/answer", "became optional"),
    (changed("answers/answer", place=TEXT), set(), "breaking", "answers/answer",
    "type changed: integer → "
    "string"),
    (changed("answers/answer", code={"enum": [*range(16), *range(20, 38)]}), set(), "warning",
    "answers/answer", "value added: 37"),
    (changed(GRANTED, channel=TEXT), set(), "compatible", GRANTED, "field added"),
    (required(GRANTED, "channel"), set(), "breaking", GRANTED, "required field added"),
    # old lines of the journal do not have it
    (required(GRANTED, "ticket"), set(), "breaking", GRANTED, "became required"),
    (required(GRANTED, "left", False), set(), "breaking", GRANTED, "became optional"),
    (changed(GRANTED, user=None, taker=TEXT), set(), "breaking", GRANTED, "field removed"),
    (changed(RELEASED_V1, reason={"enum": ["command", "expired"]}), set(), "breaking", RELEASED_V1,
    "value removed"),
    (changed(RELEASED_V1, reason={"enum": ["command", "expired", "left_queue", "paid"]}), set(), "warning",
    RELEASED_V1,
     "value added: 'paid'"),
    (come("events/grab.seized.v1", GRANTED), set(), "warning", "events/grab.seized", "a new type"),
    (gone(GRANTED), set(), "breaking", "events/grab.granted", "the type was removed"),
    (come("events/grab.granted.v2", GRANTED), {("grab.granted", 1)}, "warning", "events/grab.granted",
    "v1 → v2"),
    (come("events/grab.granted.v3", GRANTED), {("grab.granted", 1), ("grab.granted", 2)}, "warning",
    "events/grab.granted", "v1 → v3"),
    (come("events/grab.granted.v2", GRANTED), set(), "breaking", "events/grab.granted",
    "v1 was raised to v2 without an upcaster"),
    (come("events/grab.granted.v3", GRANTED), {("grab.granted", 1)}, "breaking", "events/grab.granted",
    "v2 was raised to v3"),
    (come("events/grab.granted.v2", GRANTED, keep=False), {("grab.granted", 1)}, "breaking", GRANTED,
    "older version was removed"),
    (come("events/grab.granted.v0", GRANTED, keep=False), set(), "breaking", "events/grab.granted",
    "v1 was released, and this is v0"),
    (changed(GRANTED_RUN, users=None, takers=TEXT), set(), "breaking", GRANTED_RUN, "field removed"),
    (changed(GRANTED_RUN, channels=TEXT), set(), "compatible", GRANTED_RUN, "field added"),
    (gone(GRANTED_RUN), set(), "breaking", GRANTED_RUN, "the schema was removed"),
    (required("payments/receipt", "currency"), set(), "breaking", "payments/receipt", "became required"),
    (changed("payments/receipt", more=TEXT), set(), "compatible", "payments/receipt", "field added"),
    (changed("payments/answer", payments=None), set(), "breaking", "payments/answer", "field removed"),
    (changed("payments/query", more=TEXT), set(), "compatible", "payments/query", "field added"),
    (changed("payments/token", due=None), set(), "breaking", "payments/token", "field removed"),
    (lambda schemas, asyncapi: asyncapi["channels"].pop("results"), set(), "breaking", "topics/results",
    "the topic was removed"),
    (topic("events", lambda it: it.update(address="{prefix}.facts")), set(), "breaking", "topics/events",
    "events → {prefix}.facts"),
    (topic("journal", lambda it: it["bindings"]["kafka"]["topicConfiguration"].update({"retention.ms": 9})),
    set(), "warning",
     "topics/journal", "kept for 9 ms"),
    (topic("results", lambda it: it["bindings"]["kafka"]["topicConfiguration"].update({"retention.ms": -1})),
    set(), "compatible", "", ""),
    (topic("journal", lambda it: it["messages"].pop("marker")), set(), "breaking", "topics/journal/marker",
    "the topic no longer has this message"),
    (message("answer", lambda it: it["bindings"]["kafka"].pop("key")), set(), "breaking",
    "topics/results/answer/key", "→ None"),
    (message("block", lambda it: it["headers"]["schema"]["properties"].pop("prev")), set(), "breaking",
    "topics/journal/block/headers",
     "field removed"),
    (message("grab_held", lambda it: it["headers"]["schema"]["properties"].update(ce_type={"const": "x"})),
    set(), "breaking",
     "topics/events/grab_held/headers", "type changed"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "upcasts", "verdict", "name", "words"), CONTRACTS)
def test_the_verdict_about_a_contract(
    change: Any, upcasts: set[tuple[str, int]], verdict: str, name: str, words: str
) -> None:
    schemas, asyncapi = copy.deepcopy(dict(RELEASED.schemas)), copy.deepcopy(dict(RELEASED.asyncapi))
    change(schemas, asyncapi)
    changes = changes_between(RELEASED, Contract(schemas, asyncapi, RELEASED.openapi), upcasts)
    assert verdict_of(changes) == verdict
    if not words:
        assert changes == []
        return
    assert (changes[0].verdict, changes[0].name) == (verdict, name)
    assert words in changes[0].words
    assert bool(changes[0].way_out) == (verdict == "breaking")


GRABS = "http/post /v1/offers/{offer}/grabs"


def operation(
    change: Callable[[dict[str, Any]], Any], path: str = "/v1/offers/{offer}/grabs", method: str = "post"
) -> Callable[[dict[str, Any]], Any]:
    """Changes an operation of an OpenAPI document."""
    return lambda openapi: change(openapi["paths"][path][method])


def component(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda openapi: change(openapi["components"]["schemas"][name])


def parameter(is_required: bool) -> dict[str, Any]:
    return {"name": "colour", "in": "query", "required": is_required, "schema": TEXT}


def without_first(items: list[Any]) -> None:
    del items[0]


#: The change of the operations since the release, the verdict, and name and text of the worst change.
OPERATIONS: list[tuple[Callable[[dict[str, Any]], Any], str, str, str]] = [
    (lambda openapi: None, "compatible", "", ""),
    (lambda openapi: openapi["paths"].pop("/v1/offers/{offer}/grabs"), "breaking", GRABS,
    "the operation was removed"),
    (operation(lambda it: it["parameters"].append(parameter(True))), "breaking", f"{GRABS}/request",
    "required field added"),
    (operation(lambda it: it["parameters"].append(parameter(False))), "compatible", f"{GRABS}/request",
    "field added"),
    (operation(lambda it: without_first(it["parameters"])), "breaking", f"{GRABS}/request", "field removed"),
    (operation(lambda it: it["requestBody"].update(required=False)), "compatible", f"{GRABS}/request",
    "became optional"),
    (operation(lambda it: it["requestBody"].update(required=True), "/v1/offers/{offer}/pause"), "breaking",
    "http/post /v1/offers/{offer}/pause/request", "became required"),
    (operation(lambda it: it["requestBody"].update(content={"text/plain": {"schema": TEXT}})), "breaking",
    f"{GRABS}/request", "field removed"),
    (operation(lambda it: it["responses"].pop("202")), "breaking", f"{GRABS}/202 application/json",
    "the response was removed"),
    (operation(lambda it: it["responses"].pop("409")), "compatible", "", ""),
    (operation(lambda it: it.update(security=[])), "breaking", GRABS, "apiKey grab may not use it any more"),
    (component("GrabBody", lambda it: it["properties"].pop("wait")), "breaking", f"{GRABS}/request",
    "field removed"),
    (component("GrabBody", lambda it: it["properties"].update(colour=TEXT)), "compatible",
    f"{GRABS}/request", "field added"),
    (component("Problem", lambda it: it["properties"].update(colour=TEXT)), "compatible",
    "http/post /v1/offers/400 application/problem+json", "field added"),
    (component("Problem", lambda it: it["properties"].pop("outcome")), "breaking",
    "http/post /v1/offers/400 application/problem+json", "field removed"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "verdict", "name", "words"), OPERATIONS)
def test_the_verdict_about_operations(change: Any, verdict: str, name: str, words: str) -> None:
    openapi = copy.deepcopy(dict(RELEASED.openapi))
    change(openapi)
    changes = changes_between(RELEASED, RELEASED._replace(openapi=openapi), set())
    assert verdict_of(changes) == verdict
    if not words:
        assert changes == []
        return
    assert (changes[0].verdict, changes[0].name) == (verdict, name)
    assert words in changes[0].words
    assert bool(changes[0].way_out) == (verdict == "breaking")


def test_an_operation_that_is_new_breaks_nothing() -> None:
    openapi = copy.deepcopy(dict(RELEASED.openapi))
    openapi["paths"]["/v1/colours"] = {"get": openapi["paths"]["/v1/offers/{offer}/grabs"]["post"]}
    changes = changes_between(RELEASED, RELEASED._replace(openapi=openapi), set())
    assert [(change.verdict, change.name) for change in changes] == [("compatible", "http/get /v1/colours")]


# -- the script ----------------------------------------------------------------------------------------------


def compare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/schemas.py", "--folder", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


@pytest.mark.long
def test_the_script_prints_what_breaks_and_what_to_do(tmp_path: Path) -> None:
    """The release has a field that the models lack, and lacks an outcome that the models have."""
    shutil.copytree(SCHEMAS, tmp_path, dirs_exist_ok=True)
    assert compare(tmp_path, "--release", "0.10.0").returncode == 0
    released = tmp_path / "released" / "0.10.0.json"
    kept = json.loads(released.read_text())
    kept["schemas"][GRANTED]["properties"]["colour"] = TEXT
    kept["schemas"]["answers/answer"]["properties"]["outcome"]["enum"].remove("waiting")
    (tmp_path / "released" / "0.9.0.json").write_text("not the last one")
    released.write_text(json.dumps(kept))
    done = compare(tmp_path, "--compare")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "schemas since 0.10.0: breaking (1 breaking, 1 warning)",
        f"  breaking  {GRANTED} $.colour: field removed: the new schema lacks it",
        "            → raise its version and write an upcaster (docs/events.md)",
        "  warning   answers/answer $.outcome: value added: 'waiting' is allowed too",
    ]
    as_json = json.loads(compare(tmp_path, "--compare", "--json").stdout)
    assert (as_json["since"], as_json["verdict"], len(as_json["changes"])) == ("0.10.0", "breaking", 2)
    missing = compare(tmp_path, "--compare", "--since", "0.2.0")
    assert missing.returncode == 1
    assert "0.2.0.json" in missing.stderr


@pytest.mark.long
def test_a_release_is_written_once(tmp_path: Path) -> None:
    folder = tmp_path / "schemas"
    shutil.copytree(SCHEMAS, folder, ignore=shutil.ignore_patterns("released"))
    first = compare(folder, "--compare")
    assert (first.returncode, "nothing is released yet" in first.stdout, first.stderr) == (0, True, "")
    assert json.loads(compare(folder, "--compare", "--json").stdout)["since"] is None
    assert compare(folder, "--release", "0.2.0").returncode == 0
    stored = json.loads((folder / "released" / "0.2.0.json").read_text())
    assert stored["schemas"].keys() == RELEASED.schemas.keys()
    assert compare(folder, "--compare").stdout == "schemas since 0.2.0: compatible (no change)\n"
    again = compare(folder, "--release", "0.2.0")
    assert (again.returncode, "a release never changes" in again.stderr) == (1, True)
