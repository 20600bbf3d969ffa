"""What all models of the vocabulary share: validation, JSON without defaults, and the conversion to the wire
form and back.

A model names its wire form, a msgspec struct, as the parameter of `Wired`. pydantic checks types; the
functions that check the wire form check the rules; constraints of the JSON Schema (bounds, patterns,
descriptions of fields) are read from the struct. The models themselves are made from the structs
(`generated.py`); `tests/models/test_vocabulary.py` compares what both accept, refuse and write.
"""

from collections.abc import Callable
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Generic,
    Protocol,
    Self,
    TypeVar,
    cast,
    get_args,
    get_origin,
)  # fmt: skip

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from grabstream.models import commands, entries, offers
from grabstream.models.money import Invalid
from grabstream.models.outcomes import NOT_DECIDED, Outcome

W = TypeVar("W", bound=msgspec.Struct)
T = TypeVar("T")
Schema = dict[str, Any]

#: Scalars are never converted: "no" is not a bool, 1.0 is not an integer, true is not 1.
Text = Annotated[str, Strict()]
Whole = Annotated[int, Strict()]
Flag = Annotated[bool, Strict()]

#: The keywords of a struct's schema, other than the type, that a model's schema copies.
_CONSTRAINTS: Final = frozenset(
    {"minimum", "maximum", "minLength", "maxLength", "pattern", "minItems", "maxItems", "minProperties"}
    | {"maxProperties", "description"}
)
#: Fields with the type or kind of an object; JSON always has them.
_TAGS: Final = ("type", "kind")


def omitted(default: Any, **options: Any) -> Any:
    """A field with a default that JSON leaves out, as the wire form does."""
    return Field(default=default, exclude_if=lambda value: bool(value == default), **options)


class _NotNull:
    """Refuses null, although None means an absent field in Python."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        (present,) = (member for member in get_args(source) if member is not type(None))
        return handler.generate_schema(present)


#: A field that may be absent (None in Python) but never null.
Absent = Annotated[T | None, _NotNull()]


def _exact(value: object) -> object:
    """Raises ValueError for True and 1.0, which equal the version 1."""
    if type(value) is not int:
        raise ValueError("must be an integer")
    return value


#: With a literal integer: no value that only equals it.
Exact: Final = BeforeValidator(_exact)


class _Verbatim:
    """Marks a field whose value is JSON text in the wire form."""


_VERBATIM: Final = _Verbatim()
#: A JSON object from a command that its event contains unchanged.
JsonObject = Annotated[dict[str, Any], _VERBATIM]


#: The functions that check a wire form and raise Invalid.
_CHECKS: Final[dict[type[Any], Callable[[Any], None]]] = {
    **dict.fromkeys(get_args(commands.AnyCommand), commands.check),
    **dict.fromkeys(get_args(offers.Terms), offers.check_terms),
    entries.Entry: entries.check_adjustment,
    offers.Changes: offers.check_changes,
    offers.Hours: lambda hours: offers.check_hours((hours,)),
    offers.Limit: lambda limit: offers.check_limits((limit,)),
}


class Wired(Generic[W]):
    """The conversion to the wire form `W` and back."""

    struct: ClassVar[type[Any]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for base in cls.__dict__.get("__orig_bases__", ()):
            if get_origin(base) is Wired:
                (cls.struct,) = get_args(base)

    def to_wire(self) -> W:
        """The wire form, which gates, encoders and projections take."""
        return cast(W, _to_wire(self))

    @classmethod
    def from_wire(cls, struct: W) -> Self:
        """The model of a wire form; raises pydantic's ValidationError when the wire form breaks a rule."""
        document = msgspec.json.decode(msgspec.json.encode(struct))
        return cast(Self, cast(type[BaseModel], cls).model_validate(document))


class Model(BaseModel, frozen=True, serialize_by_alias=True):
    """A value of the vocabulary: immutable, compared by its fields, validated when it is made."""

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        check = _CHECKS.get(getattr(self, "struct", Model))
        try:
            if check is not None:
                check(_to_wire(self))
        except Invalid as error:
            raise invalid(self, str(error)) from None
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        reference = handler(core_schema)
        struct = getattr(cls, "struct", None)
        if struct is not None:
            schema = handler.resolve_ref_schema(reference)
            for name, struct_field in _schema_of(struct)["properties"].items():
                field = schema["properties"][name]
                field.pop("title", None)
                if "default" not in struct_field:
                    field.pop("default", None)
                if name in _TAGS and name not in schema.get("required", ()):
                    schema["required"] = [name, *schema.get("required", ())]
                _constrain(field, struct_field)
        return reference


class CommandModel(Model, frozen=True):
    """What commands do in addition to other models: they read JSON as `decode_command` does."""

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """The command of a JSON text; refuses, as `decode_command` does, a text above the bound of a command
        or with a field that is named twice.
        """
        # The parser refuses text that is not valid Unicode.
        raw = json_data.encode(errors="surrogatepass") if isinstance(json_data, str) else bytes(json_data)
        try:
            commands.check_size(raw)
        except Invalid as error:
            raise invalid(cls, str(error)) from None
        command = super().model_validate_json(json_data, **options)
        try:
            commands.decode_command(raw)
        except commands.Undecodable as error:
            raise invalid(command, error.reason) from None
        return command


class _HasCode(Protocol):
    @property
    def code(self) -> int: ...


class AnswerModel(Model, frozen=True):
    """What answers do in addition to other models."""

    @property
    def positive(self: _HasCode) -> bool:
        """Whether the command was executed."""
        return self.code < Outcome.invalid

    @property
    def decided(self: _HasCode) -> bool:
        """Whether the command was decided; after `fenced` or `busy` it may be sent again."""
        return self.code not in NOT_DECIDED


class ChangesModel(Model, frozen=True):
    """What changes of terms do in addition to other models."""

    def fields(self) -> dict[str, Any]:
        """What changes, by name."""
        return {name: value for name, value in self if value is not None}


def invalid(model: Model | type[Model], reason: str) -> ValidationError:
    """The error for a broken rule, at the field that the reason names first (`terms.total: …`).

    `model` may be the class if no object exists yet; the reason then names no field.
    """
    kind = model if isinstance(model, type) else type(model)
    fields = {info.alias or name: name for name, info in kind.model_fields.items()}
    names = reason.partition(":")[0].split(".")
    while names and names[0] not in fields:
        names.pop(0)
    return ValidationError.from_exception_data(
        kind.__name__,
        [
            InitErrorDetails(
                type=PydanticCustomError("invalid", "{reason}", {"reason": reason}),
                loc=tuple(names),
                input=getattr(model, fields[names[0]]) if names else model,
            )
        ],
    )


def _to_wire(value: Any) -> Any:
    if isinstance(value, Model):
        struct, fields = _conversion_of(type(value))
        arguments = {}
        for name, default, verbatim in fields:
            field = getattr(value, name)
            # Model and struct have the same defaults, which the JSON of both leaves out.
            if field != default:
                arguments[name] = msgspec.Raw(msgspec.json.encode(field)) if verbatim else _to_wire(field)
        return struct(**arguments)
    if isinstance(value, tuple):
        return tuple(_to_wire(member) for member in value)
    return value


@cache
def _conversion_of(model: Any) -> tuple[Any, tuple[tuple[str, Any, bool], ...]]:
    """The wire form of a model, and its fields: name, default, and whether the wire form has it as JSON text.
    A tag is not a field of a struct.
    """
    fields = ((name, model.model_fields[name]) for name in model.struct.__struct_fields__)
    return model.struct, tuple((name, info.default, _VERBATIM in info.metadata) for name, info in fields)


@cache
def _schema_of(struct: type[Any]) -> Schema:
    (_, components) = msgspec.json.schema_components([struct])
    schema: Schema = components[struct.__name__]
    return schema


def _constrain(schema: Schema, wire_schema: Schema) -> None:
    """Copies the constraints from the schema of a value's wire form to the schema of the value."""
    schema.update({word: wire_schema[word] for word in _CONSTRAINTS & wire_schema.keys()})
    if "enum" in wire_schema and not {"const", "enum"} & schema.keys():
        schema["enum"] = wire_schema["enum"]
    for word in ("items", "additionalProperties", "propertyNames"):
        if isinstance(wire_schema.get(word), dict):
            _constrain(schema.setdefault(word, {}), wire_schema[word])
    for word in ("anyOf", "prefixItems"):
        for member, wire_member in zip(schema.get(word, ()), wire_schema.get(word, ()), strict=False):
            _constrain(member, wire_member)
