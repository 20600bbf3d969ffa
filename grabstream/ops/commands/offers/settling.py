"""`confirm`, `release`, `extend`, `return`, `redeem`, `unredeem`: commands about one grab, named by the id of
the command that made it.
"""

from typing import Any, TextIO

import click

from grabstream.models.commands import (
    RECEIPT_LENGTH_MAX,
    Confirm,
    Extend,
    Redeem,
    Release,
    Return,
    Unredeem,
)
from grabstream.ops.commands.offers.fields import field_options
from grabstream.ops.commands.offers.through_a_gate import carry_out, id_option, make_command, offer_argument
from grabstream.ops.console.output import json_option

_grab_argument = click.argument("grab")


@click.command()
@offer_argument
@_grab_argument
@field_options(Confirm, "grab", "receipt")
@click.option(
    "--receipt",
    "receipt_file",
    type=click.File(),
    help="A file with the receipt that the payment side signed; `-` is standard input.",
)
@id_option
@json_option
def confirm(
    offer: str, receipt_file: TextIO | None, command_id: str | None, as_json: bool, **fields: Any
) -> None:
    """Confirm that the units of OFFER that GRAB holds were paid: they then belong to the user. A payment for
    units that cannot be confirmed is recorded as due for a refund.
    """
    # One character more than a receipt may have, which is refused as too long.
    receipt = receipt_file.read(RECEIPT_LENGTH_MAX + 1).strip() if receipt_file is not None else None
    carry_out(make_command("confirm", command_id, offer, receipt=receipt, **fields), as_json)


@click.command()
@offer_argument
@_grab_argument
@field_options(Release, "grab")
@id_option
@json_option
def release(offer: str, command_id: str | None, as_json: bool, **fields: Any) -> None:
    """Return the units of OFFER that GRAB holds, or leave the waiting list."""
    carry_out(make_command("release", command_id, offer, **fields), as_json)


@click.command()
@offer_argument
@_grab_argument
@field_options(Extend, "grab")
@id_option
@json_option
def extend(offer: str, command_id: str | None, as_json: bool, **fields: Any) -> None:
    """Extend the deadline of GRAB's hold of OFFER by the offer's hold_ms."""
    carry_out(make_command("extend", command_id, offer, **fields), as_json)


@click.command("return")
@offer_argument
@_grab_argument
@field_options(Return, "grab")
@id_option
@json_option
def return_(offer: str, command_id: str | None, as_json: bool, **fields: Any) -> None:
    """Return units of OFFER that GRAB owns. Money that was paid for them is refunded."""
    carry_out(make_command("return", command_id, offer, **fields), as_json)


@click.command()
@offer_argument
@_grab_argument
@field_options(Redeem, "grab")
@id_option
@json_option
def redeem(offer: str, command_id: str | None, as_json: bool, **fields: Any) -> None:
    """Use units of OFFER that GRAB has, for an order."""
    carry_out(make_command("redeem", command_id, offer, **fields), as_json)


@click.command()
@offer_argument
@_grab_argument
@field_options(Unredeem, "grab")
@id_option
@json_option
def unredeem(offer: str, command_id: str | None, as_json: bool, **fields: Any) -> None:
    """Undo the use of GRAB's units of OFFER for an order."""
    carry_out(make_command("unredeem", command_id, offer, **fields), as_json)
