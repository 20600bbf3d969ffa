"""The differences between an offer of a file and that of the system: `offers --check`."""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from grabstream.models.commands import Open
from grabstream.models.offers import MOST_OF, TIME_MS_MAX, Hours, Limit, Terms
from grabstream.ops.formats.offer_plan import shown_hours
from grabstream.ops.formats.written_values import shown_duration, shown_time

#: No event has the seed of an envelope, until it closes.
_NOT_KEPT: Final = frozenset({"seed"})
_DURATIONS: Final = ("hold_ms", "grace_ms", "retire_after_ms")
_TIMES: Final = tuple(name for name in MOST_OF if MOST_OF[name] == TIME_MS_MAX and name not in _DURATIONS)


class OfferDifference(NamedTuple):
    """A difference of an offer: it is `missing` in the system, `extra` (not in the file), or a `field`
    differs: a term, or the `state`. `file` and `system` are the values there, or None.
    """

    offer: str
    difference: str
    field: str | None = None
    file: Any = None
    system: Any = None
    timezone: str = "UTC"

    def document(self) -> dict[str, Any]:
        """The difference for programs: values as a command has them."""
        names = ("offer", "difference", "field", "file", "system")
        return {name: msgspec.to_builtins(getattr(self, name)) for name in names}

    def line(self) -> str:
        """The difference for people: values as in a file."""
        if self.difference == "missing":
            return f"{self.offer}: missing: the system does not have it"
        if self.difference == "extra":
            return f"{self.offer}: extra: {self.system} in the system, not in the file"
        file_text, system_text = (
            _value_text(self.field, value, self.timezone) for value in (self.file, self.system)
        )
        return f"{self.offer}: {self.field}: {file_text} in the file, {system_text} in the system"


def differences_of(command: Open, state: str, terms: Terms) -> Iterator[OfferDifference]:
    """Yields the differences of an offer from that of the system in a `state` with these terms."""
    if state not in ("open", "paused"):
        yield OfferDifference(command.offer, "differs", "state", "open", state)
    file_terms, system_terms = (
        msgspec.structs.asdict(each) | {"kind": each.__struct_config__.tag} for each in (command.terms, terms)
    )
    if file_terms["kind"] != system_terms["kind"]:
        # The terms of one kind mean nothing in another.
        yield OfferDifference(command.offer, "differs", "kind", file_terms["kind"], system_terms["kind"])
        return
    for name, value in file_terms.items():
        if name not in _NOT_KEPT and value != system_terms[name]:
            yield OfferDifference(
                command.offer, "differs", name, value, system_terms[name], command.terms.timezone
            )


def _value_text(name: str | None, value: Any, timezone: str) -> str:
    if value is None or value in ((), ""):
        return "nothing"
    if name in _TIMES:
        return shown_time(value, timezone)
    if name in _DURATIONS:
        return shown_duration(value)
    if isinstance(value, tuple):
        return "; ".join(
            shown_hours(part) if isinstance(part, Hours) else _limit_text(part) for part in value
        )
    return str(value).lower() if isinstance(value, bool) else str(value)


def _limit_text(limit: Limit) -> str:
    scope = "" if limit.scope == "offer" else f"/{limit.scope}"
    return f"{limit.by}/{limit.per}/{limit.max}{scope}"
