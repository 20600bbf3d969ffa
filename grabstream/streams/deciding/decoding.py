"""Decodes records of a topic of commands into commands, and keeps bytes that are not a command.

Any record costs bounded time, memory and records of `rejected`. Invalid bytes are kept: of each invalid
element of an array, of the whole record if the record is invalid, and in numbered pieces if they are too many
for one record.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

from grabstream.models.answers import Answer, refusal
from grabstream.models.bounds import (
    REJECTED_KEY_BYTES_MAX,
    REJECTED_OF_ARRAY_MAX,
    REJECTED_PIECE_BYTES_MAX,
    shortened,
)
from grabstream.models.commands import (
    AnyCommand,
    Grab,
    Undecodable,
    commands_of,
    encode_command,
    may_be_plain_grab,
    may_have_secret,
    plain_grabs,
    raws_of,
    secret_of,
    torn_baskets,
    user_of,
)
from grabstream.models.outcomes import Outcome
from grabstream.streams.topics import Topics

log = logging.getLogger(__name__)

#: How long decoding may run before other tasks of the process run.
SLICE_SECONDS: Final = 0.01

#: Records that are decoded together.
RUN_RECORDS_MAX: Final = 256

#: The header of records of `rejected` that hold a valid command which no script could decide.
SET_ASIDE_HEADER: Final = "set-aside"

RecordHeaders = list[tuple[str, bytes]]


class Rejected(NamedTuple):
    """A record of the topic `rejected`: bytes that could not be decoded, and their position."""

    key: bytes | None
    raw: bytes
    headers: RecordHeaders


class RecordPosition(NamedTuple):
    """The position of a record, and its key."""

    topic: str
    partition: int
    offset: int
    key: bytes | None


class Understood(NamedTuple):
    """A decoded record: its commands and the index of each in the record, the answers to elements that are
    refused here, and the records that keep what was not decoded.
    """

    commands: list[AnyCommand]
    indexes: list[int]
    refused: list[Answer]
    rejected: list[Rejected]


class TopicAuthority:
    """Which commands a topic may carry: writers of `commands` must not be able to open an offer or to adjust
    the books. With `operations_on_commands`, as before version 0.2, `commands` takes them all.
    """

    def __init__(self, topics: Topics, operations_on_commands: bool = False) -> None:
        self._topics = topics
        self._operations_on_commands = operations_on_commands
        self._has_warned = False

    def judge(self, command: AnyCommand | Undecodable, topic: str) -> AnyCommand | Undecodable:
        """The command, or the reason why it must not come by this topic, which names the right one."""
        if isinstance(command, Undecodable) or (right := self._topics.of(command)) == topic:
            return command
        name = type(command).__name__.lower()
        if self._operations_on_commands and topic == self._topics.commands:
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "%s: a command `%s` is accepted, since GRAB_OPERATIONS_ON_COMMANDS is set: send it to "
                    "%s, which the next release requires; this is logged once", topic, name, right,
                )  # fmt: skip
            return command
        reason = f"type: `{name}` is not accepted from {topic}; send it to {right}"
        return _refused(command, reason)


class Pace:
    """Lets other tasks run during long decoding: the caller awaits `step` between two commands."""

    def __init__(self) -> None:
        self._until = time.monotonic() + SLICE_SECONDS

    async def step(self) -> None:
        """Returns at once, or, after SLICE_SECONDS, when other tasks have run."""
        if time.monotonic() >= self._until:
            await asyncio.sleep(0)
            self._until = time.monotonic() + SLICE_SECONDS


def plain_groups(records: Sequence[Any]) -> Iterator[tuple[Sequence[Any], Sequence[Grab]]]:
    """Yields the records in parts, in order: those that each have one plain grab, as most do, with their
    commands, which are decoded together; the others without.
    """
    for start in range(0, len(records), RUN_RECORDS_MAX):
        part = records[start : start + RUN_RECORDS_MAX]
        values = [record.value for record in part]
        if None not in values and (grabs := plain_grabs(values)):
            yield part, grabs
            continue
        for may_be_plain, group in groupby(part, lambda record: may_be_plain_grab(record.value)):
            some = list(group)
            yield some, plain_grabs([record.value for record in some]) if may_be_plain else ()


async def decode_record(record: Any, pace: Pace, authority: TopicAuthority) -> Understood:
    """Decodes a record into commands. Elements that are not commands of its topic keep their bytes, and are
    answered if their id can be read.
    """
    value = record.value or b""
    elements: list[AnyCommand | Undecodable] = []
    for decoded in commands_of(value):
        elements.append(authority.judge(_without_secret(decoded), record.topic))
        await pace.step()
    _keep_sent_bytes(elements, value)
    # Baskets are checked here, where the whole record is: each shard gets only its commands of the record,
    # without the elements that were not decoded.
    if torn := torn_baskets(elements):
        for index, reason in torn.items():
            if not isinstance(element := elements[index], Undecodable):
                elements[index] = _refused(element, reason)
        _keep_sent_bytes(elements, value)
    bad = [(index, element) for index, element in enumerate(elements) if isinstance(element, Undecodable)]
    refused = [
        refusal(element.id, Outcome.invalid, element.offer, element.reason, user=element.user)
        for _, element in bad
        if element.id is not None
    ]
    commands: list[AnyCommand] = []
    indexes: list[int] = []
    for index, element in enumerate(elements):
        if not isinstance(element, Undecodable):
            commands.append(element)
            indexes.append(index)
    if len(bad) > REJECTED_OF_ARRAY_MAX:
        first, undecodable = bad[0]
        reason = f"{len(bad)} of {len(elements)} commands; the first: {undecodable.reason}"
        bad = [(first, Undecodable(reason, value))]
    position = RecordPosition(record.topic, record.partition, record.offset, record.key)
    rejected = [
        kept
        for index, undecodable in bad
        for kept in _rejected(position, index, undecodable, may_have_secret(undecodable.raw))
    ]
    return Understood(commands, indexes, refused, rejected)


def _keep_sent_bytes(elements: Sequence[AnyCommand | Undecodable], value: bytes) -> None:
    """Gives each command that was decoded and then refused the bytes that were sent, in place of its
    canonical form.
    """
    refused = [
        (index, element)
        for index, element in enumerate(elements)
        if isinstance(element, Undecodable) and element.is_decoded
    ]
    if not refused:
        return
    raws = raws_of(value)
    for index, element in refused:
        element.raw = raws[index]


def reject_undecidable(
    position: RecordPosition, index: int, command: AnyCommand, reason: str
) -> list[Rejected]:
    """Returns the records that keep a valid command which no script can decide; `doctor` recognises them by
    their header.
    """
    bad = Undecodable(reason, encode_command(command))
    return [
        rejected._replace(headers=[*rejected.headers, (SET_ASIDE_HEADER, b"1")])
        for rejected in _rejected(position, index, bad)
    ]


def _without_secret(command: AnyCommand | Undecodable) -> AnyCommand | Undecodable:
    """Refuses a command with a secret, which must not be in a topic; such a command is sent to a gate."""
    if isinstance(command, Undecodable) or (field := secret_of(command)) is None:
        return command
    reason = f"{field}: only a gate accepts it, since the topic would store it unencrypted"
    return _refused(command, reason)


def _refused(command: AnyCommand, reason: str) -> Undecodable:
    """A command that was decoded, and that its topic may not carry, or of a basket that is refused."""
    bad = Undecodable(reason, b"", command.id, command.offer, user_of(command))
    bad.is_decoded = True
    return bad


def _rejected(
    position: RecordPosition, index: int, bad: Undecodable, is_withheld: bool = False
) -> Iterator[Rejected]:
    """Yields the records of `rejected` that keep an element; more than one when its bytes, or the record's
    key, are too many for one record. Bytes that are withheld are not copied: the headers say how many they
    are, and where they were sent.
    """
    where = (
        ("topic", position.topic),
        ("partition", position.partition),
        ("offset", position.offset),
        ("index", index),
    )
    headers = [
        ("reason", shortened(bad.reason).encode()),
        *((name, str(value).encode()) for name, value in where),
    ]
    raw = bad.raw
    if is_withheld:
        headers.append(("withheld", b"%d" % len(raw)))
        raw = b""
    key = position.key
    if key is not None and len(key) > REJECTED_KEY_BYTES_MAX:
        yield from _pieces(key[:REJECTED_KEY_BYTES_MAX], key, [*headers, ("part", b"key")])
        key = key[:REJECTED_KEY_BYTES_MAX]
    yield from _pieces(key, raw, headers)


def _pieces(key: bytes | None, raw: bytes, headers: RecordHeaders) -> Iterator[Rejected]:
    count = -(-len(raw) // REJECTED_PIECE_BYTES_MAX)
    if count <= 1:
        yield Rejected(key, raw, headers)
        return
    for number in range(count):
        start = number * REJECTED_PIECE_BYTES_MAX
        numbered = [("piece", b"%d" % (number + 1)), ("pieces", b"%d" % count)]
        yield Rejected(key, raw[start : start + REJECTED_PIECE_BYTES_MAX], [*headers, *numbered])
