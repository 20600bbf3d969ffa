"""Commands, terms, answers and events as pydantic models: for programs that want validation messages,
`model_dump`, JSON Schema, or FastAPI.

    command = Grab(id="g-1", offer="lunch", user="bob")
    for_the_gate = command.to_wire()        # the msgspec struct of models/commands.py
    answer = Answer.from_wire(answer_of_the_gate)

A model accepts and refuses the same values as its wire form, with the messages of the same checks, and has
the same JSON: fields with their default value are left out, even if they were given. Use `decode_commands`
for bytes of unknown origin. Frequent code uses the wire form, which is many times faster
(docs/performance.md).
"""

from typing import Any, Final, get_args, overload

from grabstream.models import commands as wire_commands
from grabstream.models import events as wire_events
from grabstream.models.vocabulary.answers import Answer, LimitState
from grabstream.models.vocabulary.base import Model, Wired
from grabstream.models.vocabulary.commands import (
    Adjust,
    Amend,
    AnyCommand,
    Close,
    Command,
    Confirm,
    Entry,
    Extend,
    Grab,
    GrabCommand,
    Load,
    OfferCommand,
    Open,
    Pause,
    Redeem,
    Release,
    Resume,
    Return,
    Unredeem,
)
from grabstream.models.vocabulary.events import (
    AnyEvent,
    BookedEntry,
    CampaignZone,
    Event,
    GrabConfirmed,
    GrabEvent,
    GrabExtended,
    GrabGranted,
    GrabHeld,
    GrabQueued,
    GrabRedeemed,
    GrabReleased,
    GrabReturned,
    GrabUnredeemed,
    LedgerAdjusted,
    OfferAmended,
    OfferClosed,
    OfferLoaded,
    OfferOpened,
    OfferPaused,
    OfferResumed,
    OfferRetired,
    PaymentRefundDue,
)
from grabstream.models.vocabulary.offers import (
    Changes,
    CouponTerms,
    EnvelopeTerms,
    Hours,
    Limit,
    StockTerms,
    Terms,
)

__all__ = [
    "Adjust",
    "Amend",
    "Answer",
    "AnyCommand",
    "AnyEvent",
    "BookedEntry",
    "CampaignZone",
    "Changes",
    "Close",
    "Command",
    "Confirm",
    "CouponTerms",
    "Entry",
    "EnvelopeTerms",
    "Event",
    "Extend",
    "Grab",
    "GrabCommand",
    "GrabConfirmed",
    "GrabEvent",
    "GrabExtended",
    "GrabGranted",
    "GrabHeld",
    "GrabQueued",
    "GrabRedeemed",
    "GrabReleased",
    "GrabReturned",
    "GrabUnredeemed",
    "Hours",
    "LedgerAdjusted",
    "Limit",
    "LimitState",
    "Load",
    "Model",
    "OfferAmended",
    "OfferClosed",
    "OfferCommand",
    "OfferLoaded",
    "OfferOpened",
    "OfferPaused",
    "OfferResumed",
    "OfferRetired",
    "Open",
    "Pause",
    "PaymentRefundDue",
    "Redeem",
    "Release",
    "Resume",
    "Return",
    "StockTerms",
    "Terms",
    "Unredeem",
    "Wired",
    "from_wire",
]

_MODELS: Final[dict[type[Any], Any]] = {
    model.struct: model for union in (AnyCommand, AnyEvent) for model in get_args(get_args(union)[0])
}


@overload
def from_wire(struct: wire_commands.AnyCommand) -> AnyCommand: ...
@overload
def from_wire(struct: wire_events.AnyEvent) -> AnyEvent: ...
def from_wire(struct: Any) -> Any:
    """The model of any command or event; raises pydantic's ValidationError when it breaks a rule."""
    return _MODELS[type(struct)].from_wire(struct)
