"""The options of a replay, recorded with its output: its destination is continued with the same options only,
or it would lack events unnoticed.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from grabstream.models.bounds import quoted
from grabstream.models.calendar import utc_text
from grabstream.streams.durable_files import replace_durably
from grabstream.streams.history.chunks import Point
from grabstream.streams.replaying.selection import Wanted

#: The header of the first record that a replay writes into a partition of a topic, and of appended records.
FILTERS_HEADER: Final = "replay"
#: More names than these are recorded as their number and their SHA-256.
NAMES_MAX: Final = 20
#: A record has about 30 bytes a shard, and at most 3 KiB of names.
FILTERS_BYTES_MAX: Final = 262_144


class Filters(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The options that select the events of a replay: the system, by its prefix and Kafka's id of its journal
    (empty: not known), and the options. `offers` and `users` are texts (empty: all); `first` is its start in
    a shard (absent: at the first event). Its end may change.
    """

    prefix: str
    journal: str = ""
    offers: str = ""
    users: str = ""
    first: dict[int, str] = {}

    def shard_record(self, shard: int) -> bytes:
        """The record for one shard, as JSON."""
        first = {shard: self.first[shard]} if shard in self.first else {}
        return msgspec.json.encode(msgspec.structs.replace(self, first=first))


def filters_of(prefix: str, journal: str, wanted: Wanted, first: Mapping[int, Point]) -> Filters:
    """The filters of a request to a system; `first` are the points at which it begins, by shard."""
    begins = {
        shard: f"{shard}:{point.seq}" if point.at is None else utc_text(point.at)
        for shard, point in first.items()
        if point != Point(seq=1)
    }
    return Filters(prefix, journal, _names(wanted.offers), _names(wanted.users), begins)


def decode_filters(text: bytes) -> Filters:
    """The recorded filters; raises ValueError for another text."""
    if len(text) > FILTERS_BYTES_MAX:
        raise ValueError(f"it has more than {FILTERS_BYTES_MAX:,} bytes")
    try:
        return msgspec.json.decode(text, type=Filters)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{error}; it begins with {quoted(text[:40].decode(errors='replace'))}") from None


def difference(recorded: Filters, asked: Filters, shards: Sequence[int]) -> str | None:
    """The difference between the filters of earlier output and those requested now, in words; None if they do
    not. Starts are compared for these `shards`; journals where both are known.
    """
    pairs = [
        ("GRAB_PREFIX", recorded.prefix, asked.prefix),
        ("journal", recorded.journal or asked.journal, asked.journal or recorded.journal),
        ("--offer", recorded.offers, asked.offers),
        ("--user", recorded.users, asked.users),
        *(("--from", recorded.first.get(shard, ""), asked.first.get(shard, "")) for shard in shards),
    ]
    for option, before, now in pairs:
        if before != now:
            return f"was written {_with(option, before)}, not {_with(option, now)}"
    return None


def filters_file(file: Path) -> Path:
    """Where the filters of a file of lines are recorded."""
    return file.with_name(file.name + ".replay")


def read_filters(file: Path) -> Filters | None:
    """The filters with which a file of lines was written; None if they are not recorded, as by older
    releases. Raises ValueError for another text, and OSError.
    """
    try:
        with filters_file(file).open("rb") as stream:
            return decode_filters(stream.read(FILTERS_BYTES_MAX + 1))
    except FileNotFoundError:
        return None


def write_filters(file: Path, filters: Filters) -> None:
    """Records the filters of a file of lines; raises OSError."""
    path = filters_file(file)
    replace_durably(path, msgspec.json.encode(filters), path.with_name(path.name + ".new"))


def _names(names: Sequence[str]) -> str:
    if len(names) <= NAMES_MAX:
        return ", ".join(names)
    return f"{len(names)} names, SHA-256 {sha256(','.join(names).encode()).hexdigest()}"


def _with(option: str, value: str) -> str:
    return f"with {option} {value}" if value else f"without {option}"
