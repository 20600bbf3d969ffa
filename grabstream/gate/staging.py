"""Writes the parts of large envelopes to Redis in pieces, since a call that writes megabytes takes too long.

For `open`, parts are staged under a random name for one attempt; the deciding call renames that key to the
offer's key. Staged parts count only in the server epoch in which all of them were staged. Parts that no call
takes are deleted after the call, or by their time to live.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from grabstream.runtime.trouble import suppressed_trouble

#: Bytes of an envelope's parts that may be arguments of the call that opens the offer (8,000 parts); more
#: parts are staged before the call.
INLINE_BYTES_MAX: Final = 48_000
PIECE_BYTES: Final = 131_072
#: How long staged parts exist after the last piece, if no call takes them.
STAGED_MS: Final = 60_000
DISCARD_SECONDS_MAX: Final = 1.0


class Staged(NamedTuple):
    """Parts to be written to a key before a call, and the position (from 0) of their text among the texts of
    parts in the call's arguments.
    """

    position: int
    key: str
    parts: bytes


class ScriptCall(NamedTuple):
    """The keys of a call after those of the shard, and its arguments: one packed text, then a text of parts
    for each offer to open.
    """

    keys: Sequence[str]
    arguments: list[bytes]
    staged: Sequence[Staged] = ()


#: Runs a script: name, keys, arguments.
RunScript = Callable[[str, Sequence[str], Sequence[object]], Awaitable[Any]]


def pieces(parts: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields offsets and pieces, the last piece first: its write reserves the memory for all pieces, so that
    no later write moves data.
    """
    for offset in range((len(parts) - 1) // PIECE_BYTES * PIECE_BYTES, -1, -PIECE_BYTES):
        yield offset, parts[offset : offset + PIECE_BYTES]


async def stage(run: RunScript, call: ScriptCall) -> list[bytes]:
    """Stages the parts of a call; returns its arguments, which name the server epoch of the staged parts, or
    '' if pieces were lost.
    """
    arguments = list(call.arguments)
    for staged in call.staged:
        server_epoch = b""
        for number, (offset, piece) in enumerate(pieces(staged.parts)):
            server_epoch = await run("stage", [staged.key], [offset, piece, server_epoch, STAGED_MS])
            if number and not server_epoch:
                break
        arguments[1 + staged.position] = server_epoch
    return arguments


async def discard(redis: Any, call: ScriptCall) -> None:
    """Deletes staged parts that were not taken; if the server does not answer, they expire by their time to
    live.
    """
    with suppressed_trouble():
        async with asyncio.timeout(DISCARD_SECONDS_MAX):
            for staged in call.staged:
                await redis.unlink(staged.key)
