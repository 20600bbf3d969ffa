"""Parts of large envelopes, brought to Redis in pieces: no call may take as long as writing megabytes takes.

For `open` they are staged under a name drawn for one attempt, which the deciding call renames into the
offer's key. They count only in the server's life under which all of them were staged; what nobody takes is
deleted after the call, or by its time to live.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from grabstream.lua.trouble import suppressed_trouble

#: Bytes of an envelope's parts that may go with the call that opens their offer (8,000 parts); more are
#: brought before it.
INLINE_BYTES_MAX: Final = 48_000
PIECE_BYTES: Final = 131_072
#: How long staged parts stay when nobody takes them, from the last piece on.
STAGED_MS: Final = 60_000
DISCARD_SECONDS_MAX: Final = 1.0


class Staged(NamedTuple):
    """Parts to be brought to a key before a call, and their place (from 0) among the texts of parts that are
    the call's arguments.
    """

    place: int
    key: str
    parts: bytes


class ScriptCall(NamedTuple):
    """Keys after the shard's own, and arguments: one packed text, then a text of parts for each offer to
    open.
    """

    keys: list[str]
    arguments: list[bytes]
    staged: Sequence[Staged] = ()


#: Runs a script: name, keys, arguments.
RunScript = Callable[[str, Sequence[str], Sequence[object]], Awaitable[Any]]


def pieces(parts: bytes) -> Iterator[tuple[int, bytes]]:
    """Offsets and pieces, the last piece first: writing that one makes room for all, and no later one has to
    move what is there.
    """
    for offset in range((len(parts) - 1) // PIECE_BYTES * PIECE_BYTES, -1, -PIECE_BYTES):
        yield offset, parts[offset : offset + PIECE_BYTES]


async def stage(run: RunScript, batch: ScriptCall) -> list[bytes]:
    """Stages what a batch has to; returns its arguments, which say under which life, or '' where the pieces
    were lost meanwhile.
    """
    arguments = list(batch.arguments)
    for staged in batch.staged:
        server_epoch = b""
        for number, (offset, piece) in enumerate(pieces(staged.parts)):
            server_epoch = await run("stage", [staged.key], [offset, piece, server_epoch, STAGED_MS])
            if number and not server_epoch:
                break
        arguments[1 + staged.place] = server_epoch
    return arguments


async def discard(redis: Any, batch: ScriptCall) -> None:
    """Deletes what was staged and not taken; a server that does not answer does so by itself."""
    with suppressed_trouble():
        async with asyncio.timeout(DISCARD_SECONDS_MAX):
            for staged in batch.staged:
                await redis.unlink(staged.key)
