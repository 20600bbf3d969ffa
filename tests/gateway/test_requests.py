"""Requests become the same commands as their JSON in a topic; ids and paths."""

import json
import time
from contextlib import suppress
from typing import Any, cast
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grabstream.gateway.problems import Problem
from grabstream.gateway.requests import (
    Request,
    command_of,
    grab_of,
    new_id,
    opening_of,
    plain_grab_of,
    prefers_async,
    query_of,
    segments_of,
)
from grabstream.models.commands import Grab, Undecodable, decode_command
from grabstream.models.identifiers import ID_PATTERN

ids = st.from_regex(ID_PATTERN[:-1] + r"\Z").filter(lambda text: text != "sweep")
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | ids
values = scalars | st.lists(scalars, max_size=2) | st.dictionaries(st.text(max_size=5), scalars, max_size=2)
names = st.sampled_from(
    ["user", "quantity", "attributes", "ticket", "basket", "wait", "metadata", "id", "offer", "type", "x"]
)
bodies = st.dictionaries(names, values | st.just("ann"), max_size=4)


@given(ids, ids, bodies)
def test_body_joined_with_path_is_the_command_of_a_topic(key: str, offer: str, body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    try:
        found: Any = command_of("grab", {"id": key, "offer": offer}, raw)
    except Problem:
        found = None
    try:
        expected: Any = decode_command(
            json.dumps({**body, "type": "grab", "id": key, "offer": offer}).encode()
        )
    except Undecodable:
        expected = None
    if body.keys() & {"id", "offer", "type"}:
        expected = None
    assert found == expected


def test_offer_to_be_opened_is_not_null() -> None:
    with pytest.raises(Problem, match="Expected `str`, got `null`") as raised:
        opening_of(request(**{"idempotency-key": b"k"}), b'{"offer": null, "terms": {}}')
    assert raised.value.field == "offer"


@given(st.binary(max_size=60))
def test_any_bytes_are_a_command_or_a_problem(raw: bytes) -> None:
    with suppress(Problem):
        command = command_of("grab", {"id": "k", "offer": "o"}, raw)
        assert (command.id, command.offer) == ("k", "o")


def test_ids_are_in_the_order_of_time_and_never_the_same() -> None:
    before = time.time_ns() // 1_000_000
    made = [new_id() for _ in range(2_000)]
    after = time.time_ns() // 1_000_000
    assert len(set(made)) == len(made)
    for text in made:
        one = UUID(text)
        assert str(one) == text
        assert (one.version, one.variant) == (7, "specified in RFC 4122")
        assert before <= one.int >> 80 <= after


def test_segments_of_a_path() -> None:
    assert segments_of(b"/v1/offers/a%3Ab/grabs") == ["v1", "offers", "a:b", "grabs"]
    assert segments_of(b"/") == [""]
    assert segments_of(b"/a//b/") == ["a", "", "b", ""]
    for path in (b"", b"*", b"a/b", b"http://x/", b"/" * 17):
        with pytest.raises(Problem) as raised:
            segments_of(path)
        assert raised.value.name == "not_found"


@given(st.binary(max_size=40))
def test_any_path_has_ids_as_parts_or_is_refused(path: bytes) -> None:
    try:
        parts = segments_of(b"/" + path)
    except Problem:
        return
    assert all(part not in (".", "..") for part in parts)
    assert "/".join(parts).replace("/", "") == "".join(parts)


#: Keys and users that are right, and such that are not: reserved, no ids, or changed by proxies in a path.
odd_ids = ids | st.sampled_from(["", ".", "..", "sweep", "grabstream:x", '"k"', "a b", "ä", "x" * 65])
grab_bodies = (
    st.builds(lambda user: json.dumps({"user": user}), odd_ids)
    | st.builds(lambda user: f' {{\t"user" :\n"{user}"\r}} ', odd_ids)
    | st.builds(lambda user, again: f'{{"user":"{user}","user":"{again}"}}', ids, ids)
    | st.builds(json.dumps, bodies)
)


@given(odd_ids, grab_bodies, st.none() | ids)
@example("k", '{"user":"."}', None)
@example("..", '{"user":"ann"}', None)
@example("sweep", '{"user":"ann"}', None)
@example("k", '{"user":"ann"}', "bob")
def test_grab_that_is_read_fast_is_the_same_grab(key: str, body: str, user: str | None) -> None:
    """What the fast way takes, the other one reads alike; what the other one refuses, it does not take."""
    headers = [(b"idempotency-key", key.encode("latin-1"))]
    asked = Request({"headers": headers, "query_string": b""}, cast(Any, None), {"offer": "x"})
    asked.user = user
    raw = body.encode()
    found = plain_grab_of(asked, raw)
    try:
        expected = grab_of(asked, raw)
    except Problem:
        expected = None
    assert found is None or list(found.commands) == [expected]


def test_grab_with_a_user_alone_is_read_fast() -> None:
    asked = Request(
        {"headers": [(b"idempotency-key", b"k")], "query_string": b""}, cast(Any, None), {"offer": "x"}
    )
    found = plain_grab_of(asked, b'{"user": "ann"}')
    assert found is not None
    assert list(found.commands) == [Grab(id="k", offer="x", user="ann")]


def request(query: bytes = b"", **headers: bytes) -> Request:
    scope = {"query_string": query, "headers": [(name.encode(), value) for name, value in headers.items()]}

    async def receive() -> Any:
        raise AssertionError

    return Request(scope, receive, {})


@given(st.binary(max_size=40))
def test_any_query_is_read_or_refused(query: bytes) -> None:
    try:
        found = query_of(request(query), ("a", "b"))
    except Problem:
        return
    assert found.keys() <= {"a", "b"}


@pytest.mark.parametrize(
    ("value", "is_async"),
    [
        (b"respond-async", True), (b"Respond-Async", True), (b"wait=10, respond-async", True),
        (b"respond-async; wait=10", True), (b"respond-asynchronously", False), (b"", False), (b"\xff", False),
    ],
)  # fmt: skip
def test_preference(value: bytes, is_async: bool) -> None:
    assert prefers_async(request(prefer=value)) is is_async


def test_query_that_came_before_is_read_alike_for_each_path_and_caller() -> None:
    def asked(raw: bytes, known: tuple[str, ...]) -> dict[str, str]:
        scope = {"type": "http", "query_string": raw, "headers": []}
        return query_of(Request(scope, cast(Any, None), {}), known)

    first = asked(b"a=1&b=%C3%A9", ("a", "b"))
    assert first == {"a": "1", "b": "é"}
    first["a"] = "changed by its caller"
    assert asked(b"a=1&b=%C3%A9", ("a", "b")) == {"a": "1", "b": "é"}
    for _ in range(2):
        with pytest.raises(Problem, match="'b' is not a parameter"):
            asked(b"a=1&b=%C3%A9", ("a",))
        with pytest.raises(Problem, match="twice"):
            asked(b"a=1&a=1", ("a",))
    long = b"a=" + b"x" * 1_000
    assert asked(long, ("a",)) == {"a": "x" * 1_000}
