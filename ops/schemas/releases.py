"""What changed since the last release, and whether other people's programs survive it.

A release is one file, `schemas/released/<version>.json`, never edited: all schemas and the AsyncAPI document
as they were. Commands are compared as what we read, answers as what we write, events as both: consumers read
what we write, and we read for ever what stands in the journal. A change that breaks events is no obstacle
when the type's version was raised and an upcaster leads there.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from grabstream.ops.schemas.compatibility import VERDICTS, Difference, Direction, Schema, Verdict, differences

_event_name = re.compile(r"events/(?P<type>.+)\.v(?P<version>\d+)\Z").match

FOR_EVER: Final = -1


class Contract(NamedTuple):
    """What others rely on at one time: JSON Schemas by name, and the AsyncAPI document."""

    schemas: Mapping[str, Schema]
    asyncapi: Mapping[str, Any]


class Change(NamedTuple):
    """One change: of what, where in it, what it is, what it means, and what to do about it (empty:
    nothing).
    """

    verdict: Verdict
    name: str
    where: str
    words: str
    way_out: str = ""


def last_release(folder: Path) -> str | None:
    """The highest version in the folder of releases; None when there was none."""
    versions = [path.stem for path in folder.glob("*.json")]
    return max(versions, key=lambda version: [int(part) for part in version.split(".")], default=None)


def read_release(folder: Path, version: str) -> Contract:
    """A release as it was; raises OSError when there is no such file."""
    found = json.loads((folder / f"{version}.json").read_text(encoding="utf-8"))
    return Contract(found["schemas"], found["asyncapi"])


def verdict_of(changes: Collection[Change]) -> Verdict:
    """The worst of all changes."""
    return max((change.verdict for change in changes), key=VERDICTS.index, default="compatible")


def changes_between(old: Contract, new: Contract, upcasts: Collection[tuple[str, int]]) -> list[Change]:
    """Every change since a release, the worst first; `upcasts` are the (type, version) that upcasters begin
    at.
    """
    found = [
        *_commands(old, new),
        *_answers(old, new),
        *_events(old, new, upcasts),
        *_topics(old.asyncapi, new.asyncapi),
    ]
    return sorted(found, key=lambda change: -VERDICTS.index(change.verdict))


def _of(contract: Contract, room: str) -> dict[str, Schema]:
    return {name: schema for name, schema in contract.schemas.items() if name.startswith(f"{room}/")}


def _changes(name: str, old: Schema, new: Schema, way_out: str, *directions: Direction) -> Iterator[Change]:
    for difference in differences(old, new):
        verdict = difference.verdict(*directions)
        yield Change(
            verdict, name, difference.where, _in_words(difference), way_out if verdict == "breaking" else ""
        )


def _in_words(difference: Difference) -> str:
    return (
        difference.words if difference.words == difference.kind else f"{difference.kind}: {difference.words}"
    )


def _commands(old: Contract, new: Contract) -> Iterator[Change]:
    olds, news = _of(old, "commands"), _of(new, "commands")
    way_out = (
        "keep taking what was taken: make a new field optional, or add a command of another type "
        "beside this one"
    )
    for name, schema in olds.items():
        if name in news:
            yield from _changes(name, schema, news[name], way_out, "reads")
        else:
            yield Change("breaking", name, "$", "the command is gone", "keep it")
    yield from (Change("compatible", name, "$", "a new command") for name in news if name not in olds)


def _answers(old: Contract, new: Contract) -> Iterator[Change]:
    news = _of(new, "answers")
    for name, schema in _of(old, "answers").items():
        yield from _changes(
            name, schema, news[name], "keep the field as it is, and say more in a new one", "writes"
        )


# -- events --------------------------------------------------------------------------------------------------


def _versions(contract: Contract) -> dict[str, int]:
    """The newest version of every type."""
    found: dict[str, int] = {}
    for name in contract.schemas:
        if event := _event_name(name):
            found[event["type"]] = max(found.get(event["type"], 0), int(event["version"]))
    return found


def _events(old: Contract, new: Contract, upcasts: Collection[tuple[str, int]]) -> Iterator[Change]:
    olds, news = _versions(old), _versions(new)
    for type_, released in olds.items():
        if type_ not in news:
            yield Change(
                "breaking",
                f"events/{type_}",
                "$",
                "the type is gone",
                "keep it: it stands in journals for ever",
            )
        elif news[type_] < released:
            yield Change(
                "breaking",
                f"events/{type_}",
                "$",
                f"v{released} was released, this is v{news[type_]}",
                "versions only rise",
            )
        else:
            yield from _raised(type_, released, news[type_], upcasts)
    for name, schema in _of(old, "events").items():
        way_out = "raise its version and write an upcaster (docs/events.md)"
        if name in new.schemas:
            yield from _changes(name, schema, new.schemas[name], way_out, "reads", "writes")
        elif (event := _event_name(name)) and news.get(event["type"], 0) > int(event["version"]):
            yield Change(
                "breaking",
                name,
                "$",
                "the schema of an older version is gone",
                "keep the file: such events are read for ever",
            )
    for type_ in (type_ for type_ in news if type_ not in olds):
        yield Change(
            "warning", f"events/{type_}", "$", "a new type: readers that know all types by name meet one more"
        )


def _raised(
    type_: str, released: int, current: int, upcasts: Collection[tuple[str, int]]
) -> Iterator[Change]:
    name = f"events/{type_}"
    for version in range(released, current):
        if (type_, version) not in upcasts:
            words = f"v{version} was raised to v{version + 1}, and no upcaster leads there"
            yield Change("breaking", name, "$.v", words, "write it in models/upcasters.py")
    if current > released:
        words = (
            f"v{released} → v{current}: readers of the journal and of the events topic must know both "
            "before the first is written"
        )
        yield Change("warning", name, "$.v", words)


# -- topics --------------------------------------------------------------------------------------------------


def _topics(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    for name, was in old["channels"].items():
        topic, is_ = f"topics/{name}", new["channels"].get(name)
        if is_ is None:
            yield Change("breaking", topic, "$", "the topic is gone", "keep it")
            continue
        if was["address"] != is_["address"]:
            yield Change(
                "breaking", topic, "$.address", f"{was['address']} → {is_['address']}", "keep the name"
            )
        kept = [channel["bindings"]["kafka"]["topicConfiguration"]["retention.ms"] for channel in (was, is_)]
        if kept[0] != kept[1] and kept[1] != FOR_EVER and (kept[0] == FOR_EVER or kept[1] < kept[0]):
            yield Change(
                "warning",
                topic,
                "$.retention",
                f"kept for {kept[1]} ms, before for {kept[0]} ms (-1: for ever)",
            )
        for message in was["messages"]:
            if message in is_["messages"]:
                yield from _message(
                    f"{topic}/{message}", name, _message_in(old, message), _message_in(new, message)
                )
            elif name != "events":
                # What became of the types of events is said above.
                yield Change("breaking", f"{topic}/{message}", "$", "stands in this topic no more", "keep it")


def _message_in(document: Mapping[str, Any], message: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = document["components"]["messages"][message]
    return found


def _message(name: str, topic: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    """Its headers and its key."""
    # Our own relays and projections read the journal's headers too, of blocks of any age.
    directions: tuple[Direction, ...] = ("reads", "writes") if topic == "journal" else ("writes",)
    headers = [message.get("headers", {}).get("schema", {}) for message in (old, new)]
    yield from _changes(
        f"{name}/headers",
        headers[0],
        headers[1],
        "keep the header as it is, and say more in a new one",
        *directions,
    )
    keys = [message["bindings"]["kafka"].get("key") for message in (old, new)]
    if keys[0] != keys[1]:
        yield Change(
            "breaking",
            f"{name}/key",
            "$",
            f"{keys[0]} → {keys[1]}",
            "records of one key must stay together: keep it",
        )
