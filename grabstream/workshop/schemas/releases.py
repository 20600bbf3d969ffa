"""What changed since the last release, and whether it breaks other programs.

A release is one file that is never edited, `schemas/released/<version>.json`: all schemas, the AsyncAPI and
the OpenAPI document as they were. Commands and requests are compared in the direction `reads`, answers and
responses in the direction `writes`, and events and runs in both: other programs read them, and grabstream
itself reads old lines of the journal without limit. A breaking change of an event is allowed with a new
version of its type and an upcaster.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from grabstream.workshop.schemas.compatibility import (
    VERDICTS,
    Direction,
    Schema,
    SchemaDifference,
    Verdict,
    differences,
)
from grabstream.workshop.schemas.http_operations import Compared, changes_of_operations

_event_name = re.compile(r"events/(?P<type>.+)\.v(?P<version>\d+)\Z").match

FOR_EVER: Final = -1
#: The direction of each signed text about payments.
_PAYMENTS: Final[Mapping[str, Direction]] = {
    "payments/answer": "reads",
    "payments/query": "writes",
    "payments/receipt": "reads",
    "payments/token": "writes",
}


class Contract(NamedTuple):
    """What other programs rely on: JSON Schemas by name, the AsyncAPI and the OpenAPI document."""

    schemas: Mapping[str, Schema]
    asyncapi: Mapping[str, Any]
    openapi: Mapping[str, Any]


class SchemaChange(NamedTuple):
    """A change: its verdict, the name of what changed, where in it, a description, and what to do instead
    (empty when nothing has to be done).
    """

    verdict: Verdict
    name: str
    where: str
    words: str
    way_out: str = ""


def last_release(folder: Path) -> str | None:
    """The highest version in the folder of releases; None when the folder has no release."""
    versions = [path.stem for path in folder.glob("*.json")]
    return max(versions, key=lambda version: [int(part) for part in version.split(".")], default=None)


def read_release(folder: Path, version: str) -> Contract:
    """A release as it was; raises OSError when its file does not exist."""
    released = json.loads((folder / f"{version}.json").read_text(encoding="utf-8"))
    return Contract(released["schemas"], released["asyncapi"], released["openapi"])


def verdict_of(changes: Collection[SchemaChange]) -> Verdict:
    """The worst verdict of all changes."""
    return max((change.verdict for change in changes), key=VERDICTS.index, default="compatible")


def changes_between(old: Contract, new: Contract, upcasts: Collection[tuple[str, int]]) -> list[SchemaChange]:
    """Every change since a release, the worst first. `upcasts` are the (type, version) for which upcasters to
    the next version exist.
    """
    changes = [
        *_commands(old, new),
        *_answers(old, new),
        *_events(old, new, upcasts),
        *_runs_and_payments(old, new),
        *_topics(old.asyncapi, new.asyncapi),
        *_http(old.openapi, new.openapi),
    ]
    return sorted(changes, key=lambda change: -VERDICTS.index(change.verdict))


def _of(contract: Contract, folder: str) -> dict[str, Schema]:
    return {name: schema for name, schema in contract.schemas.items() if name.startswith(f"{folder}/")}


def _changes(
    name: str, old: Schema, new: Schema, way_out: str, *directions: Direction
) -> Iterator[SchemaChange]:
    for difference in differences(old, new):
        verdict = difference.verdict(*directions)
        yield SchemaChange(
            verdict,
            name,
            difference.where,
            _difference_text(difference),
            way_out if verdict == "breaking" else "",
        )


def _difference_text(difference: SchemaDifference) -> str:
    return (
        difference.words if difference.words == difference.kind else f"{difference.kind}: {difference.words}"
    )


def _commands(old: Contract, new: Contract) -> Iterator[SchemaChange]:
    olds, news = _of(old, "commands"), _of(new, "commands")
    way_out = (
        "keep accepting every command that was accepted: make a new field optional, or add a command of "
        "another type"
    )
    for name, schema in olds.items():
        if name in news:
            yield from _changes(name, schema, news[name], way_out, "reads")
        else:
            yield SchemaChange("breaking", name, "$", "the command was removed", "keep it")
    yield from (SchemaChange("compatible", name, "$", "a new command") for name in news if name not in olds)


def _answers(old: Contract, new: Contract) -> Iterator[SchemaChange]:
    news = _of(new, "answers")
    for name, schema in _of(old, "answers").items():
        yield from _changes(
            name, schema, news[name], "keep the field as it is, and add a new field", "writes"
        )


def _runs_and_payments(old: Contract, new: Contract) -> Iterator[SchemaChange]:
    """Changes of what has no versions: runs in the journal, and signed texts about payments."""
    for name, schema in {**_of(old, "journal"), **_of(old, "payments")}.items():
        if name in new.schemas:
            directions: tuple[Direction, ...] = (
                (_PAYMENTS[name],) if name in _PAYMENTS else ("reads", "writes")
            )
            way_out = "keep the field as it is, and add an optional field"
            yield from _changes(name, schema, new.schemas[name], way_out, *directions)
        else:
            yield SchemaChange("breaking", name, "$", "the schema was removed", "keep it")


# -- events --------------------------------------------------------------------------------------------------


def _versions(contract: Contract) -> dict[str, int]:
    """The newest version of every type."""
    newest: dict[str, int] = {}
    for name in contract.schemas:
        if event := _event_name(name):
            newest[event["type"]] = max(newest.get(event["type"], 0), int(event["version"]))
    return newest


def _events(old: Contract, new: Contract, upcasts: Collection[tuple[str, int]]) -> Iterator[SchemaChange]:
    olds, news = _versions(old), _versions(new)
    for type_, released in olds.items():
        if type_ not in news:
            yield SchemaChange(
                "breaking",
                f"events/{type_}",
                "$",
                "the type was removed",
                "keep it: journals keep such events permanently",
            )
        elif news[type_] < released:
            yield SchemaChange(
                "breaking",
                f"events/{type_}",
                "$",
                f"v{released} was released, and this is v{news[type_]}",
                f"set it to v{released} or higher: versions are never lowered",
            )
        else:
            yield from _raised(type_, released, news[type_], upcasts)
    for name, schema in _of(old, "events").items():
        way_out = "raise its version and write an upcaster (docs/events.md)"
        if name in new.schemas:
            yield from _changes(name, schema, new.schemas[name], way_out, "reads", "writes")
        elif (event := _event_name(name)) and news.get(event["type"], 0) > int(event["version"]):
            yield SchemaChange(
                "breaking",
                name,
                "$",
                "the schema of an older version was removed",
                "keep the file: journals keep such events permanently",
            )
    for type_ in (type_ for type_ in news if type_ not in olds):
        yield SchemaChange(
            "warning", f"events/{type_}", "$", "a new type: readers that list all types must know it"
        )


def _raised(
    type_: str, released: int, current: int, upcasts: Collection[tuple[str, int]]
) -> Iterator[SchemaChange]:
    name = f"events/{type_}"
    for version in range(released, current):
        if (type_, version) not in upcasts:
            words = f"v{version} was raised to v{version + 1} without an upcaster"
            yield SchemaChange("breaking", name, "$.v", words, "write the upcaster in models/upcasters.py")
    if current > released:
        words = (
            f"v{released} → v{current}: readers of the journal and of the events topic must know both "
            f"before the first event of v{current} is written"
        )
        yield SchemaChange("warning", name, "$.v", words)


def _http(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[SchemaChange]:
    if old == new:
        return
    way_out = "keep accepting every request and giving every answer of the release, and add a new one"
    for change in changes_of_operations(old, new):
        if isinstance(change, Compared):
            yield from _changes(change.name, change.old, change.new, way_out, change.direction)
        elif change.is_breaking:
            yield SchemaChange("breaking", change.name, "$", change.words, "keep it")
        else:
            yield SchemaChange("compatible", change.name, "$", change.words)


# -- topics --------------------------------------------------------------------------------------------------


def _topics(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[SchemaChange]:
    for name, was in old["channels"].items():
        topic, is_ = f"topics/{name}", new["channels"].get(name)
        if is_ is None:
            yield SchemaChange("breaking", topic, "$", "the topic was removed", "keep it")
            continue
        if was["address"] != is_["address"]:
            yield SchemaChange(
                "breaking", topic, "$.address", f"{was['address']} → {is_['address']}", "keep the name"
            )
        kept = [channel["bindings"]["kafka"]["topicConfiguration"]["retention.ms"] for channel in (was, is_)]
        if kept[0] != kept[1] and kept[1] != FOR_EVER and (kept[0] == FOR_EVER or kept[1] < kept[0]):
            yield SchemaChange(
                "warning",
                topic,
                "$.retention",
                f"kept for {kept[1]} ms, formerly for {kept[0]} ms (-1: permanently)",
            )
        for message in was["messages"]:
            if message in is_["messages"]:
                yield from _message(
                    f"{topic}/{message}", name, _message_in(old, message), _message_in(new, message)
                )
            elif name != "events":
                # Removed types of events are reported by _events.
                yield SchemaChange(
                    "breaking", f"{topic}/{message}", "$", "the topic no longer has this message", "keep it"
                )


def _message_in(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    message: Mapping[str, Any] = document["components"]["messages"][name]
    return message


def _message(name: str, topic: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[SchemaChange]:
    """The changes of a message's headers and key."""
    # grabstream itself reads the headers of old blocks of the journal.
    directions: tuple[Direction, ...] = ("reads", "writes") if topic == "journal" else ("writes",)
    headers = [message.get("headers", {}).get("schema", {}) for message in (old, new)]
    yield from _changes(
        f"{name}/headers",
        headers[0],
        headers[1],
        "keep the header as it is, and add a new header",
        *directions,
    )
    keys = [message["bindings"]["kafka"].get("key") for message in (old, new)]
    if keys[0] != keys[1]:
        yield SchemaChange(
            "breaking",
            f"{name}/key",
            "$",
            f"{keys[0]} → {keys[1]}",
            "keep the key: records of one key must stay in one partition",
        )
