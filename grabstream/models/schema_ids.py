"""The names and ids of the JSON Schemas in `schemas/`. A record of `grab.events` names the schema of its
value by this id (`dataschema` of CloudEvents).
"""

from typing import Final

from grabstream.models.events import CURRENT_VERSIONS

_ID_BEGINS: Final = "urn:grabstream:"


def schema_id(name: str) -> str:
    """The `$id` of the schema in the file `schemas/<name>.json`: `events/grab.granted.v1` is
    `urn:grabstream:events:grab.granted.v1`.
    """
    return _ID_BEGINS + name.replace("/", ":")


def event_name(type_: str, version: int | None = None) -> str:
    """The name of the schema of an event; without a version, of the current version."""
    return f"events/{type_}.v{CURRENT_VERSIONS[type_] if version is None else version}"
