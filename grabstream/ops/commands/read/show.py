"""`show`: one offer, who got what, the luckiest grab, what is left."""

import asyncio
import sys
import time
from typing import Any

import click
from psycopg import AsyncConnection
from psycopg.rows import dict_row
from rich.text import Text

from grabstream.connections.opening import checked_database
from grabstream.models.bounds import counted
from grabstream.models.currencies import shown_amount
from grabstream.models.offers import TIME_MS_MAX
from grabstream.ops.console.output import WholeNumber, complain, console, json_option, print_json, table
from grabstream.ops.formats.moments import show_time
from grabstream.settings import Settings, load_settings


@click.command()
@click.argument("offer")
@click.option(
    "--limit", type=WholeNumber(min=0), default=20, show_default=True, help="Grabs to list, the newest first."
)
@json_option
def show(offer: str, limit: int, as_json: bool) -> None:
    """Show OFFER from the read models: its state, who got what, the luckiest grab, and what is left. Money
    is in major units, as in 99.00 CNY; where ISO 4217 does not know a currency, and with --json, in minor
    units. Exit code 1: the read models do not have the offer.
    """
    shown = asyncio.run(_read(load_settings(), offer, limit))
    if shown is None:
        fail_unknown_offer(offer)
        sys.exit(1)
    if as_json:
        print_json(shown)
        return
    print_offer(shown, limit, time.time() * 1000)


def fail_unknown_offer(offer: str) -> None:
    """Prints on standard error that the read models do not have an offer."""
    complain(f"the read models have no offer {offer!r} (a new offer appears there within moments)")


async def _read(settings: Settings, offer: str, limit: int) -> dict[str, Any] | None:
    async with checked_database(settings, row_factory=dict_row) as connection:
        details = await read_offer(connection, offer, limit)
        if details is None:
            return None
        refused = await (
            await connection.execute(
                "SELECT outcome, sum(refusals)::bigint AS refusals FROM demand WHERE offer = %s GROUP BY "
                "outcome ORDER BY 2 DESC",
                (offer,),
            )
        ).fetchall()
    return details | {"refused": {row["outcome"]: row["refusals"] for row in refused}}


async def read_offer(
    connection: AsyncConnection[dict[str, Any]], offer: str, limit: int | None
) -> dict[str, Any] | None:
    """An offer with its newest grabs, its waiting list and its payments, from the views of the connection's
    schema; None when they do not have the offer.
    """
    row = await (await connection.execute("SELECT * FROM offers WHERE offer = %s", (offer,))).fetchone()
    if row is None:
        return None
    grabs = (
        "SELECT place, user_id, amount, quantity, held, taken, redeemed, state, deadline_at, paid, currency, "
        "grab, at "
        "FROM grabs WHERE offer = %s AND NOT is_waiting"
    )
    newest_first = " ORDER BY place DESC LIMIT %s"
    newest = await (await connection.execute(grabs + newest_first, (offer, limit))).fetchall()
    luckiest = None
    if row["kind"] == "envelope":
        # As the index of the luckiest has them.
        by_amount = " AND strpos(asset, ':') = 0 ORDER BY -amount, place LIMIT 1"
        luckiest = await (await connection.execute(grabs + by_amount, (offer,))).fetchone()
    queue = (
        "SELECT position, user_id, quantity, grab FROM waiting WHERE offer = %s ORDER BY position LIMIT %s"
    )
    waiting = await (await connection.execute(queue, (offer, limit))).fetchall()
    money = (
        "SELECT state, currency, count(*) AS payments, sum(amount) AS amount, sum(refunded) AS refunded "
        "FROM payments WHERE offer = %s GROUP BY state, currency ORDER BY state, currency"
    )
    payments = await (await connection.execute(money, (offer,))).fetchall()
    return {"offer": row, "luckiest": luckiest, "grabs": newest, "waiting": waiting, "payments": payments}


def print_offer(details: dict[str, Any], limit: int, now_ms: float) -> None:
    """Prints the result of `read_offer` for the time `now_ms`, in ms since 1970 UTC."""
    offer = details["offer"]
    heading = Text.assemble(
        (offer["offer"], "bold"),
        f"  {offer['title']}  ",
        (f"{offer['kind']}, {offer['asset']}, by {offer['issuer']}", "dim"),
    )
    # Names and titles may look like markup (`[red]`) or emoji (`:b:`).
    console.print(heading, soft_wrap=True, emoji=False)
    closes = "" if offer["closes_at"] == TIME_MS_MAX else f", closes {show_time(offer['closes_at'])}"
    closed = f", closed {show_time(offer['closed_at'])} ({offer['reason']})" if offer["closed_at"] else closes
    early = offer["state"] == "open" and offer["opens_at"] > now_ms
    console.print(
        f"{'not open yet' if early else offer['state']}; opens {show_time(offer['opens_at'])}{closed}"
    )
    console.print(_stock_of(offer), highlight=False)
    for paid in details["payments"]:
        what = (
            "due for a refund"
            if paid["state"] == "refund_due"
            else f"served, {shown_amount(paid['refunded'], paid['currency'])} refunded"
        )
        console.print(
            f"{counted(paid['payments'], 'payments')} of {shown_amount(paid['amount'], paid['currency'])} "
            f"{what}",
            highlight=False,
        )
    if details["luckiest"]:
        lucky = details["luckiest"]
        part = shown_amount(lucky["amount"], offer["asset"])
        words = f"Luckiest grab: {lucky['user_id']} with {part}, at place {lucky['place']:,}."
        console.print(Text(words), highlight=False)
    if details.get("refused"):
        counts = ", ".join(f"{outcome} {count:,}" for outcome, count in details["refused"].items())
        console.print(f"Refused: {counts}", highlight=False)
    if offer["seed"]:
        console.print(f"[dim]seed {offer['seed']}[/]", highlight=False)
    if details["grabs"] and offer["kind"] == "envelope":
        rows = (
            (
                grab["place"],
                grab["user_id"],
                shown_amount(grab["amount"], offer["asset"]),
                grab["state"],
                grab["grab"],
                show_time(grab["at"]),
            )
            for grab in details["grabs"]
        )
        console.print(
            table(
                f"Newest grabs (at most {limit})",
                ("place", "user", "amount", "state", "grab", "at"),
                rows,
            )
        )
    elif details["grabs"]:
        columns = ("place", "user", "state", "held", "taken", "used", "paid", "until", "grab")
        console.print(table(f"Newest grabs (at most {limit})", columns, map(_grab_row, details["grabs"])))
    if details["waiting"]:
        queue = (
            (waiting["position"], waiting["user_id"], waiting["quantity"], waiting["grab"])
            for waiting in details["waiting"]
        )
        title = f"Waiting list (at most {limit})"
        console.print(table(title, ("position", "user", "quantity", "grab"), queue))


def _stock_of(offer: dict[str, Any]) -> str:
    """How much was given, is held and is left, in words."""
    if offer["kind"] == "envelope":
        given, total, left, refunded = (
            shown_amount(offer[name], offer["asset"])
            for name in ("given", "total", "amount_left", "refunded")
        )
        return (
            f"{offer['grabs']:,} of {counted(offer['units'], 'parts')} taken: {given} of {total}; left "
            f"{counted(offer['units_left'], 'parts')}, {left}; refunded {refunded}"
        )
    uncoded = offer["amount_left"] - offer["units_left"]
    without_code = f" and {uncoded:,} without code" if uncoded else ""
    return (
        f"of {offer['total']:,}: {offer['given']:,} taken, {offer['held']:,} held, {offer['units_left']:,} "
        f"left{without_code}, {offer['refunded']:,} returned to the issuer; {offer['waiting']:,} waiting"
    )


def _grab_row(grab: dict[str, Any]) -> tuple[object, ...]:
    paid = shown_amount(grab["paid"], grab["currency"]) if grab["currency"] else ""
    until = show_time(grab["deadline_at"]) if grab["held"] else ""
    return (
        grab["place"],
        grab["user_id"],
        grab["state"],
        grab["held"],
        grab["taken"],
        grab["redeemed"],
        paid,
        until,
        grab["grab"],
    )
