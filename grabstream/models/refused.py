"""A refused command, as the topic of refusals has it."""

from collections.abc import Callable
from typing import Annotated, Final, Literal, get_args

import msgspec

from grabstream.models.commands import AnyCommand
from grabstream.models.identifiers import Count, Id, in_schema
from grabstream.models.money import Quantity, Sum
from grabstream.models.outcomes import OutcomeName

_TYPES: Final = [str(command.__struct_config__.tag) for command in get_args(AnyCommand)]


class Refused(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A command that was refused. It is not an event, but a sample: it changed nothing and has no number.
    `at` and `retry_at` are milliseconds since 1970 UTC.

    `type` and `id` are those of the command, `grab` the one it was about, `limit` the limit that refused it
    (`user/day`), with the units that it leaves in `limit_left`; `left` are the units that the offer has left.
    What does not apply is absent.
    """

    v: Literal[1]
    at: Count
    type: Annotated[str, in_schema(enum=_TYPES)]
    id: Id
    offer: Id
    user: Id | None = None
    grab: Id | None = None
    quantity: Quantity | None = None
    outcome: OutcomeName
    code: Count
    limit: str | None = None
    limit_left: Sum | None = None
    left: Sum | None = None
    retry_at: Count | None = None


encode_refused: Final[Callable[[Refused], bytes]] = msgspec.json.Encoder().encode
