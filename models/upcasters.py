"""The upcasters of this program: what became of the events of earlier releases. Every type is at its first
version today.

One function and one line for each version that a type has left behind, never edited again (docs/events.md):

    def grab_redeemed_1(event: Document) -> Document:
        event["receipt"] = event.pop("order")
        return event

    UPCASTERS = (Upcaster("grab.redeemed", 1, grab_redeemed_1),)
"""

from typing import Final

from grabstream.models.upcasting import Upcaster

UPCASTERS: Final[tuple[Upcaster, ...]] = ()
