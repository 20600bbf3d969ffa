"""Users on the command line, by their id or by their name in tokens."""

import click

from grabstream.models.bounds import quoted
from grabstream.models.identifiers import is_id
from grabstream.models.pseudonyms import user_of
from grabstream.settings import Settings


def user_named(settings: Settings, text: str) -> str:
    """The id of a user; raises BadParameter for a text that names none."""
    try:
        return text if is_id(text) else user_of(text, settings.user_key)
    except ValueError as error:
        raise click.BadParameter(f"{error}; got {quoted(text)}", param_hint="USER") from None
