"""The schemas in the tree: they agree with the models, are valid by their own standards, and refuse what the
decoder of commands refuses.
"""

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator

from grabstream.models.answers import decode_answer
from grabstream.models.commands import AnyCommand, Undecodable, decode_command
from grabstream.models.events import CURRENT_VERSIONS, decode_event
from grabstream.models.journal import GENESIS, Cursor, anchor_headers, block_headers, marker_headers
from grabstream.models.runs import AnyRun
from grabstream.models.schema_documents import documents, run_name, tag_of
from grabstream.models.schema_ids import event_name
from grabstream.models.transfers import transfers_of
from grabstream.streams.journal_keys import JournalKeys, new_key_pair
from grabstream.streams.topics import Topics, retention_ms
from tests.contract import ASYNCAPI, SCHEMAS, asyncapi_problems, check_events, problems

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "events"


def schemas(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/schemas.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.long
def test_stale_schemas_are_named_and_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "schemas"
    shutil.copytree(SCHEMAS, folder)
    (folder / "events" / "grab.held.v1.json").write_text("{}")
    (folder / "commands" / "grab.json").unlink()
    (folder / "commands" / "seize.json").write_text("{}")
    stale = {
        "commands/grab.json": "is missing",
        "commands/seize.json": "belongs to nothing",
        "events/grab.held.v1.json": "is stale",
    }
    found = schemas("--check", "--json", "--folder", str(folder))
    assert (found.returncode, json.loads(found.stdout)) == (1, {"stale": stale})
    shown = schemas("--check", "--folder", str(folder))
    assert shown.stdout.splitlines()[:-1] == [f"schemas: {name} {what}" for name, what in stale.items()]
    assert shown.stdout.endswith("`python scripts/schemas.py` writes them\n")
    assert schemas("--folder", str(folder)).returncode == 0
    assert schemas("--check", "--folder", str(folder)).returncode == 0
    assert {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")} == {
        path.relative_to(SCHEMAS): path.read_bytes() for path in SCHEMAS.rglob("*.*")
    }


def test_every_command_answer_and_event_has_a_schema() -> None:
    commands = {f"commands/{tag_of(command)}" for command in get_args(AnyCommand)}
    runs = {run_name(tag_of(run)) for run in get_args(AnyRun)}
    assert documents().keys() == commands | runs | {"answers/answer", "answers/refused.v1"} | {
        event_name(type_) for type_ in CURRENT_VERSIONS
    }


@pytest.mark.parametrize("name", sorted(documents()))
def test_a_schema_is_valid(name: str) -> None:
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    Draft202012Validator.check_schema(schema)
    assert schema["description"]
    assert (schema.get("additionalProperties") is False) == name.startswith("commands/")


# -- commands: what the schema refuses, the door refuses, and the other way ----------------------------------

ENVELOPE = {"kind": "envelope", "issuer": "a", "funding": "f", "asset": "CNY", "total": 10, "parts": 2}
COUPON = {"kind": "coupon", "issuer": "a", "total": 10}
STOCK = {"kind": "stock", "issuer": "a", "total": 10}
ENTRY = {"asset": "CNY", "debit": "external:bank", "credit": "wallet:ann", "amount": 5}
ABOUT: dict[str, dict[str, Any]] = {
    "open": {"terms": STOCK}, "load": {"what": "codes", "chunk": 1, "chunks": 1, "items": ["x"]},
    "amend": {"changes": {"total": 5}},
    "pause": {}, "resume": {}, "close": {}, "grab": {"user": "u"}, "confirm": {"grab": "g"},
    "release": {"grab": "g"},
    "extend": {"grab": "g"}, "return": {"grab": "g"}, "redeem": {"grab": "g", "order": "o"},
    "unredeem": {"grab": "g", "order": "o"},
    "adjust": {"transfers": [ENTRY], "reason": "why", "approved_by": "boss"},
}  # fmt: skip


def command(type_: str, **said: Any) -> dict[str, Any]:
    return {"type": type_, "id": "c", "offer": "o", **ABOUT[type_], **said}


RIGHT = [
    *(command(type_) for type_ in ABOUT),
    command("open", terms=ENVELOPE), command("open", terms={**ENVELOPE, "seed": "ab" * 16, "law": "bounded",
    "max": 9}),
    command("open", terms=COUPON, operator="olga"),
    command("open", terms={**STOCK, "asset": "sku:x", "hours": [{"from": "10:00"}]}),
    command("open", terms={**STOCK, "limits": [{"by": "user", "per": "day", "max": 1}], "opens_at": None}),
    command("amend", changes={"title": 'a "b" 你好', "limits": [], "late": "retake"}),
    command("load", what="audience", items=["u1", "u2"]),
    command("grab", quantity=10**13, attributes={"card": "k"}, ticket="t.t.t", wait=True),
    command("grab", basket="b", attributes={}, metadata={}),
    command("grab", metadata={f"n{n}": 'a "b" 你好' for n in range(16)}),
    command("confirm", payment="p", paid=5, currency="CNY", quantity=1),
    command("return", reason='too "small"', quantity=None),
    command("adjust", transfers=[{**ENTRY, "asset": "coupon:x", "credit": "receivable:ann"}] * 16),
]  # fmt: skip

WRONG = [
    {"id": "c", "offer": "o"}, {**command("pause"), "type": "seize"}, command("pause", more=1),
    command("grab", usr="x"),
    command("pause", id="a b"), command("pause", id=""), command("pause", id="x" * 65),
    command("pause", id=7), command("pause", offer="ü"),
    command("pause", operator="a b"),
    command("grab", user=""), command("grab", quantity=0), command("grab", quantity=10**13 + 1),
    command("grab", quantity=1.5),
    command("grab", quantity="1"), command("grab", quantity=True), command("grab", attributes={"a b": "c"}),
    command("grab", attributes={"a": "b c"}), command("grab", attributes={f"a{n}": "b" for n in range(9)}),
    command("grab", metadata={"a b": "c"}), command("grab", metadata={"a": "b\nc"}),
    command("grab", metadata={"a": 1}), command("grab", metadata={f"n{n}": "" for n in range(17)}),
    command("grab", ticket=""),
    command("grab", ticket="x" * 4097), command("grab", ticket="ü"), command("grab", wait="yes"),
    command("open", terms={**STOCK, "kind": "gift"}), command("open", terms={**STOCK, "parts": 2}),
    command("open", terms={**STOCK, "total": -1}),
    command("open", terms={"kind": "stock", "total": 1}), command("open", terms={**STOCK, "asset": "x"}),
    command("open", terms={**STOCK, "late": "never"}), command("open", terms={**STOCK, "title": "x" * 201}),
    command("open", terms={**STOCK, "title": "a\nb"}), command("open", terms={**STOCK, "title": "a\x7fb"}),
    command("open", terms={**STOCK, "hold_ms": 0}),
    command("open", terms={**STOCK, "hours": [{"from": "25:00"}]}),
    command("open", terms={**STOCK, "hours": [{"until": "24:01"}]}),
    command("open", terms={**STOCK, "hours": [{"weekdays": []}]}),
    command("open", terms={**STOCK, "hours": [{"weekdays": ["sunday"]}]}),
    command("open", terms={**STOCK, "currency": "yuan"}),
    command("open", terms={**STOCK, "limits": [{"by": "user", "per": "year", "max": 1}]}),
    command("open", terms={**STOCK, "limits": [{"by": "user", "per": "day", "max": 0}]}),
    command("open", terms={**STOCK, "limits": [{"by": f"a{n}", "per": "day", "max": 1} for n in range(9)]}),
    command("open", terms={**ENVELOPE, "asset": "cny"}), command("open", terms={**ENVELOPE, "parts": 0}),
    command("open", terms={**ENVELOPE, "seed": "ab"}), command("open", terms={**ENVELOPE, "law": "kind"}),
    command("amend", changes={}), command("amend", changes={"parts": 3}),
    command("amend", changes={"total": None}),
    command("amend", changes={"title": "a\nb"}),
    command("amend", changes={"limits": [{"by": f"a{n}", "per": "day", "max": 1} for n in range(9)]}),
    command("load", what="gifts"), command("load", chunk=0), command("load", chunks=100_001),
    command("load", items=[]),
    command("load", items=[""]), command("load", items=["x" * 201]),
    command("load", items=[f"{n}" for n in range(1001)]),
    command("confirm", paid=-1), command("confirm", paid=5, payment="p", currency="yuan"),
    command("confirm", quantity=0),
    command("confirm", grab="a b"), command("confirm", payment=""),
    command("return", quantity=0), command("return", reason="a\nb"), command("return", reason="x" * 201),
    command("redeem", quantity=0), command("redeem", order="a b"),
    command("unredeem", order=""), command("release", grab=""), command("extend", grab=None),
    command("adjust", transfers=[]), command("adjust", transfers=[ENTRY] * 17),
    command("adjust", transfers=[{**ENTRY, "amount": 0}]),
    command("adjust", transfers=[{**ENTRY, "debit": "wallet:ann"}]),
    command("adjust", transfers=[{**ENTRY, "credit": "offer:o"}]),
    command("adjust", transfers=[{**ENTRY, "asset": "gold"}]),
    command("adjust", transfers=[{**ENTRY, "more": 1}]),
    command("adjust", reason=""), command("adjust", approved_by="the boss"),
]  # fmt: skip


@pytest.mark.parametrize("document", RIGHT, ids=str)
def test_a_valid_command_fits_its_schema_and_is_decoded(document: dict[str, Any]) -> None:
    assert problems(f"commands/{document['type']}", document) == []
    decode_command(json.dumps(document).encode())


@pytest.mark.parametrize("document", WRONG, ids=lambda document: str(document)[:120])
def test_an_invalid_command_fits_no_schema_and_is_not_decoded(document: dict[str, Any]) -> None:
    name = f"commands/{document.get('type')}"
    assert all(
        problems(schema, document)
        for schema in ([name] if name in documents() else [f"commands/{type_}" for type_ in ABOUT])
    )
    with pytest.raises(Undecodable):
        decode_command(json.dumps(document).encode())


# -- answers and events --------------------------------------------------------------------------------------

ANSWER = {"id": "c", "outcome": "granted", "code": 0}
LIMIT = {"by": "user", "per": "day", "max": 2, "left": 1, "resets_at": 5}


@pytest.mark.parametrize(
    ("answer", "fits"),
    [
        (ANSWER, True), ({**ANSWER, "new": 1}, True),
        ({**ANSWER, "limits": [LIMIT], "limit": {**LIMIT, "scope": "campaign", "new": 1}}, True),
        ({**ANSWER, "outcome": "given"}, False), ({**ANSWER, "code": 16}, False),
        ({"id": "c", "code": 0}, False),
        ({**ANSWER, "amount": 1.5}, False), ({**ANSWER, "amount": -1}, False),
        ({**ANSWER, "left": None}, False),
        ({**ANSWER, "limits": [{**LIMIT, "per": "year"}]}, False), ({**ANSWER, "currency": "yuan"}, False),
    ],
)  # fmt: skip
def test_valid_answers_fit_their_schema_and_others_do_not(answer: dict[str, Any], fits: bool) -> None:
    assert (problems("answers/answer", answer) == []) == fits
    if fits:
        decode_answer(json.dumps(answer).encode())


GOLDEN_LINES = {
    path.name.removesuffix(".json"): json.loads(path.read_text())["line"]
    for path in sorted(GOLDEN.glob("*.json"))
}


def test_golden_events_fit_their_schemas() -> None:
    assert check_events(line.encode() for line in GOLDEN_LINES.values()).keys() == CURRENT_VERSIONS.keys()


@pytest.mark.parametrize("name", sorted(GOLDEN_LINES))
def test_an_invalid_event_does_not_fit_its_schema(name: str) -> None:
    """Without a required field, with a field of another type, with another version, with another type."""
    event = json.loads(GOLDEN_LINES[name])
    name = f"{event['type']}.v{event['v']}"
    schema = json.loads((SCHEMAS / f"events/{name}.json").read_text())
    for field in schema["required"]:
        assert problems(f"events/{name}", {key: value for key, value in event.items() if key != field}), field
    for field in schema["properties"]:
        assert problems(f"events/{name}", {**event, field: [{"x": None}]}), field
    for wrong in (
        {"v": 2},
        {"v": "1"},
        {"type": "grab.seized"},
        {"seq": 0},
        {"shard": -1},
        {"offer": "a b"},
        {"at": 1.5},
    ):
        assert problems(f"events/{name}", {**event, **wrong}), wrong


@pytest.mark.parametrize("name", sorted(GOLDEN_LINES))
def test_readers_ignore_fields_they_do_not_know(name: str) -> None:
    """Both this program and a program that uses the schemas; also in objects inside the event."""
    event = json.loads(GOLDEN_LINES[name])
    more = copy.deepcopy(event) | {"new": {"field": 1}}
    for entry in more.get("transfers", ()):
        entry["new"] = 1
    assert problems(f"events/{event['type']}.v{event['v']}", more) == []
    decoded = decode_event(json.dumps(more).encode())
    assert transfers_of(decoded) == transfers_of(decode_event(GOLDEN_LINES[name].encode()))


# -- AsyncAPI ------------------------------------------------------------------------------------------------


def test_the_asyncapi_document_is_valid() -> None:
    assert asyncapi_problems(ASYNCAPI) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("asyncapi",), "9"), (("info", "version"), 7), (("operations", "decide", "action"), "eat"),
        (("channels", "journal", "bindings", "kafka", "partitions"), "many"),
        (("channels", "journal", "topic"), "x"),
        (("components", "messages", "answer", "bindings", "kafka", "keys"), {}),
    ],
)  # fmt: skip
def test_the_check_refuses_an_invalid_asyncapi_document(path: tuple[str, ...], value: Any) -> None:
    document = copy.deepcopy(ASYNCAPI)
    node = document
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    assert asyncapi_problems(document)


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        return [value for key, value in node.items() if key == "$ref"] + [
            reference for value in node.values() for reference in _references(value)
        ]
    return (
        [reference for member in node for reference in _references(member)] if isinstance(node, list) else []
    )


def test_every_reference_exists() -> None:
    files = set()
    for reference in _references(ASYNCAPI):
        if reference.startswith("./"):
            assert (SCHEMAS / reference).is_file(), reference
            files.add(reference.removeprefix("./").removesuffix(".json"))
            continue
        node = ASYNCAPI
        for name in reference.removeprefix("#/").split("/"):
            node = node[name]
    assert files == documents().keys()


def test_topics_and_headers_of_the_document_are_those_of_the_code() -> None:
    kept = {topic.partition(".")[2]: ms for topic, ms in retention_ms(Topics("x")).items()}
    channels = ASYNCAPI["channels"]
    assert {
        name: channel["bindings"]["kafka"]["topicConfiguration"]["retention.ms"]
        for name, channel in channels.items()
    } == kept
    assert {channel["address"] for channel in channels.values()} == set(retention_ms(Topics("{prefix}")))
    messages = ASYNCAPI["components"]["messages"]
    headers = {
        name: list(message["headers"]["schema"]["properties"])
        for name, message in messages.items()
        if "headers" in message
    }
    signer = JournalKeys.from_text(f"k1:{new_key_pair()[0]}", "").signer
    assert signer is not None
    # For an anchor, which has more than a marker.
    of_anchor = signer.signed("x.journal", 0, anchor_headers(Cursor(term=1, owner="a"), 0))
    assert headers["marker"] == [name for name, _ in of_anchor]
    assert headers["marker"][:4] == [name for name, _ in marker_headers(0, 1, "a")]
    # For a block with runs.
    of_block = signer.signed("x.journal", 0, block_headers(0, 1, "a", 1, 1, GENESIS, GENESIS, 2))
    assert sorted(headers["block"]) == sorted(name for name, _ in of_block)
