"""The optional fields of commands that the methods of the clients take by name, for Python and TypeScript."""

from types import UnionType
from typing import Any, Final, Union, get_args, get_origin

import msgspec

from grabstream.models import commands

#: The types of these fields: of which command, and the fields that a method takes in another way.
FIELDS: Final[dict[str, tuple[type[msgspec.Struct], frozenset[str]]]] = {
    "OperatorFields": (commands.OfferCommand, frozenset({"id", "offer"})),
    "GrabFields": (commands.Grab, frozenset({"id", "offer", "user", "basket"})),
    "ConfirmFields": (commands.Confirm, frozenset({"id", "offer", "user", "grab"})),
    "ReturnFields": (commands.Return, frozenset({"id", "offer", "user", "grab"})),
    "RedeemFields": (commands.Redeem, frozenset({"id", "offer", "user", "grab", "order"})),
}

HEAD: Final = '''\
"""The optional fields of commands, as the methods of clients take them; None: the field is absent.

Made from the structs of `models/` by `python -m scripts.generated`: change those.
"""

from collections.abc import Mapping, Sequence
from typing import TypedDict
'''


def source() -> str:
    """The text of `client/fields.py`."""
    return "\n\n".join([HEAD, *(_class_text(name, *origin) for name, origin in FIELDS.items())])


def _class_text(name: str, struct: type[msgspec.Struct], given: frozenset[str]) -> str:
    fields = [
        f"    {field.name}: {_type_text(field.type)} | None\n"
        for field in msgspec.structs.fields(struct)
        if field.name not in given
    ]
    docstring = f'"""The optional fields of `{struct.__name__}`."""'
    return f"class {name}(TypedDict, total=False):\n    {docstring}\n\n{''.join(fields)}"


def _type_text(annotation: Any) -> str:
    """The type of an argument that is not None, which is an absent field."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _type_text(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(_type_text(member) for member in arguments if member is not type(None))
    if origin is dict:
        return f"Mapping[{', '.join(map(_type_text, arguments))}]"
    if origin is tuple:
        return f"Sequence[{_type_text(arguments[0])}]"
    return str(annotation.__name__)
