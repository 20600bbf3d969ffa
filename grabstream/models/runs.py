"""Runs: consecutive grants or holds of one offer by one call, as one event in columns.

A run is version 2 of `grab.granted` and `grab.held`. It takes as many seqs as it has grabs: its grab number i
(from 0) has the seq `seq + i`, the offer_seq `offer_seq + i` and the place `place + i`. So (shard, seq) names
one grab. `singles` returns the events of the grabs one by one, in the form of version 1, as on `grab.events`.

In the journal and in the audit trail, every grant and every hold is a run, also that of one grab.
`decode_line` and `decode_lines` read their lines.
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final, Literal, Self, TypeAlias, get_args

import msgspec

from grabstream.models.commands import CARRIED, carried_by
from grabstream.models.events import (
    CURRENT_VERSIONS,
    AnyEvent,
    GrabGranted,
    GrabHeld,
    LineEvent,
    Metadata,
    Number,
)
from grabstream.models.identifiers import Count, Id
from grabstream.models.money import Asset, Currency, Quantity, Sum
from grabstream.models.upcasters import UPCASTERS
from grabstream.models.upcasting import Upcaster, Upcasters, VersionedDecoder

V2 = Literal[2]
RUN_VERSION: Final = 2
#: The grabs of a run; includes/runs.lua has the same bound.
RUN_GRABS_MAX: Final = 1_000
#: The id of a single-use ticket, and when it ends if it is good for the whole campaign (ms since 1970 UTC).
Ticket = tuple[Id, Count | None]


# Runs are many, and never part of a cycle: Python's collector need not look at them.
class _Run(msgspec.Struct, tag_field="type", frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What runs have in common. A column has a value for each grab; it is absent if all have the default.

    `quantities` are the units, 1 by default; `amounts` the same in the offer's asset, the quantities by
    default. `place` is that of the first grab, `left` the units left after the last one. `asked` is what was
    requested, where it was more than was given. `digests` are those of the commands, `plain` by default.
    `command` is the command that made units free for queued grabs; other grabs are commands themselves.
    Raises ValueError if the columns do not fit together.
    """

    #: The names of the columns other than `grabs`.
    columns: ClassVar[tuple[str, ...]] = (
        "users", "quantities", "amounts", "asked", "attributes", *CARRIED, "tickets", "digests"
    )  # fmt: skip

    v: V2
    shard: Count
    seq: Number
    offer_seq: Number
    offer: Id
    at: Count
    command: Id | None = None
    grabs: tuple[Id, ...]
    users: tuple[Id, ...]
    quantities: tuple[Quantity, ...] = ()
    amounts: tuple[Sum, ...] = ()
    asset: Asset
    place: Number
    left: Sum
    asked: tuple[Quantity | None, ...] = ()
    attributes: tuple[dict[Id, Id] | None, ...] = ()
    metadata: tuple[Metadata | None, ...] = ()
    tickets: tuple[Ticket | None, ...] = ()
    basket: Id | None = None
    digests: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.grabs)
        if not count:
            raise ValueError("grabs: a run has at least one grab")
        for name in self.columns:
            column = getattr(self, name)
            if len(column) != count and (column or name == "users"):
                raise ValueError(f"{name}: {len(column)} values for {count} grabs")

    @property
    def seqs(self) -> int:
        """The number of seqs that the run takes: one for each grab."""
        return len(self.grabs)

    @property
    def last_seq(self) -> int:
        """The seq of the last grab."""
        return self.seq + self.seqs - 1

    @property
    def given(self) -> Sequence[int]:
        """The units of each grab."""
        return self.quantities or (1,) * len(self.grabs)

    @property
    def moved(self) -> Sequence[int]:
        """The amount of each grab, in minor units or pieces."""
        return self.amounts or self.given

    def grab(self, i: int) -> Self:
        """The run of grab number i alone."""
        columns = {name: getattr(self, name)[i : i + 1] for name in ("grabs", *self.columns)}
        return msgspec.structs.replace(
            self,
            seq=self.seq + i,
            offer_seq=self.offer_seq + i,
            place=self.place + i,
            left=self.left + sum(self.given[i + 1 :]),
            **columns,
        )


class GrantedRun(_Run, tag="grab.granted", frozen=True, kw_only=True, gc=False):
    """Users got amounts permanently. `codes` are sealed."""

    columns: ClassVar[tuple[str, ...]] = (*_Run.columns, "codes")

    codes: tuple[tuple[str, ...], ...] = ()

    def single(self, i: int, common: dict[str, Any]) -> GrabGranted:
        """The event of grab number i, from the fields that it has in common with a hold."""
        return GrabGranted(**common, codes=self.codes[i] if self.codes else ())


class HeldRun(_Run, tag="grab.held", frozen=True, kw_only=True, gc=False):
    """Units are held for users until `deadline_at` (milliseconds since 1970 UTC), to be paid with `price`
    minor units of `currency` each. With `waited`, the grabs were on the waiting list.
    """

    deadline_at: Count
    price: Sum = 0
    currency: Currency | None = None
    waited: bool = False

    def due(self, quantity: int) -> int | None:
        """What `quantity` units cost; None if they cost nothing."""
        return None if self.currency is None else self.price * quantity

    def single(self, i: int, common: dict[str, Any]) -> GrabHeld:
        """The event of grab number i, from the fields that it has in common with a grant."""
        return GrabHeld(
            **common,
            deadline_at=self.deadline_at,
            due=self.due(common["quantity"]),
            currency=self.currency,
            waited=self.waited,
        )


AnyRun: TypeAlias = GrantedRun | HeldRun
#: What a line of the journal contains.
AnyLine: TypeAlias = LineEvent | GrantedRun | HeldRun

#: The types of runs.
RUN_TYPES: Final = tuple(str(run.__struct_config__.tag) for run in get_args(AnyRun))
#: The current version of every type in lines.
LINE_VERSIONS: Final = CURRENT_VERSIONS | dict.fromkeys(RUN_TYPES, RUN_VERSION)


class LineDecoder(VersionedDecoder[AnyLine]):
    """Decodes lines of the journal, where granted and held grabs are runs."""

    def __init__(self, upcasters: Iterable[Upcaster] = UPCASTERS) -> None:
        line_upcasters = (step for step in upcasters if step.type not in RUN_TYPES)
        first = dict.fromkeys(RUN_TYPES, RUN_VERSION)
        super().__init__(AnyLine, Upcasters(line_upcasters, LINE_VERSIONS, first))


LINES: Final = LineDecoder()
decode_line = LINES.decode
decode_lines = LINES.decode_list


#: How the scripts begin a line that is a run.
RUN_BEGINS: Final = tuple(b'{"type":"%s","v":%d,' % (tag.encode(), RUN_VERSION) for tag in RUN_TYPES)


def is_run(line: bytes) -> bool:
    """Whether a line that a script has written is a run, also of one grab."""
    return line.startswith(RUN_BEGINS)


def singles(event: AnyEvent | AnyRun) -> Sequence[AnyEvent]:
    """The events of the grabs of a run, in order; any other event as it is."""
    if not isinstance(event, AnyRun):
        return (event,)
    given, moved = event.given, event.moved
    left, carried = event.left + sum(given), carried_by(event).items()
    found: list[AnyEvent] = []
    for i, (grab, user, quantity, amount) in enumerate(
        zip(event.grabs, event.users, given, moved, strict=True)
    ):
        left -= quantity
        ticket, ends_at = (event.tickets[i] if event.tickets else None) or (None, None)
        common: dict[str, Any] = {
            "v": 1, "shard": event.shard, "seq": event.seq + i, "offer_seq": event.offer_seq + i,
            "offer": event.offer, "at": event.at, "command": event.command or grab, "grab": grab,
            "user": user, "quantity": quantity, "amount": amount, "asset": event.asset,
            "place": event.place + i, "left": left, "asked": event.asked[i] if event.asked else None,
            "attributes": (event.attributes[i] if event.attributes else None) or {},
            "ticket": ticket, "ticket_ends_at": ends_at, "basket": event.basket,
            "digest": event.digests[i] if event.digests else None if event.command else "plain",
        }  # fmt: skip
        for name, column in carried:
            common[name] = column[i]
        found.append(event.single(i, common))
    return found
