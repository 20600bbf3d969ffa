"""Owning a shard: the term, and the scripts that refuse unless term, owner and server epoch are still those
of the takeover.
"""

import re
import secrets
from typing import Any, Final, Literal, NamedTuple, cast

from redis.exceptions import ResponseError

from grabstream.lua.keys import ShardKeys
from grabstream.lua.running import run_script
from grabstream.lua.server import raise_term
from grabstream.models.journal import SIGNED_OWNER, Cursor, is_signed_owner

READ_ENTRIES_MAX: Final = 16
#: The bytes of a damaged value that are shown at most.
SHOWN_MAX: Final = 64
#: A line of the outbox, and the number of seqs that it takes.
OutboxLine = tuple[bytes, int]
#: Numbers as the scripts write them: with at most 16 digits, like all integers that are exact in Lua.
_NUMBER: Final = re.compile(rb"[0-9]{1,16}")
_OWNER: Final = re.compile(rb"[!-~]{0,64}")
_HASH: Final = re.compile(rb"(?:[0-9a-f]{2}){32}")
#: The name of a line in an entry of the outbox.
_FIELD: Final = re.compile(rb"e|[1-9][0-9]{0,8}")

#: Why a shard needs a takeover. `incomplete`: its state does not follow from its events, because it is being
#: rebuilt, or a script was interrupted while it wrote; `outdated`: its keys have an older layout; `fenced`:
#: it decides nothing for another reason.
Fault = Literal["incomplete", "outdated", "fenced", ""]


class SteppedDown(Exception):
    """Another owner has the shard now; nothing was damaged."""


class NotReconciled(Exception):
    """The journal lacks acknowledged events, or contradicts itself: the shard stays fenced until an operator
    repairs that.
    """


class DamagedState(NotReconciled):
    """A field of the shard's hash in Redis is not in the form that the scripts write."""


class NewerProgram(Exception):
    """The shard's keys were written by a newer program; this program must not change them."""


class Ownership(NamedTuple):
    """What every script of an owner checks: its term, its random id, and the server epoch of its takeover."""

    term: int
    owner: str
    server_epoch: str

    @property
    def arguments(self) -> tuple[str, str, str]:
        """The first arguments of the owner's scripts."""
        return (str(self.term), self.owner, self.server_epoch)


class Raised(NamedTuple):
    """The reply of raise_term: the new ownership, and the state of the shard in Redis.

    `alive`: the shard was reconciled in the present server epoch. `form`: `partial` after an interrupted
    rebuild, `outdated` if its keys have an older layout.
    """

    ownership: Ownership
    alive: bool
    seq: int
    form: Literal["complete", "partial", "outdated"]


class Outbox(NamedTuple):
    """The shard's seq, and a bounded number of lines after the requested seq, by their entries; reading ends
    before a hole. An entry divided by the requested seq lacks its first lines.

    `fault`: why the shard needs a takeover; '' if it needs none. `has_hole`: whether an entry follows that
    does not continue these, or that no script writes.
    """

    seq: int
    entries: list[list[OutboxLine]]
    fault: Fault
    has_hole: bool = False

    @property
    def lines(self) -> list[OutboxLine]:
        """The lines of all entries."""
        return [line for entry in self.entries for line in entry]


class OwnedShard:
    """A shard's keys, and the operations of its owner. `redis` must not decode replies."""

    def __init__(self, redis: Any, keys: ShardKeys) -> None:
        self.redis = redis
        self.keys = keys
        #: Why the owner runs plain scripts, in words; '' if it uses functions.
        self.plain = ""

    async def is_signed(self) -> bool:
        """Whether the owner of the last checkpoint signs its records. A hint: the journal decides."""
        owner = await self.redis.hget(self.keys.state, "journaled_owner") or b""
        return is_signed_owner(owner.decode(errors="replace"))

    async def raise_term(self, floor: int, signs: bool = False) -> Raised:
        """The first step of a takeover: a term above `floor`; raises NewerProgram and DamagedState. The
        server then has the library, unless the shard records why functions cannot be used. The id of an owner
        that `signs` shows it.
        """
        owner = secrets.token_hex(8) + (SIGNED_OWNER if signs else "")
        try:
            reply, self.plain = await raise_term(self.redis, self.keys.state, floor, owner)
        except ResponseError as error:
            if str(error).startswith("NEWER"):
                raise NewerProgram(str(error).removeprefix("NEWER ")) from None
            if str(error).startswith("DAMAGED"):
                raise DamagedState(str(error).removeprefix("DAMAGED ")) from None
            raise
        term, server_epoch, reconciled_epoch, seq, form = reply
        ownership = Ownership(int(term), owner, server_epoch.decode())
        try:
            number = self._number("seq", seq)
        except DamagedState as error:
            await self.fence(ownership, str(error))
            raise
        form_name = cast(Literal["complete", "partial", "outdated"], form.decode())
        return Raised(ownership, reconciled_epoch == server_epoch, number, form_name)

    def _number(self, field: str, value: bytes | None) -> int:
        """A number of the shard's hash; raises DamagedState."""
        return int(self._checked(field, value, _NUMBER, "a number"))

    def _checked(self, field: str, value: bytes | None, form: re.Pattern[bytes], what: str) -> bytes:
        if value is None or not form.fullmatch(value):
            shown = "missing" if value is None else repr(value[:SHOWN_MAX].decode(errors="replace"))
            raise DamagedState(
                f"the field {field} of shard {self.keys.shard} in Redis ({self.keys.state}) is {shown}, "
                f"which is not {what}: delete the field "
                f"{'journaled_seq' if field.startswith('journaled_') else field}, then the shard is rebuilt "
                "from the journal"
            )
        return value

    async def run(self, name: str, keys: list[Any], ownership: Ownership, *arguments: object) -> Any:
        """Runs a script of the owner; raises SteppedDown if the shard has another owner."""
        try:
            return await run_script(self.redis, name, keys, (*ownership.arguments, *arguments))
        except ResponseError as error:
            if str(error).startswith("LOST"):
                raise SteppedDown(str(error)) from None
            raise

    async def fence(self, ownership: Ownership, reason: str) -> None:
        """Stops all deciding in the shard."""
        await self.run("fence", [self.keys.state], ownership, reason)

    async def read(self, ownership: Ownership, command: str, key: str | None, *arguments: object) -> Any:
        """The reply of a reading command from the server of the takeover; raises SteppedDown. After a
        failover, the client's other connections may lead to another server, whose state would be taken for
        that of this one.
        """
        keys = [self.keys.state] if key is None else [self.keys.state, key]
        return await self.run("read", keys, ownership, command, len(arguments), *arguments)

    async def checkpoint(self, ownership: Ownership) -> Cursor:
        """The cursor of the last trim; the journal's beginning if there was none. Raises DamagedState."""
        fields = await self.read(
            ownership, "HMGET", self.keys.state,
            "journaled_seq", "journaled_head", "journaled_offset", "journaled_term", "journaled_owner",
        )  # fmt: skip
        if fields[0] is None:
            return Cursor()
        seq, head, offset, term, owner = fields
        return Cursor(
            self._number("journaled_seq", seq),
            bytes.fromhex(self._checked("journaled_head", head, _HASH, "a hash").decode()),
            self._number("journaled_offset", offset),
            self._number("journaled_term", term),
            self._checked("journaled_owner", owner, _OWNER, "the id of an owner").decode(),
        )

    async def read_outbox(self, ownership: Ownership, after_seq: int) -> Outbox:
        """The entries after a seq. Raises DamagedState."""
        reply = await self.run(
            "read_outbox", [self.keys.state, self.keys.outbox], ownership, after_seq + 1, READ_ENTRIES_MAX
        )
        return await self._outbox(ownership, after_seq, reply)

    async def trim(self, ownership: Ownership, cursor: Cursor) -> None:
        """Removes the events journaled up to the cursor from the outbox, and announces them; the cursor
        becomes the checkpoint, with the term and owner in force there. (With others, a taker would ignore the
        records that follow.)
        """
        await self._trim(ownership, cursor, 0)

    async def trim_and_read(self, ownership: Ownership, cursor: Cursor) -> Outbox:
        """Trims, and returns the entries after the cursor, in one call. Raises DamagedState."""
        return await self._outbox(
            ownership, cursor.seq, await self._trim(ownership, cursor, READ_ENTRIES_MAX)
        )

    async def _trim(self, ownership: Ownership, cursor: Cursor, entries_max: int) -> Any:
        """The reply to the first call; further calls read nothing, and trim the rest."""
        keys = [self.keys.state, self.keys.outbox]
        arguments = (
            cursor.seq, cursor.head.hex(), cursor.next_offset, self.keys.channel, cursor.term, cursor.owner
        )  # fmt: skip
        reply = await self.run("trim", keys, ownership, *arguments, entries_max)
        is_more = reply[3]
        while is_more:
            is_more = (await self.run("trim", keys, ownership, *arguments, 0))[3]
        return reply

    async def _outbox(self, ownership: Ownership, after_seq: int, reply: Any) -> Outbox:
        entries: list[list[OutboxLine]] = []
        next_seq, has_hole = after_seq + 1, False
        for entry_id, fields in reply[1]:
            seq = int(entry_id.partition(b"-")[0])
            has_hole = seq > next_seq or not all(map(_FIELD.fullmatch, fields[::2]))
            if has_hole:
                break
            lines = []
            for name, text in zip(fields[::2], fields[1::2], strict=True):
                seqs = 1 if name == b"e" else int(name)
                if seq == next_seq:
                    lines.append((text, seqs))
                    next_seq += seqs
                seq += seqs
            if lines:
                entries.append(lines)
            elif seq > next_seq:
                has_hole = True  # the seq is within a run, which no journal divides
                break
        try:
            seq_of_shard = self._number("seq", reply[0])
        except DamagedState as error:
            await self.fence(ownership, str(error))
            raise
        return Outbox(seq_of_shard, entries, cast(Fault, reply[2].decode()), has_hole)
