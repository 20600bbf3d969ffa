"""Adjustments of the ledger with amounts near the bound of a bigint."""

import json

from tests.support.projecting import (
    SHARD,
    journal,  # noqa: F401 - a fixture
)

#: Twice this amount is more than a bigint can store.
LARGE = 9 * 10**18


def adjusted(seq: int, amount: int = LARGE, credit: str = "wallet:u1", reason: str = "why") -> bytes:
    transfer = {"asset": "CNY", "debit": "external:bank", "credit": credit, "amount": amount}
    return json.dumps(
        {"type": "ledger.adjusted", "v": 1, "shard": SHARD, "seq": seq, "offer_seq": seq, "offer": "e",
        "at": seq, "command": f"a{seq}",
         "transfers": [transfer], "reason": reason, "approved_by": "boss", "operator": "olga", "digest": "d"},
        separators=(",", ":"),
    ).encode()  # fmt: skip
