"""Selection: which events of a history are wanted, by offer and by user, and what read models of a part can
say exactly.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from grabstream.models.events import (
    OfferAmended,
    OfferClosed,
    OfferLoaded,
    OfferOpened,
    OfferPaused,
    OfferResumed,
    OfferRetired,
    PaymentRefundDue,
)
from grabstream.projections.cursors import Fact

_OfferEvent = (
    OfferOpened | OfferLoaded | OfferAmended | OfferPaused | OfferResumed | OfferClosed | OfferRetired
)


class Wanted(NamedTuple):
    """What was asked for; an empty tuple is no restriction."""

    offers: tuple[str, ...] = ()
    users: tuple[str, ...] = ()

    @property
    def everything(self) -> bool:
        """Whether nothing is left out."""
        return not self.offers and not self.users


class Selection:
    """Picks events. Told apart by user, it has to see a shard from its beginning: a refund due names a grab,
    not its user.

    A user's events are those that name them, those that book on their `wallet:` or `hold:` (a correction, the
    rest of an envelope they gave), and refunds due for their grabs. `offer_events` adds all that concerns a
    whole offer, which read models need.
    """

    def __init__(self, wanted: Wanted, offer_events: bool, grabs: Iterable[tuple[str, str]] = ()) -> None:
        self._offers, self._users = frozenset(wanted.offers), frozenset(wanted.users)
        self._accounts = {f"{kind}:{user}" for user in wanted.users for kind in ("wallet", "hold")}
        self._offer_events = offer_events
        self._grabs = set(grabs)
        #: Which of the wanted offers have an event in what was read.
        self.offers_met: set[str] = set()

    def of(self, facts: Sequence[Fact]) -> Sequence[Fact]:
        """Those that are wanted, in their order."""
        if self._offers:
            facts = [fact for fact in facts if fact.event.offer in self._offers]
            self.offers_met.update(fact.event.offer for fact in facts)
        return [fact for fact in facts if self._is_users(fact)] if self._users else facts

    def _is_users(self, fact: Fact) -> bool:
        event: Any = fact.event
        if getattr(event, "user", None) in self._users:
            self._grabs.add((event.offer, event.grab))
            return True
        if isinstance(event, PaymentRefundDue):
            return (event.offer, event.grab) in self._grabs
        if self._offer_events and isinstance(event, _OfferEvent):
            return True
        return any(one.debit in self._accounts or one.credit in self._accounts for one in fact.transfers)
