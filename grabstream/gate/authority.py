"""Authority: the signatures that commands must carry. A gate checks them before any script runs, so they hold
for every way into the system: topics, HTTP, Python and the command line.

- A `confirm` of money carries the `receipt` of the payment side, when GRAB_PAYMENT_KEYS is set.
- A command of an operator carries `approvals`, when GRAB_OPERATOR_KEYS is set; an `adjust` of more than
  GRAB_ADJUST_TWO_SIGNATURES_ABOVE carries those of two operators.

Where the keys are not set, a signed text is refused: it could not be verified, and would seem to count.
"""

from typing import Final

from grabstream.crypto.signing import NotSigned, PublicKeys, Purpose, SigningKeys
from grabstream.models.approvals import check_approval, operator_of
from grabstream.models.bounds import quoted
from grabstream.models.commands import APPROVAL_LENGTH_MAX, Adjust, AnyCommand, Confirm, OfferCommand
from grabstream.models.money import Invalid
from grabstream.models.payments import TOKEN_LENGTH_MAX, check_audience, decode_receipt

_NOT_A_RECEIPT = "receipt: is not a receipt signed with a key of GRAB_PAYMENT_KEYS"


class Authority:
    """The keys of one system, whose prefix is `system`: `payment_keys` sign receipts for its `audience`
    (`models/payments.py`), `operator_keys` sign approvals. Without either, commands need no signature.
    """

    def __init__(
        self,
        system: str = "",
        payment_keys: SigningKeys | None = None,
        operator_keys: PublicKeys | None = None,
        two_signatures_above: int | None = None,
        audience: str = "",
    ) -> None:
        self._system = system
        #: The `aud` of receipts for this system; '' where it is not needed.
        self.audience = audience
        self._payment_keys = payment_keys
        self._operator_keys = operator_keys
        self._two_signatures_above = two_signatures_above

    @property
    def needs_receipts(self) -> bool:
        """Whether a `confirm` must carry a receipt."""
        return self._payment_keys is not None

    def check(self, command: AnyCommand, from_system: bool = False) -> None:
        """Raises Invalid, naming the field, when a command lacks a signature or has a wrong one. It requires
        none for the system's own commands (`from_system`), whose cause was verified.
        """
        if isinstance(command, Confirm):
            self._check_receipt(command, from_system)
        elif isinstance(command, OfferCommand):
            self._check_approvals(command)

    def _check_receipt(self, command: Confirm, from_system: bool) -> None:
        keys, text = self._payment_keys, command.receipt
        if text is None:
            # Nothing is due for a hold that is confirmed without money. The id of a payment is the payment
            # side's: a caller who could name one without a receipt could take that of a later payment.
            names_money = bool(command.paid) or command.payment is not None
            if keys is not None and names_money and not from_system:
                raise Invalid(
                    "receipt: is required, since GRAB_PAYMENT_KEYS is set: send the receipt that the payment "
                    "side has signed for this payment"
                )
            return
        if keys is None:
            raise Invalid(
                "receipt: cannot be verified, since GRAB_PAYMENT_KEYS is not set: set it, or leave it out"
            )
        try:
            receipt = decode_receipt(keys.read(Purpose.receipt, text, TOKEN_LENGTH_MAX))
            check_audience(receipt.aud, self.audience)
        except NotSigned:
            raise Invalid(_NOT_A_RECEIPT) from None
        except Invalid as error:
            raise Invalid(f"receipt: {error}") from None
        if receipt.status != "paid":
            raise Invalid("receipt: status: this payment failed, so nothing can be confirmed")
        for name in ("offer", "grab", "payment", "paid", "currency"):
            _compare(name, getattr(receipt, name), getattr(command, name))
        # Without a quantity, a receipt and a command mean all units of the grab.
        _compare("quantity", receipt.quantity or "all", command.quantity or "all")
        if command.user is not None:
            _compare("user", receipt.user, command.user)

    def _check_approvals(self, command: OfferCommand) -> None:
        keys = self._operator_keys
        if keys is None:
            if command.approvals:
                raise Invalid(
                    "approvals: cannot be verified, since GRAB_OPERATOR_KEYS is not set: set it, or leave "
                    "them out"
                )
            return
        if not command.approvals:
            raise Invalid(
                "approvals: is required, since GRAB_OPERATOR_KEYS is set: sign the command with `grabstream "
                "approve`"
            )
        operators: set[str] = set()
        for number, text in enumerate(command.approvals, 1):
            name = f"approvals: number {number}"
            try:
                signer, payload = keys.read(Purpose.approval, text, APPROVAL_LENGTH_MAX)
                check_approval(payload, command, self._system)
            except NotSigned:
                raise Invalid(f"{name} is not an approval signed with a key of GRAB_OPERATOR_KEYS") from None
            except Invalid as error:
                raise Invalid(f"{name}: {error}") from None
            if (operator := operator_of(signer)) in operators:
                raise Invalid(f"{name}: {operator} has signed already; another operator must sign")
            operators.add(operator)
        bound = self._two_signatures_above
        if (
            bound is not None
            and len(operators) < 2
            and isinstance(command, Adjust)
            and sum(transfer.amount for transfer in command.transfers) > bound
        ):
            raise Invalid(
                f"approvals: two operators must sign an adjust of more than {bound} "
                "(GRAB_ADJUST_TWO_SIGNATURES_ABOVE)"
            )


NO_KEYS: Final = Authority()


def _compare(name: str, signed: object, given: object) -> None:
    if signed != given:
        raise Invalid(
            f"receipt: {name}: {quoted(str(signed))} was signed, but the command has {quoted(str(given))}"
        )
