"""Understanding: records of the commands topic as commands, and what is kept of those that are none.

Whatever a record holds, it costs bounded time, memory and records of `rejected`, and its bytes are kept: one
by one where elements of an array are bad, as a whole where the record is, in numbered pieces where they are
too many for one record.
"""

import asyncio
import time
from collections.abc import Iterator
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
    Undecodable,
    commands_of,
    encode_command,
    secret_of,
    torn_baskets,
)
from grabstream.models.outcomes import Outcome

#: Decoding goes on so long before other tasks of the process have their turn.
SLICE_SECONDS: Final = 0.01

#: On records of `rejected` that are commands which were understood, and which no script could decide.
SET_ASIDE_HEADER: Final = "set-aside"

RecordHeaders = list[tuple[str, bytes]]


class Rejected(NamedTuple):
    """A record of the topic `rejected`: bytes that could not be understood, with where they stood."""

    key: bytes | None
    raw: bytes
    headers: RecordHeaders


class Place(NamedTuple):
    """Where a record stands, and its key."""

    topic: str
    partition: int
    offset: int
    key: bytes | None

    @classmethod
    def of(cls, record: Any) -> "Place":
        """The place of a record as the client gives it."""
        return cls(record.topic, record.partition, record.offset, record.key)


class Understood(NamedTuple):
    """What a record says: its commands and the place of each in it, the answers to those that are refused
    already, and what is kept of what was not understood.
    """

    commands: list[AnyCommand]
    places: list[int]
    refused: list[Answer]
    rejected: list[Rejected]


class Pace:
    """Lets other tasks have their turn while much is decoded: whoever decodes says `step` between two
    commands.
    """

    def __init__(self) -> None:
        self._until = time.monotonic() + SLICE_SECONDS

    async def step(self) -> None:
        """Returns at once, or after the other tasks had their turn."""
        if time.monotonic() >= self._until:
            await asyncio.sleep(0)
            self._until = time.monotonic() + SLICE_SECONDS


async def understand(record: Any, pace: Pace) -> Understood:
    """A record as commands; what cannot be understood keeps its bytes, and is answered when its id can be
    read.
    """
    value = record.value or b""
    found: list[AnyCommand | Undecodable] = []
    for decoded in map(_without_secret, commands_of(value)):
        found.append(decoded)
        await pace.step()
    bad = [(index, one) for index, one in enumerate(found) if isinstance(one, Undecodable)]
    refused = [
        refusal(one.id, Outcome.invalid, one.offer, one.reason) for _, one in bad if one.id is not None
    ]
    # Here, where all of the record is: the shards get their parts of it, without what was not understood.
    torn = torn_baskets(found)
    commands: list[AnyCommand] = []
    places: list[int] = []
    for index, one in enumerate(found):
        if isinstance(one, Undecodable):
            continue
        if index in torn:
            refused.append(refusal(one.id, Outcome.invalid, one.offer, torn[index]))
        else:
            commands.append(one)
            places.append(index)
    if len(bad) > REJECTED_OF_ARRAY_MAX:
        first, undecodable = bad[0]
        bad = [
            (
                first,
                Undecodable(f"{len(bad)} of {len(found)} commands; the first: {undecodable.reason}", value),
            )
        ]
    kept = [one for place, undecodable in bad for one in _kept(Place.of(record), place, undecodable)]
    return Understood(commands, places, refused, kept)


def set_aside(record: Place, index: int, command: AnyCommand, reason: str) -> list[Rejected]:
    """What is kept of a command that was understood, and that no script can decide; `doctor` knows it by its
    header.
    """
    bad = Undecodable(reason, encode_command(command))
    return [
        one._replace(headers=[*one.headers, (SET_ASIDE_HEADER, b"1")]) for one in _kept(record, index, bad)
    ]


def _without_secret(command: AnyCommand | Undecodable) -> AnyCommand | Undecodable:
    """A command whose secret must not stand in a topic is refused here; the gate takes it."""
    if isinstance(command, Undecodable) or (field := secret_of(command)) is None:
        return command
    reason = f"{field}: is taken by the gate only, since the topic would keep it in clear"
    return Undecodable(reason, encode_command(command), command.id, command.offer)


def _kept(record: Place, index: int, bad: Undecodable) -> Iterator[Rejected]:
    """The records of `rejected` that keep what is bad; more than one when it, or the record's key, is too
    long for one.
    """
    where = (
        ("topic", record.topic),
        ("partition", record.partition),
        ("offset", record.offset),
        ("index", index),
    )
    headers = [
        ("reason", shortened(bad.reason).encode()),
        *((name, str(value).encode()) for name, value in where),
    ]
    key = record.key
    if key is not None and len(key) > REJECTED_KEY_BYTES_MAX:
        yield from _pieces(key[:REJECTED_KEY_BYTES_MAX], key, [*headers, ("part", b"key")])
        key = key[:REJECTED_KEY_BYTES_MAX]
    yield from _pieces(key, bad.raw, headers)


def _pieces(key: bytes | None, raw: bytes, headers: RecordHeaders) -> Iterator[Rejected]:
    count = -(-len(raw) // REJECTED_PIECE_BYTES_MAX)
    if count <= 1:
        yield Rejected(key, raw, headers)
        return
    for number in range(count):
        start = number * REJECTED_PIECE_BYTES_MAX
        numbered = [("piece", b"%d" % (number + 1)), ("pieces", b"%d" % count)]
        yield Rejected(key, raw[start : start + REJECTED_PIECE_BYTES_MAX], [*headers, *numbered])
