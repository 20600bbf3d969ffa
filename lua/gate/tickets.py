"""Tickets: what the eligibility service signs for one user and one offer (or its campaign), as a JWT.

The gate checks who signed it, for whom and for what; until when it is good, and whether it was used before,
is decided in Lua.
"""

from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import jwt  # the usual library for these tokens; its signatures are those of cryptography
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from grabstream.models.identifiers import campaign_of, is_id
from grabstream.models.offers import TIME_MS_MAX

SECRET_BYTES_MIN: Final = 32
PUBLIC_KEY_BYTES: Final = 32
#: How far ahead of ours the clock of who signs may be, when a ticket says from when on it is good (`nbf`).
NOT_BEFORE_LEEWAY_SECONDS: Final = 5
#: Verified tickets that are remembered, about 1 kB each.
REMEMBERED_MAX: Final = 16_384


class Ticket(NamedTuple):
    """A ticket that is right for its user and offer: good until `expires_at_ms` (ms since 1970 UTC), once
    when `once_id` is not ''.

    `of_campaign`: it is good for more than this offer, so that a single use counts in the whole campaign.
    """

    expires_at_ms: int
    once_id: str
    of_campaign: bool = False


class TicketKeys:
    """Who may sign tickets, by key id. The key decides on the algorithm: a secret is HS256's, an Ed25519
    public key EdDSA's.
    """

    def __init__(self, keys: Mapping[str, bytes | Ed25519PublicKey]) -> None:
        """Without keys every ticket is refused."""
        self._keys = dict(keys)
        # EdDSA costs 100 µs, and the same ticket comes with every retry. What is refused raises and so is not
        # remembered: forged tickets cannot push good ones out, and one that is not good yet is looked at
        # again.
        self._verified: Callable[[str, str, str], Ticket] = lru_cache(REMEMBERED_MAX)(self._verify)

    @classmethod
    def from_text(cls, text: str) -> "TicketKeys":
        """From `id:algorithm:key,id:algorithm:key`, '' for none; raises ValueError that names the setting
        when it cannot be read.

        HS256 has a secret of at least 32 bytes, EdDSA an Ed25519 public key of 32 bytes; both in base64 or
        base64url.
        """
        keys: dict[str, bytes | Ed25519PublicKey] = {}
        for place, part in enumerate(filter(None, map(str.strip, text.split(","))), start=1):
            # Keys are named by their place: in a mistyped setting the secret may stand anywhere, and errors
            # are logged.
            key = f"GRAB_TICKET_KEYS: key {place}"
            fields = part.split(":")
            if len(fields) != 3:
                raise ValueError(f"{key} has {len(fields)} fields; write it as id:algorithm:key")
            key_id, algorithm, encoded = fields
            if not is_id(key_id):
                raise ValueError(f"{key}: the id before the first ':' must match [A-Za-z0-9._-]{{1,64}}")
            # The later of two under one id would silently refuse what the other signed.
            if key_id in keys:
                raise ValueError(f"{key} has the id of another; give the new key an id of its own")
            keys[key_id] = _read_key(key, algorithm, encoded)
        return cls(keys)

    def read(self, token: str, user: str, offer: str) -> Ticket | None:
        """The ticket in a token (a compact JWT); None when it is not signed by one of the keys, or not for
        this user and offer.

        `sub` must be the user, `aud` the offer or its campaign (or a list with one of them), `exp` is
        required (seconds since 1970, until 2100), `jti`, when there, an id under which it is used once: for
        the offer, when `aud` names only that, else in the campaign. Expiry is NOT checked: the shard's clock
        decides that, in Lua, so that a command that is asked again gets its first answer. `nbf` has no place
        there and is checked here, by the clock of this process.
        """
        if not token.isascii():
            return None
        try:
            return self._verified(token, user, offer)
        except jwt.InvalidTokenError:
            return None

    def _verify(self, token: str, user: str, offer: str) -> Ticket:
        key_id = jwt.get_unverified_header(token).get("kid")
        key = self._keys.get(key_id) if isinstance(key_id, str) else None
        if key is None:
            raise jwt.InvalidTokenError("signed with a key that is not in GRAB_TICKET_KEYS")
        claims = jwt.decode(
            token,
            key,
            # Never what the token says: a public key would else be good as everybody's HS256 secret.
            algorithms=[_algorithm_of(key)],
            # `iat` is no promise about when a ticket is good.
            options={"require": ["sub", "aud", "exp"], "verify_exp": False, "verify_iat": False},
            subject=user,
            audience={offer, campaign_of(offer)},
            leeway=NOT_BEFORE_LEEWAY_SECONDS,
        )
        expires_at = claims["exp"]
        # The bound also finds milliseconds, and numbers that are none (NaN).
        if (
            isinstance(expires_at, bool)
            or not isinstance(expires_at, int | float)
            or not 1 <= expires_at <= TIME_MS_MAX / 1000
        ):
            raise jwt.InvalidTokenError("exp must be in seconds since 1970, until 2100")
        once_id = claims.get("jti", "")
        if "jti" in claims and not is_id(once_id):
            raise jwt.InvalidTokenError("jti must be an id")
        audience = claims["aud"]
        named = {audience} if isinstance(audience, str) else set(audience)
        return Ticket(round(expires_at * 1000), once_id, named != {offer} or campaign_of(offer) == offer)


def sign(
    key_id: str,
    key: bytes | Ed25519PrivateKey,
    *,
    user: str,
    offer: str | Sequence[str],
    expires_at_ms: int,
    once_id: str = "",
) -> str:
    """A token for a user, good for an offer, a campaign or several of them until `expires_at_ms` (ms since
    1970 UTC).

    With an HS256 secret of at least 32 bytes, ValueError if it is shorter, or an Ed25519 private key (EdDSA).
    With `once_id` it is good for one grab: of the offer, or, where it is for a campaign or for several
    offers, in each campaign. For tests, rehearsals and the command line: the gate itself never signs.
    """
    if isinstance(key, bytes) and len(key) < SECRET_BYTES_MIN:
        raise ValueError(f"a ticket's secret must have at least {SECRET_BYTES_MIN} bytes, it has {len(key)}")
    seconds, rest = divmod(expires_at_ms, 1000)
    claims = {
        "sub": user,
        "aud": offer if isinstance(offer, str) else list(offer),
        # Whole seconds as an integer: not every library takes the fraction that the standard allows.
        "exp": expires_at_ms / 1000 if rest else seconds,
    }
    return jwt.encode(
        claims | ({"jti": once_id} if once_id else {}), key, _algorithm_of(key), {"kid": key_id}
    )


def _algorithm_of(key: bytes | Ed25519PublicKey | Ed25519PrivateKey) -> str:
    return "HS256" if isinstance(key, bytes) else "EdDSA"


def _read_key(name: str, algorithm: str, encoded: str) -> bytes | Ed25519PublicKey:
    """A key from its algorithm and base64; `name` begins the text of the ValueError."""
    if algorithm not in ("HS256", "EdDSA"):
        raise ValueError(f"{name}: the algorithm between the ':' must be HS256 or EdDSA")
    # `openssl rand -base64` and a JWK write different alphabets, with and without padding.
    encoded = encoded.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        raw = b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except ValueError:
        raise ValueError(f"{name} is not base64") from None
    if algorithm == "EdDSA":
        if len(raw) != PUBLIC_KEY_BYTES:
            raise ValueError(
                f"{name}: an Ed25519 public key has {PUBLIC_KEY_BYTES} bytes, this has {len(raw)}; give it "
                "without its frame"
            )
        return Ed25519PublicKey.from_public_bytes(raw)
    if len(raw) < SECRET_BYTES_MIN:
        raise ValueError(
            f"{name}: an HS256 secret must have at least {SECRET_BYTES_MIN} bytes, it has {len(raw)}"
        )
    try:
        jwt.get_algorithm_by_name("HS256").prepare_key(raw)
    except jwt.InvalidKeyError:
        # The library would refuse every ticket with it, and rightly: what is public must not be a secret.
        raise ValueError(
            f"{name}: a PEM, SSH or JWK file stands there as HS256 secret; give random bytes"
        ) from None
    return raw
