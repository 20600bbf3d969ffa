"""The routes of the gateway, each with what its document and its checks need to know about it."""

from typing import Final, Literal, NamedTuple

from grabstream.gateway.bounds import GRAB_BODY_BYTES_MAX
from grabstream.models.bounds import COMMAND_BYTES_MAX

Kind = Literal["command", "read", "document"]
Key = Literal["required", "optional", "none"]
Scope = Literal["grab", "settle", "operate", "read", "none"]


class Parameter(NamedTuple):
    """A parameter of a query: its meaning, and its choices, or what kind of text it is."""

    name: str
    meaning: str
    choices: tuple[str, ...] = ()
    form: Literal["text", "id", "integer", "position"] = "text"


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
)
_OFFER: Final = "/v1/offers/{offer}"
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
    Operation("GET", "/openapi.json", "openapi", "document", "none", "This document"),
    Operation("GET", "/problems/{problem}", "problem", "document", "none", "What a type of problems means"),
    Operation("GET", "/health", "health", "document", "none", "Whether the gateway takes requests"),
)  # fmt: skip
