"""`keys`: API keys of the services that call a gateway."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Final

import click
from psycopg import AsyncConnection

from grabstream.connections.opening import checked_database
from grabstream.gate.calls import now_ms
from grabstream.gateway.api_keys import PREFIX, digest_of, new_secret
from grabstream.gateway.bounds import REVOCATION_SECONDS_MAX
from grabstream.gateway.callers import SCOPES
from grabstream.models.identifiers import is_id
from grabstream.models.money import Invalid
from grabstream.models.offers import TIME_MS_MAX
from grabstream.ops.console.arguments import grace_option
from grabstream.ops.console.output import console, json_option, print_json, refuse, table
from grabstream.ops.formats.written_values import read_duration, read_time
from grabstream.projections.tables import api_keys
from grabstream.projections.tables.api_keys import ApiKey, ApiKeyRefused
from grabstream.settings import load_settings

_COLUMNS: Final = (
    "name",
    "scopes",
    "state",
    "created",
    "rotated",
    "secret before until",
    "expires",
    "revoked",
)

Change = Callable[[AsyncConnection[Any]], Awaitable[ApiKey]]

_dry_run = click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
_expires = click.option(
    "--expires", help="When the key expires: a duration from now (90d), or a time as in a file of offers."
)


class _Scopes(click.Choice[str]):
    """Scopes, separated by commas."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return [super(_Scopes, self).convert(one.strip(), param, ctx) for one in str(value).split(",")]


def _name_alone(ctx: click.Context, param: click.Parameter, name: str) -> str:
    """The name of a key. A secret is not repeated in a message."""
    if name.startswith(PREFIX):
        raise click.BadParameter(
            "this is the secret of a key; give its name, as `grabstream keys list` shows it"
        )
    return name


_name = click.argument("name", callback=_name_alone)


@click.group()
def keys() -> None:
    """API keys of the services that call a gateway (docs/http.md). A key is a name with scopes and a secret;
    the secret is printed once, and only its hash is kept.
    """


@keys.command()
@_name
@click.option(
    "--scope", "scopes", multiple=True, required=True, type=_Scopes(list(SCOPES)),
    help="What the key allows; repeatable, or with commas. "
    f"{'; '.join(f'{name}: {what}' for name, what in SCOPES.items())}.",
)  # fmt: skip
@_expires
@_dry_run
@json_option
def create(
    name: str, scopes: Sequence[Sequence[str]], expires: str | None, dry_run: bool, as_json: bool
) -> None:
    """Create the key NAME, and print its secret. A name is never used twice."""
    if not is_id(name):
        raise click.BadParameter(f"must match [A-Za-z0-9._:-]{{1,64}}, got {name!r}", param_hint="NAME")
    expires_at, secret = _expiry(expires), new_secret()

    async def make(connection: AsyncConnection[Any]) -> ApiKey:
        return await api_keys.create(
            connection, name, sorted(set(chain(*scopes))), digest_of(secret.encode()), expires_at
        )

    _show_change(_changed(make, dry_run), "created", secret, dry_run, as_json)


@keys.command()
@_name
@grace_option("stays valid next to the new one")
@_expires
@_dry_run
@json_option
def rotate(name: str, grace_ms: int, expires: str | None, dry_run: bool, as_json: bool) -> None:
    """Give the key NAME a new secret, and print it. The old secret stays valid for the time of --grace, in
    which the service changes to the new one; a secret from before it is revoked at once.
    """
    expires_at, secret = _expiry(expires), new_secret()

    async def make(connection: AsyncConnection[Any]) -> ApiKey:
        return await api_keys.rotate(connection, name, digest_of(secret.encode()), grace_ms, expires_at)

    _show_change(_changed(make, dry_run), "rotated", secret, dry_run, as_json)


@keys.command()
@_name
@_dry_run
@json_option
def revoke(name: str, dry_run: bool, as_json: bool) -> None:
    """Revoke the key NAME permanently, with all of its secrets. Gateways refuse it within seconds."""

    was_revoked = False

    async def make(connection: AsyncConnection[Any]) -> ApiKey:
        nonlocal was_revoked
        known = await api_keys.load(connection)
        was_revoked = any(key.name == name and key.revoked_at is not None for key in known)
        return await api_keys.revoke(connection, name)

    revoked = _changed(make, dry_run)
    if was_revoked and not as_json:
        at = _cell(_described(revoked)["revoked_at"])
        console.print(f"Was revoked before, at {at}: key {name}.", highlight=False)
        return
    _show_change(revoked, "revoked", None, dry_run, as_json)
    if not dry_run and not as_json:
        console.print(f"Running gateways refuse it within {REVOCATION_SECONDS_MAX:.0f} s.")


@keys.command(name="list")
@json_option
def list_(as_json: bool) -> None:
    """List the keys, including revoked ones. Secrets are not kept, so they cannot be shown."""

    async def load() -> list[ApiKey]:
        async with checked_database(load_settings()) as connection:
            return await api_keys.load(connection)

    found = list(map(_described, asyncio.run(load())))
    if as_json:
        print_json(found)
    elif found:
        rows = ([_cell(value) for value in key.values()] for key in found)
        console.print(table("API keys", _COLUMNS, rows))
    else:
        console.print("There are no keys; `grabstream keys create NAME --scope …` creates one.")


def _changed(make: Change, dry_run: bool) -> ApiKey:
    """The key after a change, which is undone again in a dry run; a refusal ends the process with 1."""

    async def change() -> ApiKey:
        async with (
            checked_database(load_settings()) as connection,
            connection.transaction(force_rollback=dry_run),
        ):
            return await make(connection)

    try:
        return asyncio.run(change())
    except ApiKeyRefused as error:
        refuse(error)


def _show_change(key: ApiKey, what: str, secret: str | None, dry_run: bool, as_json: bool) -> None:
    secret = None if dry_run else secret
    described = _described(key)
    if as_json:
        print_json({**described, "dry_run": dry_run, **({"secret": secret} if secret else {})})
        return
    verb = f"Would be {what}" if dry_run else what.capitalize()
    facts = [f"scopes {', '.join(key.scopes)}"]
    if what == "rotated" and key.previous_until is not None:
        facts.append(f"the previous secret is valid until {_cell(described['previous_until'])}")
    facts.append(f"expires {_cell(described['expires_at'])}" if key.expires_at else "does not expire")
    console.print(f"{verb}: key {key.name}; {'; '.join(facts)}.", highlight=False, soft_wrap=True)
    if secret is not None:
        console.print("Its secret, which is shown only once:", highlight=False)
        click.echo(secret)


def _described(key: ApiKey) -> dict[str, Any]:
    """A key without its hashes; times in ms since 1970 UTC, null: does not apply."""
    return {
        "name": key.name,
        "scopes": list(key.scopes),
        "state": key.state(datetime.now(UTC)),
        "created_at": _milliseconds(key.created_at),
        "rotated_at": _milliseconds(key.rotated_at),
        "previous_until": _milliseconds(key.previous_until),
        "expires_at": _milliseconds(key.expires_at),
        "revoked_at": _milliseconds(key.revoked_at),
    }


def _milliseconds(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return f"{datetime.fromtimestamp(value / 1000, UTC):%Y-%m-%d %H:%M:%SZ}"
    return ", ".join(value) if isinstance(value, list) else "–" if value is None else str(value)


def _expiry(expires: str | None) -> datetime | None:
    if expires is None:
        return None
    try:
        # Digits only are a time here: a duration has a unit, and no date.
        is_time = expires.isdigit() or "-" in expires
        at = read_time(expires) if is_time else now_ms() + read_duration(expires)
    except Invalid as error:
        raise click.BadParameter(str(error), param_hint="--expires") from None
    if not now_ms() < at <= TIME_MS_MAX:
        raise click.BadParameter("must be in the future, until 2100", param_hint="--expires")
    return datetime.fromtimestamp(at / 1000, UTC)
