"""`confirm`, `release`, `extend`, `return`, `redeem`, `unredeem`: commands about one grab, named by the id of
the command that made it.
"""

from typing import TextIO

import click

from grabstream.models.commands import RECEIPT_LENGTH_MAX
from grabstream.ops.commands.offers.through_a_gate import carry_out, id_option, make_command, offer_argument
from grabstream.ops.console.output import json_option

_grab_argument = click.argument("grab")
_user_option = click.option("--user", help="Whose grab it must be. Default: anybody's.")


@click.command()
@offer_argument
@_grab_argument
@click.option("--payment", help="The payment's id; a payment is booked only once.")
@click.option(
    "--paid", type=int, default=0, show_default=True, help="The amount paid, in minor units of the currency."
)
@click.option("--currency", help="The currency of the payment, such as CNY.")
@click.option("--quantity", type=int, help="How many of the held units to confirm. Default: all.")
@click.option(
    "--receipt",
    "receipt_file",
    type=click.File(),
    help="A file with the receipt that the payment side signed; `-` is standard input.",
)
@_user_option
@id_option
@json_option
def confirm(
    offer: str,
    grab: str,
    payment: str | None,
    paid: int,
    currency: str | None,
    quantity: int | None,
    receipt_file: TextIO | None,
    user: str | None,
    command_id: str | None,
    as_json: bool,
) -> None:
    """Confirm that the units of OFFER that GRAB holds were paid: they become the user's for good. A payment
    for units that cannot be confirmed is recorded as due for a refund.
    """
    command = make_command(
        "confirm",
        command_id,
        offer,
        grab=grab,
        user=user,
        payment=payment,
        paid=paid,
        currency=currency,
        quantity=quantity,
        # One character more than a receipt may have, which is refused as too long.
        receipt=receipt_file.read(RECEIPT_LENGTH_MAX + 1).strip() if receipt_file is not None else None,
    )
    carry_out(command, as_json)


@click.command()
@offer_argument
@_grab_argument
@_user_option
@id_option
@json_option
def release(offer: str, grab: str, user: str | None, command_id: str | None, as_json: bool) -> None:
    """Return the units of OFFER that GRAB holds, or leave the waiting list."""
    carry_out(make_command("release", command_id, offer, grab=grab, user=user), as_json)


@click.command()
@offer_argument
@_grab_argument
@_user_option
@id_option
@json_option
def extend(offer: str, grab: str, user: str | None, command_id: str | None, as_json: bool) -> None:
    """Extend the deadline of GRAB's hold of OFFER by the offer's hold_ms."""
    carry_out(make_command("extend", command_id, offer, grab=grab, user=user), as_json)


@click.command("return")
@offer_argument
@_grab_argument
@click.option("--quantity", type=int, help="How many units. Default: all that are not redeemed.")
@click.option("--reason", default="", help="The reason, in one line.")
@_user_option
@id_option
@json_option
def return_(
    offer: str,
    grab: str,
    quantity: int | None,
    reason: str,
    user: str | None,
    command_id: str | None,
    as_json: bool,
) -> None:
    """Return units of OFFER that GRAB has for good. Money that was paid for them is refunded."""
    carry_out(
        make_command("return", command_id, offer, grab=grab, user=user, quantity=quantity, reason=reason),
        as_json,
    )


@click.command()
@offer_argument
@_grab_argument
@click.option("--order", required=True, help="The order's id; each order uses units only once.")
@click.option("--quantity", type=int, default=1, show_default=True, help="How many units.")
@_user_option
@id_option
@json_option
def redeem(
    offer: str, grab: str, order: str, quantity: int, user: str | None, command_id: str | None, as_json: bool
) -> None:
    """Use units of OFFER that GRAB has, for an order."""
    carry_out(
        make_command("redeem", command_id, offer, grab=grab, user=user, order=order, quantity=quantity),
        as_json,
    )


@click.command()
@offer_argument
@_grab_argument
@click.option("--order", required=True, help="The order's id.")
@_user_option
@id_option
@json_option
def unredeem(
    offer: str, grab: str, order: str, user: str | None, command_id: str | None, as_json: bool
) -> None:
    """Undo the use of GRAB's units of OFFER for an order."""
    carry_out(make_command("unredeem", command_id, offer, grab=grab, user=user, order=order), as_json)
