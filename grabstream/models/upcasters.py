"""The upcasters of this program, which raise events of earlier versions. At present, every type has its first
version.

Each earlier version of a type has one function and one line, which are never edited (docs/events.md):

    def grab_redeemed_1(event: Document) -> Document:
        event["receipt"] = event.pop("order")
        return event

    UPCASTERS = (Upcaster("grab.redeemed", 1, grab_redeemed_1),)
"""

from typing import Final

from grabstream.models.upcasting import Upcaster

UPCASTERS: Final[tuple[Upcaster, ...]] = ()
