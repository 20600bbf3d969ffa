"""Selection: picks the wanted events of a history, by offer and by user."""

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
from grabstream.projections.cursors import Fact, single_facts

_OfferEvent = (
    OfferOpened | OfferLoaded | OfferAmended | OfferPaused | OfferResumed | OfferClosed | OfferRetired
)


class Wanted(NamedTuple):
    """The requested offers and users; an empty tuple does not restrict."""

    offers: tuple[str, ...] = ()
    users: tuple[str, ...] = ()

    @property
    def everything(self) -> bool:
        """Whether all events are wanted."""
        return not self.offers and not self.users


class Selection:
    """Picks events. To select by user, it must read a shard from its beginning, because a refund due may name
    a grab, but not its user.

    The events of a user are those that name the user, those that book on the user's `wallet:` or `hold:`
    account (a correction, the rest of an envelope that the user gave), and refunds due for the user's grabs.
    `offer_events` adds the events about a whole offer, which read models need. Of a run of grabs, it picks
    single grabs, each in the form that it has on `grab.events`; with `singles`, it divides every run into
    them, and a replay begins and ends at any of them.
    """

    def __init__(
        self,
        wanted: Wanted,
        offer_events: bool,
        grabs: Iterable[tuple[str, str]] = (),
        singles: bool = False,
    ) -> None:
        self._offers, self._users = frozenset(wanted.offers), frozenset(wanted.users)
        self._accounts = {f"{kind}:{user}" for user in wanted.users for kind in ("wallet", "hold")}
        self._offer_events = offer_events
        self.singles = singles
        self._grabs = set(grabs)
        #: The wanted offers that had an event so far.
        self.offers_met: set[str] = set()

    def of(self, facts: Sequence[Fact]) -> Sequence[Fact]:
        """The wanted facts, in order."""
        if self._offers:
            facts = [fact for fact in facts if fact.event.offer in self._offers]
            self.offers_met.update(fact.event.offer for fact in facts)
        if self._users or self.singles:
            facts = single_facts(facts)
        return [fact for fact in facts if self._is_users(fact)] if self._users else facts

    def _is_users(self, fact: Fact) -> bool:
        event: Any = fact.event
        if isinstance(event, PaymentRefundDue):
            # A user may have paid for a grab of another user, which does not become theirs.
            if event.user is not None:
                return event.user in self._users
            return (event.offer, event.grab) in self._grabs
        if getattr(event, "user", None) in self._users:
            self._grabs.add((event.offer, event.grab))
            return True
        if self._offer_events and isinstance(event, _OfferEvent):
            return True
        return any(
            transfer.debit in self._accounts or transfer.credit in self._accounts
            for transfer in fact.transfers
        )
