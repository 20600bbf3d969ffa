"""The commands of a client, as methods. How a command is sent is up to the client."""

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar
from uuid import uuid4

from grabstream.models.vocabulary import (
    Amend,
    AnyCommand,
    Changes,
    Close,
    Confirm,
    Extend,
    Grab,
    Open,
    Pause,
    Redeem,
    Release,
    Resume,
    Return,
    Terms,
    Unredeem,
)

#: What a client returns for a command, and for a basket: an answer, or something to await.
One = TypeVar("One")
Many = TypeVar("Many")


class Commands(Generic[One, Many]):
    """Commands that are made from their fields.

    `id` is the id of the command; without one, a new one is made. Pass one (for example, that of the request
    that causes the command) where the command may be repeated after your own process has ended: a repeat with
    the same id gets the first answer. Every method raises pydantic's ValidationError for a value that breaks
    a rule.
    """

    def decide(self, command: AnyCommand) -> One:
        """Sends a command, and returns its answer."""
        raise NotImplementedError

    def take_basket(self, grabs: Sequence[Grab], id: str | None = None) -> Many:
        """Sends grabs of offers of one campaign, of which all or none succeed, and returns their answers in
        the same order. `id` is the id of the basket.
        """
        raise NotImplementedError

    def open(
        self, terms: Terms, offer: str | None = None, *, id: str | None = None, operator: str | None = None
    ) -> One:
        """Creates an offer. Without `offer`, the id of the offer is that of the command."""
        command = given(id)
        return self.decide(
            Open(id=command, offer=command if offer is None else offer, terms=terms, operator=operator)
        )

    def amend(
        self, offer: str, changes: Changes, *, id: str | None = None, operator: str | None = None
    ) -> One:
        """Changes terms of an offer."""
        return self.decide(Amend(id=given(id), offer=offer, changes=changes, operator=operator))

    def pause(self, offer: str, *, id: str | None = None, operator: str | None = None) -> One:
        """Refuses grabs until the offer is resumed."""
        return self.decide(Pause(id=given(id), offer=offer, operator=operator))

    def resume(self, offer: str, *, id: str | None = None, operator: str | None = None) -> One:
        """Accepts grabs again."""
        return self.decide(Resume(id=given(id), offer=offer, operator=operator))

    def close(self, offer: str, *, id: str | None = None, operator: str | None = None) -> One:
        """Closes an offer for ever."""
        return self.decide(Close(id=given(id), offer=offer, operator=operator))

    def grab(
        self,
        offer: str,
        user: str,
        *,
        id: str | None = None,
        quantity: int = 1,
        attributes: Mapping[str, str] | None = None,
        ticket: str | None = None,
        wait: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> One:
        """Grabs units of an offer for a user. `wait`: the user joins the waiting list when it is sold out.
        `metadata`: texts that the answer and the event have again.
        """
        return self.decide(
            Grab(
                id=given(id),
                offer=offer,
                user=user,
                quantity=quantity,
                attributes=dict(attributes or {}),
                ticket=ticket,
                wait=wait,
                metadata=dict(metadata) if metadata else None,
            )
        )

    def confirm(
        self,
        offer: str,
        grab: str,
        user: str,
        *,
        id: str | None = None,
        payment: str | None = None,
        paid: int = 0,
        currency: str | None = None,
        quantity: int | None = None,
        receipt: str | None = None,
    ) -> One:
        """Reports that a hold was paid: `paid` minor units of `currency`; with the receipt that the payment
        side has signed, where the system has keys of a payment side (GRAB_PAYMENT_KEYS).
        """
        return self.decide(
            Confirm(
                id=given(id),
                offer=offer,
                grab=grab,
                user=user,
                payment=payment,
                paid=paid,
                currency=currency,
                quantity=quantity,
                receipt=receipt,
            )
        )

    def release(self, offer: str, grab: str, user: str, *, id: str | None = None) -> One:
        """Ends a hold, or leaves the waiting list."""
        return self.decide(Release(id=given(id), offer=offer, grab=grab, user=user))

    def extend(self, offer: str, grab: str, user: str, *, id: str | None = None) -> One:
        """Extends the deadline of a hold."""
        return self.decide(Extend(id=given(id), offer=offer, grab=grab, user=user))

    def return_(
        self,
        offer: str,
        grab: str,
        user: str,
        *,
        id: str | None = None,
        quantity: int | None = None,
        reason: str = "",
    ) -> One:
        """Gives units back that were granted or confirmed (absent: all)."""
        return self.decide(
            Return(id=given(id), offer=offer, grab=grab, user=user, quantity=quantity, reason=reason)
        )

    def redeem(
        self, offer: str, grab: str, user: str, order: str, *, id: str | None = None, quantity: int = 1
    ) -> One:
        """Uses units of a coupon for an order, once."""
        return self.decide(
            Redeem(id=given(id), offer=offer, grab=grab, user=user, order=order, quantity=quantity)
        )

    def unredeem(self, offer: str, grab: str, user: str, order: str, *, id: str | None = None) -> One:
        """Undoes the use of a coupon for an order."""
        return self.decide(Unredeem(id=given(id), offer=offer, grab=grab, user=user, order=order))


def given(id: str | None) -> str:
    """The id of a caller, or a new one. An empty one is refused later: a new one in its place would make a
    repeat another command.
    """
    return str(uuid4()) if id is None else id
