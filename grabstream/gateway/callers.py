"""Callers, and what they may do: the scopes of services, and the rights of end users.

A service has an API key, with scopes. An end user has a token, and may only act as themselves.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from grabstream.gateway.operations import OPERATIONS, Operation
from grabstream.gateway.problems import Header, Problem
from grabstream.gateway.requests import Request, check_user

REALM: Final = 'Bearer realm="grabstream"'
#: What the scopes of an API key allow, in words.
SCOPES: Final[Mapping[str, str]] = {
    "grab": "grab, baskets, release, extend",
    "settle": "confirm, return, redeem, unredeem, release, extend",
    "read": "questions, streams of events",
    "operate": "open, amend, load, adjust, pause, resume, close; webhooks, and the findings of the doctor",
}
_GRAB_OPERATIONS: Final = frozenset({"release", "extend"})
#: What an end user may do. A new operation is not theirs until it is named here.
USER_OPERATIONS: Final = frozenset(
    {"grab", "take_basket", "release", "extend", "offers", "offer", "offer_grabs"}
    | {"user_balances", "user_grabs", "user_transfers", "user_events"}
)


class Caller(NamedTuple):
    """The sender of a request: a service, by the name of its key, with its scopes; or an end user, who is
    `user`.
    """

    name: str
    scopes: frozenset[str] = frozenset()
    user: str | None = None


def scopes_of(operation: Operation) -> tuple[str, ...]:
    """The scopes of which a service needs one for an operation; none: open to every caller."""
    if operation.scope == "none":
        return ()
    return ("grab", operation.scope) if operation.name in _GRAB_OPERATIONS else (operation.scope,)


#: The scopes by the name of an operation.
_SCOPES: Final = {operation.name: scopes_of(operation) for operation in OPERATIONS}


def authorize(caller: Caller, operation: Operation, request: Request) -> None:
    """Raises Problem unless a caller may do this. The request is marked with the service, or with the end
    user, which the checks of its body compare.
    """
    needed = _SCOPES[operation.name]
    if caller.user is None:
        if caller.scopes.isdisjoint(needed):
            raise _insufficient(
                needed, f"This needs the scope {' or '.join(needed)}, which the API key does not have."
            )
        request.service = caller.name
        return
    if operation.name not in USER_OPERATIONS:
        raise _insufficient(
            needed, f"End users may not do this: it needs an API key with the scope {' or '.join(needed)}."
        )
    request.user = caller.user
    if "user" in request.path:
        check_user(request, request.path["user"])


def unauthenticated(detail: str, error: str | None = None) -> Problem:
    """The problem of a request without valid credentials. It is the same for a key that never existed and for
    one that is revoked or has expired.
    """
    words = REALM if error is None else f'{REALM}, error="{error}"'
    return Problem("unauthenticated", detail, "Authorization", [_header(words)])


def _insufficient(needed: tuple[str, ...], detail: str) -> Problem:
    words = f'{REALM}, error="insufficient_scope", scope="{" ".join(needed)}"'
    return Problem("insufficient_scope", detail, "Authorization", [_header(words)])


def _header(words: str) -> Header:
    return b"www-authenticate", words.encode()
