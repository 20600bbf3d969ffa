"""Invented earlier versions of events, and the upcasters that raise them, as an example of a later change.

`grab.redeemed` v0 had `units` for `quantity`, no `amount`, which equals it, and one text for user and order.
`offer.opened` v0 had `sum` for `total`, v-1 also `owner` for `issuer`.
"""

import json
from typing import Any

from grabstream.models.upcasting import Document, Upcaster


def offer_opened_before_0(event: Document) -> Document:
    """Renames a field."""
    event["issuer"] = event.pop("owner")
    return event


def offer_opened_0(event: Document) -> Document:
    """Renames another field."""
    event["total"] = event.pop("sum")
    return event


def grab_redeemed_0(event: Document) -> Document:
    """Renames a field, computes another one, and splits a field in two."""
    event["quantity"] = event["amount"] = event.pop("units")
    event["user"], _, event["order"] = event.pop("use").partition("/")
    return event


UPCASTERS = (
    Upcaster("offer.opened", -1, offer_opened_before_0),
    Upcaster("offer.opened", 0, offer_opened_0),
    Upcaster("grab.redeemed", 0, grab_redeemed_0),
)


def as_it_was(line: bytes) -> bytes:
    """A current event as an earlier program would have written it; the same line if its type has no earlier
    version.
    """
    event: dict[str, Any] = json.loads(line)
    if event["type"] == "offer.opened":
        event["owner"], event["sum"], event["v"] = event.pop("issuer"), event.pop("total"), -1
    elif event["type"] == "grab.redeemed":
        event["units"], event["use"] = event.pop("quantity"), f"{event.pop('user')}/{event.pop('order')}"
        del event["amount"]
        event["v"] = 0
    else:
        return line
    return json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode()
