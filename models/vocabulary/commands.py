"""Commands: what a sender wants done. The sender chooses the id: unique within its campaign, or for a grab,
among those of its user and offer.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field

from grabstream.models import commands as wire
from grabstream.models import entries
from grabstream.models.money import Invalid
from grabstream.models.vocabulary.base import Flag, Model, Text, Whole, Wired, invalid, omitted
from grabstream.models.vocabulary.offers import Changes, Terms


class Entry(Model, Wired[entries.Entry], extra="forbid", frozen=True):
    """A transfer in an `adjust`: `amount` (minor units or pieces) of `asset` from the account `debit` to the
    account `credit`.
    """

    rules = (entries.check_adjustment,)

    asset: Text
    debit: Text
    credit: Text
    amount: Whole


class Command(Model, extra="forbid", frozen=True):
    """What every command has: its id, and the offer it is about."""

    rules = (wire.check,)

    type: str
    id: Text
    offer: Text

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """The command of a JSON text; refuses, as `decode_command` does, a text above the bound of a command
        or with a field that is named twice.
        """
        # The parser refuses text that is not valid Unicode.
        raw = json_data.encode(errors="surrogatepass") if isinstance(json_data, str) else bytes(json_data)
        try:
            wire.check_size(raw)
        except Invalid as error:
            raise invalid(cls, str(error)) from None
        command = super().model_validate_json(json_data, **options)
        try:
            wire.decode_command(raw)
        except wire.Undecodable as error:
            raise invalid(command, error.reason) from None
        return command


class OfferCommand(Command, frozen=True):
    """A command of an operator about an offer; `operator` says who sent it, `approvals` are the signatures of
    the operators who approve it.
    """

    operator: Text | None = omitted(None)
    approvals: tuple[Text, ...] = omitted(())


class Open(OfferCommand, Wired[wire.Open], frozen=True):
    """Creates and funds an offer."""

    type: Literal["open"] = "open"
    terms: Terms


class Grab(Command, Wired[wire.Grab], frozen=True):
    """One user's attempt to get `quantity` units.

    `attributes` are names and values that limits may count by, `ticket` is a signed token of the eligibility
    service. The grabs of one array that share a `basket` are all granted or all refused. With `wait`, the
    user joins the waiting list when the offer is sold out. `metadata` are texts by name that the answer and
    the events of the grab repeat; nothing is decided by them.
    """

    type: Literal["grab"] = "grab"
    user: Text
    quantity: Whole = omitted(1)
    attributes: dict[Text, Text] = omitted({})
    ticket: Text | None = omitted(None)
    basket: Text | None = omitted(None)
    wait: Flag = omitted(False)
    metadata: dict[Text, Text] | None = omitted(None)


class Pause(OfferCommand, Wired[wire.Pause], frozen=True):
    """Refuses grabs with `on_hold` until the offer is resumed."""

    type: Literal["pause"] = "pause"


class Resume(OfferCommand, Wired[wire.Resume], frozen=True):
    """Takes grabs again."""

    type: Literal["resume"] = "resume"


class Close(OfferCommand, Wired[wire.Close], frozen=True):
    """Ends the offer now; the rest goes back to the issuer."""

    type: Literal["close"] = "close"


class Amend(OfferCommand, Wired[wire.Amend], frozen=True):
    """Changes terms while the offer runs, in order with the grabs."""

    type: Literal["amend"] = "amend"
    changes: Changes


class Load(OfferCommand, Wired[wire.Load], frozen=True):
    """Loads one chunk of a list that an offer needs before it opens: coupon codes, or the ids of users who
    may grab. `chunk` counts from 1 to `chunks`.
    """

    type: Literal["load"] = "load"
    what: Literal["codes", "audience"]
    chunk: Whole
    chunks: Whole
    items: tuple[Text, ...]


class Adjust(OfferCommand, Wired[wire.Adjust], frozen=True):
    """Corrects the ledger with `transfers`, with a reason and who approved it."""

    type: Literal["adjust"] = "adjust"
    transfers: tuple[Entry, ...]
    reason: Text
    approved_by: Text


class GrabCommand(Command, frozen=True):
    """A command about one grab: `grab` is the id of the command that made it. If `user` is given, the grab
    must be theirs; another user's grab does not exist for this command.
    """

    grab: Text
    user: Text | None = omitted(None)


class Confirm(GrabCommand, Wired[wire.Confirm], frozen=True):
    """Reports that a hold was paid: `paid` minor units of `currency` by `payment`, for `quantity` of its
    units (absent: all that are held). `receipt` is the signature of the payment side.
    """

    type: Literal["confirm"] = "confirm"
    payment: Text | None = omitted(None)
    paid: Whole = omitted(0)
    currency: Text | None = omitted(None)
    quantity: Whole | None = omitted(None)
    receipt: Text | None = omitted(None)


class Release(GrabCommand, Wired[wire.Release], frozen=True):
    """Gives a hold back, or leaves the waiting list."""

    type: Literal["release"] = "release"


class Extend(GrabCommand, Wired[wire.Extend], frozen=True):
    """Moves the deadline of a hold by the offer's `hold_ms`, as often as the offer allows."""

    type: Literal["extend"] = "extend"


class Return(GrabCommand, Wired[wire.Return], frozen=True):
    """Gives back `quantity` units (absent: all) that were granted or confirmed; money paid for them goes
    back.
    """

    type: Literal["return"] = "return"
    quantity: Whole | None = omitted(None)
    reason: Text = omitted("")


class Redeem(GrabCommand, Wired[wire.Redeem], frozen=True):
    """Uses `quantity` units of a coupon, once for each order."""

    type: Literal["redeem"] = "redeem"
    order: Text
    quantity: Whole = omitted(1)


class Unredeem(GrabCommand, Wired[wire.Unredeem], frozen=True):
    """Takes the use for an order back."""

    type: Literal["unredeem"] = "unredeem"
    order: Text


AnyCommand = Annotated[
    Open
    | Grab
    | Pause
    | Resume
    | Close
    | Amend
    | Load
    | Adjust
    | Confirm
    | Release
    | Extend
    | Return
    | Redeem
    | Unredeem,
    Field(discriminator="type"),
]
