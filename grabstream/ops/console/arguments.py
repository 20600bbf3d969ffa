"""Arguments that several verbs take."""

from collections.abc import Callable
from typing import Any, Final

import click

from grabstream.models.money import Invalid
from grabstream.ops.formats.written_values import read_duration

GRACE_MS_MAX: Final = 30 * 24 * 3_600_000


def grace_option(words: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option of how long an old secret counts next to a new one, as `grace_ms`; `words` say for what."""
    return click.option(
        "--grace", "grace_ms", default="24h", show_default=True, callback=_grace_ms,
        help=f"How long the old secret {words}; 0 revokes it at once.",
    )  # fmt: skip


def _grace_ms(context: click.Context, parameter: click.Parameter, written: str) -> int:
    try:
        grace_ms = read_duration(written)
    except Invalid as error:
        raise click.BadParameter(str(error), param_hint="--grace") from None
    if grace_ms > GRACE_MS_MAX:
        raise click.BadParameter("is at most 30d", param_hint="--grace")
    return grace_ms


def require_id_alone(key_id: str, param_hint: str) -> None:
    """Raises BadParameter when the id of a key is followed by its secret, as in a setting: no message may
    print the secret.
    """
    alone, colon, _ = key_id.partition(":")
    if colon:
        raise click.BadParameter(
            f"{alone}:… contains the secret of a key; give only its id, the part before the colon",
            param_hint=param_hint,
        )
