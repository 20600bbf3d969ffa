"""`webhooks`: subscriptions of URLs to events, and their undelivered events."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import click
from psycopg import AsyncConnection

from grabstream.connections.opening import checked_database, sealer
from grabstream.connections.seal_keys import require_seal_keys
from grabstream.models.events import CURRENT_VERSIONS
from grabstream.models.identifiers import is_id
from grabstream.ops.console.arguments import grace_option
from grabstream.ops.console.output import WholeNumber, console, json_option, print_json, refuse, say, table
from grabstream.ops.formats.moments import BadMoment, parse_time, show_time
from grabstream.projections.tables import webhooks as stored
from grabstream.projections.tables.webhooks import Delivery, TooMany, Webhook
from grabstream.settings import Settings, load_settings
from grabstream.streams.webhooks.addresses import BadUrl, check_url
from grabstream.streams.webhooks.messages import SEALED_FOR, new_secret

OFFERS_MAX: Final = 100
SHOWN: Final = 50
SHOWN_MAX: Final = 10_000

T = TypeVar("T")
_webhook = click.argument("webhook")


@click.group()
def webhooks() -> None:
    """Send events to URLs (Standard Webhooks). A worker with the role `webhooks` delivers them."""


@webhooks.command()
@click.argument("url")
@click.option(
    "--event",
    "types",
    multiple=True,
    type=click.Choice(sorted(CURRENT_VERSIONS)),
    metavar="TYPE",
    help="A type of events, such as grab.granted. Repeatable; without it, all types.",
)
@click.option(
    "--offer", "offers", multiple=True, metavar="ID", help="An offer. Repeatable; without it, all offers."
)
@click.option(
    "--from",
    "from_time",
    metavar="TIME",
    help="Send events from a past time on; without it, new events only.",
)
@json_option
def add(url: str, types: Sequence[str], offers: Sequence[str], from_time: str | None, as_json: bool) -> None:
    """Send new events to URL. The secret that is printed signs them; it is not shown again."""
    settings = load_settings()
    settings.require_seal_keys()
    try:
        check_url(url, settings.webhook_http, settings.webhook_private_addresses)
    except BadUrl as error:
        raise click.BadParameter(str(error), param_hint="URL") from None
    if len(offers) > OFFERS_MAX:
        raise click.BadParameter(f"at most {OFFERS_MAX}, got {len(offers)}", param_hint="--offer")
    for offer in offers:
        if not is_id(offer):
            raise click.BadParameter(
                f"must match [A-Za-z0-9._:-]{{1,64}}, got {offer!r}", param_hint="--offer"
            )
    from_ms = None
    if from_time is not None:
        try:
            from_ms = parse_time(from_time)
        except BadMoment as error:
            raise click.BadParameter(str(error), param_hint="--from") from None
    name, secret = f"wh-{secrets.token_hex(6)}", new_secret()
    sealed = sealer(settings).seal(0, name, SEALED_FOR, secret)

    async def insert(connection: AsyncConnection[Any]) -> Webhook:
        await require_seal_keys(connection, settings)
        return await stored.add(
            connection, name, url, sorted(set(types)), sorted(set(offers)), sealed, from_ms
        )

    try:
        added = _ask(settings, insert)
    except TooMany as error:
        refuse(str(error))
    if as_json:
        print_json({**_as_json(added), "secret": secret})
    else:
        say(f"{name} sends {_wanted(added)} to {url}, from {show_time(added.from_ms)} UTC on.")
        say(f"Secret, shown only once: {secret}")


@webhooks.command(name="list")
@json_option
def list_(as_json: bool) -> None:
    """List the webhooks, with their delivered and undelivered events."""
    found, waiting, parked = _ask(load_settings(), _read)
    if as_json:
        print_json(
            [
                {
                    **_as_json(one),
                    "waiting": waiting.get(one.webhook, 0),
                    "parked": parked.get(one.webhook, 0),
                }
                for one in found
            ]
        )
        return
    rows = [
        (
            one.webhook, one.state, one.url, _wanted(one), one.delivered, waiting.get(one.webhook, 0),
            parked.get(one.webhook, 0),
        )
        for one in found
    ]  # fmt: skip
    columns = ("webhook", "state", "url", "events", "delivered", "waiting", "parked")
    console.print(table("Webhooks", columns, rows), markup=False)


@webhooks.command()
@_webhook
@json_option
def show(webhook: str, as_json: bool) -> None:
    """Show WEBHOOK: its subscription, its progress, and its errors."""

    async def read(connection: AsyncConnection[Any]) -> Any:
        return await _read(connection), await stored.undelivered(connection, webhook, None, 1)

    (found, waiting, parked), first = _ask(load_settings(), read)
    one = next((one for one in found if one.webhook == webhook), None)
    if one is None:
        refuse(f"there is no webhook {webhook}: `grabstream webhooks list` shows them")
    shown = {
        **_as_json(one), "waiting": waiting.get(webhook, 0), "parked": parked.get(webhook, 0),
        "problem": next((delivery.problem for delivery in first if delivery.problem), None),
    }  # fmt: skip
    if as_json:
        print_json(shown)
        return
    for name, value in shown.items():
        if value is not None:
            say(f"{name:<14} {value if not isinstance(value, list) else ', '.join(value) or 'all'}")


def _webhook_command(function: Callable[..., Any]) -> Any:
    """A command about one webhook that prints its id, and a word."""
    return webhooks.command()(_webhook(json_option(function)))


@_webhook_command
def pause(webhook: str, as_json: bool) -> None:
    """Send nothing to WEBHOOK until it is resumed. It then gets all events since the pause."""
    _change(webhook, lambda connection: stored.set_state(connection, webhook, "paused"), "paused", as_json)


@_webhook_command
def resume(webhook: str, as_json: bool) -> None:
    """Continue sending to WEBHOOK from where it was paused, and retry failed events at once."""
    _change(webhook, lambda connection: stored.set_state(connection, webhook, "active"), "active", as_json)


@_webhook_command
def remove(webhook: str, as_json: bool) -> None:
    """Remove WEBHOOK and its undelivered events."""
    _change(webhook, lambda connection: stored.remove(connection, webhook), "removed", as_json)


@webhooks.command()
@_webhook
@grace_option("also signs")
@json_option
def rotate(webhook: str, grace_ms: int, as_json: bool) -> None:
    """Give WEBHOOK a new secret, and print it. For a time, events are signed with both, so that the receiver
    can change to the new one without a gap.
    """
    settings = load_settings()
    settings.require_seal_keys()
    secret = new_secret()
    sealed = sealer(settings).seal(0, webhook, SEALED_FOR, secret)
    rotated = _ask(settings, lambda connection: stored.rotate(connection, webhook, sealed, grace_ms))
    if rotated is None:
        refuse(f"there is no webhook {webhook}: `grabstream webhooks list` shows them")
    if as_json:
        print_json({**_as_json(rotated), "secret": secret})
        return
    until = rotated.previous_until
    if until is None:
        say(f"{webhook} has a new secret; the previous one no longer signs.")
    else:
        say(f"{webhook} has a new secret; the previous one also signs until {until:%Y-%m-%d %H:%M:%SZ}.")
    say(f"Secret, shown only once: {secret}")


@webhooks.command()
@click.argument("webhook", required=False)
@click.option("--state", type=click.Choice(("waiting", "parked")), help="Only those in this state.")
@click.option(
    "--limit", type=WholeNumber(min=1, max=SHOWN_MAX), default=SHOWN, show_default=True, help="How many."
)
@json_option
def deliveries(webhook: str | None, state: str | None, limit: int, as_json: bool) -> None:
    """List undelivered events, of WEBHOOK or of all, by offer, the next one of each first."""
    found = _ask(load_settings(), lambda connection: stored.undelivered(connection, webhook, state, limit))
    if as_json:
        print_json([_delivery_as_json(one) for one in found])
        return
    rows = [
        (one.webhook, one.event, one.offer, one.type, one.state, one.attempts, one.problem or "")
        for one in found
    ]
    columns = ("webhook", "event", "offer", "type", "state", "attempts", "problem")
    console.print(table("Not delivered", columns, rows), markup=False)


@webhooks.command()
@_webhook
@click.option("--offer", metavar="ID", help="Only parked or failed events of this offer.")
@json_option
def resend(webhook: str, offer: str | None, as_json: bool) -> None:
    """Send parked and failed events of WEBHOOK again at once, in order. Exit code 1: there are none."""
    count = _ask(load_settings(), lambda connection: stored.resend(connection, webhook, offer))
    if not count:
        refuse(f"no event is parked, or has failed, for {webhook}{f' of offer {offer}' if offer else ''}")
    if as_json:
        print_json({"webhook": webhook, "resent": count})
    else:
        say(f"{count:,} {'delivery' if count == 1 else 'deliveries'} will be sent again.")


@webhooks.command()
@_webhook
@click.argument("event")
@json_option
def discard(webhook: str, event: str, as_json: bool) -> None:
    """Give up EVENT (SHARD-SEQ) for WEBHOOK, such as one that its receiver cannot process; `resend` then
    sends the later ones.
    """
    named = stored.event_of(event)
    if named is None:
        raise click.BadParameter(f"must be written as SHARD-SEQ, got {event!r}", param_hint="EVENT")
    if not _ask(load_settings(), lambda connection: stored.discard(connection, webhook, *named)):
        refuse(f"{event} is neither waiting nor parked for {webhook}")
    if as_json:
        print_json({"webhook": webhook, "event": event, "discarded": True})
    else:
        say(f"{event} will not be sent to {webhook}.")


# -- in common -----------------------------------------------------------------------------------------------


def _ask(settings: Settings, question: Callable[[AsyncConnection[Any]], Awaitable[T]]) -> T:
    async def ask() -> T:
        async with checked_database(settings) as connection:
            return await question(connection)

    return asyncio.run(ask())


async def _read(connection: AsyncConnection[Any]) -> tuple[list[Webhook], dict[str, int], dict[str, int]]:
    """All webhooks, and how much waits and is parked for each."""
    return (
        await stored.find_all(connection),
        await stored.backlogs(connection, "waiting"),
        await stored.backlogs(connection, "parked"),
    )


def _change(
    webhook: str, change: Callable[[AsyncConnection[Any]], Awaitable[bool]], state: str, as_json: bool
) -> None:
    if not _ask(load_settings(), change):
        refuse(f"there is no webhook {webhook}: `grabstream webhooks list` shows them")
    if as_json:
        print_json({"webhook": webhook, "state": state})
    else:
        say(f"{webhook} is {state}.")


def _wanted(webhook: Webhook) -> str:
    types = ", ".join(webhook.types) or "all events"
    return f"{types} of {', '.join(webhook.offers)}" if webhook.offers else types


def _as_json(webhook: Webhook) -> dict[str, Any]:
    shown = webhook._asdict()
    del shown["sealed_secret"], shown["previous_sealed_secret"]
    return {name: list(value) if isinstance(value, list | tuple) else value for name, value in shown.items()}


def _delivery_as_json(delivery: Delivery) -> dict[str, Any]:
    shown = delivery._asdict()
    del shown["body"]
    return {"event": delivery.event, **shown}
