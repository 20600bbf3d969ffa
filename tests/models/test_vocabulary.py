"""The pydantic models and their wire forms accept the same values, and have the same messages, bytes and
schemas.
"""

import json
import math
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticUndefined

import grabstream.vocabulary
from grabstream.models import answers, commands, entries, events, offers, vocabulary
from grabstream.models.answers import decode_answer, encode_answer
from grabstream.models.beacon import CHAINS
from grabstream.models.bounds import COMMAND_BYTES_MAX
from grabstream.models.commands import Undecodable, check, decode_command, encode_command
from grabstream.models.events import CURRENT_VERSIONS, decode_event, encode_event
from grabstream.models.money import Invalid
from grabstream.models.vocabulary import Answer, AnyCommand, AnyEvent, Grab, Hours, Limit, Open, from_wire
from tests.support.odd_values import COMMANDS, ODD_NUMBERS, ODD_TEXTS, damaged, encoded, of_command, of_python
from tests.support.odd_values import structured as wrong_in_places

ANY_COMMAND: Final[TypeAdapter[Any]] = TypeAdapter(AnyCommand)
ANY_EVENT: Final[TypeAdapter[Any]] = TypeAdapter(AnyEvent)
ANY_TERMS: Final[TypeAdapter[Any]] = TypeAdapter(vocabulary.Terms)
COMMAND_MODELS: Final = {
    model.model_fields["type"].default: model for model in get_args(get_args(AnyCommand)[0])
}
EVENT_MODELS: Final = {model.model_fields["type"].default: model for model in get_args(get_args(AnyEvent)[0])}
STRUCTS: Final = [
    *get_args(commands.AnyCommand), *get_args(events.AnyEvent), *get_args(offers.Terms),
    answers.Answer, answers.LimitState, entries.BookedEntry, entries.Entry, events.CampaignZone,
    offers.Changes, offers.Hours, offers.Limit,
]  # fmt: skip
MODELS: Final = {struct: getattr(vocabulary, struct.__name__) for struct in STRUCTS}


def golden_event(type_: str) -> dict[str, Any]:
    path = Path(__file__).parents[1] / "golden" / "events" / f"{type_}.v{CURRENT_VERSIONS[type_]}.json"
    event: dict[str, Any] = json.loads(json.loads(path.read_text())["line"])
    return event


EVENTS: Final = [golden_event(type_) for type_ in CURRENT_VERSIONS]
LIMIT: Final = {"by": "user", "per": "day", "max": 2, "left": 1, "resets_at": 5, "scope": "campaign"}
ANSWER: Final[dict[str, Any]] = {
    "id": "c", "outcome": "granted", "code": 0, "offer": "o", "grab": "c", "amount": 5, "quantity": 1,
    "place": 1, "left": 7, "repeated": True, "retry_at": 1, "shard": 0, "seq": 2, "at": 3, "message": "m",
    "deadline_at": 4, "due": 5, "currency": "CNY", "limit": LIMIT, "limits": [LIMIT],
    "coupon_code": "1", "coupon_codes": ["1"], "metadata": {"form_id": "f"},
}  # fmt: skip
PIECES: Final[dict[str, Any]] = {
    "issuer": "a", "title": "t", "total": 9, "opens_at": 5, "closes_at": 9, "timezone": "Europe/Berlin",
    "hours": [{"weekdays": ["mon"], "from": "10:00", "until": "11:00"}], "audience": "list",
    "retire_after_ms": 7, "limits": [{"by": "user", "per": "day", "max": 1, "scope": "campaign"}],
    "max_per_grab": 2, "take": "up_to", "price": 5, "currency": "CNY", "hold_ms": 1000, "extensions": 1,
    "late": "grace", "grace_ms": 10, "return_restores": True, "valid_until": 11, "waiting_list": True,
}  # fmt: skip
#: A round of a beacon, whose randomness is the SHA-256 of its signature.
ROUND: Final = f"7/{sha256(bytes(48)).hexdigest()}/{bytes(48).hex()}"
ENVELOPE: Final[dict[str, Any]] = {
    **{name: PIECES[name] for name in ("issuer", "title", "opens_at", "closes_at", "timezone", "hours")},
    "kind": "envelope", "audience": "ticket", "retire_after_ms": 7, "funding": "f", "asset": "CNY",
    "total": 100, "parts": 10, "law": "bounded", "min": 2, "max": 50, "draw": "at_grab", "seed": "ab" * 16,
    "beacon": f"{next(iter(CHAINS))}/7",
}  # fmt: skip
HEAD: Final = {"id": "i", "offer": "o", "operator": "p"}
OPEN_STOCK: Final = {"type": "open", **HEAD, "terms": {"kind": "stock", **PIECES, "asset": "sku:x"}}
#: A document of every type with every field, including those of the fuzzing tests.
WHOLE: Final[list[dict[str, Any]]] = [
    *COMMANDS,
    {"type": "open", **HEAD, "terms": ENVELOPE},
    {"type": "open", **HEAD, "terms": {"kind": "coupon", **PIECES, "codes": True}},
    OPEN_STOCK,
    {
        "type": "amend",
        **HEAD,
        "changes": {name: {**PIECES, "randomness": ROUND}[name] for name in offers.Changes.__struct_fields__},
    },
    {"type": "grab", "id": "i", "offer": "o", "user": "u", "wait": True},
    {"type": "return", "id": "i", "offer": "o", "grab": "g", "quantity": 2, "reason": "r"},
    *({"type": type_, **HEAD} for type_ in ("pause", "resume", "close")),
    *({"type": type_, "id": "i", "offer": "o", "grab": "g"} for type_ in ("release", "extend")),
    {"type": "unredeem", "id": "i", "offer": "o", "grab": "g", "order": "x"},
]


def wire_of(document: Any) -> Any:
    """The struct of a command, or the error that refuses it."""
    try:
        command = msgspec.convert(document, commands.AnyCommand)
        check(command)
    except (msgspec.ValidationError, Invalid, UnicodeEncodeError) as error:
        return error
    return command


def model_of(adapter: TypeAdapter[Any], document: Any) -> Any:
    """The model of a document, or the error that refuses it."""
    try:
        return adapter.validate_python(document)
    except ValidationError as error:
        return error


def compare(document: Any) -> Any:
    """Checks that both forms accept or refuse a document alike. Returns the errors of both, or None if both
    accept.
    """
    wire, model = wire_of(document), model_of(ANY_COMMAND, document)
    refused = isinstance(wire, Exception), isinstance(model, Exception)
    assert refused in ((True, True), (False, False)), f"{document}: {wire!r}, {model!r}"
    if isinstance(wire, Exception):
        # If the types fit the wire form, a rule refuses it, with the same message.
        if isinstance(wire, Invalid):
            assert all(error["type"] == "invalid" for error in model.errors()), model
        return wire, model
    assert model.to_wire() == wire
    assert from_wire(wire) == model
    raw = encode_command(model.to_wire())
    assert model.model_dump_json().encode() == ANY_COMMAND.dump_json(model) == raw
    assert decode_command(raw) == wire
    assert json.dumps(model.model_dump(mode="json")) == json.dumps(json.loads(raw))
    return None


# -- commands ------------------------------------------------------------------------------------------------


def places_in(value: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a document."""
    members = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for name, member in members:
        yield (name,)
        yield from ((name, *path) for path in places_in(member))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The document with another value in one place."""
    if not path:
        return value
    copy = document.copy()
    copy[path[0]] = changed(document[path[0]], path[1:], value)
    return copy


OTHERS: Final = (
    None, True, False, 0, 1, -1, 2, 1.0, 0.5, 10**13, 10**13 + 1, 10**16, 2**64, math.nan, "", "no", "true",
    "1", "a b", "a\0b", "\0", "\ud800", "ü", "x" * 64, "x" * 65, "x" * 201, "x" * 4097, "CNY", "cny",
    "24:00", "24:01", "user", "day", [], ["x"], ["x", "x"], ["a\0"], [1], {}, {"a": "b"},
    {"a b": "c"}, {"a": 1}, {1: "a"}, b"x", {f"a{n}": "b" for n in range(9)},
    [{"by": "user", "per": "day", "max": 1}] * 2,
)  # fmt: skip


@pytest.mark.parametrize("document", WHOLE, ids=lambda one: str(one)[:60])
def test_every_field_of_a_command_accepts_and_refuses_the_same_values(document: dict[str, Any]) -> None:
    assert compare(document) is None, "it is valid as it is"
    refused = 0
    for path in places_in(document):
        for value in OTHERS:
            found = compare(changed(document, path, value))
            if found is not None:
                refused += 1
                wire, model = found
                if isinstance(wire, Invalid) and isinstance(model, ValidationError):
                    assert [error["msg"] for error in model.errors()] == [str(wire)]
        if isinstance(path[-1], str):
            short = changed(document, path[:-1], without(document, path))
            compare(short)
    for path in ((), *(path for path in places_in(document) if isinstance(at(document, path), dict))):
        compare(changed(document, path, {**at(document, path), "more": 1}))
    assert refused > 20


def at(document: Any, path: tuple[Any, ...]) -> Any:
    return at(document[path[0]], path[1:]) if path else document


def without(document: Any, path: tuple[Any, ...]) -> Any:
    """The object that holds a field, without the field."""
    return {name: value for name, value in at(document, path[:-1]).items() if name != path[-1]}


@given(document=st.sampled_from(WHOLE).flatmap(wrong_in_places))
def test_damaged_documents_of_commands_are_treated_alike(document: Any) -> None:
    compare(document)


def from_json(raw: bytes) -> Any:
    """The command that the model named by a text decodes from it, or the error."""
    try:
        model = COMMAND_MODELS[json.loads(raw)["type"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        model = Grab
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        return error


@given(raw=damaged(of_command.map(encoded)))
def test_damaged_json_texts_are_treated_alike(raw: bytes) -> None:
    try:
        wire: Any = decode_command(raw)
    except Undecodable as error:
        wire = error
    model = from_json(raw)
    assert isinstance(wire, Exception) == isinstance(model, Exception), f"{wire!r} {model!r}"
    if not isinstance(wire, Exception):
        assert model.to_wire() == wire


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"type":"grab","id":"i","offer":"o","user":"u","user":"v"}', "'user': is named twice; keep one"),
        ('{"type":"grab","id":"i","offer":"o","user":"u"}' + " " * COMMAND_BYTES_MAX, "at most 131072 bytes"),
        # The length is checked before parsing: this is not JSON either.
        ("[" * (COMMAND_BYTES_MAX + 1), "at most 131072 bytes"),
        ('{"id":"i","offer":"o","user":"u"}', "missing required field `type`"),
    ],
)
def test_problems_of_the_json_text_are_refused(text: str, word: str) -> None:
    for raw in (text, text.encode(), bytearray(text.encode())):
        with pytest.raises(ValidationError, match=word):
            Grab.model_validate_json(raw)


@given(command=of_python)
def test_commands_made_in_python_are_treated_alike(command: commands.AnyCommand) -> None:
    try:
        check(command)
    except (Invalid, TypeError) as error:
        refused: Exception | None = error
    else:
        refused = None
    try:
        encode_command(command)
    except (TypeError, ValueError, OverflowError):
        assume(False)  # JSON has no such value, so there is no document to compare
    if refused is not None:
        with pytest.raises(ValidationError):
            from_wire(command)
        return
    model = from_wire(command)
    assert model.to_wire() == command
    assert model.model_dump_json().encode() == encode_command(model.to_wire())


def test_json_omits_given_defaults() -> None:
    terms = {"kind": "stock", "issuer": "a", "total": 5}
    given = {
        **terms, "timezone": "UTC", "retire_after_ms": 604_800_000, "title": "", "take": "all", "limits": [],
        "hours": [{"weekdays": list(offers.WEEKDAYS), "from": "00:00", "until": "24:00"}],
    }  # fmt: skip
    plain = {"type": "open", "id": "i", "offer": "o", "terms": {**terms, "hours": [{}]}}
    model = Open.model_validate({**plain, "terms": given})
    assert model.model_dump(mode="json") == plain
    assert encode_command(model.to_wire()) == encoded(plain).replace(b" ", b"")


def test_error_has_the_message_of_the_check_and_its_field() -> None:
    with pytest.raises(ValidationError) as caught:
        Grab(id="a b", offer="o", user="u")
    [error] = caught.value.errors(include_url=False)
    reason = "id: must match [A-Za-z0-9._:-]{1,64}, got 'a b'"
    assert error == {
        "type": "invalid", "loc": ("id",), "msg": reason, "input": "a b", "ctx": {"reason": reason}
    }  # fmt: skip
    found = model_of(ANY_COMMAND, changed(OPEN_STOCK, ("terms", "hours", 0, "from"), "25:00"))
    assert [error["loc"] for error in found.errors()] == [("open", "terms", "stock", "hours", 0, "from")]


@pytest.mark.parametrize(
    ("model", "said", "word"),
    [
        (Limit, {"by": "a b", "per": "day", "max": 1}, "terms.limits.by: must match"),
        (Hours, {"from": "11:00", "until": "10:00"}, "from must be before until"),
        (vocabulary.Entry, {"asset": "x", "debit": "a", "credit": "b", "amount": 1}, "transfers.asset"),
        (vocabulary.CouponTerms, {"issuer": "a", "total": 0}, "terms.total: must be from 1"),
        (vocabulary.Changes, {}, "name at least one field"),
    ],
)
def test_parts_of_commands_are_checked_when_made(model: Any, said: Any, word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        model(**said)


def test_from_is_named_from_underscore_in_python_only() -> None:
    assert Hours(from_="10:00").to_wire() == offers.Hours(from_="10:00")
    assert Hours(from_="10:00").model_dump_json() == '{"from":"10:00"}'
    text = encoded(changed(OPEN_STOCK, ("terms", "hours", 0), {"from_": "10:00"}))
    assert isinstance(from_json(text), ValidationError)


def test_models_cannot_be_changed() -> None:
    command = Grab(id="i", offer="o", user="u")
    with pytest.raises(ValidationError, match="frozen"):
        command.user = "v"  # type: ignore[misc]
    assert len({Limit(by="user", per="day", max=1), Limit(by="user", per="day", max=1)}) == 1


def test_changes_name_the_changed_fields() -> None:
    assert vocabulary.Changes(total=5).fields() == offers.Changes(total=5).fields() == {"total": 5}
    with pytest.raises(ValidationError, match="valid integer"):
        vocabulary.Changes(total=None)


# -- answers and events --------------------------------------------------------------------------------------


def decoded(decode: Any, raw: bytes) -> Any:
    try:
        return decode(raw)
    except (msgspec.DecodeError, ValidationError) as error:
        return error


def compare_texts(decode: Any, encode: Any, adapter: TypeAdapter[Any], document: Any) -> None:
    """Like `compare`, for values that are read from a topic."""
    raw = encoded(document)
    wire, model = decoded(decode, raw), decoded(adapter.validate_json, raw)
    assert isinstance(wire, Exception) == isinstance(model, Exception), f"{document}: {wire!r}, {model!r}"
    assert isinstance(model_of(adapter, document), Exception) == isinstance(model, Exception)
    if not isinstance(wire, Exception):
        assert model_of(adapter, document) == model
        assert type(model).from_wire(wire) == model
        raw = encode(model.to_wire())
        assert model.model_dump_json().encode() == raw
        # The text of terms and changes may have another format.
        assert type(model).from_wire(decode(raw)) == model


def is_json(document: Any) -> bool:
    """Whether the document is valid JSON: no NaN, no single surrogate, no number that JSON lacks, and no name
    that is a number.
    """
    try:
        raw = json.dumps(document, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, UnicodeEncodeError):
        return False
    return bool(json.loads(raw) == document)


def has_objects(document: Any) -> bool:
    """Whether `terms` and `changes` of an event are objects. The wire form does not check this."""
    return not isinstance(document, dict) or all(
        isinstance(document.get(name, {}), dict) for name in ("terms", "changes")
    )


ANY_ANSWER: Final = TypeAdapter(Answer)


@given(document=wrong_in_places(ANSWER))
def test_damaged_answers_are_treated_alike(document: Any) -> None:
    assume(is_json(document))
    compare_texts(decode_answer, encode_answer, ANY_ANSWER, document)


@pytest.mark.parametrize("name", sorted(ANSWER))
def test_every_field_of_an_answer_accepts_and_refuses_the_same_values(name: str) -> None:
    for value in filter(is_json, OTHERS[:-3]):
        if not isinstance(value, bytes):
            compare_texts(decode_answer, encode_answer, ANY_ANSWER, {**ANSWER, name: value})
    compare_texts(
        decode_answer, encode_answer, ANY_ANSWER, {key: said for key, said in ANSWER.items() if key != name}
    )


def test_answers_agree_about_positive_and_decided() -> None:
    for outcome in ("granted", "fenced", "sold_out"):
        code = int(answers.Outcome[outcome])
        wire = answers.Answer("c", outcome, code)
        model = Answer.from_wire(wire)
        assert (model.positive, model.decided) == (wire.positive, wire.decided)


@given(document=st.sampled_from(EVENTS).flatmap(wrong_in_places))
def test_damaged_events_are_treated_alike(document: Any) -> None:
    assume(is_json(document) and has_objects(document))
    compare_texts(decode_event, encode_event, ANY_EVENT, document)


@pytest.mark.parametrize("document", EVENTS, ids=lambda one: str(one["type"]))
def test_every_field_of_an_event_accepts_and_refuses_the_same_values(document: dict[str, Any]) -> None:
    compare_texts(decode_event, encode_event, ANY_EVENT, document)
    raw = msgspec.json.encode(document)
    assert ANY_EVENT.validate_json(raw).model_dump_json().encode() == raw
    for name in document:
        for value in OTHERS:
            other = {**document, name: value}
            if not isinstance(value, bytes) and value != {1: "a"} and is_json(other) and has_objects(other):
                compare_texts(decode_event, encode_event, ANY_EVENT, other)
        compare_texts(decode_event, encode_event, ANY_EVENT, without(document, (name,)))
    compare_texts(decode_event, encode_event, ANY_EVENT, {**document, "more": {"x": 1}})


@given(value=st.one_of(ODD_TEXTS, ODD_NUMBERS, st.lists(st.integers(), max_size=2)))
def test_terms_of_an_event_must_be_an_object(value: Any) -> None:
    with pytest.raises(ValidationError, match="valid dictionary"):
        ANY_EVENT.validate_python({**golden_event("offer.opened"), "terms": value})


# -- schemas and signatures ----------------------------------------------------------------------------------


def normal(schema: Any, where: str = "") -> Any:
    """A schema without the differences between two generators: names and descriptions of objects, `const` or
    `enum` for a single value, `oneOf` or `anyOf` for alternatives with a tag.
    """
    if isinstance(schema, list | tuple):
        return [normal(member) for member in schema]
    if not isinstance(schema, dict):
        return schema
    if where in ("properties", "$defs", "mapping"):
        return {name: normal(member) for name, member in schema.items()}
    plain = {word: normal(value, word) for word, value in schema.items() if word != "title"}
    if "properties" in plain:
        plain.pop("description", None)
        plain["required"] = sorted(plain.get("required", ()))
    if "const" in plain:
        plain["enum"] = [plain.pop("const")]
    if "enum" in plain:
        plain.pop("type", None)
        plain["enum"] = sorted(plain["enum"], key=str)
    if "oneOf" in plain:
        plain["anyOf"] = plain.pop("oneOf")
    if "prefixItems" in plain and plain["maxItems"] == len(plain["prefixItems"]):
        plain.pop("items", None)
    if plain.get("additionalProperties") is True:
        plain.pop("additionalProperties")
    if plain.get("propertyNames", {}).get("type") == "string":
        plain["propertyNames"].pop("type")
    return plain


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_model_has_the_schema_of_its_wire_form(struct: Any) -> None:
    model = MODELS[struct]
    _, components = msgspec.json.schema_components([struct], ref_template="#/$defs/{name}")
    root = components.pop(struct.__name__)
    expected = normal({**root, **({"$defs": components} if components else {})})
    for mode in ("validation", "serialization"):
        assert normal(model.model_json_schema(mode=mode)) == expected, mode
    assert model.model_json_schema()["description"]


@pytest.mark.parametrize(
    ("union", "adapter"),
    [(commands.AnyCommand, ANY_COMMAND), (events.AnyEvent, ANY_EVENT), (offers.Terms, ANY_TERMS)],
    ids=["commands", "events", "terms"],
)
def test_union_has_the_schema_of_its_wire_forms(union: Any, adapter: TypeAdapter[Any]) -> None:
    assert normal(adapter.json_schema()) == normal(msgspec.json.schema(union))


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_model_has_the_fields_of_its_wire_form(struct: Any) -> None:
    model = MODELS[struct]
    assert model.struct is struct
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    tag = struct.__struct_config__.tag_field
    assert list(model.model_fields) == [*([tag] if tag else []), *fields]
    if tag:
        assert model.model_fields[tag].default == struct.__struct_config__.tag
    for name, field in fields.items():
        made = model.model_fields[name]
        assert made.is_required() == field.required, name
        if field.required:
            assert made.default is PydanticUndefined
        else:
            default = (
                field.default_factory() if field.default is msgspec.NODEFAULT else field.default  # type: ignore[misc]
            )
            assert made.default == (None if default is msgspec.UNSET else default), name


def test_public_module_has_all_models() -> None:
    assert set(vocabulary.__all__) <= set(dir(grabstream.vocabulary))
    assert grabstream.vocabulary.Grab is vocabulary.Grab


def test_every_struct_has_a_model() -> None:
    assert COMMAND_MODELS.keys() == {struct.__struct_config__.tag for struct in get_args(commands.AnyCommand)}
    assert EVENT_MODELS.keys() == CURRENT_VERSIONS.keys()
    assert {model for model in vars(vocabulary).values() if hasattr(model, "struct")} == set(MODELS.values())
    assert set(vocabulary.__all__) <= set(dir(vocabulary))
