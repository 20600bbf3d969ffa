"""The commands of a client, as methods. How a command is sent is up to the client."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar, Unpack
from uuid import uuid4

from grabstream.client.fields import (
    ConfirmFields,
    GrabFields,
    OperatorFields,
    RedeemFields,
    ReturnFields,
)
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
Result = TypeVar("Result")
BasketResult = TypeVar("BasketResult")


class CommandMethods(Generic[Result, BasketResult]):
    """Commands that are made from their fields.

    `id` is the id of the command; without one, a new one is made. Pass one (for example, that of the request
    that causes the command) where the command may be repeated after your own process has ended: a repeat with
    the same id gets the first answer. Every method raises pydantic's ValidationError for a value that breaks
    a rule.
    """

    def decide(self, command: AnyCommand) -> Result:
        """Sends a command, and returns its answer."""
        raise NotImplementedError

    def take_basket(self, grabs: Sequence[Grab], id: str | None = None) -> BasketResult:
        """Sends grabs of offers of one campaign; all or none of them succeed. Returns their answers in the
        same order. `id` is the id of the basket.
        """
        raise NotImplementedError

    def open(
        self,
        terms: Terms,
        offer: str | None = None,
        *,
        id: str | None = None,
        **fields: Unpack[OperatorFields],
    ) -> Result:
        """Creates an offer. Without `offer`, the id of the offer is that of the command."""
        command = given(id)
        return self._send(Open, command, command if offer is None else offer, terms=terms, **fields)

    def amend(
        self, offer: str, changes: Changes, *, id: str | None = None, **fields: Unpack[OperatorFields]
    ) -> Result:
        """Changes terms of an offer."""
        return self._send(Amend, id, offer, changes=changes, **fields)

    def pause(self, offer: str, *, id: str | None = None, **fields: Unpack[OperatorFields]) -> Result:
        """Refuses grabs until the offer is resumed."""
        return self._send(Pause, id, offer, **fields)

    def resume(self, offer: str, *, id: str | None = None, **fields: Unpack[OperatorFields]) -> Result:
        """Accepts grabs again."""
        return self._send(Resume, id, offer, **fields)

    def close(self, offer: str, *, id: str | None = None, **fields: Unpack[OperatorFields]) -> Result:
        """Closes an offer permanently."""
        return self._send(Close, id, offer, **fields)

    def grab(self, offer: str, user: str, *, id: str | None = None, **fields: Unpack[GrabFields]) -> Result:
        """Grabs units of an offer for a user. `wait`: the user joins the waiting list when it is sold out.
        `metadata`: texts that the answer and the event repeat.
        """
        return self._send(Grab, id, offer, user=user, **fields)

    def confirm(
        self, offer: str, grab: str, user: str, *, id: str | None = None, **fields: Unpack[ConfirmFields]
    ) -> Result:
        """Reports that a hold was paid: `paid` minor units of `currency`; with the receipt that the payment
        side has signed, where the system has keys of a payment side (GRAB_PAYMENT_KEYS).
        """
        return self._send(Confirm, id, offer, grab=grab, user=user, **fields)

    def release(self, offer: str, grab: str, user: str, *, id: str | None = None) -> Result:
        """Ends a hold, or leaves the waiting list."""
        return self._send(Release, id, offer, grab=grab, user=user)

    def extend(self, offer: str, grab: str, user: str, *, id: str | None = None) -> Result:
        """Extends the deadline of a hold."""
        return self._send(Extend, id, offer, grab=grab, user=user)

    def return_(
        self, offer: str, grab: str, user: str, *, id: str | None = None, **fields: Unpack[ReturnFields]
    ) -> Result:
        """Returns granted or confirmed units (absent: all)."""
        return self._send(Return, id, offer, grab=grab, user=user, **fields)

    def redeem(
        self,
        offer: str,
        grab: str,
        user: str,
        order: str,
        *,
        id: str | None = None,
        **fields: Unpack[RedeemFields],
    ) -> Result:
        """Uses units of a coupon for an order, once."""
        return self._send(Redeem, id, offer, grab=grab, user=user, order=order, **fields)

    def unredeem(self, offer: str, grab: str, user: str, order: str, *, id: str | None = None) -> Result:
        """Undoes the use of a coupon for an order."""
        return self._send(Unredeem, id, offer, grab=grab, user=user, order=order)

    def _send(self, command: type[AnyCommand], id: str | None, offer: str, **fields: Any) -> Result:
        """Sends a command with these fields; one that is None is absent."""
        said = {name: value for name, value in fields.items() if value is not None}
        return self.decide(command(id=given(id), offer=offer, **said))


def given(id: str | None) -> str:
    """The id of a caller, or a new one. An empty one is refused later: replacing it by a new one would make a
    repeat another command.
    """
    return str(uuid4()) if id is None else id
