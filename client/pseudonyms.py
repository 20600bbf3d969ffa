"""Pseudonyms: ids of users, devices or orders that say nothing to who has not the key."""

import hmac
from base64 import b32encode
from hashlib import sha256
from typing import Final

from grabstream.models.identifiers import is_id

KEY_BYTES_MIN: Final = 32
_BYTES: Final = 20


def pseudonym(key: bytes, name: str, kind: str = "user") -> str:
    """A pseudonym of `name`, 32 characters that are valid as an id: HMAC-SHA256 under `key`, at least 32
    bytes that only the service has that knows the names. The same name, key and kind give the same one.

    Names of different kinds (user, card, device) never have one pseudonym. Raises ValueError for a shorter
    key, or a kind that is no id.
    """
    if len(key) < KEY_BYTES_MIN:
        raise ValueError(f"key: must have at least {KEY_BYTES_MIN} bytes, it has {len(key)}")
    if not is_id(kind) or ":" in kind:
        raise ValueError("kind: must match [A-Za-z0-9._-]{1,64}")
    digest = hmac.new(key, f"{kind}:{name}".encode(), sha256).digest()
    return b32encode(digest[:_BYTES]).decode().lower()
