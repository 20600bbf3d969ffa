"""Checkpoints: signed heads of all shards, against which a later history can be compared, and Merkle roots,
against which single grabs are proved.

A head is the hash of the chain after an event, so it represents all events up to there. A root is that of the
tree whose leaves are the texts of the same events as `grab.events` has them (`models/merkle.py`).
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from psycopg import AsyncConnection

from grabstream.gate.calls import now_ms
from grabstream.models.bounds import counted, quoted
from grabstream.models.journal import Corrupt, Cursor, Gap
from grabstream.models.merkle import Root, leaf_hash
from grabstream.ops.verification.checks import Say, VerificationCheck
from grabstream.ops.verification.evidence import BadCheckpoint, read_evidence
from grabstream.ops.verification.signatures import IgnoredRecords
from grabstream.projections import cursors
from grabstream.projections.cursors import single_facts
from grabstream.settings import BadSettings, Settings
from grabstream.streams.buckets import BucketAddress
from grabstream.streams.history.sources import AuditSource, Start
from grabstream.streams.journal import open_reader
from grabstream.streams.journal_keys import journal_keys
from grabstream.streams.topics import Topics

PURPOSE: Final = "grabstream checkpoint 1"

_Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class ShardHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The position of a shard: the seq of its last event, the hash of the chain and the root of the tree
    there, and the offset of the journal after it.
    """

    shard: _Number
    seq: _Number
    head: _Hash
    offset: _Number
    root: _Hash


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The heads of all shards of a system, with the time in ms since 1970 UTC, and their signer."""

    type: Literal["grabstream.checkpoint"]
    v: Literal[1]
    journal: Annotated[str, msgspec.Meta(max_length=255)]
    at: _Number
    shards: Annotated[list[ShardHead], msgspec.Meta(min_length=1, max_length=4_096)]
    key: Annotated[str, msgspec.Meta(max_length=64)]
    sig: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{128}$")]

    @property
    def signed_text(self) -> bytes:
        """What the signature covers: a line for the purpose, the journal and the time, and one for each
        shard.
        """
        lines = [PURPOSE, self.journal, str(self.at)]
        lines += [f"{one.shard} {one.seq} {one.head} {one.offset} {one.root}" for one in self.shards]
        return "\n".join(lines).encode()


# -- making --------------------------------------------------------------------------------------------------


class NewCheckpoint(NamedTuple):
    """A new checkpoint, and the records of the journal before it that do not count."""

    checkpoint: Checkpoint
    ignored: IgnoredRecords


async def make_checkpoint(
    settings: Settings, books: AsyncConnection[Any], report: Say = lambda line: None
) -> NewCheckpoint:
    """The checkpoint of a system at the end of its audit trail, signed with the first key. Reads every event
    of the trail, and every record of the journal, in bounded memory. Raises BadSettings without a key,
    BadCheckpoint when the trail contradicts itself, or its end is not in the journal.
    """
    signer = journal_keys().signer
    if signer is None:
        raise BadSettings("GRAB_JOURNAL_KEYS is not set: a checkpoint is signed with the first of these keys")
    heads = []
    ignored = IgnoredRecords()
    ends = await cursors.load(books, "audit")
    async with open_reader(settings.brokers, Topics(settings.prefix).journal) as reader:
        for shard in range(settings.shards):
            end = ends.get(shard, Cursor())
            if end.seq and not await reader.has_head(shard, end):
                raise BadCheckpoint(
                    f"shard {shard}: the audit trail ends at seq {end.seq}, and the journal has no event "
                    "with its hash: run `grabstream verify`"
                )
            report(f"reading shard {shard} of {settings.shards}, {counted(end.seq, 'events')}")
            await ignored.read(reader, shard, end.next_offset)
            root = Root()
            async with aclosing(texts_of(books, shard, end.seq, end.head)) as texts:
                async for text in texts:
                    root.add(leaf_hash(text))
            heads.append(ShardHead(shard, end.seq, end.head.hex(), end.next_offset, root.hash().hex()))
    journal = Topics(settings.prefix).journal
    made = Checkpoint("grabstream.checkpoint", 1, journal, now_ms(), heads, signer.key_id, "0" * 128)
    return NewCheckpoint(msgspec.structs.replace(made, sig=signer.sign(made.signed_text)), ignored)


async def texts_of(
    books: AsyncConnection[Any], shard: int, seq: int, head: bytes
) -> AsyncGenerator[bytes, None]:
    """The texts of the events of a shard from the first up to a seq, each as `grab.events` has it; raises
    BadCheckpoint when they do not lead to the head there.
    """
    after = Cursor()
    try:
        chunks = AuditSource(books).chunks(shard, Start(Cursor(), seq))
        async with aclosing(chunks) as reading:
            async for chunk in reading:
                after = chunk.after
                for fact in single_facts(chunk.facts):
                    yield fact.line
    except (Corrupt, Gap) as error:
        raise BadCheckpoint(str(error)) from None
    if (after.seq, after.head) != (seq, head):
        raise BadCheckpoint(
            f"audit trail, shard {shard}: its events do not lead to the hash at seq {seq}: the history was "
            "rewritten"
        )


# -- reading -------------------------------------------------------------------------------------------------


class Given(NamedTuple):
    """A checkpoint that was read, and remarks about its file."""

    checkpoint: Checkpoint
    notes: tuple[str, ...] = ()


def read_checkpoint(path: Path | BucketAddress, settings: Settings) -> Given:
    """The checkpoint in a file, on disk or in a bucket, whose signature is that of a known key; raises
    BadCheckpoint and StoreError.
    """
    read = read_evidence(path, settings.store_login)
    try:
        found = msgspec.json.decode(read.content, type=Checkpoint)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"{path} is not a checkpoint: {error}") from None
    try:
        require_signed(found)
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{path}: {error}") from None
    journal = Topics(settings.prefix).journal
    if found.journal != journal:
        raise BadCheckpoint(
            f"{path} is of the journal {quoted(found.journal)}, this system's is {journal}: set GRAB_PREFIX"
        )
    if [one.shard for one in found.shards] != list(range(settings.shards)):
        raise BadCheckpoint(f"{path} has other shards than this system, which has {settings.shards}")
    return Given(found, read.notes)


def require_signed(checkpoint: Checkpoint) -> None:
    """Raises BadCheckpoint unless a known key signed the checkpoint, and it is unchanged."""
    keys = journal_keys()
    if not keys.public:
        raise BadCheckpoint("no keys are known to check its signature with: set GRAB_JOURNAL_PUBLIC_KEYS")
    if checkpoint.key not in keys.public:
        raise BadCheckpoint(
            f"it is signed by the key {quoted(checkpoint.key)}, which GRAB_JOURNAL_PUBLIC_KEYS does not have"
        )
    if not keys.verifies(checkpoint.key, checkpoint.sig, checkpoint.signed_text):
        raise BadCheckpoint(f"it was altered: its signature is not that of the key {checkpoint.key}")


class Against:
    """Compares a journal, while it is read, with a checkpoint."""

    def __init__(self, given: Given) -> None:
        self._heads = {one.shard: one for one in given.checkpoint.shards}
        self._notes = list(given.notes)
        self._found: dict[int, str] = {}

    def take(self, shard: int, seq: int, head: bytes) -> None:
        """Takes the hash of the chain after a line."""
        wanted = self._heads.get(shard)
        if wanted is not None and wanted.seq == seq:
            self._found[shard] = head.hex()

    def check(self, ends: dict[int, int]) -> VerificationCheck:
        """Whether every shard had this history, given the last seq of each now."""
        problems = []
        for shard, wanted in self._heads.items():
            if not wanted.seq:
                continue
            found = self._found.get(shard)
            if found is None and ends.get(shard, 0) < wanted.seq:
                problems.append(
                    f"shard {shard}: the history ends at seq {ends.get(shard, 0)}, the checkpoint is at seq "
                    f"{wanted.seq}: events were removed"
                )
            elif found != wanted.head:
                problems.append(
                    f"shard {shard}: the history up to seq {wanted.seq} was rewritten: the hash there is "
                    f"{(found or 'none')[:16]}…, the checkpoint has {wanted.head[:16]}…"
                )
        return VerificationCheck(
            "history is that of the checkpoint", len(self._heads), "shards", problems, self._notes
        )
