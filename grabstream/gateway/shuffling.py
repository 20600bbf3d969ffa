"""Offers in a random order for each visitor. It is stable until their number needs more or fewer buckets: a
new offer is inserted, and moves no other.

Offers are in buckets by their names, for all visitors. Each visitor gets their own order of the buckets, and
of the offers in each bucket. So a page looks at the offers of a bucket or two, however many there are.
"""

from collections.abc import Iterator, Sequence
from hashlib import md5
from itertools import islice
from typing import Final
from zlib import crc32

#: Offers of a bucket, on average at most, and at least half as many: enough that buckets are about equally
#: large, so every offer is first about equally often.
BUCKET_OFFERS_MAX: Final = 256


class Shuffled:
    """A list of offers in the orders of visitors."""

    def __init__(self, offers: Sequence[str]) -> None:
        full = max(len(offers) - 1, 0) // BUCKET_OFFERS_MAX
        self._buckets: list[list[str]] = [[] for _ in range(1 << full.bit_length())]
        for offer in offers:
            self._buckets[self._bucket_of(offer)].append(offer)

    def page(self, visitor: str, after: str | None, rows: int) -> list[str]:
        """The next offers of a visitor, at most `rows`: those after an offer, which need not be in the list
        any more, or the first ones.
        """
        return list(islice(self._from(visitor, after), rows))

    def _from(self, visitor: str, after: str | None) -> Iterator[str]:
        order = sorted(range(len(self._buckets)), key=lambda bucket: _spot(str(bucket), visitor))
        if after is not None:
            del order[: order.index(self._bucket_of(after))]
        for number, bucket in enumerate(order):
            offers = sorted((_spot(offer, visitor), offer) for offer in self._buckets[bucket])
            first = (_spot(after, visitor), after) if after is not None and number == 0 else ("", "")
            yield from (offer for spot, offer in offers if (spot, offer) > first)

    def _bucket_of(self, offer: str) -> int:
        return crc32(offer.encode()) % len(self._buckets)


def _spot(name: str, visitor: str) -> str:
    """The place of a name in the order of a visitor: random, and always the same."""
    return md5(f"{name}/{visitor}".encode(), usedforsecurity=False).hexdigest()
