"""Counts what relays signed in the journal, and what does not count because none of them did."""

from contextlib import aclosing
from typing import Final

from grabstream.models.bounds import counted
from grabstream.models.journal import Block, Cursor, is_signed_owner
from grabstream.ops.verification.checks import VerificationCheck
from grabstream.streams.journal import JournalReader, JournalRecord
from grabstream.streams.journal_keys import NOT_SIGNED, journal_keys

#: Records of a shard that are named; the others are counted.
NAMED_MAX: Final = 5


class IgnoredRecords:
    """Records of the journal that do not count because no known relay signed them."""

    def __init__(self) -> None:
        self._named: dict[int, list[str]] = {}
        #: How many there are, by shard.
        self.counts: dict[int, int] = {}

    def add(self, shard: int, offset: int, why: str) -> None:
        """Counts a record."""
        self.counts[shard] = self.counts.get(shard, 0) + 1
        named = self._named.setdefault(shard, [])
        if len(named) < NAMED_MAX:
            named.append(f"{offset} ({why or NOT_SIGNED})")

    async def read(self, reader: JournalReader, shard: int, to_offset: int) -> None:
        """Counts those of a shard before an offset that the journal still has. An unsigned record does not
        count after the first signed one, a wrongly signed one nowhere.
        """
        has_begun = False
        records = reader.read(shard, await reader.beginning(shard), to_offset)
        async with aclosing(records) as lists:
            async for found in lists:
                for record in found:
                    authority, why = reader.authority(record)
                    has_begun = has_begun or authority == "signed"
                    if authority == "forged" or (authority == "unsigned" and has_begun):
                        self.add(shard, record.offset, why)

    def in_words(self) -> list[str]:
        """A line for each shard with ignored records."""
        lines = []
        for shard, named in sorted(self._named.items()):
            ignored = self.counts[shard]
            more = ignored - len(named)
            lines.append(
                f"shard {shard}: {counted(ignored, 'records')} {'does' if ignored == 1 else 'do'} "
                "not count, at journal offset " + ", ".join(named) + (f", and {more:,} more" if more else "")
            )
        return lines


class Signatures:
    """What `verify` says about the signatures in the journal. Records that no known relay signed are notes,
    not problems: they change nothing, and stay in the journal permanently.
    """

    def __init__(self) -> None:
        self._signed = 0
        self._begun: set[int] = set()
        self._ignored = IgnoredRecords()

    def take(self, record: JournalRecord, cursor: Cursor, block: Block) -> None:
        """Takes a record, its block, and the cursor before it."""
        if block.authority == "unchecked" and is_signed_owner(block.owner):
            self._begun.add(record.shard)
        self._signed += block.authority == "signed"
        if cursor.ignores(block):
            self._ignored.add(record.shard, record.offset, block.fault)

    def checks(self) -> list[VerificationCheck]:
        """The check; none if nothing is signed and no keys are known."""
        name, notes = "signed records are of known relays", []
        if not journal_keys().public:
            if not self._begun:
                return []
            notes = [
                f"not checked: shards {', '.join(map(str, sorted(self._begun)))} have signed records; set "
                "GRAB_JOURNAL_PUBLIC_KEYS"
            ]
        return [VerificationCheck(name, self._signed, "records", [], notes + self._ignored.in_words())]
