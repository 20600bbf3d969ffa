"""Ids, campaigns and shards.

An id needs no escaping in JSON, Lua, COPY, Redis keys or hash tags, because its characters are restricted.
"""

import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Annotated, Any, Final
from zlib import crc32

from msgspec import Meta

ID_PATTERN: Final = "^[A-Za-z0-9._:-]{1,64}$"
ID_LENGTH_MAX: Final = 64
#: The name under which refusals of all offers that do not exist are counted. No id can equal it, and invented
#: offer names cannot fill the counters.
NO_OFFER: Final = "*"


def in_schema(**words: Any) -> Meta:
    """A constraint that only the JSON Schemas state. msgspec does not check it: a function in `models/` does,
    or the script that writes the value.
    """
    return Meta(extra_json_schema=words)


#: Command ids of events that the system makes when a time is reached (`sweep`). Senders must not use them.
RESERVED_IDS: Final = frozenset({"sweep"})
#: The ids of commands that the system sends itself begin so (`models/payments.py`). Senders must not use
#: them: a command under such an id would be taken for the one of the system.
SYSTEM_IDS: Final = "grabstream:"

#: Payment ids are opaque texts of the payment side: 1 to 255 bytes of UTF-8 without control characters,
#: compared by bytes.
PAYMENT_BYTES_MAX: Final = 255
PAYMENT_CHARACTERS: Final = r"[^\u0000-\u001f\u007f-\u009f]"
PAYMENT_WORDS: Final = f"must be 1 to {PAYMENT_BYTES_MAX} bytes of UTF-8 without control characters"

# `is_payment_id` checks it.
PaymentId = Annotated[
    str,
    in_schema(
        minLength=1,
        maxLength=PAYMENT_BYTES_MAX,
        pattern=f"^{PAYMENT_CHARACTERS}*$",
        description=f"Of the payment side: 1 to {PAYMENT_BYTES_MAX} bytes of UTF-8, compared by bytes.",
    ),
]
# `is_id` and `are_ids` check it.
Id = Annotated[str, in_schema(pattern=ID_PATTERN)]
#: Numbers, ordinals, and times in milliseconds since 1970 UTC.
Count = Annotated[int, in_schema(minimum=0)]

_id_match = re.compile(ID_PATTERN[:-1] + r"\Z").match
#: Three ids with a slash between them, which no id contains.
_three_ids_match = re.compile("/".join([ID_PATTERN[1:-1]] * 3) + r"\Z").match
# PostgreSQL refuses NUL, and UTF-8 has no single surrogates.
_find_control = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]").search
_ID_BYTES: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-"


def is_id(text: str) -> bool:
    """Whether the text may name a command, offer, user, issuer or attribute."""
    return _id_match(text) is not None


def is_reserved(id: str) -> bool:
    """Whether an id may only be used by the system itself."""
    return id in RESERVED_IDS or id.startswith(SYSTEM_IDS)


def may_be_reserved(ids: Sequence[str]) -> bool:
    """Whether one of the ids may be reserved: fast, and True for a few lists without a reserved id. Raises
    TypeError for a value that is not a string.
    """
    return SYSTEM_IDS in "".join(ids) or not RESERVED_IDS.isdisjoint(ids)


def are_three_ids(first: str, second: str, third: str) -> bool:
    """Whether all three are ids, in one match; raises TypeError for a value that is not a string."""
    return _three_ids_match("/".join((first, second, third))) is not None


def are_ids(texts: Iterable[str]) -> bool:
    """Whether every text is an id. Checks all of them in one pass in C."""
    texts = list(texts)
    if not texts:
        return True
    lengths = list(map(len, texts))
    if min(lengths) == 0 or max(lengths) > ID_LENGTH_MAX:
        return False
    joined = "".join(texts)
    return joined.isascii() and not joined.encode().translate(None, _ID_BYTES)


def is_payment_id(text: str) -> bool:
    """Whether the text may be the id of a payment; raises TypeError for a value that is not a string."""
    return (
        0 < len(text) <= PAYMENT_BYTES_MAX
        and _find_control(text) is None
        and len(text.encode()) <= PAYMENT_BYTES_MAX
    )


def are_payment_ids(texts: Sequence[str]) -> bool:
    """Whether every text may be the id of a payment. Most are ordinary ids, which is checked in C."""
    return are_ids(texts) or all(map(is_payment_id, texts))


def encoded_payment(payment: str) -> str:
    """The id of a payment as the inside of a JSON text, in the one encoding that has no needless escape. It
    is canonical, since only `"` and `\\` need one where control characters are not allowed; so scripts join
    it into events, and compare payments by its bytes.
    """
    return payment.replace("\\", "\\\\").replace('"', '\\"')


def id_of_end_user(user: str, key: str) -> str:
    """The id of a command about a grab that an end user sends. The key alone would be valid in the whole
    campaign: a user who guesses the key of a service's command could send another command with it first.
    """
    return f"user:{sha256(f'{user}/{key}'.encode()).hexdigest()[:40]}"


def campaign_of(offer: str) -> str:
    """The campaign of an offer: its id up to the first `:`, or the whole id if it has none."""
    return offer.partition(":")[0]


def shard_of(campaign: str, shards: int) -> int:
    """The shard (0 … shards-1) that decides a campaign: CRC-32 (IEEE, as in zlib) modulo the number of
    shards.
    """
    return crc32(campaign.encode()) % shards
