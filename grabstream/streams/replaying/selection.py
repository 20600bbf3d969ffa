"""Selection: picks the wanted events of a history, by offer and by user."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from grabstream.models.events import AnyOfferEvent, PaymentRefundDue, encode_event
from grabstream.models.runs import AnyRun
from grabstream.models.transfers import transfers_of
from grabstream.projections.cursors import Fact, single_facts


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
    `offer_events` is for read models: it adds the events about a whole offer, and picks grabs out of a run as
    runs of one. Otherwise, it picks them in the form that they have on `grab.events`; with `singles`, it
    divides every run into them, and a replay begins and ends at any of them.
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
        #: The wanted offers that have had an event.
        self.offers_met: set[str] = set()

    def of(self, facts: Sequence[Fact]) -> Sequence[Fact]:
        """The wanted facts, in order."""
        if self._offers:
            facts = [fact for fact in facts if fact.event.offer in self._offers]
            self.offers_met.update(fact.event.offer for fact in facts)
        if self._users:
            return [one for fact in facts for one in self._facts_of_users(fact)]
        return single_facts(facts) if self.singles else facts

    def _facts_of_users(self, fact: Fact) -> list[Fact]:
        """The fact, if it is about the users; of a run, one for each of their grabs."""
        run = fact.event
        if not isinstance(run, AnyRun):
            return [fact] if self._is_users(fact) else []
        found = []
        for index in (index for index, user in enumerate(run.users) if user in self._users):
            grab = run.grab(index)
            self._grabs.add((run.offer, grab.grabs[0]))
            found.append(Fact(encode_event(grab), fact.hash, grab, transfers_of(grab)))
        return found if self._offer_events else list(single_facts(found))

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
        if self._offer_events and isinstance(event, AnyOfferEvent):
            return True
        return any(
            transfer.debit in self._accounts or transfer.credit in self._accounts
            for transfer in fact.transfers
        )
