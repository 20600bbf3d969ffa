"""Arguments that several verbs take."""

import click


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
