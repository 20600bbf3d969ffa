"""Pseudonyms: ids of users, devices or orders that reveal nothing without the key; and ids for users of an
identity provider.
"""

import hmac
from base64 import b32encode
from hashlib import sha256
from typing import Final

from grabstream.models.identifiers import ID_PATTERN, is_id

KEY_BYTES_MIN: Final = 32
_BYTES: Final = 20


def pseudonym(key: bytes, name: str, kind: str = "user") -> str:
    """A pseudonym of `name`, 32 characters that are valid as an id: HMAC-SHA256 under `key`, at least 32
    bytes known only to the service that knows the names. The same name, key and kind give the same one.

    Names of different kinds (user, card, device) never have one pseudonym. Raises ValueError for a shorter
    key, or a kind that is not an id.
    """
    if len(key) < KEY_BYTES_MIN:
        raise ValueError(f"key: must have at least {KEY_BYTES_MIN} bytes, it has {len(key)}")
    if not is_id(kind) or ":" in kind:
        raise ValueError("kind: must match [A-Za-z0-9._-]{1,64}")
    digest = hmac.new(key, f"{kind}:{name}".encode(), sha256).digest()
    return b32encode(digest[:_BYTES]).decode().lower()


#: The start of ids of users made from a name at their identity provider. No name is an id that begins so;
#: otherwise a user who may choose a name could become another one.
NAMED_USERS: Final = "sub:"
#: The name of a user, in UTF-8.
USER_NAME_BYTES_MAX: Final = 255
#: Ids that clients and proxies remove from a path.
_NOT_IN_PATHS: Final = frozenset({".", ".."})


def user_of(name: str, key: bytes | None) -> str:
    """The id of the user with this name at an identity provider: the name itself, if it is an id that a user
    may have; otherwise `sub:` and the pseudonym of the name. The same name and key give the same id, and no
    two names give one. Raises ValueError for a name that no user may have, or that needs a key where there is
    none.
    """
    if is_id(name) and name not in _NOT_IN_PATHS and not name.startswith(NAMED_USERS):
        return name
    # The length is checked first: a character has one byte or more.
    if not (0 < len(name) <= USER_NAME_BYTES_MAX and len(_bytes_of(name)) <= USER_NAME_BYTES_MAX):
        raise ValueError(f"must be a string of 1 to {USER_NAME_BYTES_MAX} bytes of UTF-8")
    if key is None:
        raise ValueError(
            f"must match {ID_PATTERN}, and be neither . nor .. nor begin with {NAMED_USERS}; with "
            "GRAB_JWT_USER_KEY, any text gives an id"
        )
    return NAMED_USERS + pseudonym(key, name)


def _bytes_of(text: str) -> bytes:
    """The text in UTF-8; raises ValueError for half of a surrogate pair, which is not a character."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair, which is not a character") from None
