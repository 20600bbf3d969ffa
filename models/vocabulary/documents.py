"""The documents that questions get, as pydantic models: the OpenAPI document describes them, and a test holds
answers against them. A field that does not apply is absent. Times are milliseconds since 1970 UTC.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field

from grabstream.models.vocabulary import Answer

OfferState = Literal["open", "paused", "closed", "retired"]
GrabState = Literal["held", "waiting", "confirmed", "granted", "released", "expired", "returned"]


class Document(BaseModel, extra="forbid"):
    """What all documents have in common."""


class OfferSummary(Document):
    """An offer in a list. `total` and amounts count minor units (envelope) or pieces, `units` parts or
    pieces.
    """

    offer: str
    kind: Literal["envelope", "coupon", "stock"]
    issuer: str
    title: str
    asset: str
    state: OfferState
    total: int
    units: int
    units_left: int
    amount_left: int
    grabs: int
    given: int
    held: int
    waiting: int
    refunded: int
    opened_at: int
    opens_at: int
    closes_at: int | None = Field(None, description="Absent: it does not close by itself.")
    closed_at: int | None = None
    retired_at: int | None = None
    reason: str | None = Field(None, description="Why it was closed: command, deadline, or drained.")


class OfferDetail(OfferSummary):
    """An offer with its terms. The seed of an envelope is there when it has closed."""

    shard: int
    terms: dict[str, Any]
    seed_sha256: str | None = None
    seed: str | None = None


class Taken(Document):
    """Who got what. `held`, `taken` and `redeemed` are units of the `quantity`."""

    place: int
    user: str
    grab: str
    state: GrabState
    quantity: int
    amount: int
    asset: str
    held: int
    taken: int
    redeemed: int
    at: int


class UserGrab(Document):
    """A grab of a user. `back` units were returned, or are still waited for."""

    offer: str
    grab: str
    state: GrabState
    quantity: int
    amount: int
    asset: str
    place: int
    held: int
    taken: int
    redeemed: int
    back: int
    due: int | None = None
    currency: str | None = None
    paid: int
    refunded: int
    deadline_at: int | None = None
    payment_token: str | None = Field(None, description="Of a hold for which something is due.")
    basket: str | None = None
    metadata: dict[str, str] | None = Field(None, description="What the grab was sent with.")
    shard: int
    seq: int
    at: int


class Balance(Document):
    """What a user has of an asset, and what is held for them."""

    asset: str
    available: int
    held: int


class UserTransfer(Document):
    """A movement of `amount` of `asset` into a user's account (`wallet`, `hold`), or out of it, with the
    account on the other side.
    """

    shard: int
    seq: int
    leg: int
    offer: str
    asset: str
    amount: int
    direction: Literal["in", "out"]
    account: Literal["wallet", "hold"]
    other: str
    at: int


class Page(Document):
    """A page of a list. `next` is the cursor of the next page; absent: there is none."""

    next: str | None = None


class OfferPage(Page):
    """A page of offers."""

    offers: tuple[OfferSummary, ...]


class TakenPage(Page):
    """A page of grabs of an offer."""

    grabs: tuple[Taken, ...]


class UserGrabPage(Page):
    """A page of grabs of a user, the newest first."""

    grabs: tuple[UserGrab, ...]


class BalancePage(Page):
    """Balances of a user, by asset."""

    balances: tuple[Balance, ...]


class TransferPage(Page):
    """A page of transfers of a user, the newest first."""

    transfers: tuple[UserTransfer, ...]


class PaymentResult(Document):
    """What has become of a payment. `confirmed`: its units are the user's for good. `refund_due`: they are
    not, and it is journaled that the money is to be paid back. `released`: the hold has ended. `unchanged`:
    nothing was held. `answer` is the answer to the command that followed from the receipt.
    """

    payment: str
    result: Literal["confirmed", "refund_due", "released", "unchanged"]
    answer: Answer


#: The document of each question, by the name of its operation.
DOCUMENTS: dict[str, type[Document]] = {
    "offers": OfferPage,
    "offer": OfferDetail,
    "offer_grabs": TakenPage,
    "user_balances": BalancePage,
    "user_grabs": UserGrabPage,
    "user_transfers": TransferPage,
}
