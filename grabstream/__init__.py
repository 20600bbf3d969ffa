"""grabstream gives out limited things that a crowd grabs at once. This module is its public interface for
Python.

- `Client` and `AsyncClient` send commands and ask questions over HTTP, `SyncKafkaClient` and `KafkaClient`
  send commands by Kafka. They return pydantic models of `grabstream.vocabulary`, and need no extra.
- Commands, terms, answers, outcomes and events are types. `encode_command`, `decode_answer` and
  `decode_event` convert them to and from records of Kafka; `decode_line` reads lines of the journal and of
  the audit trail, of which some are runs of grabs (`singles`). They need no extra.
- `grabstream.vocabulary` has the same commands, terms, answers and events as pydantic models (validation
  messages, `model_dump`, JSON Schema, FastAPI); `to_wire()` and `from_wire()` convert.
- `open_gate` decides commands directly in Redis, `Projection` describes a read model of your own,
  `follow_into` hands events on to any sink, `read_events` reads past events. They need the extra `server`.
- `load_settings` reads the settings (`GRAB_*` variables and `.env`) that all of them use.

A name is imported when it is first used, so `import grabstream` is fast. Names that are not in `__all__` may
change with any release.
"""

from importlib import import_module
from typing import Any, Final

from grabstream.extras import MissingExtra, server_needed_by

#: The public names of each module. Type checkers read them in `__init__.pyi`, which
#: `python -m scripts.generated` makes of this list.
_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "client.exchange": ("RequestProblem",),
    "client.following": ("ServedEvent", "StreamReset", "WaitingPosition"),
    "client.over_http": ("AsyncClient", "Client"),
    "client.over_kafka": ("KafkaClient", "SyncKafkaClient"),
    "gate.gate": ("Gate",),
    "models.answers": ("Answer", "LimitState", "decode_answer"),
    "models.commands": (
        "Adjust", "Amend", "AnyCommand", "Close", "Confirm", "Extend", "Grab", "Load", "Open", "Pause",
        "Redeem", "Release", "Resume", "Return", "Undecodable", "Unredeem",
        "check_command", "decode_command", "encode_command",
    ),
    "models.entries": ("Entry",),
    "models.events": (
        "AnyEvent", "AnyGrabEvent", "CampaignZone", "GrabConfirmed", "GrabExtended", "GrabGranted",
        "GrabHeld", "GrabQueued", "GrabRedeemed", "GrabReleased", "GrabReturned", "GrabUnredeemed",
        "LedgerAdjusted", "OfferAmended", "OfferClosed", "OfferLoaded", "OfferOpened", "OfferPaused",
        "OfferResumed", "OfferRetired", "PaymentRefundDue", "decode_event",
    ),
    "models.identifiers": ("campaign_of", "shard_of"),
    "models.journal": ("Corrupt", "Gap"),
    "models.money": ("Invalid",),
    "models.offers": (
        "Changes", "CouponTerms", "EnvelopeTerms", "Hours", "Limit", "StockTerms", "Terms",
    ),
    "models.outcomes": ("Outcome", "OutcomeUnknown"),
    "models.pseudonyms": ("pseudonym",),
    "models.runs": ("AnyLine", "GrantedRun", "HeldRun", "decode_line", "singles"),
    "models.transfers": ("Transfer",),
    "models.upcasting": ("NewerEvent",),
    "connections.event_sources": ("NoTrail",),
    "connections.opening": ("open_gate",),
    "ops.event_cursor": ("EventCursor",),
    "ops.following": ("follow_into",),
    "ops.history": ("JournalLine", "read_events", "read_events_sync", "read_lines", "read_lines_sync"),
    "settings": ("BadSettings", "Settings", "load_settings"),
    "projections.cursors": ("CursorMoved", "Fact"),
    "streams.following.sinks": ("EventSink", "FileSink", "SinkDamaged"),
    "streams.following.user_projection": ("Projection",),
    "streams.history.chunks": ("Point",),
}  # fmt: skip
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names}
#: Names that are shorter in their module.
_NAMES_IN_MODULES: Final = {"check_command": "check"}

__all__ = sorted([*_MODULES, MissingExtra.__name__])


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with server_needed_by(f"grabstream.{name}"):
        value = getattr(import_module(f"{__name__}.{module}"), _NAMES_IN_MODULES.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
