"""The routes of the gateway, each with what its document and its checks need to know about it."""

from typing import Final, Literal, NamedTuple

from grabstream.gateway.bounds import (
    AFTER_SECONDS_MAX,
    GRAB_BODY_BYTES_MAX,
    PAGE_ROWS,
    PAGE_ROWS_MAX,
)
from grabstream.models.bounds import COMMAND_BYTES_MAX

Kind = Literal["command", "read", "document", "receipt"]
Key = Literal["required", "optional", "none"]
Scope = Literal["grab", "settle", "operate", "read", "none"]


class Parameter(NamedTuple):
    """A parameter of a query: its meaning, and its choices, or what kind of text it is."""

    name: str
    meaning: str
    choices: tuple[str, ...] = ()
    form: Literal["text", "id", "integer", "position"] = "text"
    default: str | int | None = None
    maximum: int | None = None


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
_AFTER: Final = Parameter(
    "after",
    "`<shard>-<seq>` of an answer: waits until the read model has its event, "
    f"{AFTER_SECONDS_MAX:.0f} s at most.",
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
    Parameter("cursor", "The `next` of the page before."),
    _AFTER,
)
_OFFER: Final = "/v1/offers/{offer}"
_USER: Final = "/v1/users/{user}"
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


def _asking(path: str, name: str, summary: str, *parameters: Parameter) -> Operation:
    return Operation("GET", path, name, "read", "read", summary, parameters=parameters)


OPERATIONS: Final = (
    _operating("POST", "/v1/offers", "open", "Open an offer", "optional"),
    _operating("PATCH", _OFFER, "amend", "Change terms of an offer"),
    _operating("POST", f"{_OFFER}/pause", "pause", "Refuse grabs until the offer is resumed"),
    _operating("POST", f"{_OFFER}/resume", "resume", "Accept grabs again"),
    _operating("POST", f"{_OFFER}/close", "close", "Close an offer for ever"),
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
    _asking(_OFFER, "offer", "An offer, with its terms", _AFTER),
    _asking(
        f"{_OFFER}/grabs", "offer_grabs", "Who got what",
        Parameter("order", "By `place`, or the `luckiest` first, by amount.", TAKEN_ORDERS, default="place"),
        *_PAGE,
    ),
    _asking(f"{_USER}/balances", "user_balances", "What a user has", *_PAGE),
    _asking(f"{_USER}/grabs", "user_grabs", "The grabs of a user, the newest first", *_PAGE),
    _asking(f"{_USER}/transfers", "user_transfers", "The transfers of a user, the newest first", *_PAGE),
    Operation("GET", "/openapi.json", "openapi", "document", "none", "This document"),
    Operation("GET", "/problems/{problem}", "problem", "document", "none", "What a type of problems means"),
    Operation("GET", "/health", "health", "document", "none", "Whether the gateway takes requests"),
)  # fmt: skip
