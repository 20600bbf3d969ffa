"""Upcasting: events of older versions become current ones while they are read, one version at a time.

An event's text never changes: it is hashed, published and audited as it was written. Only its decoded form is
raised, by pure functions from JSON object to JSON object, so that everything behind the decoder knows one
form of each type, the current one. The versions of a type count from 1. What this program knows is in
`models/upcasters.py`; docs/events.md says how to add to it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from grabstream.models.bounds import quoted

FIRST_VERSION: Final = 1
#: In the words of every NewerEvent, so that a stop for this reason can be told from others.
NEWER: Final = "a newer grabstream"

Document = dict[str, Any]


class BrokenChain(Exception):
    """The upcasters do not lead from every version of every type to the current one. Found when the program
    starts.
    """


class NewerEvent(msgspec.ValidationError):
    """An event that a newer grabstream wrote: reading it as one of ours would misread it, so its shard stops
    there.
    """


class UpcastFailed(msgspec.ValidationError):
    """An event of an older version that its upcaster cannot raise."""


class Upcaster(NamedTuple):
    """Raises events of `type` from `from_version` to the version after it.

    `raise_version` is given the decoded event and returns it in the next version's form; `v` is set
    afterwards. It may change its argument. It must not touch `shard`, `seq`, `offer_seq` and `offer`: they
    are the event's place in the journal.
    """

    type: str
    from_version: int
    raise_version: Callable[[Document], Document]


class _Versioned(msgspec.Struct):
    """As much of an event as says which form it has."""

    type: str
    v: int
    seq: int | None = None


_decode_versioned = msgspec.json.Decoder(_Versioned).decode


class Upcasters:
    """The chains of upcasters of a program; making them checks that they have no gap."""

    def __init__(self, steps: Iterable[Upcaster], current: Mapping[str, int]) -> None:
        """`current` is the version of every type that this program writes; raises BrokenChain with everything
        that is wrong.
        """
        self._current = dict(current)
        self._steps: dict[tuple[str, int], Upcaster] = {}
        problems = []
        for step in steps:
            if (step.type, step.from_version) in self._steps:
                problems.append(
                    f"{step.type}: two upcasters from v{step.from_version} to v{step.from_version + 1}"
                )
            self._steps[step.type, step.from_version] = step
        problems += self._gaps()
        if problems:
            raise BrokenChain("; ".join(problems))

    def _gaps(self) -> list[str]:
        problems = [
            f"{type_}: an upcaster from v{version}, but there is no such type"
            for type_, version in self._steps
            if type_ not in self._current
        ]
        for type_, current in sorted(self._current.items()):
            versions = {version for of_type, version in self._steps if of_type == type_}
            for version in range(min(FIRST_VERSION, *versions, current), current):
                if version not in versions:
                    problems.append(
                        f"{type_}: no upcaster from v{version} to v{version + 1}, although v{current} is "
                        "written now"
                    )
            problems += [
                f"{type_}: an upcaster from v{version} to v{version + 1}, but v{current} is written now"
                for version in sorted(versions)
                if version >= current
            ]
        return problems

    def raised(self, line: bytes) -> bytes | None:
        """The event in its current form, as JSON; None when it is of the current version already, or no event
        at all.

        Raises NewerEvent for a type or version that this program does not know, UpcastFailed when an upcaster
        cannot raise it.
        """
        try:
            found = _decode_versioned(line)
        except msgspec.DecodeError:
            return None
        current = self._current.get(found.type)
        where = f"seq {found.seq}: " if found.seq is not None else ""
        if current is None:
            raise NewerEvent(
                f"{where}type {quoted(found.type)} is not known here: either {NEWER} wrote it, or it is no "
                "event"
            )
        if found.v > current:
            raise NewerEvent(
                f"{where}{found.type} v{found.v} was written by {NEWER}, this one knows up to v{current}: "
                "start that one here; it goes on from this event, nothing is lost"
            )
        return None if found.v == current else self._raise(line, found, current, where)

    def _raise(self, line: bytes, found: _Versioned, current: int, where: str) -> bytes:
        document = msgspec.json.decode(line)
        for version in range(found.v, current):
            step = self._steps.get((found.type, version))
            if step is None:
                raise UpcastFailed(f"{where}{found.type} v{version}: there has never been such a version")
            try:
                document = step.raise_version(document)
                document["v"] = version + 1
            # Whatever a step says against this one event: its shard stops, and the others go on.
            except Exception as error:
                raise UpcastFailed(
                    f"{where}{found.type} v{version}: the upcaster to v{version + 1} failed: {error!r}"
                ) from error
        return msgspec.json.encode(document)
