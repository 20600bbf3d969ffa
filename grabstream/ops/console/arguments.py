"""Arguments that several verbs take."""

import click


def require_id_alone(key_id: str, param_hint: str) -> None:
    """Raises BadParameter when the id of a key is followed by its secret, as in a setting: neither the
    message nor anything else may print the secret.
    """
    alone, colon, _ = key_id.partition(":")
    if colon:
        raise click.BadParameter(
            f"{alone}:… is a key with its secret; give the id alone, what stands before the colon",
            param_hint=param_hint,
        )
