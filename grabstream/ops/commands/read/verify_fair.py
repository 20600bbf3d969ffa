"""`verify-fair`: recomputes every part of an envelope from its events."""

import asyncio
import sys
from contextlib import aclosing
from typing import Literal

import click

from grabstream.connections.event_sources import NoTrail
from grabstream.models.bounds import counted
from grabstream.models.events import AnyEvent
from grabstream.models.fairness import CannotVerify, Fairness, verify_fairness
from grabstream.models.identifiers import is_id
from grabstream.models.journal import Corrupt, Gap
from grabstream.ops.console.output import console, json_option, print_json, refuse
from grabstream.ops.formats.replay_request import source_option
from grabstream.ops.history import read_events
from grabstream.settings import Settings, load_settings


@click.command("verify-fair")
@click.argument("offer")
@source_option("Read the events from the journal in Kafka, or from the audit trail in PostgreSQL.", "audit")
@json_option
def verify_fair(offer: str, source: Literal["journal", "audit"], as_json: bool) -> None:
    """Compute every part of the closed envelope OFFER from its events alone, and compare it with the part
    that was given. Says what this proves, and what it cannot prove.

    Exit code 0: all checks pass; 1: one does not; 2: it cannot be verified, since it is not an envelope, or
    still open.
    """
    if not is_id(offer):
        raise click.BadParameter(f"must match [A-Za-z0-9._:-]{{1,64}}, got {offer!r}", param_hint="OFFER")
    try:
        result = asyncio.run(_verify(load_settings(), offer, source))
    except CannotVerify as error:
        refuse(error, 2)
    except (NoTrail, Corrupt, Gap) as error:
        refuse(error)
    if as_json:
        print_json(
            {
                **result._asdict(),
                "checks": [check._asdict() for check in result.checks],
                "proved": result.is_proved,
                "not_proved": result.not_proved,
            }
        )
    else:
        _print(result)
    sys.exit(0 if result.is_proved else 1)


async def _verify(settings: Settings, offer: str, source: Literal["journal", "audit"]) -> Fairness:
    found: list[AnyEvent] = []
    async with aclosing(read_events(settings, offer=offer, source=source)) as events:
        async for event in events:
            found.append(event)
    return verify_fairness(offer, found)


def _print(result: Fairness) -> None:
    taken = f"{counted(result.parts, 'parts')} of {result.of_parts:,} were taken"
    console.print(f"{result.offer}: {taken}; seed {result.seed}", highlight=False)
    if result.beacon is not None:
        console.print(
            f"beacon {result.beacon}; {result.randomness or 'no randomness given'}", highlight=False
        )
    for check in result.checks:
        mark = "[green]✓[/]" if check.problem is None else "[red]✗[/]"
        console.print(f"{mark} {check.name}{f': {check.problem}' if check.problem else ''}", highlight=False)
    console.print("Not proved:")
    for what in result.not_proved:
        console.print(f"  {what}", highlight=False)
