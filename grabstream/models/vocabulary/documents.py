"""The documents that answer questions, as pydantic models: the OpenAPI document describes them, and a test
compares answers with them. A field that does not apply is absent. Times are milliseconds since 1970 UTC.
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
    closes_at: int | None = Field(None, description="Absent: it does not close automatically.")
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
    """A grab of a user. `back` units were returned, or are still awaited."""

    offer: str
    grab: str
    state: GrabState
    quantity: int
    amount: int
    asset: str
    place: int
    position: int | None = Field(
        None, description="On the waiting list; 1 is served next. Told where one offer is asked about."
    )
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


class DemandSecond(Document):
    """Answers to grabs in one second (since 1970 UTC): their number by outcome."""

    second: int
    outcomes: dict[str, int]


class DemandWindow(Document):
    """Answers to grabs in the last seconds: grants, holds and queued grabs by the events of the audit trail,
    and refusals by their counters. The counts are complete from the second `since`; seconds without answers
    are left out.
    """

    since: int
    until: int
    seconds: tuple[DemandSecond, ...]


class OfferRefusals(Document):
    """The refusals of an offer since it was opened, by outcome."""

    offer: str
    refusals: dict[str, int]


class WaitingGrab(Document):
    """A grab on a waiting list; position 1 is served next."""

    position: int
    user: str
    grab: str
    quantity: int
    at: int


class WaitingPage(Page):
    """A page of the waiting list of an offer."""

    waiting: tuple[WaitingGrab, ...]


class FilmFrame(Document):
    """An offer at the end of a frame, by the events up to `seq`, the last of which happened at `at`."""

    at: int
    seq: int
    state: OfferState
    total: int
    units_left: int
    amount_left: int
    grabs: int
    given: int
    held: int
    waiting: int
    refunded: int


class FilmGrab(Document):
    """A grab as answered. `left` units were left after it."""

    seq: int
    at: int
    outcome: Literal["granted", "held", "waiting"]
    user: str
    grab: str
    quantity: int
    amount: int
    asset: str
    place: int
    left: int


class Film(Document):
    """An offer from its opening to a time: `now` is its state then, `frames` are states before, in order, and
    `grabs` are the last ones until then, the newest first.
    """

    offer: str
    kind: str
    asset: str
    now: FilmFrame
    frames: tuple[FilmFrame, ...]
    grabs: tuple[FilmGrab, ...]


class FairnessBin(Document):
    """How many grabs got an amount from `least` to `most`, and how many the law of the envelope gives on
    average.
    """

    least: int
    most: int
    grabs: int
    expected: float | None = None


class FairnessPlaces(Document):
    """The mean amount of the grabs at the places from `first` to `last`."""

    first: int
    last: int
    grabs: int
    mean: float


class Fairness(Document):
    """How the amounts of the first `grabs` places are distributed. For an envelope: its `law`, and the `mean`
    that it gives to every place.
    """

    offer: str
    kind: str
    asset: str
    grabs: int
    law: str | None = None
    mean: float | None = None
    bins: tuple[FairnessBin, ...]
    places: tuple[FairnessPlaces, ...]


class Shard(Document):
    """A shard as Redis has it. `waiting` events are decided, but not journaled yet. `fault` says why it
    decides nothing; `relay` is the worker that holds its lease.
    """

    shard: int
    server: str
    seq: int | None = None
    journaled_seq: int | None = None
    waiting: int | None = None
    time: int | None = Field(None, description="Of the last event, by the clock of the shard.")
    term: int | None = None
    relay: str | None = None
    fault: str | None = None


class ReadModelShard(Document):
    """The position of a read model in a shard. It is `behind` the journal in events, and in ms between the
    last event of the shard and the last one that it has. Both are absent while Redis is away.
    """

    projection: str
    shard: int
    seq: int
    behind: int | None = None
    behind_ms: int | None = None


class VerifiedShard(Document):
    """The event up to which the verifier has compared the books with the journal, and the last time it
    did.
    """

    shard: int
    seq: int
    rounds: int
    at: int | None = None


class StoppedShard(Document):
    """A read model that has stopped at an event of a shard, and why."""

    projection: str
    shard: int
    seq: int
    reason: str
    at: int


class Recovery(Document):
    """A recovery of a shard in Redis from the journal: `applied` events in `seconds`."""

    shard: int
    term: int
    kind: str
    problem: str
    redis_seq: int
    journal_seq: int
    applied: int
    seconds: float
    at: int


class Difference(Document):
    """An open difference that the verifier found."""

    id: int
    kind: str
    shard: int
    subject: str
    seq: int | None = None
    what: str
    at: int


class SystemState(Document):
    """Shards, read models and faults. `redis` says why Redis has no answer."""

    at: int
    redis: str | None = None
    shards: tuple[Shard, ...]
    read_models: tuple[ReadModelShard, ...]
    verified: tuple[VerifiedShard, ...]
    stopped: tuple[StoppedShard, ...]
    differences: tuple[Difference, ...]
    recoveries: tuple[Recovery, ...]


class BookSum(Document):
    """The sum of all accounts of a kind (`offer`, `wallet`, `hold`, `external` and so on) in an asset."""

    asset: str
    kind: str
    accounts: int
    sum: int


class BookSums(Document):
    """The sums of the ledger. Those of one asset add up to 0."""

    at: int
    sums: tuple[BookSum, ...]


class ServerAnswer(Document):
    """Whether a server answers; `problem` says why not."""

    server: str
    problem: str | None = None


class DoctorFinding(Document):
    """What is stuck or at risk, what it means, and the command that repairs it."""

    check: str
    severity: Literal["stuck", "risk", "note"]
    what: str
    means: str
    command: str
    since: int | None = None


class DoctorReport(Document):
    """What `grabstream doctor` says."""

    at: int
    healthy: bool
    servers: tuple[ServerAnswer, ...]
    findings: tuple[DoctorFinding, ...]
    passed: tuple[str, ...]
    not_checked: tuple[str, ...]


class WebhookSummary(Document):
    """A subscription to events. `types` and `offers` are empty where all are wanted. `reason` says why the
    system has paused it. `waiting` and `parked` events are not delivered.
    """

    webhook: str
    url: str
    types: tuple[str, ...]
    offers: tuple[str, ...]
    state: Literal["active", "paused"]
    reason: str | None = None
    from_ms: int
    delivered: int
    delivered_at: int | None = None
    waiting: int
    parked: int


class WebhookList(Document):
    """All webhooks, the oldest first."""

    at: int
    webhooks: tuple[WebhookSummary, ...]


class WebhookDelivery(Document):
    """The `events` of an offer that a webhook has not delivered. `event` is the first of them, which blocks
    the others; `status` and `problem` are those of its last attempt, `due_at` the time of the next one.
    """

    state: Literal["waiting", "parked"]
    offer: str
    events: int
    event: str
    type: str
    at: int
    attempts: int
    status: int | None = None
    problem: str | None = None
    due_at: int


class WebhookDeliveries(Document):
    """The undelivered events of a webhook, by offer: parked ones first, then the oldest."""

    at: int
    webhook: str
    deliveries: tuple[WebhookDelivery, ...]


class WebhookState(Document):
    """A webhook that was paused or resumed."""

    webhook: str
    state: Literal["active", "paused"]


class WebhookResent(Document):
    """How many events will be sent again: parked ones, and those that wait after they failed."""

    webhook: str
    resent: int


class WebhookDiscarded(Document):
    """Whether an event was discarded for a webhook; false: it was neither waiting nor parked."""

    webhook: str
    event: str
    discarded: bool


class LimitCount(Document):
    """A counter of a limit before and after a moment."""

    scope: str
    by: str
    per: str
    value: str
    before: int
    after: int
    max: int


class StoryMoment(Document):
    """An event, or a refusal: `what` is its type or outcome, `since_opening_ms` the time since the offer
    opened. It came `late_ms` after `late_behind`, such as the close; negative: before it. `details` depend on
    `what`.
    """

    at: int
    since_opening_ms: int
    what: str
    refused: bool
    command: str
    grab: str | None = None
    details: dict[str, Any]
    late_ms: int | None = None
    late_behind: str | None = None
    limits: tuple[LimitCount, ...]


class StoryTransfer(Document):
    """A movement in the ledger that belongs to the story."""

    seq: int
    leg: int
    asset: str
    debit: str
    credit: str
    amount: int
    at: int


class UnbookedEvent(Document):
    """An event whose transfers the ledger lacks, and why."""

    seq: int
    type: str
    because: str


class Story(Document):
    """Everything that happened between a user and an offer, as `grabstream why` shows it. Of
    `refusals_of_offer` refusals, `refusals_kept` are kept one by one. `redis` is what Redis has now.
    """

    user: str
    offer: str
    kind: str
    title: str
    state: OfferState
    opens_at: int
    story: tuple[StoryMoment, ...]
    ledger: tuple[StoryTransfer, ...]
    not_in_ledger: tuple[UnbookedEvent, ...]
    refusals_of_offer: int
    refusals_kept: int
    lost: tuple[dict[str, Any], ...]
    redis: dict[str, Any]


class PaymentResult(Document):
    """The result of a payment. `confirmed`: its units are the user's permanently. `refund_due`: they are not,
    and the refund due is journaled. `unchanged`: the payment failed; a hold stays until its deadline, and may
    be paid by another payment. `answer` is the answer to the command that followed from the receipt; a failed
    payment has none.
    """

    payment: str
    result: Literal["confirmed", "refund_due", "unchanged"]
    answer: Answer | None = None


#: The document of each question, by the name of its operation.
DOCUMENTS: dict[str, type[Document]] = {
    "offers": OfferPage,
    "offer": OfferDetail,
    "offer_grabs": TakenPage,
    "user_balances": BalancePage,
    "user_grabs": UserGrabPage,
    "user_transfers": TransferPage,
    "demand": DemandWindow,
    "system": SystemState,
    "books": BookSums,
    "doctor": DoctorReport,
    "user_why": Story,
    "offer_waiting": WaitingPage,
    "offer_demand": OfferRefusals,
    "offer_film": Film,
    "offer_fairness": Fairness,
    "webhooks": WebhookList,
    "webhook_deliveries": WebhookDeliveries,
}
