"""Options of verbs for the fields of their commands, made from the structs."""

from collections.abc import Callable, Sequence
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import click
import msgspec

F = TypeVar("F", bound=Callable[..., Any])


def field_options(command: type[msgspec.Struct], *but: str) -> Callable[[F], F]:
    """Adds an option for each field of a command, but for id, offer and these, in their order. A map is given
    by an option NAME=VALUE that may be repeated, and is named in the singular.
    """
    fields = [field for field in msgspec.structs.fields(command) if field.name not in {"id", "offer", *but}]

    def decorated(verb: F) -> F:
        for field in reversed(fields):
            verb = _option(field)(verb)
        return verb

    return decorated


def _option(field: msgspec.structs.FieldInfo) -> Callable[[F], F]:
    kind, words = kind_of(field.type), _description(field.type)
    if kind is dict:
        return click.option(
            f"--{field.name.removesuffix('s')}", field.name, multiple=True, callback=_values_by_name,
            metavar="NAME=VALUE", help=f"{words} Repeatable.",
        )  # fmt: skip
    if kind is bool:
        return click.option(f"--{field.name}", is_flag=True, help=words)
    if field.required:
        return click.option(f"--{field.name}", type=kind, required=True, help=words)
    # A default that is neither a string nor absent is worth showing.
    is_shown = kind is int and field.default is not None
    return click.option(
        f"--{field.name}", type=kind, default=field.default, show_default=is_shown, help=words
    )


def kind_of(annotation: Any) -> type:
    """int, str, bool or dict: the type of a field, if present."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind_of(arguments[0])
    if origin in (Union, UnionType):
        return kind_of(next(member for member in arguments if member is not type(None)))
    kind: type = origin or annotation
    return kind


def _description(annotation: Any) -> str:
    """The description of a field as a sentence."""
    words = next(
        meta.description
        for meta in reversed(annotation.__metadata__)
        if isinstance(meta, msgspec.Meta) and meta.description
    )
    words = words.replace("; absent: ", ". Default: ")
    return f"{words[0].upper()}{words[1:]}."


def _values_by_name(
    context: click.Context, option: click.Parameter, written: Sequence[str]
) -> dict[str, str] | None:
    pairs = pairs_of(option.opts[0], written)
    if len(dict(pairs)) < len(pairs):
        raise click.BadParameter("a name is given twice; keep one", param_hint=option.opts[0])
    return dict(pairs) or None


def pairs_of(option: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of texts NAME=VALUE; raises BadParameter for a text without `=`."""
    pairs = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"must be written as NAME=VALUE, got {text!r}", param_hint=option)
        pairs.append((name, value))
    return pairs
