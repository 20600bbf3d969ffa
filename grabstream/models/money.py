"""Integers that count money and pieces, and the bounds that keep them exact everywhere.

Numbers in Lua are doubles and print with 14 digits. 10^13 leaves room for a sum of two amounts and a sign.
"""

from typing import Annotated, Final

from grabstream.models.bounds import quoted
from grabstream.models.identifiers import in_schema

AMOUNT_MAX: Final = 10**13
PARTS_MAX: Final = 1_000_000

#: An amount that moves or is left; it may be 0.
Sum = Annotated[int, in_schema(minimum=0, maximum=AMOUNT_MAX)]
#: An amount that a sender asks for: at least 1.
Quantity = Annotated[int, in_schema(minimum=1, maximum=AMOUNT_MAX)]
Currency = Annotated[str, in_schema(pattern="^[A-Z]{3}$")]
Asset = Annotated[str, in_schema(pattern="^([A-Z]{3}|(coupon|sku):[A-Za-z0-9._:-]{1,64})$")]
Account = Annotated[str, in_schema(pattern="^[a-z]+:[A-Za-z0-9._:-]{1,64}$")]


class Invalid(ValueError):
    """A command that must not reach a script. `str(error)` names the field and says what is allowed."""


def check_amount(field: str, value: object, least: int = 0, most: int = AMOUNT_MAX) -> int:
    """Returns the value if it is an integer from `least` to `most`; else raises Invalid with the name of the
    field.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise Invalid(f"{field}: must be an integer (minor units or pieces), got {quoted(value)}")
    if not least <= value <= most:
        raise Invalid(f"{field}: must be from {least} to {most}, got {quoted(value)}")
    return value
