"""The OpenAPI document is valid, says what the routes are, and is what a running gateway does: hostile
requests get no answer that the document does not have.
"""

import asyncio
import json
import re
from importlib import metadata
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from grabstream.gateway.openapi import document
from grabstream.gateway.operations import OPERATIONS, Operation
from grabstream.models.bounds import BASKET_GRABS_MAX
from grabstream.models.commands import Undecodable, decode_command
from grabstream.models.identifiers import ID_PATTERN
from grabstream.workshop.services.servers import PROJECT
from tests.conftest import examples
from tests.gateway.conftest import Door, Guarded
from tests.support.gateways import Caller, calling

DOCUMENT = document(metadata.version("grabstream"))


def validator(schema: Any) -> Draft202012Validator:
    """A validator of a schema that refers to the document."""
    return Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def test_document_is_valid() -> None:
    validate(DOCUMENT)
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT)))
    assert references <= DOCUMENT["components"]["schemas"].keys()
    assert DOCUMENT["components"]["schemas"].keys() - references == set()


def test_file_is_the_document() -> None:
    assert json.loads((PROJECT / "schemas" / "openapi.json").read_text()) == DOCUMENT


def test_document_has_every_route_once() -> None:
    routes = {(operation.method.lower(), operation.path) for operation in OPERATIONS}
    assert {(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods} == routes
    names = [methods[method]["operationId"] for _, methods in DOCUMENT["paths"].items() for method in methods]
    assert len(set(names)) == len(names) == len(OPERATIONS)


def test_document_says_who_may_ask() -> None:
    assert DOCUMENT["components"]["securitySchemes"].keys() == {"apiKey", "userToken"}
    for operation in OPERATIONS:
        node = DOCUMENT["paths"][operation.path][operation.method.lower()]
        if operation.kind in ("document", "receipt"):
            assert not node.get("security")
            continue
        assert {"401", "403", "429"} <= node["responses"].keys(), operation.name
        scopes = {scope for one in node["security"] for scope in one.get("apiKey", ())}
        assert operation.scope in scopes
    assert DOCUMENT["paths"]["/v1/offers/{offer}/grabs/{grab}/release"]["post"]["security"] == [
        {"apiKey": ["grab"]}, {"apiKey": ["settle"]}, {"userToken": []},
    ]  # fmt: skip
    assert DOCUMENT["paths"]["/v1/offers"]["post"]["security"] == [{"apiKey": ["operate"]}]


async def test_gateway_serves_it(caller: Caller, guarded: Guarded) -> None:
    """A gateway without authentication says so: a client without credentials may call each operation."""
    async with calling(guarded.gateway.port) as anyone:
        assert (await anyone.send("GET", "/openapi.json")).body == DOCUMENT
    served = (await caller.send("GET", "/openapi.json")).body
    assert served == document(metadata.version("grabstream"), asks_callers=False)
    for operation in OPERATIONS:
        strict, plain = (one["paths"][operation.path][operation.method.lower()] for one in (DOCUMENT, served))
        wanted = {"security": [*strict["security"], {}]} if "security" in strict else {}
        assert plain == {**strict, **wanted}, operation.name


GOOD_TERMS: dict[str, dict[str, Any]] = {
    "EnvelopeTerms": {
        "kind": "envelope", "issuer": "i", "funding": "pay", "asset": "CNY", "total": 1, "parts": 1,
        "law": "bounded", "min": 1, "max": 1,
    },
    "CouponTerms": {"kind": "coupon", "issuer": "i", "total": 1, "hold_ms": 1},
    "StockTerms": {"kind": "stock", "issuer": "i", "total": 1, "hold_ms": 1},
}  # fmt: skip


def refusal_of(command: dict[str, Any]) -> str:
    """Why a command is not taken; empty if it is."""
    try:
        decode_command(json.dumps(command).encode())
    except Undecodable as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", GOOD_TERMS)
def test_terms_that_the_document_allows_are_not_below_a_bound(name: str) -> None:
    """For every number of terms, the least one that the document has is the least one that is taken."""
    fits = validator(DOCUMENT["components"]["schemas"][name])
    numbers = 0
    for field, node in DOCUMENT["components"]["schemas"][name]["properties"].items():
        for least in (one["minimum"] for one in (node, *node.get("anyOf", ())) if "minimum" in one):
            numbers += 1
            for value in (least, least - 1):
                terms = {**GOOD_TERMS[name], field: value}
                command = {"type": "open", "id": "c", "offer": "o", "terms": terms}
                refusal = refusal_of(command)
                is_below = (
                    re.search(rf"\b{field}: must be (from|at least) |>= .*\.{field}`", refusal) is not None
                )
                assert fits.is_valid(terms) != is_below, (field, value, refusal)
    assert numbers >= 5


def test_a_total_is_at_least_one() -> None:
    for name, field in (
        *((name, "total") for name in (*GOOD_TERMS, "Changes")), ("EnvelopeTerms", "min"),
        ("EnvelopeTerms", "max"),
    ):  # fmt: skip
        node = DOCUMENT["components"]["schemas"][name]["properties"][field]
        assert not validator(node).is_valid(0), (name, field)
        assert validator(node).is_valid(1), (name, field)


async def test_gateway_serves_every_schema_that_records_of_events_name(caller: Caller) -> None:
    """As they are in the tree; any client may keep them, and ask whether they have changed."""
    for file in sorted((PROJECT / "schemas" / "events").glob("*.json")):
        got = await caller.send("GET", f"/v1/schemas/events/{file.stem}")
        assert (got.status, got.body) == (200, json.loads(file.read_text())), file.stem
        assert got.body["$id"] == f"urn:grabstream:events:{file.stem}"
    assert got.headers["cache-control"] == "public, max-age=3600"
    tag = got.headers["etag"]
    again = await caller.send("GET", f"/v1/schemas/events/{file.stem}", If_None_Match=tag)
    assert (again.status, again.raw, again.headers["etag"]) == (304, b"", tag)
    for unknown in ("grab.granted.v9", "grab.granted", "..%2fopenapi"):
        got = await caller.send("GET", f"/v1/schemas/events/{unknown}")
        assert (got.status, got.headers["cache-control"]) in ((404, "no-store"), (400, "no-store")), unknown


# -- hostile requests ----------------------------------------------------------------------------------------

ids = st.from_regex(ID_PATTERN[:-1] + r"\Z") | st.sampled_from(["a", "shop", "sweep", ".", "..", "a:b"])
odd_texts = st.text(max_size=70) | st.sampled_from(
    ["", " ", "\x00", "../..", "%2e", "é", "А", "a\r\nX: y", "x" * 70]
)
odd_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | odd_texts
    | st.sampled_from([2**63, 2**64, -1, 10**13, 10**13 + 1, 1e308]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(odd_texts, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def fitting(schema: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """Values that fit a schema, as far as one schema shows."""
    if "$ref" in schema:
        return fitting(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]], depth)
    for word in ("oneOf", "anyOf"):
        if word in schema:
            return st.one_of([fitting(one, depth) for one in schema[word]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    kind = schema.get("type")
    if kind == "string":
        if "pattern" in schema:
            return st.from_regex(schema["pattern"].removesuffix("$") + r"\Z").filter(
                lambda text: len(text) <= schema.get("maxLength", 100)
            )
        return st.text(min_size=schema.get("minLength", 0), max_size=min(schema.get("maxLength", 10), 10))
    if kind == "integer":
        least, most = schema.get("minimum", 0), schema.get("maximum", 10**13)
        return st.integers(least, most) | st.integers(least, min(most, max(least, 5)))
    if kind == "boolean":
        return st.booleans()
    if kind == "null":
        return st.none()
    if kind == "array":
        return st.lists(fitting(schema["items"], depth + 1), min_size=schema.get("minItems", 0), max_size=3)
    assert kind == "object", schema
    properties, required = schema.get("properties", {}), set(schema.get("required", ()))
    if not properties:
        inner = schema.get("additionalProperties")
        return st.dictionaries(ids, fitting(inner), max_size=2) if isinstance(inner, dict) else st.just({})
    return st.fixed_dictionaries(
        {name: fitting(one, depth + 1) for name, one in properties.items() if name in required},
        optional={name: fitting(one, depth + 1) for name, one in properties.items() if name not in required},
    )


def body_schema(operation: Operation) -> dict[str, Any]:
    node = DOCUMENT["paths"][operation.path][operation.method.lower()]
    schema: dict[str, Any] = node["requestBody"]["content"]["application/json"]["schema"]
    return schema


@st.composite
def bodies(draw: st.DrawFn, operation: Operation) -> bytes | None:
    if not operation.body_bytes_max:
        return draw(st.none() | st.binary(max_size=20))
    fits = json.dumps(draw(fitting(body_schema(operation)))).encode()
    how = draw(st.integers(0, 5))
    if how < 3:
        return fits
    if how == 3:  # a value or a field is another
        value = json.loads(fits)
        value[draw(st.sampled_from([*value, "id", "type", "offer", "grab", "x"]) | odd_texts)] = draw(
            odd_values
        )
        return json.dumps(value).encode()
    if how == 4:  # a byte is another, or bytes are missing
        at = draw(st.integers(0, len(fits)))
        return fits[:at] + draw(st.binary(max_size=3)) + fits[at + draw(st.integers(0, 3)) :]
    return draw(st.binary(max_size=50) | st.sampled_from([b"", b"[]", b"{}", b"null", b"[" * 3_000]))


@st.composite
def requests(draw: st.DrawFn) -> tuple[Operation, str, str, bytes | None, dict[str, str]]:
    """An operation, the method and target of a request, its body and headers."""
    operation = draw(st.sampled_from(OPERATIONS))
    path = re.sub(
        r"\{\w+\}",
        lambda _: quote(draw(st.sampled_from(["a", "b", "c"]) | ids | odd_texts), safe=""),
        operation.path,
    )
    query = draw(
        st.just("")
        | st.sampled_from(
            ["?", "?promise=decided", "?promise=x", "?promise=journaled&promise=decided", "?a=b&&"]
        )
        | st.text("abc=&%+;12", max_size=20).map(lambda text: f"?{text}")
    )
    method = draw(
        st.just(operation.method) | st.sampled_from(["GET", "PUT", "POST", "PATCH", "OPTIONS", "HEAD"])
    )
    headers = {}
    if draw(st.integers(0, 9)):
        headers["Idempotency-Key"] = draw(ids | st.text("ab\"' ;=\\", max_size=8))
    if not draw(st.integers(0, 9)):
        headers["Prefer"] = draw(st.sampled_from(["respond-async", "respond-async;x", "=,;", "wait=x"]))
    kinds = st.sampled_from(["application/json", "text/html", "application/json;charset=utf-8", "/"])
    headers["Content-Type"] = draw(st.just("application/json") | kinds)
    return operation, method, path + query, draw(bodies(operation)), headers


# Each example is up to five requests, one after the other: on a busy machine, 120 of them took 240 s.
@pytest.mark.timeout(4_800)
@settings(max_examples=examples(120))
@given(st.lists(requests(), min_size=1, max_size=5))
def test_hostile_requests_get_answers_of_the_document(door: Door, sent: list[Any]) -> None:
    async def send() -> None:
        async with calling(door.gateway.port) as caller:
            for operation, method, target, body, headers in sent:
                got = await caller.send(
                    method, target, body, **{name.replace("-", "_"): value for name, value in headers.items()}
                )
                what = (method, target, body, headers, got)
                assert got.status != 500, what
                node = DOCUMENT["paths"][operation.path].get(method.lower())
                if method in ("OPTIONS", "HEAD") or node is None:
                    assert got.status in (200, 204, 400, 404, 405, 411, 414), what
                    continue
                answer = node["responses"].get(str(got.status))
                assert answer is not None, what
                kind = got.headers["content-type"]
                assert kind in answer["content"], what
                if kind == "text/event-stream":
                    continue
                validator(answer["content"][kind]["schema"]).validate(got.body)
                if got.status >= 400:
                    assert got.body["status"] == got.status, what
                    assert got.body["detail"], what
                else:
                    # What is executed fits the document.
                    if method == operation.method and operation.body_bytes_max and body:
                        validator(body_schema(operation)).validate(json.loads(body))

    asyncio.run(send())


@pytest.mark.parametrize(
    "operation", [one for one in OPERATIONS if one.kind == "command"], ids=lambda one: one.name
)
@settings(max_examples=examples(40))
@given(data=st.data())
def test_fitting_body_is_refused_only_by_a_rule(operation: Operation, data: st.DataObject) -> None:
    """A body that fits the document is a command, or breaks a rule about several fields, which the message
    names; it never has an unknown field, or a value of another type.
    """
    body = data.draw(fitting(body_schema(operation)))
    parts = body["grabs"] if operation.name == "take_basket" else [body]
    assert len(parts) <= BASKET_GRABS_MAX
    for part in parts:
        command = {"type": operation.command, "id": "k", "offer": "o", **part}
        if operation.scope == "settle":
            command["grab"] = "g"
        if operation.name == "adjust":
            command.setdefault("approved_by", "o")  # which the API key may give
        reason = ""
        try:
            decode_command(json.dumps(command).encode())
        except Undecodable as error:
            reason = error.reason
        assert not re.search(r"unknown field|missing required|Expected `", reason), (body, reason)
