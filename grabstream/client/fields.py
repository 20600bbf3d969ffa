"""The optional fields of commands, as the methods of clients take them; None: the field is absent.

Made from the structs of `models/` by `python -m scripts.generated`: change those.
"""

from collections.abc import Mapping, Sequence
from typing import TypedDict


class OperatorFields(TypedDict, total=False):
    """The optional fields of `OfferCommand`."""

    operator: str | None
    approvals: Sequence[str] | None


class GrabFields(TypedDict, total=False):
    """The optional fields of `Grab`."""

    quantity: int | None
    attributes: Mapping[str, str] | None
    ticket: str | None
    wait: bool | None
    metadata: Mapping[str, str] | None


class ConfirmFields(TypedDict, total=False):
    """The optional fields of `Confirm`."""

    payment: str | None
    paid: int | None
    currency: str | None
    quantity: int | None
    receipt: str | None


class ReturnFields(TypedDict, total=False):
    """The optional fields of `Return`."""

    quantity: int | None
    reason: str | None


class RedeemFields(TypedDict, total=False):
    """The optional fields of `Redeem`."""

    quantity: int | None
