"""What all models of the vocabulary share: validation, JSON without defaults, and the conversion to the wire
form and back.

A model names its wire form, a msgspec struct, as the parameter of `Wired`. pydantic checks types; the
functions that check the wire form check `rules`; constraints of the JSON Schema (bounds, patterns,
descriptions of fields) are read from the struct. `tests/models/test_vocabulary.py` compares models and
structs.
"""

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Generic, Self, TypeVar, cast, get_args, get_origin

import msgspec
from pydantic import (
    BaseModel,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from grabstream.models.money import Invalid

W = TypeVar("W", bound=msgspec.Struct)
T = TypeVar("T")
Schema = dict[str, Any]

#: Scalars are never converted: "no" is not a bool, 1.0 is not an integer, true is not 1.
Text = Annotated[str, Strict()]
Whole = Annotated[int, Strict()]
Flag = Annotated[bool, Strict()]

#: The words of a struct's schema, beside the type, that a model's schema copies.
_CONSTRAINTS: Final = frozenset(
    {"minimum", "maximum", "minLength", "maxLength", "pattern", "minItems", "maxItems", "minProperties"}
    | {"maxProperties", "description"}
)
#: Fields that tell which type or kind an object has; JSON always has them.
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


class _Verbatim:
    """Marks a field whose value is JSON text in the wire form."""


_VERBATIM: Final = _Verbatim()
#: A JSON object from a command that its event contains unchanged.
JsonObject = Annotated[dict[str, Any], _VERBATIM]


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

    #: Functions that check the wire form and raise Invalid.
    rules: ClassVar[tuple[Callable[[Any], None], ...]] = ()

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        try:
            for check in self.rules:
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
            for name, of_struct in _schema_of(struct)["properties"].items():
                field = schema["properties"][name]
                field.pop("title", None)
                if "default" not in of_struct:
                    field.pop("default", None)
                if name in _TAGS and name not in schema.get("required", ()):
                    schema["required"] = [name, *schema.get("required", ())]
                _constrain(field, of_struct)
        return reference


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


def _constrain(schema: Schema, of_wire: Schema) -> None:
    """Copies the constraints from the schema of a value's wire form to the schema of the value."""
    schema.update({word: of_wire[word] for word in _CONSTRAINTS & of_wire.keys()})
    if "enum" in of_wire and not {"const", "enum"} & schema.keys():
        schema["enum"] = of_wire["enum"]
    for word in ("items", "additionalProperties", "propertyNames"):
        if isinstance(of_wire.get(word), dict):
            _constrain(schema.setdefault(word, {}), of_wire[word])
    for word in ("anyOf", "prefixItems"):
        for member, member_of_wire in zip(schema.get(word, ()), of_wire.get(word, ()), strict=False):
            _constrain(member, member_of_wire)
