"""`show`: one offer, who got what, the luckiest, what is left."""

import asyncio
import sys
from datetime import UTC, datetime
from typing import Any

import click
from psycopg import AsyncConnection
from psycopg.rows import dict_row

from ops.output import console, json_option, print_json, table
from ops.settings import Settings, load_settings
from projections.migrate import use_schema


@click.command()
@click.argument("offer")
@click.option("--limit", default=20, show_default=True, help="Grabs to list, the newest first.")
@json_option
def show(offer: str, limit: int, as_json: bool) -> None:
    """Show OFFER from the read models: its state, who got what, the luckiest, and what is left. Exit 1: there is none."""
    found = asyncio.run(_read(load_settings(), offer, limit))
    if found is None:
        click.echo(
            f"grabstream: there is no offer {offer!r} in the read models; a new one is there a moment after it was opened",
            err=True,
        )
        sys.exit(1)
    if as_json:
        print_json(found)
        return
    _print(found, limit)


async def _read(settings: Settings, offer: str, limit: int) -> dict[str, Any] | None:
    async with await AsyncConnection.connect(settings.postgres, autocommit=True, row_factory=dict_row, connect_timeout=5) as connection:
        await use_schema(connection, settings.schema_)
        found = await (await connection.execute("SELECT * FROM offers WHERE offer = %s", (offer,))).fetchone()
        if found is None:
            return None
        grabs = "SELECT place, user_id, amount, quantity, state, grab, at FROM grabs WHERE offer = %s ORDER BY "
        newest = await (await connection.execute(grabs + "place DESC LIMIT %s", (offer, limit))).fetchall()
        luckiest = await (await connection.execute(grabs + "amount DESC, place LIMIT 1", (offer,))).fetchone()
        refused = await (
            await connection.execute(
                "SELECT outcome, sum(refusals)::bigint AS refusals FROM demand WHERE offer = %s GROUP BY outcome ORDER BY 2 DESC",
                (offer,),
            )
        ).fetchall()
    return {
        "offer": found,
        "luckiest": luckiest,
        "grabs": newest,
        "refused": {row["outcome"]: row["refusals"] for row in refused},
    }


def _print(found: dict[str, Any], limit: int) -> None:
    offer = found["offer"]
    console.print(f"[bold]{offer['offer']}[/]  {offer['title']}  [dim]{offer['kind']}, {offer['asset']}, by {offer['issuer']}[/]")
    closed = f", closed {_time(offer['closed_at'])} ({offer['reason']})" if offer["closed_at"] else f", closes {_time(offer['closes_at'])}"
    console.print(f"{offer['state']}; opens {_time(offer['opens_at'])}{closed}")
    console.print(
        f"{offer['grabs']:,} of {offer['units']:,} parts taken: {offer['given']:,} of {offer['total']:,}; "
        f"left {offer['units_left']:,} parts, {offer['amount_left']:,}; refunded {offer['refunded']:,}",
        highlight=False,
    )
    if found["luckiest"]:
        lucky = found["luckiest"]
        console.print(f"The luckiest: [bold]{lucky['user_id']}[/] with {lucky['amount']:,}, at place {lucky['place']:,}.", highlight=False)
    if found["refused"]:
        console.print("Refused: " + ", ".join(f"{outcome} {count:,}" for outcome, count in found["refused"].items()), highlight=False)
    if offer["seed"]:
        console.print(f"[dim]seed {offer['seed']}[/]", highlight=False)
    if found["grabs"]:
        rows = ((grab["place"], grab["user_id"], grab["amount"], grab["state"], grab["grab"], _time(grab["at"])) for grab in found["grabs"])
        console.print(table(f"The newest grabs (at most {limit})", ("place", "user", "amount", "state", "grab", "at"), rows))


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")
