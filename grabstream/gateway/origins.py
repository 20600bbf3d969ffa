"""Pages of other origins (CORS): which ones may read answers. Without an origin in the settings, none.

No cookie exists, and credentials come in the header Authorization, which a browser never adds automatically.
So no page can use the rights of its visitor, and answers never allow a browser to send cookies.
"""

from typing import Any, Final

from starlette.types import Scope

from grabstream.gateway.problems import Header
from grabstream.gateway.requests import count_of, fields_of

#: How long a browser may remember what it may send, in seconds.
PREFLIGHT_SECONDS: Final = 600
_SENT: Final = b"Authorization, Content-Type, Idempotency-Key, If-None-Match, Last-Event-ID, Prefer"
_READ: Final = b"ETag, Idempotency-Key, Location, Preference-Applied, Retry-After, WWW-Authenticate"


class Origins:
    """The origins whose pages may read answers: scheme, host and port, compared exactly."""

    def __init__(self, allowed: frozenset[str]) -> None:
        self._allowed = frozenset(origin.encode() for origin in allowed)

    def headers(self, scope: Scope, reply: Any) -> tuple[Header, ...]:
        """The additional headers of a reply, also of a stream."""
        fields = fields_of(scope)
        if count_of(b"origin", fields, scope["headers"]) != 1 or fields[b"origin"] not in self._allowed:
            return ((b"vary", b"Origin"),)
        found = ((b"vary", b"Origin"), (b"access-control-allow-origin", fields[b"origin"]))
        asks = b"access-control-request-method" in fields
        if scope["method"] != "OPTIONS" or not asks:
            return (*found, (b"access-control-expose-headers", _READ))
        methods = next((value for name, value in reply.headers if name == b"allow"), b"")
        return (
            *found,
            (b"access-control-allow-methods", methods),
            (b"access-control-allow-headers", _SENT),
            (b"access-control-max-age", b"%d" % PREFLIGHT_SECONDS),
        )
