"""Proofs that one grab is in the history of a checkpoint. They show the event of this grab, and hashes."""

from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from psycopg import AsyncConnection

from grabstream.models.bounds import EVENT_LINE_BYTES_MAX
from grabstream.models.events import AnyEvent, GrabGranted, GrabHeld, decode_event
from grabstream.models.identifiers import campaign_of, shard_of
from grabstream.models.merkle import SIBLINGS_MAX, leaf_hash, root_of_proof
from grabstream.models.merkle import Path as MerklePath
from grabstream.ops.verification.checkpoints import Checkpoint, ShardHead, require_signed, texts_of
from grabstream.ops.verification.evidence import FILE_BYTES_MAX, BadCheckpoint, read_bounded
from grabstream.settings import Settings

#: A checkpoint, an event whose text may be escaped, and hashes.
PROOF_BYTES_MAX: Final = FILE_BYTES_MAX + 2 * EVENT_LINE_BYTES_MAX


class NotProved(Exception):
    """There is no proof, or it proves something else; the text says what is wrong."""


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The text of an event, and the hashes that lead from it to the root of its shard in a checkpoint."""

    type: Literal["grabstream.proof"]
    v: Literal[1]
    event: str
    shard: int
    seq: int
    path: Annotated[
        list[Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]], msgspec.Meta(max_length=SIBLINGS_MAX)
    ]
    checkpoint: Checkpoint


# -- making --------------------------------------------------------------------------------------------------


async def make_proof(
    settings: Settings, connection: AsyncConnection[Any], checkpoint: Checkpoint, offer: str, user: str,
    grab: str,
) -> Proof:  # fmt: skip
    """The proof that a user's grab is in the history of a checkpoint. Reads the events of its shard up to the
    checkpoint, in bounded memory. Raises NotProved, and BadCheckpoint when the history is another one.
    """
    shard = shard_of(campaign_of(offer), settings.shards)
    head = checkpoint.shards[shard]
    seq = await _seq_of(connection, shard, offer, user, grab)
    if seq is None:
        raise NotProved(f"{offer}: {user} has no grab {grab}")
    if seq > head.seq:
        raise NotProved(
            f"the grab is event {seq} of shard {shard}, the checkpoint is at {head.seq}: use a newer one"
        )
    made, event = MerklePath(seq - 1, head.seq), b""
    async with aclosing(texts_of(connection, shard, head.seq, bytes.fromhex(head.head))) as texts:
        async for text in texts:
            made.add(leaf_hash(text))
            event = text if made.root.size == seq else event
    if made.root.hash().hex() != head.root:
        raise BadCheckpoint(f"shard {shard}: the events do not lead to the root of the checkpoint")
    path = [one.hex() for one in made.hashes()]
    return Proof("grabstream.proof", 1, event.decode(), shard, seq, path, checkpoint)


async def _seq_of(
    connection: AsyncConnection[Any], shard: int, offer: str, user: str, grab: str
) -> int | None:
    """The seq of the event that granted or held a grab."""
    rows = await connection.execute(
        "SELECT seq, body FROM events WHERE shard = %s AND offer = %s "
        "AND type IN ('grab.granted', 'grab.held') AND position(%s IN body) > 0 ORDER BY seq",
        (shard, offer, f'"grab":"{grab}","user":"{user}"'),
    )
    for seq, body in await rows.fetchall():
        # Attributes of a grab may have the same text.
        event = decode_event(body.encode())
        if isinstance(event, GrabGranted | GrabHeld) and (event.user, event.grab) == (user, grab):
            return int(seq)
    return None


# -- checking ------------------------------------------------------------------------------------------------


def read_proof(path: Path) -> Proof:
    """The proof in a file; raises NotProved when it is not one."""
    try:
        return msgspec.json.decode(read_bounded(path, PROOF_BYTES_MAX), type=Proof)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotProved(f"{path} is not a proof: {error}") from None


def check_proof(proof: Proof) -> GrabGranted | GrabHeld:
    """The event that a proof proves. Raises NotProved or BadCheckpoint, which name what is wrong."""
    try:
        require_signed(proof.checkpoint)
    except BadCheckpoint as error:
        raise BadCheckpoint(f"the checkpoint of the proof: {error}") from None
    head = _head_of(proof)
    root = root_of_proof(
        leaf_hash(proof.event.encode()), proof.seq - 1, head.seq, [bytes.fromhex(one) for one in proof.path]
    )
    if root is None or root.hex() != head.root:
        raise NotProved(
            f"the event is not number {proof.seq} of shard {proof.shard} in this checkpoint: the proof was "
            "altered"
        )
    try:
        event: AnyEvent = decode_event(proof.event.encode())
    except msgspec.DecodeError as error:
        raise NotProved(f"the event cannot be read by this release: {error}") from None
    if not isinstance(event, GrabGranted | GrabHeld):
        raise NotProved(f"the event is not a grab, but {event.__struct_config__.tag}")
    return event


def _head_of(proof: Proof) -> ShardHead:
    for head in proof.checkpoint.shards:
        if head.shard == proof.shard:
            return head
    raise NotProved(f"the checkpoint of the proof has no shard {proof.shard}")
