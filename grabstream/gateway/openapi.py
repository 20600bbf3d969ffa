"""The OpenAPI 3.1 document: the routes of `operations.py`, with schemas from the pydantic models.

A body has the fields of its command that neither the path nor a header gives, so its schema is that of the
command without them.
"""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, get_args

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from grabstream.gateway.bounds import CURSOR_LENGTH_MAX
from grabstream.gateway.callers import SCOPES, USER_OPERATIONS, scopes_of
from grabstream.gateway.operations import AFTER, OPERATIONS, Operation, Parameter
from grabstream.gateway.problems import DOOR_PROBLEMS, POSITIVE, REFUSALS
from grabstream.gateway.requests import NOT_IN_PATHS
from grabstream.models.bounds import BASKET_GRABS_MAX
from grabstream.models.identifiers import ID_PATTERN
from grabstream.models.offers import LINE_PATTERN
from grabstream.models.outcomes import Outcome
from grabstream.models.payments import TOKEN_LENGTH_MAX
from grabstream.models.vocabulary import Answer, AnyCommand
from grabstream.models.vocabulary.documents import (
    DOCUMENTS,
    PaymentResult,
    WebhookDiscarded,
    WebhookResent,
    WebhookState,
)
from grabstream.projections.tables.webhooks import EVENT_PATTERN

OPENAPI_VERSION: Final = "3.1.0"
INT32_MAX: Final = 2**31 - 1
_REFERENCE: Final = "#/components/schemas/{model}"

Node = dict[str, Any]

DESCRIPTION: Final = (
    "Commands and questions to a grabstream system. A command is identified by its Idempotency-Key: a "
    "repeat gets the first answer. Amounts are integers, in minor units of a currency or in pieces; times "
    "are milliseconds since 1970 UTC. Integers are written without a fraction or exponent (1, not 1.0). A "
    "refusal is a problem document (RFC 9457) that says what was refused and until when."
)
#: Problems that every operation may answer, and those of commands and questions.
_ANY: Final = (
    "not_found", "method_not_allowed", "request_timeout", "head_too_large", "malformed_request",
    "misdirected_request", "uri_too_long", "internal_error", "busy",
)  # fmt: skip
_CALLER_PROBLEMS: Final = ("unauthenticated", "insufficient_scope", "too_many_requests")
_BODY_PROBLEMS: Final = ("content_too_large", "unsupported_media_type")
_COMMAND_PROBLEMS: Final = ("outcome_unknown",)
_READ_PROBLEMS: Final = ("unavailable", "read_model_behind")
_STREAM_PROBLEMS: Final = ("unavailable",)
_CHANGE_PROBLEMS: Final = ("unavailable",)
_RECEIPT_PROBLEMS: Final = ("not_signed", "too_many_requests", "outcome_unknown")
#: Refusals after which nothing is booked for a receipt.
_REFUSED_RECEIPTS: Final = (
    Outcome.invalid, Outcome.fenced, Outcome.busy, Outcome.conflict, Outcome.no_such_offer,
    Outcome.no_such_grab,
)  # fmt: skip


def document(version: str, asks_callers: bool = True) -> Node:
    """The document of a release, of a gateway with or without authentication."""
    schemas = _schemas()
    paths: dict[str, Node] = {}
    for operation in OPERATIONS:
        node = paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
        if not asks_callers and "security" in node:
            # Credentials are optional: a client that has some may send them.
            node["security"] = [*node["security"], {}]
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "grabstream",
            "version": version,
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": _sized(_plain(dict(sorted(schemas.items())))),
            "securitySchemes": _SECURITY,
        },
    }


#: How callers say who they are. Without authentication (GRAB_GATEWAY_AUTHENTICATION=none), callers are not
#: asked, and each operation has an alternative without credentials.
_SECURITY: Final[Mapping[str, Node]] = {
    "apiKey": {
        "type": "http",
        "scheme": "bearer",
        "description": "The secret of an API key of a service. Scopes: "
        + "; ".join(f"`{name}`: {what}" for name, what in SCOPES.items())
        + ".",
    },
    "userToken": {
        "type": "http",
        "scheme": "bearer",
        "bearerFormat": "JWT",
        "description": "A token of an end user (`sub`), who may act as themselves only. A `user` in a body "
        "may be left out, and must be this user.",
    },
}


def _security(operation: Operation) -> list[Node]:
    """The alternatives of an operation: one of these scopes, or the token of an end user."""
    found: list[Node] = [{"apiKey": [scope]} for scope in scopes_of(operation)]
    return [*found, {"userToken": []}] if operation.name in USER_OPERATIONS else found


def _plain(node: Any) -> Any:
    """The node without the line breaks that docstrings have inside of paragraphs."""
    if isinstance(node, list):
        return [_plain(member) for member in node]
    if not isinstance(node, dict):
        return node
    return {
        name: "\n\n".join(" ".join(part.split()) for part in value.split("\n\n"))
        if name == "description" and isinstance(value, str)
        else _plain(value)
        for name, value in node.items()
    }


def _sized(node: Any) -> Any:
    """The node with the format of integers that 32 bits do not hold; generated clients need it."""
    if isinstance(node, list):
        return [_sized(member) for member in node]
    if not isinstance(node, dict):
        return node
    sized = {name: _sized(value) for name, value in node.items()}
    if node.get("type") == "integer" and node.get("maximum", INT32_MAX + 1) > INT32_MAX:
        sized["format"] = "int64"
    return sized


# -- operations ----------------------------------------------------------------------------------------------


def _operation(operation: Operation) -> Node:
    node: Node = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [operation.scope if operation.scope != "none" else f"{operation.kind}s"],
        "parameters": _parameters(operation),
        "responses": _responses(operation),
        "security": _security(operation),
    }
    if operation.body_bytes_max:
        schema = body_name(operation)
        node["requestBody"] = {
            "required": operation.kind == "change" or bool(_required_of(operation)),
            "content": {"application/json": {"schema": _reference(schema)}},
            "description": f"At most {operation.body_bytes_max} bytes.",
        }
    return {name: value for name, value in node.items() if value != []}


def _parameters(operation: Operation) -> list[Node]:
    in_path = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    found: list[Node] = [
        {"name": name, "in": "path", "required": True, "schema": _reference("PathId")} for name in in_path
    ]
    if operation.key != "none":
        found.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": operation.key == "required",
                "description": "The id of the command; quotes around it are dropped. A repeat with the same "
                "key and body gets the first answer. Keys of grabs belong to an offer and a user, all others "
                "to a campaign: there, another body under a known key is a `conflict`."
                + ("" if operation.key == "required" else " Absent: the id of the offer, or a new UUID."),
                "schema": {
                    "type": "string",
                    "pattern": f'^("?){ID_PATTERN[1:-1]}\\1$',
                    "not": {"enum": [form for id_ in NOT_IN_PATHS for form in (id_, f'"{id_}"')]},
                },
            }
        )
    if operation.kind == "stream":
        found.append(
            {
                "name": "Last-Event-ID",
                "in": "header",
                "required": False,
                "description": "As `after`, which it replaces. Browsers send it automatically.",
                "schema": {"type": "string"},
            }
        )
    if operation.kind == "command":
        found.append(
            {
                "name": "Prefer",
                "in": "header",
                "required": False,
                "description": "`respond-async` means `promise=decided`.",
                "schema": {"type": "string"},
            }
        )
    found += [_query_parameter(parameter) for parameter in operation.parameters]
    return found


_FORMS: Final[Mapping[str, Node]] = {
    "text": {"type": "string"},
    "id": {"$ref": "#/components/schemas/Id"},
    "integer": {"type": "integer", "minimum": 1},
    "position": {"type": "string", "pattern": "^[0-9]{1,4}-[0-9]{1,16}$"},
    "place of offer": {"type": "string", "pattern": "^(0|[0-9]{1,4}-[0-9]{1,16})$"},
    "place of user": {"type": "string", "pattern": r"^[0-9]{1,16}(\.[0-9]{1,16}){0,1023}$"},
    "cursor": {"type": "string", "pattern": f"^[A-Za-z0-9_-]{{1,{CURSOR_LENGTH_MAX}}}$"},
}


def _query_parameter(parameter: Parameter) -> Node:
    schema: Node = dict(_FORMS[parameter.form])
    if parameter.choices:
        schema = {"type": "string", "enum": list(parameter.choices)}
    if parameter.maximum is not None:
        schema["maximum"] = parameter.maximum
    if parameter.default is not None:
        schema["default"] = parameter.default
    return {
        "name": parameter.name,
        "in": "query",
        "required": parameter.is_required,
        "description": parameter.meaning,
        "schema": schema,
    }


def _responses(operation: Operation) -> Node:
    found: dict[int, Node] = {}
    for status, words in _positive(operation).items():
        content: Node = {"text/event-stream": {"schema": {"type": "string"}}}
        if operation.kind != "stream":
            content = {"application/json": {"schema": _reference(answer_name(operation))}}
        found[status] = {"description": words, "content": content}
    if operation.kind in ("read", "watch") or operation.name == "event_schema":
        found[200]["headers"] = {"ETag": {"schema": {"type": "string"}}}
        found[304] = {"description": "The client has it already (If-None-Match)."}
    problems: dict[int, list[str]] = {}
    if operation.kind in ("command", "receipt"):
        for outcome in REFUSALS if operation.kind == "command" else _REFUSED_RECEIPTS:
            problems.setdefault(int(REFUSALS[outcome].status), []).append(f"`{outcome.name}`")
    else:
        problems[400] = ["`invalid`"]
        if ("{offer}" in operation.path and operation.kind != "stream") or operation.name == "user_why":
            problems[404] = ["`no_such_offer`"]
    for name in (
        *_ANY,
        *(_CALLER_PROBLEMS if operation.scope != "none" else ()),
        *(("other_user",) if operation.name in USER_OPERATIONS else ()),
        *(_BODY_PROBLEMS if operation.body_bytes_max else ()),
        *(_COMMAND_PROBLEMS if operation.kind == "command" else ()),
        *(_READ_PROBLEMS if operation.kind in ("read", "watch") else ()),
        *(("position_not_reached",) if AFTER in operation.parameters else ()),
        *(_STREAM_PROBLEMS if operation.kind == "stream" else ()),
        *(_RECEIPT_PROBLEMS if operation.kind == "receipt" else ()),
        *(_CHANGE_PROBLEMS if operation.kind == "change" else ()),
        *(("no_such_webhook",) if "{webhook}" in operation.path else ()),
        *(("unavailable",) if operation.name == "health_ready" else ()),
    ):
        status_problems = problems.setdefault(int(DOOR_PROBLEMS[name][0]), [])
        if f"`{name}`" not in status_problems:
            status_problems.append(f"`{name}`")
    for status, names in problems.items():
        found[status] = {
            "description": ", ".join(names),
            "content": {"application/problem+json": {"schema": _reference("Problem")}},
        }
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            found[status]["headers"] = {"Allow": {"schema": {"type": "string"}}}
        if status == HTTPStatus.UNAUTHORIZED:
            found[status]["headers"] = {"WWW-Authenticate": {"schema": {"type": "string"}}}
        if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS):
            found[status]["headers"] = {
                "Retry-After": {
                    "description": "Seconds until it may succeed, where that is known.",
                    "schema": {"type": "integer", "minimum": 1},
                }
            }
    return {str(status): found[status] for status in sorted(found)}


def _positive(operation: Operation) -> dict[int, str]:
    """The statuses of success, with their meaning."""
    if operation.kind == "receipt":
        return {
            200: "The journal records what becomes of the money. Send the receipt again until this answer."
        }
    if operation.kind == "stream":
        return {
            200: "Server-Sent Events: `event` is the type of the event, `data` its text as on `grab.events`, "
            "`id` the position after it. `event: reset` says that the stream could not resume."
            + (
                " `event: position`, which has no `id`, tells where a grab stands on its waiting list."
                if operation.name == "user_events"
                else ""
            )
        }
    if operation.kind != "command":
        return {200: "The answer."}
    by_status: dict[int, list[str]] = {}
    for outcome in _OUTCOMES_OF[operation.command or ""]:
        by_status.setdefault(int(POSITIVE[outcome]), []).append(f"`{outcome.name}`")
    words = {
        status: f"{', '.join(names)}; the event is in the journal." for status, names in by_status.items()
    }
    return {**words, 202: _ACCEPTED}


_ACCEPTED: Final = (
    "Decided (`promise=decided`); the event may not be in the journal yet. Coupon codes are left out."
)
_OUTCOMES_OF: Final[Mapping[str, Sequence[Outcome]]] = {
    "open": (Outcome.opened,),
    "amend": (Outcome.amended,),
    "load": (Outcome.loaded,),
    "adjust": (Outcome.adjusted,),
    "pause": (Outcome.paused,),
    "resume": (Outcome.resumed,),
    "close": (Outcome.closed,),
    "grab": (Outcome.granted, Outcome.held, Outcome.waiting),
    "confirm": (Outcome.confirmed,),
    "release": (Outcome.released,),
    "extend": (Outcome.extended,),
    "return": (Outcome.returned,),
    "redeem": (Outcome.redeemed,),
    "unredeem": (Outcome.unredeemed,),
}


# -- schemas -------------------------------------------------------------------------------------------------

_COMMANDS: Final[Mapping[str, type[BaseModel]]] = {
    model.model_fields["type"].default: model for model in get_args(get_args(AnyCommand)[0])
}


#: Changes of webhooks: the names of their bodies, and their answers.
_CHANGES: Final[Mapping[str, tuple[str, type[BaseModel]]]] = {
    "webhook_amend": ("WebhookBody", WebhookState),
    "webhook_resend": ("ResendBody", WebhookResent),
    "webhook_discard": ("DiscardBody", WebhookDiscarded),
}


def body_name(operation: Operation) -> str:
    """The name of the schema of a body."""
    if operation.name == "take_basket":
        return "Basket"
    if operation.kind == "receipt":
        return "ReceiptBody"
    if operation.kind == "change":
        return _CHANGES[operation.name][0]
    return f"{(operation.command or '').capitalize()}Body"


def answer_name(operation: Operation) -> str:
    """The name of the schema of a successful answer."""
    if operation.kind == "command":
        return "BasketAnswer" if operation.name == "take_basket" else "Answer"
    if operation.kind in ("read", "watch"):
        return DOCUMENTS[operation.name].__name__
    if operation.kind == "receipt":
        return PaymentResult.__name__
    if operation.kind == "change":
        return _CHANGES[operation.name][1].__name__
    return {"openapi": "Document", "problem": "ProblemType", "event_schema": "EventSchema"}.get(
        operation.name, "Health"
    )


def _reference(name: str) -> Node:
    return {"$ref": _REFERENCE.format(model=name)}


def _schemas() -> dict[str, Node]:
    models: list[tuple[type[BaseModel], Any]] = [(model, "validation") for model in _COMMANDS.values()]
    models += [(model, "validation") for model in DOCUMENTS.values()]
    models += [(answer, "validation") for _, answer in _CHANGES.values()]
    models += [(PaymentResult, "serialization"), (Answer, "serialization")]
    _, made = models_json_schema(models, ref_template=_REFERENCE)
    known: dict[str, Node] = made["$defs"]
    commands = {model.__name__ for model in _COMMANDS.values()}
    schemas = {name: schema for name, schema in known.items() if name not in commands}
    for operation in OPERATIONS:
        if operation.command is not None and operation.name != "take_basket":
            schemas[body_name(operation)] = _body(operation, known)
    grab = _without(known["Grab"], ("type", "id", "basket"))
    schemas["BasketGrab"] = {**grab, "title": "BasketGrab"}
    schemas["Basket"] = _object(
        "Grabs that are all granted or held, or all refused. Their offers are of one campaign; none is an "
        "envelope.",
        {
            "grabs": {
                "type": "array", "items": _reference("BasketGrab"), "minItems": 1,
                "maxItems": BASKET_GRABS_MAX,
            }
        },
        ["grabs"],
    )  # fmt: skip
    for name, fields in _AT_LEAST_ONE.items():
        for field in fields:
            node = schemas[name]["properties"][field]
            for one in (node, *node.get("anyOf", ())):
                if one.get("type") == "integer":
                    one["minimum"] = 1
    answer = schemas["Answer"]
    answer["properties"]["outcome"] = {"type": "string", "enum": [outcome.name for outcome in Outcome]}
    schemas["BasketAnswer"] = _object(
        "The answers to the grabs of a basket, in their order.",
        {"answers": {"type": "array", "items": _reference("Answer")}},
        ["answers"],
    )
    schemas["Id"] = {"type": "string", "pattern": ID_PATTERN}
    schemas["PathId"] = {
        "type": "string",
        "pattern": ID_PATTERN,
        "not": {"enum": list(NOT_IN_PATHS)},
        "description": "An id in a path. Clients and proxies change paths with `.` or `..`.",
    }
    schemas["Problem"] = _problem(answer)
    answer["properties"]["payment_token"] = {
        "type": "string",
        "description": "Of a hold for which something is due, where the gateway has payment keys: a compact "
        "JWS for the payment side, in a compact JWE where the gateway has a key for its encryption.",
    }
    return schemas | _fixed_schemas()


def _fixed_schemas() -> dict[str, Node]:
    """The schemas of bodies and answers that follow from no model."""
    return {
        "ReceiptBody": _object(
            "A receipt of the payment side.",
            {
                "receipt": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": TOKEN_LENGTH_MAX,
                    "description": "A compact JWS, signed with a key of GRAB_PAYMENT_KEYS.",
                }
            },
            ["receipt"],
        ),
        "WebhookBody": _object(
            "A change of a webhook.", {"state": {"type": "string", "enum": ["active", "paused"]}}, ["state"]
        ),
        "ResendBody": _object(
            "What is sent again: all that is parked or has failed, or that of one offer.",
            {"offer": _reference("Id")},
            [],
        ),
        "DiscardBody": _object(
            "An event that is given up, as SHARD-SEQ.",
            {"event": {"type": "string", "pattern": EVENT_PATTERN}},
            ["event"],
        ),
        "ProblemType": _object(
            "What a type of problems means.",
            {
                "title": {"type": "string"},
                "status": {"type": "integer"},
                "outcome": {"type": "string"},
                "code": {"type": "integer"},
            },
            ["title", "status"],
        ),
        "Health": _object(
            "The gateway accepts requests.", {"status": {"type": "string", "const": "ok"}}, ["status"]
        ),
        "Document": {"type": "object", "description": "An OpenAPI document."},
        "EventSchema": {
            "type": "object",
            "description": "A JSON Schema (2020-12) of the values of `grab.events`. Its `$id` is the "
            "`ce_dataschema` of their records.",
        },
    }


def _object(description: str, properties: Node, required: Sequence[str]) -> Node:
    return {
        "type": "object",
        "description": description,
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _given(operation: Operation) -> tuple[str, ...]:
    """The fields of the command that the path and the headers give."""
    if operation.name == "open":
        return ("type", "id")
    if operation.name == "grab":
        return ("type", "id", "offer", "basket")
    return ("type", "id", "offer", "grab")


#: Fields that the gateway adds when they are absent.
_ABSENT: Final[Mapping[str, tuple[str, ...]]] = {"open": ("offer",), "adjust": ("approved_by",)}


#: Integers of which the checks refuse 0. The schemas of commands say "minimum 0" here: that a release never
#: accepted 0 is not in its schemas, so a comparison with it takes the bound for a new one.
_AT_LEAST_ONE: Final[Mapping[str, tuple[str, ...]]] = {
    "EnvelopeTerms": ("total", "min", "max"), "CouponTerms": ("total",), "StockTerms": ("total",),
    "Changes": ("total",),
}  # fmt: skip

#: Ids of users may have fewer characters than codes. Each code is handed out once.
_ITEMS_BY_LIST: Final[Node] = {
    "if": {"properties": {"what": {"const": "audience"}}},
    "then": {"properties": {"items": {"items": {"pattern": ID_PATTERN}}}},
    "else": {"properties": {"items": {"items": {"pattern": LINE_PATTERN}, "uniqueItems": True}}},
}


def _required_of(operation: Operation) -> list[str]:
    """The fields that a body must have."""
    if operation.name == "take_basket":
        return ["grabs"]
    if operation.kind == "receipt":
        return ["receipt"]
    fields = _COMMANDS[operation.command or ""].model_fields
    required = [name for name, field in fields.items() if field.is_required()]
    optional = (*_given(operation), *_ABSENT.get(operation.name, ()))
    always = ["user"] if operation.scope == "settle" else []
    return [*(name for name in required if name not in optional), *always]


def _body(operation: Operation, known: Mapping[str, Node]) -> Node:
    command = _COMMANDS[operation.command or ""]
    schema = _without(known[command.__name__], _given(operation))
    required = _required_of(operation)
    if operation.name == "open":
        schema["properties"]["offer"] = {
            **schema["properties"]["offer"],
            "description": "The id of the offer; absent: the Idempotency-Key, or a new UUID.",
        }
    if operation.name == "adjust":
        schema["properties"]["approved_by"] = {
            **schema["properties"]["approved_by"],
            "description": "Who approved it. Where callers say who they are, it is the name of the API key, "
            "and may be absent; otherwise it is required.",
        }
    if operation.name == "load":
        schema |= _ITEMS_BY_LIST
    if "user" in required:
        # Every settlement names the user of the grab.
        schema["properties"]["user"] = _reference("Id")
    schema["title"] = body_name(operation)
    schema.pop("required", None)
    return {**schema, "required": required} if required else schema


def _without(schema: Node, fields: Sequence[str]) -> Node:
    properties = {name: value for name, value in schema["properties"].items() if name not in fields}
    required = [name for name in schema.get("required", ()) if name not in fields]
    rest = {name: value for name, value in schema.items() if name not in ("properties", "required")}
    return {**rest, "properties": properties, **({"required": required} if required else {})}


def _problem(answer: Node) -> Node:
    names = [*(outcome.name for outcome in REFUSALS), *DOOR_PROBLEMS]
    return {
        "type": "object",
        "description": "Problem details (RFC 9457). A refused command has the fields of its answer, too.",
        "properties": {
            **{name: value for name, value in answer["properties"].items() if name != "message"},
            "type": {"type": "string", "enum": sorted({f"/problems/{name}" for name in names})},
            "title": {"type": "string"},
            "status": {"type": "integer", "minimum": 400, "maximum": 599},
            "detail": {"type": "string", "description": "What was refused and until when, for people."},
            "field": {"type": "string", "description": "The field, header or part of the path to correct."},
            "outcome": {"type": "string", "enum": sorted({outcome.name for outcome in REFUSALS})},
            "code": {"type": "integer", "description": "The number of the outcome."},
            "answers": {
                "type": "array", "items": _reference("Answer"),
                "description": "Of a basket: the answers to its grabs.",
            },
        },
        "required": ["type", "title", "status", "detail"],
        "additionalProperties": False,
    }  # fmt: skip
