"""The cursor of a program that reads past events: its position in each shard, as a text that it stores."""

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from grabstream.models.journal import Cursor

#: 200 bytes a shard, and far more shards than any system has.
CURSOR_BYTES_MAX: Final = 1_048_576

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class _ShardPosition(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The position of a program in a shard: it has all events up to `seq`. `line_seq`, `head`, `next_offset`,
    `term` and `owner` are the reader's cursor after the last whole line up to there.
    """

    seq: _Count
    line_seq: _Count
    head: _Hash
    next_offset: _Count = 0
    term: _Count = 0
    owner: Annotated[str, msgspec.Meta(max_length=1_000)] = ""


class _Text(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The stored form."""

    v: Annotated[int, msgspec.Meta(ge=1, le=1)]
    prefix: str = ""
    shards: _Count = 0
    journal: str = ""
    positions: dict[str, _ShardPosition] = {}


class EventCursor:
    """The position of a program in the history, shard by shard. `encode` returns it as a text of some hundred
    bytes, which `decode` reads.

    It may be after any event, also within a run of grabs. It belongs to one system, and is valid for any
    source of its history. It does not record what the program reads: with another `offer` or `user`, start
    with a new one.
    """

    def __init__(self) -> None:
        self._positions: dict[int, tuple[int, Cursor]] = {}
        self._system = ("", 0, "")

    @classmethod
    def decode(cls, text: str) -> "EventCursor":
        """The cursor that `encode` returned as a text; raises ValueError for any other text."""
        if len(text) > CURSOR_BYTES_MAX:
            raise ValueError(f"cursor: at most {CURSOR_BYTES_MAX:,} characters; use what encode() returned")
        try:
            stored = msgspec.json.decode(text, type=_Text)
            cursor = cls()
            for shard, at in stored.positions.items():
                if at.seq < at.line_seq:
                    raise ValueError(f"shard {shard}: seq is before line_seq")
                line = Cursor(at.line_seq, bytes.fromhex(at.head), at.next_offset, at.term, at.owner)
                cursor._positions[int(shard)] = (at.seq, line)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ValueError(f"cursor: {error}; use what encode() returned") from None
        cursor._system = (stored.prefix, stored.shards, stored.journal)
        return cursor

    def encode(self) -> str:
        """The cursor as a text, to be stored together with the results of the events."""
        prefix, shards, journal = self._system
        positions = {
            str(shard): _ShardPosition(
                seq, line.seq, line.head.hex(), line.next_offset, line.term, line.owner
            )
            for shard, (seq, line) in sorted(self._positions.items())
        }
        return msgspec.json.encode(_Text(1, prefix, shards, journal, positions)).decode()

    def seq(self, shard: int) -> int:
        """The last seq of a shard that the program has; 0 if it has none."""
        return self._positions[shard][0] if shard in self._positions else 0

    def positions(self) -> Mapping[int, Cursor]:
        """The cursor after the last whole line, by shard."""
        return {shard: line for shard, (_, line) in self._positions.items()}

    def move(self, shard: int, seq: int, line: Cursor) -> None:
        """Moves the cursor: the program has all events up to `seq`, and all lines up to `line`."""
        self._positions[shard] = (seq, line)

    def require_system(self, prefix: str, shards: int, journal: str | None) -> None:
        """Raises ValueError if the cursor belongs to another system or journal (Kafka's id of the topic; None
        if it is not known); takes this one if the cursor is new.
        """
        if self._system[1] and (
            self._system[:2] != (prefix, shards)
            or (journal and self._system[2] and journal != self._system[2])
        ):
            named = "prefix {}, {} shards, journal {}".format(*self._system)
            raise ValueError(
                f"cursor: it belongs to another system ({named}), not to prefix {prefix} with {shards} "
                f"shards and journal {journal}: start with a new EventCursor()"
            )
        self._system = (prefix, shards, journal or self._system[2])
