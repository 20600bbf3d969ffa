"""`show`: one offer, who got what, the luckiest, what is left."""

import asyncio
import sys
import time
from typing import Any

import click
from psycopg import AsyncConnection
from psycopg.rows import dict_row
from rich.text import Text

from grabstream.models.offers import TIME_MS_MAX
from grabstream.ops.connections.opening import checked_books
from grabstream.ops.console.output import WholeNumber, console, counted, json_option, print_json, table
from grabstream.ops.formats.moments import show_time
from grabstream.ops.settings import Settings, load_settings


@click.command()
@click.argument("offer")
@click.option(
    "--limit", type=WholeNumber(min=0), default=20, show_default=True, help="Grabs to list, the newest first."
)
@json_option
def show(offer: str, limit: int, as_json: bool) -> None:
    """Show OFFER from the read models: its state, who got what, the luckiest, and what is left. Exit 1: there
    is none.
    """
    found = asyncio.run(_read(load_settings(), offer, limit))
    if found is None:
        click.echo(
            f"grabstream: there is no offer {offer!r} in the read models; a new one is there a moment after "
            "it was opened",
            err=True,
        )
        sys.exit(1)
    if as_json:
        print_json(found)
        return
    print_offer(found, limit, time.time() * 1000)


async def _read(settings: Settings, offer: str, limit: int) -> dict[str, Any] | None:
    async with checked_books(settings, row_factory=dict_row) as connection:
        found = await read_offer(connection, offer, limit)
        if found is None:
            return None
        refused = await (
            await connection.execute(
                "SELECT outcome, sum(refusals)::bigint AS refusals FROM demand WHERE offer = %s GROUP BY "
                "outcome ORDER BY 2 DESC",
                (offer,),
            )
        ).fetchall()
    return found | {"refused": {row["outcome"]: row["refusals"] for row in refused}}


async def read_offer(
    connection: AsyncConnection[dict[str, Any]], offer: str, limit: int | None
) -> dict[str, Any] | None:
    """An offer with its newest grabs, its line and its payments, from the views of the connection's schema;
    None: there is none.
    """
    found = await (await connection.execute("SELECT * FROM offers WHERE offer = %s", (offer,))).fetchone()
    if found is None:
        return None
    grabs = (
        "SELECT place, user_id, amount, quantity, held, taken, redeemed, state, deadline_at, paid, currency, "
        "grab, at "
        "FROM grabs WHERE offer = %s AND state <> 'waiting' ORDER BY "
    )
    newest = await (await connection.execute(grabs + "place DESC LIMIT %s", (offer, limit))).fetchall()
    luckiest = None
    if found["kind"] == "envelope":
        luckiest = await (await connection.execute(grabs + "amount DESC, place LIMIT 1", (offer,))).fetchone()
    line = "SELECT position, user_id, quantity, grab FROM waiting WHERE offer = %s ORDER BY position LIMIT %s"
    waiting = await (await connection.execute(line, (offer, limit))).fetchall()
    money = (
        "SELECT state, currency, count(*) AS payments, sum(amount) AS amount, sum(refunded) AS refunded "
        "FROM payments WHERE offer = %s GROUP BY state, currency ORDER BY state, currency"
    )
    payments = await (await connection.execute(money, (offer,))).fetchall()
    return {"offer": found, "luckiest": luckiest, "grabs": newest, "waiting": waiting, "payments": payments}


def print_offer(found: dict[str, Any], limit: int, now_ms: float) -> None:
    """What `read_offer` found, as it stands at a time."""
    offer = found["offer"]
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
    for paid in found["payments"]:
        what = (
            "to be paid back" if paid["state"] == "refund_due" else f"served, {paid['refunded']:,} paid back"
        )
        console.print(
            f"{counted(paid['payments'], 'payments')} of {paid['amount']:,} {paid['currency']} {what}",
            highlight=False,
        )
    if found["luckiest"]:
        lucky = found["luckiest"]
        words = f"The luckiest: {lucky['user_id']} with {lucky['amount']:,}, at place {lucky['place']:,}."
        console.print(Text(words), highlight=False)
    if found.get("refused"):
        console.print(
            "Refused: " + ", ".join(f"{outcome} {count:,}" for outcome, count in found["refused"].items()),
            highlight=False,
        )
    if offer["seed"]:
        console.print(f"[dim]seed {offer['seed']}[/]", highlight=False)
    if found["grabs"] and offer["kind"] == "envelope":
        rows = (
            (
                grab["place"],
                grab["user_id"],
                grab["amount"],
                grab["state"],
                grab["grab"],
                show_time(grab["at"]),
            )
            for grab in found["grabs"]
        )
        console.print(
            table(
                f"The newest grabs (at most {limit})",
                ("place", "user", "amount", "state", "grab", "at"),
                rows,
            )
        )
    elif found["grabs"]:
        columns = ("place", "user", "state", "held", "taken", "used", "paid", "until", "grab")
        console.print(table(f"The newest grabs (at most {limit})", columns, map(_grab_row, found["grabs"])))
    if found["waiting"]:
        line = ((one["position"], one["user_id"], one["quantity"], one["grab"]) for one in found["waiting"])
        console.print(table(f"Who waits (at most {limit})", ("position", "user", "quantity", "grab"), line))


def _stock_of(offer: dict[str, Any]) -> str:
    """What was given, is held and is left, in words."""
    if offer["kind"] == "envelope":
        return (
            f"{offer['grabs']:,} of {counted(offer['units'], 'parts')} taken: {offer['given']:,} of "
            f"{offer['total']:,}; "
            f"left {counted(offer['units_left'], 'parts')}, {offer['amount_left']:,}; refunded "
            f"{offer['refunded']:,}"
        )
    return (
        f"of {offer['total']:,}: {offer['given']:,} taken, {offer['held']:,} held, {offer['units_left']:,} "
        "left, "
        f"{offer['refunded']:,} went back to the issuer; {offer['waiting']:,} wait"
    )


def _grab_row(grab: dict[str, Any]) -> tuple[object, ...]:
    paid = f"{grab['paid']:,} {grab['currency']}" if grab["currency"] else ""
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
