"""Owning a shard: the term, and the scripts that do nothing unless term, owner and the server's life are
still those of the takeover.
"""

import secrets
from typing import Any, Final, Literal, NamedTuple, cast

from redis.exceptions import ResponseError

from grabstream.lua.gate.calls import run_script
from grabstream.lua.keys import ShardKeys
from grabstream.models.journal import Cursor

READ_ENTRIES_MAX: Final = 16


class SteppedDown(Exception):
    """Another owner has the shard now; nothing was harmed."""


class NotReconciled(Exception):
    """The journal lacks what was acknowledged, or contradicts itself: the shard stays fenced until somebody
    mends that.
    """


class NewerProgram(Exception):
    """The shard's keys were written by a newer program: this one must leave it alone."""


class Ownership(NamedTuple):
    """What binds every script of an owner: its term, its random id, and the server's life it took over
    under.
    """

    term: int
    owner: str
    server_epoch: str

    @property
    def arguments(self) -> tuple[str, str, str]:
        """The first arguments of the owner's scripts."""
        return (str(self.term), self.owner, self.server_epoch)


class Raised(NamedTuple):
    """The reply of raise_term: the new ownership, and how Redis has the shard.

    `alive` when it was reconciled under this very life of the server. `form`: partial when a rebuild was
    broken off, outdated when its keys have an older layout.
    """

    ownership: Ownership
    alive: bool
    seq: int
    form: Literal["complete", "partial", "outdated"]


class Outbox(NamedTuple):
    """The shard's seq, and the lines that follow the seq asked for: a bounded number, fewer than there are
    where a hole is.

    `incomplete` when the shard's state is not what its events lead to: it is being rebuilt, or a script broke
    off while it wrote.
    """

    seq: int
    lines: list[bytes]
    incomplete: bool


class OwnedShard:
    """A shard's keys, and what its owner does with them. `redis` must not decode replies."""

    def __init__(self, redis: Any, keys: ShardKeys) -> None:
        self.redis = redis
        self.keys = keys

    async def raise_term(self, floor: int) -> Raised:
        """The first step of a takeover: a term above `floor`; raises NewerProgram."""
        owner = secrets.token_hex(8)
        try:
            reply = await run_script(self.redis, "raise_term", [self.keys.state], [floor, owner])
        except ResponseError as error:
            if str(error).startswith("NEWER"):
                raise NewerProgram(str(error).removeprefix("NEWER ")) from None
            raise
        term, server_epoch, reconciled_epoch, seq, form = (value.decode() for value in reply)
        known = cast(Literal["complete", "partial", "outdated"], form)
        return Raised(
            Ownership(int(term), owner, server_epoch), reconciled_epoch == server_epoch, int(seq), known
        )

    async def run(self, name: str, keys: list[str], own: Ownership, *arguments: object) -> Any:
        """A script of the owner; raises SteppedDown when another has the shard."""
        try:
            return await run_script(self.redis, name, keys, (*own.arguments, *arguments))
        except ResponseError as error:
            if str(error).startswith("LOST"):
                raise SteppedDown(str(error)) from None
            raise

    async def fence(self, own: Ownership, reason: str) -> None:
        """From here on nothing is decided in the shard."""
        await self.run("fence", [self.keys.state], own, reason)

    async def checkpoint(self) -> Cursor:
        """Where the last trim was, as a cursor; the journal's beginning when there was none."""
        fields = await self.redis.hmget(
            self.keys.state,
            ["journaled_seq", "journaled_head", "journaled_offset", "journaled_term", "journaled_owner"],
        )
        if fields[0] is None:
            return Cursor()
        seq, head, offset, term, owner = (value.decode() for value in fields)
        return Cursor(int(seq), bytes.fromhex(head), int(offset), int(term), owner)

    async def read_outbox(self, own: Ownership, behind_seq: int) -> Outbox:
        """The lines that follow `behind_seq`."""
        reply = await self.run(
            "read_outbox", [self.keys.state, self.keys.outbox], own, behind_seq + 1, READ_ENTRIES_MAX
        )
        lines: list[bytes] = []
        for entry_id, fields in reply[1]:
            first = int(entry_id.partition(b"-")[0])
            entry = fields[1::2]
            known = behind_seq + len(lines) - first + 1
            if known < 0:
                break
            lines.extend(entry[known:])
        return Outbox(int(reply[0]), lines, bool(reply[2]))

    async def trim(self, own: Ownership, cursor: Cursor) -> None:
        """What is journaled up to the cursor leaves the outbox and is announced; the cursor is the new
        checkpoint.
        """
        arguments = (cursor.seq, cursor.head.hex(), cursor.next_offset, self.keys.channel)
        while (await self.run("trim", [self.keys.state, self.keys.outbox], own, *arguments))[2]:
            pass
