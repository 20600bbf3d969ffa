"""`offers --check`: compares the offers that the system has with those of a file."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from grabstream.connections.opening import checked_database
from grabstream.models.bounds import counted
from grabstream.models.commands import Open
from grabstream.models.identifiers import campaign_of
from grabstream.models.offers import terms_of
from grabstream.ops.commands.offers.through_a_gate import (
    plan_of,
    read_text,
    refuse_file,
)
from grabstream.ops.console.output import complain, plain_console, print_json, say
from grabstream.ops.formats.offer_comparison import OfferDifference, differences_of
from grabstream.ops.formats.offer_files import BadOfferFile, Form, form_of, read_offers
from grabstream.settings import Settings, load_settings

_OFFERS: Final = "SELECT offer, state, terms::text FROM offers WHERE offer = ANY(%s)"
#: Offers of the campaigns of the file that are open or planned, and, for a plan, open in its week.
_EXTRA: Final = (
    "SELECT offer, state FROM offers WHERE campaign = ANY(%s) AND state IN ('open', 'paused') "
    "AND offer <> ALL(%s) AND (%s::text IS NULL "
    "OR to_char(opens_time AT TIME ZONE known_timezone, 'IYYY-\"W\"IW') = %s) ORDER BY offer"
)
_STOPS: Final = "SELECT shard FROM stopped_shards WHERE projection = 'balances' ORDER BY shard"


def check_offers(file: Path, form: Form | None, week: str | None, as_json: bool) -> NoReturn:
    """Prints each difference and ends the process: with 0 when there is none, else with 1."""
    plan = plan_of(week)
    try:
        opens = read_offers(read_text(file), form_of(file, form), plan)
    except BadOfferFile as error:
        refuse_file(error)
    differences, stopped = asyncio.run(_compare(load_settings(), opens, plan.week))
    for shard in stopped:
        complain(
            f"the read model has stopped at shard {shard}, so the check is not complete: see `grabstream "
            "doctor`"
        )
    if as_json:
        print_json(
            {
                "week": plan.week,
                "offers": len(opens),
                "equal": not differences and not stopped,
                "differences": [difference.document() for difference in differences],
                "stopped_shards": stopped,
            }
        )
    else:
        for difference in differences:
            say(difference.line())
        week_suffix = f" of {plan.week}" if plan.week else ""
        found = counted(len(differences), "differences") if differences else "no difference"
        plain_console.print(f"{counted(len(opens), 'offers')}{week_suffix} in the file: {found}")
    sys.exit(1 if differences or stopped else 0)


async def _compare(
    settings: Settings, opens: Sequence[Open], week: str | None
) -> tuple[list[OfferDifference], list[int]]:
    """The differences, and the shards at which the read model has stopped."""
    names = [command.offer for command in opens]
    campaigns = sorted({campaign_of(name) for name in names})
    async with checked_database(settings) as connection, connection.transaction():
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        found = {
            offer: (state, terms)
            for offer, state, terms in await (await connection.execute(_OFFERS, (names,))).fetchall()
        }
        extra = await (await connection.execute(_EXTRA, (campaigns, names, week, week))).fetchall()
        stops = await (await connection.execute(_STOPS)).fetchall()
    differences: list[OfferDifference] = []
    for command in opens:
        if command.offer not in found:
            differences.append(OfferDifference(command.offer, "missing"))
            continue
        state, terms = found[command.offer]
        differences += differences_of(command, state, terms_of(terms.encode()))
    differences += [OfferDifference(offer, "extra", system=state) for offer, state in extra]
    return differences, [shard for (shard,) in stops]
