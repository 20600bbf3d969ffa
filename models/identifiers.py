"""Ids, campaigns, shards and accounts: the names by which everything else is found.

An id is safe everywhere by construction (JSON, Lua, COPY, Redis keys, hash tags), so nobody downstream
escapes it.
"""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Final
from zlib import crc32

from msgspec import Meta

ID_PATTERN: Final = "^[A-Za-z0-9._:-]{1,64}$"
ID_LENGTH_MAX: Final = 64
#: Stands for every offer that does not exist, where refusals are counted by offer: no id can be it, and
#: nobody can invent names for it.
NO_OFFER: Final = "*"


def in_schema(**words: Any) -> Meta:
    """A constraint that the JSON Schemas say; what checks it is code of our own, or the script that writes
    the value.
    """
    return Meta(extra_json_schema=words)


#: Ids of commands that the system writes itself: what time brings (`sweep`). Nobody else may use them.
RESERVED_IDS: Final = frozenset({"sweep"})

# The check itself is `is_id`, which a whole batch can share.
Id = Annotated[str, in_schema(pattern=ID_PATTERN)]
#: Numbers and places, and times in milliseconds since 1970 UTC.
Count = Annotated[int, in_schema(minimum=0)]

_id_match = re.compile(ID_PATTERN[:-1] + r"\Z").match
_ID_BYTES: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-"


def is_id(text: str) -> bool:
    """Whether the text may name a command, offer, user, issuer, payment or attribute."""
    return _id_match(text) is not None


def are_ids(texts: Iterable[str]) -> bool:
    """Whether every text is an id; one pass in C over all of them, for batches."""
    texts = list(texts)
    if not texts:
        return True
    lengths = [len(text) for text in texts]
    if min(lengths) == 0 or max(lengths) > ID_LENGTH_MAX:
        return False
    joined = "".join(texts)
    return joined.isascii() and not joined.encode().translate(None, _ID_BYTES)


def campaign_of(offer: str) -> str:
    """The campaign of an offer: its id up to the first `:`; without one, the offer is its own campaign."""
    return offer.partition(":")[0]


def shard_of(campaign: str, shards: int) -> int:
    """The shard (0 … shards-1) that decides a campaign: CRC-32 (IEEE, as in zlib) modulo the number of
    shards.
    """
    return crc32(campaign.encode()) % shards
