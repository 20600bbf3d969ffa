"""The routes of the gateway, each with what its document and its checks need."""

from typing import Final, Literal, NamedTuple

from grabstream.gateway.bounds import (
    AFTER_SECONDS_MAX,
    DEMAND_SECONDS,
    DEMAND_SECONDS_MAX,
    GRAB_BODY_BYTES_MAX,
    PAGE_ROWS,
    PAGE_ROWS_MAX,
)
from grabstream.models.bounds import COMMAND_BYTES_MAX
from grabstream.models.offers import TIME_MS_MAX

#: `watch`: a question of operators (`operator_questions.py`). `change`: of a webhook
#: (`changing_webhooks.py`). `page`: a file of the live page.
Kind = Literal["command", "read", "watch", "document", "receipt", "stream", "change", "page"]
Key = Literal["required", "optional", "none"]
Scope = Literal["grab", "settle", "operate", "read", "none"]


class Parameter(NamedTuple):
    """A parameter of a query: its meaning, and its choices or kind of text."""

    name: str
    meaning: str
    choices: tuple[str, ...] = ()
    form: Literal["text", "id", "integer", "position", "cursor", "place of offer", "place of user"] = "text"
    default: str | int | None = None
    maximum: int | None = None
    is_required: bool = False


class Operation(NamedTuple):
    """One method of one path. `name` is also the name of its handler. `command` is the type of the command
    that it sends, `body_bytes_max` the bound of its body (0: it takes none).
    """

    method: str
    path: str
    name: str
    kind: Kind
    scope: Scope
    summary: str
    command: str | None = None
    key: Key = "none"
    body_bytes_max: int = 0
    parameters: tuple[Parameter, ...] = ()


PROMISE: Final = Parameter(
    "promise",
    "`journaled`: the answer comes when Kafka has its event. `decided`: it comes when Redis has decided, "
    "with status 202, and can be lost together with Redis.",
    ("journaled", "decided"),
    default="journaled",
)
OFFER_STATES: Final = ("open", "paused", "closed", "retired")
KINDS: Final = ("envelope", "coupon", "stock")
OFFER_ORDERS: Final = ("newest", "random")
TAKEN_ORDERS: Final = ("place", "luckiest")
AFTER: Final = Parameter(
    "after",
    "`<shard>-<seq>` of an answer: waits until the read model has its event, "
    f"{AFTER_SECONDS_MAX:.0f} s at most. A shard that the system does not have is `invalid`, an event that "
    "its shard has not decided `position_not_reached`.",
    form="position",
)
_PAGE: Final = (
    Parameter(
        "limit",
        f"Rows of a page, 1 to {PAGE_ROWS_MAX}; absent: {PAGE_ROWS}.",
        form="integer",
        default=PAGE_ROWS,
        maximum=PAGE_ROWS_MAX,
    ),
    Parameter("cursor", "The `next` of the page before.", form="cursor"),
    AFTER,
)
_OFFER: Final = "/v1/offers/{offer}"
_USER: Final = "/v1/users/{user}"
_WEBHOOK: Final = "/v1/webhooks/{webhook}"
_GRAB: Final = "/v1/offers/{offer}/grabs/{grab}"


def _settling(name: str, summary: str) -> Operation:
    return Operation(
        "POST", f"{_GRAB}/{name}", name, "command", "settle", summary, name, "required", GRAB_BODY_BYTES_MAX,
        (PROMISE,),
    )  # fmt: skip


def _operating(method: str, path: str, name: str, summary: str, key: Key = "required") -> Operation:
    return Operation(
        method, path, name, "command", "operate", summary, name, key, COMMAND_BYTES_MAX, (PROMISE,)
    )


def _following(path: str, name: str, summary: str) -> Operation:
    after = Parameter(
        "after", "The `id` of a message, after which the stream resumes, or 0.", form="place of offer"
    )
    if path.startswith(_USER):
        after = Parameter(
            "after", "The `id` of a message, after which the stream resumes.", form="place of user"
        )
    return Operation("GET", path, name, "stream", "read", summary, parameters=(after,))


def _asking(path: str, name: str, summary: str, *parameters: Parameter) -> Operation:
    return Operation("GET", path, name, "read", "read", summary, parameters=parameters)


def _watching(path: str, name: str, summary: str, *parameters: Parameter, scope: Scope = "read") -> Operation:
    return Operation("GET", path, name, "watch", scope, summary, parameters=parameters)


def _changing(method: str, path: str, name: str, summary: str) -> Operation:
    return Operation(method, path, name, "change", "operate", summary, body_bytes_max=GRAB_BODY_BYTES_MAX)


OPERATIONS: Final = (
    _operating("POST", "/v1/offers", "open", "Open an offer", "optional"),
    _operating("PATCH", _OFFER, "amend", "Change terms of an offer"),
    _operating("POST", f"{_OFFER}/loads", "load", "Load a chunk of a list: codes, or who may grab"),
    _operating("POST", f"{_OFFER}/adjustments", "adjust", "Correct the ledger"),
    _operating("POST", f"{_OFFER}/pause", "pause", "Refuse grabs until the offer is resumed"),
    _operating("POST", f"{_OFFER}/resume", "resume", "Accept grabs again"),
    _operating("POST", f"{_OFFER}/close", "close", "Close an offer permanently"),
    Operation(
        "POST", f"{_OFFER}/grabs", "grab", "command", "grab", "Grab units of an offer for a user", "grab",
        "required", GRAB_BODY_BYTES_MAX, (PROMISE,),
    ),
    Operation(
        "POST", "/v1/baskets", "take_basket", "command", "grab",
        "Grab units of several offers of one campaign: all or nothing", "grab", "required",
        COMMAND_BYTES_MAX, (PROMISE,),
    ),
    _settling("confirm", "Report that a hold was paid"),
    _settling("release", "End a hold, or leave the waiting list"),
    _settling("extend", "Extend the deadline of a hold"),
    _settling("return", "Give units back that were granted or confirmed"),
    _settling("redeem", "Use units of a coupon for an order"),
    _settling("unredeem", "Undo the use of a coupon for an order"),
    Operation(
        "POST", "/v1/payments/callback", "payment_callback", "receipt", "none",
        "Report what became of a payment, with a signed receipt", body_bytes_max=GRAB_BODY_BYTES_MAX,
    ),
    _asking(
        "/v1/offers", "offers", "List offers",
        Parameter("state", "Offers in this state only.", OFFER_STATES),
        Parameter("kind", "Offers of this kind only.", KINDS),
        Parameter("issuer", "Offers of this issuer only.", form="id"),
        Parameter(
            "order", "`newest` first, or `random`: always the same for one `visitor`.", OFFER_ORDERS,
            default="newest",
        ),
        Parameter("visitor", "Whose random order it is; required with `order=random`.", form="id"),
        *_PAGE,
    ),
    _asking(_OFFER, "offer", "An offer, with its terms", AFTER),
    _asking(
        f"{_OFFER}/grabs", "offer_grabs", "Who got what",
        Parameter("order", "By `place`, or the `luckiest` first, by amount.", TAKEN_ORDERS, default="place"),
        *_PAGE,
    ),
    _asking(f"{_USER}/balances", "user_balances", "What a user has", *_PAGE),
    _asking(
        f"{_USER}/grabs", "user_grabs", "The grabs of a user, the newest first",
        Parameter("offer", "Grabs of this offer only.", form="id"), *_PAGE,
    ),
    _asking(f"{_USER}/transfers", "user_transfers", "The transfers of a user, the newest first", *_PAGE),
    _following(f"{_OFFER}/events", "offer_events", "The events of an offer, as they come"),
    _following(f"{_USER}/events", "user_events", "The events that name a user, as they come"),
    _watching(
        "/v1/demand", "demand", "Answers to grabs by outcome and second, in the last moments",
        Parameter(
            "seconds", f"The length of the window, 1 to {DEMAND_SECONDS_MAX}; absent: {DEMAND_SECONDS}.",
            form="integer", default=DEMAND_SECONDS, maximum=DEMAND_SECONDS_MAX,
        ),
    ),
    _watching("/v1/system", "system", "Shards, read models and their lag, recoveries, differences"),
    _watching("/v1/books", "books", "The sums of the ledger by asset and kind of account"),
    _watching("/v1/doctor", "doctor", "What is stuck, and the command that repairs it", scope="operate"),
    _watching(
        f"{_USER}/why", "user_why", "Everything that happened between a user and an offer",
        Parameter("offer", "The offer.", form="id", is_required=True),
    ),
    _watching(
        f"{_OFFER}/waiting", "offer_waiting", "The waiting list of an offer, in order", *_PAGE[:2]
    ),
    _watching(
        f"{_OFFER}/film", "offer_film", "An offer through time: its state at a time, and who got what",
        Parameter(
            "at", "The time, in ms since 1970 UTC; absent: now.", form="integer", maximum=TIME_MS_MAX
        ),
    ),
    _watching(
        f"{_OFFER}/fairness", "offer_fairness", "The distribution of parts, and the mean part by place"
    ),
    _watching(f"{_OFFER}/demand", "offer_demand", "The refusals of an offer by outcome"),
    _watching("/v1/webhooks", "webhooks", "Webhooks, with what is not delivered", scope="operate"),
    _watching(
        f"{_WEBHOOK}/deliveries", "webhook_deliveries", "What a webhook has not delivered, by offer",
        scope="operate",
    ),
    _changing("PATCH", _WEBHOOK, "webhook_amend", "Pause a webhook, or resume it from where it was paused"),
    _changing("POST", f"{_WEBHOOK}/resend", "webhook_resend", "Send again what a webhook failed to deliver"),
    _changing("POST", f"{_WEBHOOK}/discard", "webhook_discard", "Give up an event for a webhook"),
    Operation("GET", "/openapi.json", "openapi", "document", "none", "This document"),
    Operation("GET", "/problems/{problem}", "problem", "document", "none", "What a type of problems means"),
    Operation(
        "GET", "/v1/schemas/events/{event}", "event_schema", "document", "none",
        "The JSON Schema of an event, as `ce_dataschema` names it: `grab.granted.v1`",
    ),
    Operation("GET", "/health", "health", "document", "none", "Whether the gateway accepts requests"),
    Operation("GET", "/health/live", "health_live", "document", "none", "Whether the gateway works at all"),
    Operation("GET", "/health/ready", "health_ready", "document", "none", "Whether Redis answers it"),
)  # fmt: skip
#: The live page. It is for people, so the OpenAPI document does not have it.
PAGES: Final = (
    Operation("GET", "/", "page", "page", "none", "The live page"),
    Operation("GET", "/o/{offer}", "offer_page", "page", "none", "The public page of an offer"),
    Operation("GET", "/ui/{file}", "page_file", "page", "none", "A file of the live page"),
)
