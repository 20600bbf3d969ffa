"""The pydantic models of `grabstream.vocabulary`, as Python text made from the structs of `models/`.

A model has the fields, defaults and docstring of its struct. What a struct cannot say is in
`models/vocabulary/base.py`: how a value is validated, and what a model does (`_BASES`).
"""

import inspect
import textwrap
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from grabstream.models import answers, commands, events, offers
from grabstream.models.decoding_words import fields_of

#: Each union, with its name and the field that tells its members apart; before those that use it.
UNIONS: Final = {
    offers.Terms: ("Terms", "kind"),
    commands.AnyCommand: ("AnyCommand", "type"),
    events.AnyEvent: ("AnyEvent", "type"),
}
#: Names of classes that are private among the structs, because a union has the public one.
_NAMES: Final = {"_BaseTerms": "CommonTerms", "_PieceTerms": "PieceTerms", "_GrabEvent": "GrabEvent"}
#: The hand-written bases of models that do more than other models.
_BASES: Final = {"Answer": "AnswerModel", "Changes": "ChangesModel", "Command": "CommandModel"}
_SCALARS: Final = {str: "Text", int: "Whole", bool: "Flag", msgspec.Raw: "JsonObject"}

HEAD: Final = '''"""Commands, terms, answers and events as pydantic models.

Made from the structs of `models/` by `python -m scripts.generated`: change those.
"""

from typing import Annotated, Any, Final, Literal, get_args, overload

from pydantic import Field

from grabstream.models import answers, commands, entries, events, offers
from grabstream.models.vocabulary.base import (
    Absent, AnswerModel, ChangesModel, CommandModel, Exact, Flag, JsonObject, Model, Text, Whole, Wired,
    omitted,
)
'''

TAIL: Final = '''
_MODELS: Final[dict[type[Any], Any]] = {
    model.struct: model for union in (AnyCommand, AnyEvent) for model in get_args(get_args(union)[0])
}


@overload
def from_wire(struct: commands.AnyCommand) -> AnyCommand: ...
@overload
def from_wire(struct: events.AnyEvent) -> AnyEvent: ...
def from_wire(struct: Any) -> Any:
    """The model of any command or event; raises pydantic's ValidationError when it breaks a rule."""
    return _MODELS[type(struct)].from_wire(struct)
'''


def source() -> str:
    """The text of the module."""
    # A class comes after those that it uses.
    classes: dict[type, str] = {}
    unions = {}
    for union, (name, tag) in UNIONS.items():
        for struct in get_args(union):
            _add(struct, classes)
        members = " | ".join(name_of(struct) for struct in get_args(union))
        unions[name] = f'{name} = Annotated[{members}, Field(discriminator="{tag}")]\n'
        classes[union] = unions[name]
    _add(answers.Answer, classes)
    names = sorted(
        [
            "Model",
            "Wired",
            "from_wire",
            *unions,
            *(name_of(struct) for struct in classes if isinstance(struct, type)),
        ]
    )
    listed = "".join(f'    "{name}",\n' for name in names)
    return "\n\n".join([f"{HEAD}\n__all__ = [\n{listed}]\n", *classes.values(), TAIL])


def name_of(struct: type) -> str:
    """The name of a struct's model."""
    return _NAMES.get(struct.__name__, struct.__name__)


def _add(struct: type, classes: dict[Any, str]) -> None:
    """Adds the text of a model, after the models that it needs."""
    if struct in classes:
        return
    base = parent_of(struct)
    used = [other for field in own_fields(struct).values() for other in _structs_in(field.type)]
    for other in [*([base] if base else []), *used]:
        _add(other, classes)
    classes[struct] = _class_text(struct)


def parent_of(struct: type) -> type | None:
    """The struct that this one extends, if any."""
    base = struct.__mro__[1]
    return None if base is msgspec.Struct else base


def own_fields(struct: type) -> dict[str, msgspec.structs.FieldInfo]:
    """The fields that a struct adds to its base, or gives another type or default."""
    base = parent_of(struct)
    inherited = fields_of(base) if base else {}
    return {
        name: field
        for name, field in fields_of(struct).items()
        if name not in inherited
        or any(
            getattr(inherited[name], word) != getattr(field, word) for word in ("type", "default", "required")
        )
    }


def _structs_in(annotation: Any) -> Iterator[type]:
    """The structs that a type names, but for those of a union."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
    elif annotation not in UNIONS and get_origin(annotation) is not Literal:
        for member in get_args(annotation):
            yield from _structs_in(member)


def _class_text(struct: Any) -> str:
    base = parent_of(struct)
    config = struct.__struct_config__
    bases = [name_of(base) if base else _BASES.get(struct.__name__, "Model")]
    if not _is_abstract(struct):
        bases.append(f"Wired[{struct.__module__.rpartition('.')[2]}.{struct.__name__}]")
    if base is None:
        bases.append(f'extra="{"forbid" if config.forbid_unknown_fields else "ignore"}"')
    renamed = any(field.name != field.encode_name for field in fields_of(struct).values())
    bases += ["validate_by_name=True"] * renamed + ["frozen=True"]
    lines = []
    if config.tag_field and (base is None or not _is_abstract(struct)):
        lines.append(
            f"{config.tag_field}: str"
            if _is_abstract(struct)
            else f'{config.tag_field}: Literal["{config.tag}"] = "{config.tag}"'
        )
    lines += [_field_text(field) for field in own_fields(struct).values()]
    docstring = textwrap.indent(inspect.getdoc(struct) or "", "    ").strip()
    ends = '\n    """' if "\n" in docstring else '"""'
    body = "".join(f"    {line}\n" for line in lines)
    return f'class {name_of(struct)}({", ".join(bases)}):\n    """{docstring}{ends}\n\n{body}'


def _is_abstract(struct: Any) -> bool:
    """Whether other structs extend it: it has no own wire form."""
    return bool(struct.__subclasses__())


def _field_text(field: msgspec.structs.FieldInfo) -> str:
    text = f"{field.name}: {type_text(field.type)}"
    if field.required:
        return text
    default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    alias = f', alias="{field.encode_name}"' if field.encode_name != field.name else ""
    words = f"{default:_}" if type(default) is int else repr(None if default is msgspec.UNSET else default)
    return f"{text} = omitted({words}{alias})"


def type_text(annotation: Any) -> str:
    """The type of a model's field."""
    if annotation in UNIONS:
        return UNIONS[annotation][0]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0])
    if origin in (Union, UnionType):
        [present] = (member for member in arguments if member not in (type(None), msgspec.UnsetType))
        words = type_text(present)
        return f"Absent[{words}]" if msgspec.UnsetType in arguments else f"{words} | None"
    if origin is Literal:
        words = f"Literal[{', '.join(map(repr, arguments))}]"
        return f"Annotated[{words}, Exact]" if isinstance(arguments[0], int) else words
    if origin in (tuple, dict):
        members = ", ".join("..." if member is ... else type_text(member) for member in arguments)
        return f"{origin.__name__}[{members}]"
    if isinstance(annotation, TypeVar):
        # The version of an event: of which type it is, its type says.
        return "int"
    return _SCALARS.get(annotation) or name_of(annotation)
