"""Tokens of end users (JWT, RFC 7519): verifies them, and returns their user.

A token's claims about its signature are not trusted: the key with its id determines the algorithm, and keys
inside of a token, or at an address that it names, are ignored.
"""

import re
import time
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final, NamedTuple, TypeVar

import jwt

from grabstream.gateway.bounds import TOKEN_BYTES_MAX, TOKEN_LEEWAY_SECONDS, TOKENS_REMEMBERED_MAX
from grabstream.gateway.callers import Caller
from grabstream.gateway.key_sets import KEY_ID_LENGTH_MAX, KeySet, VerifyingKey
from grabstream.models.money import Invalid
from grabstream.models.offers import TIME_MS_MAX
from grabstream.models.pseudonyms import user_of
from grabstream.models.unique_names import check_claims, check_header

K = TypeVar("K")
V = TypeVar("V")

is_token = re.compile(rb"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+").fullmatch
#: Headers that change how a signature is made; the gateway knows none of them.
_CRITICAL: Final = ("crit", "b64")
#: The error in the claims of a token with a valid signature.
_WRONG: Final[dict[type[jwt.PyJWTError], str]] = {
    jwt.InvalidAudienceError: "The token is for another audience (aud).",
    jwt.InvalidIssuerError: "The token is of another issuer (iss).",
}


class BadToken(Exception):
    """A token is not valid; the text, for its caller, says why. It reveals nothing about keys."""


class UnusableToken(BadToken):
    """A token that its issuer has signed, and that nevertheless is not valid here, or not now; the text names
    the claim. It is not forged, so it is not counted as a failure of its address.
    """


class _Verified(NamedTuple):
    """A token whose signature is right: its user, when it is valid (s since 1970 UTC), and the key."""

    caller: Caller
    from_seconds: float
    until_seconds: float
    key_id: str
    key: VerifyingKey


class UserNames(NamedTuple):
    """Which claim names the user, and the key that makes an id of a name that is not one; without it, such a
    name is refused.
    """

    claim: str = "sub"
    key: bytes | None = None

    def user_of(self, claims: Mapping[str, Any]) -> str:
        """The user of a token; raises UnusableToken for a claim that names none."""
        name = claims[self.claim]
        try:
            if not isinstance(name, str):
                raise ValueError("must be a string")
            return user_of(name, self.key)
        except ValueError as error:
            raise UnusableToken(
                f"The claim {self.claim} of the token is not a user id: it {error}."
            ) from None


class TokenVerifier:
    """Verifies tokens of one issuer for one audience."""

    def __init__(self, issuer: str, audience: str, keys: KeySet, names: UserNames | None = None) -> None:
        self._issuer = issuer
        self._audience = audience
        self._keys = keys
        self._names = names or UserNames()
        # A signature costs 30 to 150 µs, and a user sends the same token many times. Only good ones are
        # remembered, so forged ones cannot push them out.
        self._verified: dict[bytes, _Verified] = {}

    async def caller_of(self, token: bytes) -> Caller:
        """The user of a token; raises BadToken, or Problem when the keys cannot be read."""
        if len(token) > TOKEN_BYTES_MAX:
            raise BadToken(f"The token has more than {TOKEN_BYTES_MAX} bytes.")
        digest = sha256(token).digest()
        verified = self._verified.get(digest)
        if verified is None or self._keys.known(verified.key_id) is not verified.key:
            self._verified.pop(digest, None)
            verified = await self._verify(token.decode("ascii"))
            add_bounded(self._verified, digest, verified, TOKENS_REMEMBERED_MAX)
        now = time.time()
        if now >= verified.until_seconds + TOKEN_LEEWAY_SECONDS:
            raise UnusableToken("The token has expired.")
        if now < verified.from_seconds - TOKEN_LEEWAY_SECONDS:
            raise UnusableToken("The token is not valid yet.")
        return verified.caller

    async def _verify(self, token: str) -> _Verified:
        try:
            header = jwt.get_unverified_header(token)
            check_header(token)
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise _invalid() from None
        key_id = header.get("kid")
        if not isinstance(key_id, str) or len(key_id) > KEY_ID_LENGTH_MAX:
            raise _invalid()
        if any(name in header for name in _CRITICAL):
            raise _invalid()
        key = await self._keys.key(key_id)
        if key is None:
            raise _invalid()
        try:
            claims = jwt.decode(
                token,
                key.key,
                # The one of the key, never that of the token.
                algorithms=[key.algorithm],
                issuer=self._issuer,
                audience=self._audience,
                leeway=TOKEN_LEEWAY_SECONDS,
                options={"require": ["exp", "iss", "aud", self._names.claim], "verify_sub": False},
            )
        # The signature is verified before any claim is checked.
        except jwt.ExpiredSignatureError:
            raise UnusableToken("The token has expired.") from None
        except jwt.ImmatureSignatureError:
            raise UnusableToken("The token is not valid yet.") from None
        except jwt.MissingRequiredClaimError as error:
            raise UnusableToken(f"The token has no claim {error.claim}.") from None
        except (jwt.InvalidAudienceError, jwt.InvalidIssuerError) as error:
            raise UnusableToken(_WRONG[type(error)]) from None
        except (jwt.PyJWTError, ValueError, OverflowError, RecursionError):
            raise _invalid() from None
        try:
            check_claims(token)
        except Invalid:
            raise UnusableToken("The token names a claim twice.") from None
        user, until = self._names.user_of(claims), _seconds(claims["exp"])
        if until is None:
            raise _invalid()
        begins = [claims[name] for name in ("nbf", "iat") if name in claims]
        seconds = list(map(_seconds, begins))
        if None in seconds:
            raise _invalid()
        from_seconds = max((one for one in seconds if one is not None), default=0.0)
        return _Verified(Caller(user, user=user), from_seconds, until, key_id, key)


def add_bounded(known: dict[K, V], key: K, value: V, count_max: int) -> None:
    """Adds an entry; the oldest ones are dropped if there are too many."""
    known.pop(key, None)
    while len(known) >= count_max:
        del known[next(iter(known))]
    known[key] = value


def _seconds(value: Any) -> float | None:
    """A time in seconds since 1970, until 2100; None for anything else, such as milliseconds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= TIME_MS_MAX / 1000 else None


def _invalid() -> BadToken:
    return BadToken("The token is not valid.")
