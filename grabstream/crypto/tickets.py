"""Tickets: JWTs that an eligibility service signs for one user and one offer (or its campaign).

The gate checks the signature, the user and the offer of a ticket. The scripts decide whether the ticket has
expired or was used before.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from grabstream.crypto.signing import SECRET_BYTES_MIN, algorithm_of, has_another_purpose, read_keys
from grabstream.models.identifiers import campaign_of, is_id
from grabstream.models.money import Invalid
from grabstream.models.offers import TIME_MS_MAX
from grabstream.models.unique_names import check_claims, check_header

#: The maximum lead of the signer's clock over this machine's, for tickets with a time from which they are
#: valid (`nbf`).
NOT_BEFORE_LEEWAY_SECONDS: Final = 5
#: The number of verified tickets that are cached, about 1 kB each.
REMEMBERED_MAX: Final = 16_384


class Ticket(NamedTuple):
    """A ticket that is valid for its user and offer until `expires_at_ms` (ms since 1970 UTC), and for one
    use if `once_id` is not ''.

    `is_campaign_wide`: it is valid for more than this offer, so a single use counts in the whole campaign.
    """

    expires_at_ms: int
    once_id: str
    is_campaign_wide: bool = False


class TicketKeys:
    """The keys that may sign tickets, by key id. The key determines the algorithm: HS256 for a secret, EdDSA
    for an Ed25519 public key.
    """

    def __init__(self, keys: Mapping[str, bytes | Ed25519PublicKey]) -> None:
        """Makes the keys; without keys every ticket is refused."""
        self._keys = dict(keys)
        # EdDSA costs 100 µs, and every retry has the same ticket. A refused ticket raises and so is not
        # cached: forged tickets cannot evict valid ones, and a ticket that is not valid yet is verified
        # again.
        self._verified: Callable[[str, str, str], Ticket] = lru_cache(REMEMBERED_MAX)(self._verify)

    @classmethod
    def from_text(cls, text: str) -> "TicketKeys":
        """Reads keys from `id:algorithm:key,id:algorithm:key`, '' for none; raises ValueError that names the
        setting when a key cannot be read.

        HS256 has a secret of at least 32 bytes, EdDSA an Ed25519 public key of 32 bytes; both in base64 or
        base64url.
        """
        return cls(read_keys("GRAB_TICKET_KEYS", text))

    def replace(self, other: "TicketKeys") -> None:
        """Takes other keys in place of these. Tickets that were verified are verified again."""
        self._keys = other._keys
        self._verified = lru_cache(REMEMBERED_MAX)(self._verify)

    def read(self, token: str, user: str, offer: str) -> Ticket | None:
        """Returns the ticket in a token (a compact JWT); None when none of the keys signed it, or when it is
        not for this user and offer.

        `sub` must be the user, `aud` the offer or its campaign (or a list with one of them), and `exp` is
        required (seconds since 1970, until 2100). `jti`, if present, is an id that can be used once: for the
        offer if `aud` names only the offer, else in the campaign. Expiry is NOT checked here: the script
        decides it by the shard's clock, so that a repeated command gets its first answer. `nbf` is checked
        here, by the clock of this process, since the scripts do not have it.
        """
        if not token.isascii():
            return None
        try:
            return self._verified(token, user, offer)
        except jwt.InvalidTokenError:
            return None

    def _verify(self, token: str, user: str, offer: str) -> Ticket:
        header = jwt.get_unverified_header(token)
        if has_another_purpose(header):
            raise jwt.InvalidTokenError("signed for something else")
        key_id = header.get("kid")
        key = self._keys.get(key_id) if isinstance(key_id, str) else None
        if key is None:
            raise jwt.InvalidTokenError("signed with a key that is not in GRAB_TICKET_KEYS")
        claims = jwt.decode(
            token,
            key,
            # Never the algorithm of the token: else anyone could sign with HS256, with a public key as
            # secret.
            algorithms=[algorithm_of(key)],
            # `iat` does not limit when a ticket is valid.
            options={"require": ["sub", "aud", "exp"], "verify_exp": False, "verify_iat": False},
            subject=user,
            audience={offer, campaign_of(offer)},
            leeway=NOT_BEFORE_LEEWAY_SECONDS,
        )
        expires_at = claims["exp"]
        # The bound also refuses milliseconds and NaN.
        if (
            isinstance(expires_at, bool)
            or not isinstance(expires_at, int | float)
            or not 1 <= expires_at <= TIME_MS_MAX / 1000
        ):
            raise jwt.InvalidTokenError("exp must be in seconds since 1970, until 2100")
        try:
            check_header(token)
            check_claims(token)
        except Invalid as error:
            raise jwt.InvalidTokenError(str(error)) from None
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
    """Returns a token for a user, valid for an offer, a campaign or several of them until `expires_at_ms` (ms
    since 1970 UTC).

    Signs with an HS256 secret of at least 32 bytes (ValueError if it is shorter) or an Ed25519 private key
    (EdDSA). With `once_id` the token is valid for one grab: of the offer or, if it is for a campaign or
    several offers, in each campaign. For tests, rehearsals and the command line; the gate never signs.
    """
    if isinstance(key, bytes) and len(key) < SECRET_BYTES_MIN:
        raise ValueError(f"a ticket's secret must have at least {SECRET_BYTES_MIN} bytes, it has {len(key)}")
    seconds, rest = divmod(expires_at_ms, 1000)
    claims = {
        "sub": user,
        "aud": offer if isinstance(offer, str) else list(offer),
        # Whole seconds as an integer: not every library accepts the fraction that the standard allows.
        "exp": expires_at_ms / 1000 if rest else seconds,
    }
    return jwt.encode(claims | ({"jti": once_id} if once_id else {}), key, algorithm_of(key), {"kid": key_id})
