"""Upcasting: events of older versions are raised to the current version on reading, one version at a time.

The text of an event never changes: it is hashed, published and audited as written. Only its decoded form is
raised, by pure functions on JSON objects, so all code after the decoder handles only the current form of each
type. The versions of a type count from 1. `models/upcasters.py` has the upcasters of this program;
docs/events.md explains how to add one.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from grabstream.models.bounds import quoted

FIRST_VERSION: Final = 1
#: Part of the message of every NewerEvent. Other code recognizes a stop for this reason by it.
NEWER: Final = "a newer grabstream"

Document = dict[str, Any]
E = TypeVar("E")


class BrokenChain(Exception):
    """The upcasters do not lead from every version of every type to the current version. Raised when the
    program starts.
    """


class NewerEvent(msgspec.ValidationError):
    """An event that a newer grabstream wrote. Decoding it as a known version could misread it, so the shard
    stops there.
    """


class UpcastFailed(msgspec.ValidationError):
    """An event of an older version that its upcaster cannot raise."""


class Upcaster(NamedTuple):
    """Raises events of `type` from `from_version` to the version after it.

    `raise_version` gets the decoded event and returns it in the form of the next version; the caller sets
    `v`. It may change its argument. It must not change `shard`, `seq`, `offer_seq` and `offer`, which are the
    position of the event in the journal.
    """

    type: str
    from_version: int
    raise_version: Callable[[Document], Document]


class _Versioned(msgspec.Struct):
    """The fields with the type, version and seq of an event."""

    type: str
    v: int
    seq: int | None = None


_decode_versioned = msgspec.json.Decoder(_Versioned).decode
_decode_raw_list: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Upcasters:
    """The upcasters of a program, one chain for each type. The constructor checks that no chain has a gap."""

    def __init__(
        self, steps: Iterable[Upcaster], current: Mapping[str, int], first: Mapping[str, int] = {}
    ) -> None:
        """`current` is the version of every type that this program writes, `first` that with which a type
        began, if not with FIRST_VERSION. Raises BrokenChain with all problems.
        """
        self._current, self._first = dict(current), dict(first)
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
            versions = {version for step_type, version in self._steps if step_type == type_}
            first = self._first.get(type_, FIRST_VERSION)
            for version in range(min(first, *versions, current), current):
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
        """The event in its current form, as JSON; None when it already has the current version, or is not an
        event.

        Raises NewerEvent for a type or version that this program does not know, UpcastFailed when an upcaster
        cannot raise it.
        """
        try:
            event = _decode_versioned(line)
        except msgspec.DecodeError:
            return None
        current = self._current.get(event.type)
        where = f"seq {event.seq}: " if event.seq is not None else ""
        if current is None:
            raise NewerEvent(
                f"{where}type {quoted(event.type)} is not known here: either {NEWER} wrote it, or it is "
                "not an event"
            )
        if event.v > current:
            raise NewerEvent(
                f"{where}{event.type} v{event.v} was written by {NEWER}, this release knows up to "
                f"v{current}: start the newer release here; it continues from this event, no event is lost"
            )
        return None if event.v == current else self._raise(line, event, current, where)

    def _raise(self, line: bytes, event: _Versioned, current: int, where: str) -> bytes:
        document = msgspec.json.decode(line)
        for version in range(event.v, current):
            step = self._steps.get((event.type, version))
            if step is None:
                raise UpcastFailed(f"{where}{event.type} v{version}: there is no such version here")
            try:
                document = step.raise_version(document)
                document["v"] = version + 1
            # Any error of a step concerns this event only: its shard stops, other shards continue.
            except Exception as error:
                raise UpcastFailed(
                    f"{where}{event.type} v{version}: the upcaster to v{version + 1} failed: {error!r}"
                ) from error
        return msgspec.json.encode(document)


class VersionedDecoder(Generic[E]):
    """Decodes texts of the current versions of some types, and of every version that upcasters raise to
    these.

    The constructor raises BrokenChain when the upcasters have a gap. Decoding raises msgspec.DecodeError for
    any other text, also for one that is not UTF-8; two subclasses of it are NewerEvent, for a text of a newer
    grabstream, and UpcastFailed, where an upcaster fails.
    """

    def __init__(self, form: Any, upcasters: Upcasters) -> None:
        """`form` is the union of the current types, in which the version of each is a literal."""
        self._upcasters = upcasters
        self._decode_current: Callable[[bytes], E] = msgspec.json.Decoder(form).decode
        self._decode_current_list: Callable[[bytes], list[E]] = msgspec.json.Decoder(list[form]).decode

    def decode(self, line: bytes) -> E:
        """Decodes one text."""
        _check_encoding(line)
        # Another version fails here, in C. Texts of the current version have no additional cost.
        try:
            try:
                return self._decode_current(line)
            except msgspec.ValidationError:
                raised = self._upcasters.raised(line)
                if raised is None:
                    raise
            return self._decode_current(raised)
        except RecursionError:
            raise msgspec.DecodeError("nested too deep to be an event") from None

    def decode_list(self, lines: bytes) -> list[E]:
        """Decodes `[line,line,…]` in one call, for whole blocks; line by line only if a text does not have
        the current version.
        """
        _check_encoding(lines)
        try:
            try:
                return self._decode_current_list(lines)
            except msgspec.ValidationError:
                return [self.decode(bytes(raw)) for raw in _decode_raw_list(lines)]
        except RecursionError:
            raise msgspec.DecodeError("nested too deep to be events") from None


def _check_encoding(text: bytes) -> None:
    """Raises msgspec.DecodeError for a text that is not UTF-8. The decoder of msgspec raises
    UnicodeDecodeError for such a value, and passes over one in a field that it ignores, or keeps undecoded.
    """
    # Most texts are ASCII, which is seen in a hundredth of the time of decoding them.
    if text.isascii():
        return
    try:
        str(text, "utf-8")
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"not UTF-8: {error}") from None
