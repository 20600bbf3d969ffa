"""The columns of an archive's files (`archive_sink.py`): what an analyst asks for, next to the text of a
line.

Arrow reads the fields from the texts, in C++: no line is decoded, and no Python object is made for a value.
It knows neither upcasters nor versions to come. So it reads only lines of the versions whose texts have the
fields of the decoded events under the same names. If a part of a file has any other line, its lines are
decoded, and the columns are made from the events. A part with a line that contradicts its place in the
journal takes the second way too, which refuses it. Both ways give the same values
(`test_archive_columns.py`).
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, get_args

import msgspec

from grabstream.models.events import LineEvent
from grabstream.models.journal import LINE_BEGINS, Corrupt
from grabstream.models.runs import LINE_VERSIONS, RUN_BEGINS, RUN_TYPES, AnyRun, GrantedRun, HeldRun

HASH_BYTES: Final = 32
#: What an operator does about a line that no reader can decode.
ONCE_SET_ASIDE: Final = "Once it is set aside (`grabstream set-aside`), it is exported as text"

if TYPE_CHECKING:
    from grabstream.projections.cursors import Fact


class EventPart(NamedTuple):
    """Consecutive lines of a shard whose chain is verified: the seq before the first, the lines joined by
    newlines, their hashes, and their last seqs (8 bytes each, as `array` has them), as bytes that pass from
    process to process without an object for each line. `set_aside` has the first seqs of lines that operators
    set aside: they need not be readable.
    """

    shard: int
    before_seq: int
    text: bytes
    hashes: bytes
    last_seqs: bytes
    set_aside: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        shard: int,
        before_seq: int,
        lines: Iterable[bytes],
        hashes: Iterable[bytes],
        last_seqs: Iterable[int],
        set_aside: Iterable[int] = (),
    ) -> Self:
        """The part of these lines."""
        seqs = array("q", last_seqs).tobytes()
        return cls(shard, before_seq, b"\n".join(lines), b"".join(hashes), seqs, tuple(set_aside))

    @property
    def lines(self) -> int:
        """The number of lines."""
        return len(self.hashes) // HASH_BYTES


def _value(name: str) -> Callable[["Fact"], Any]:
    return lambda fact: getattr(fact.event, name, None)


def _column(name: str, column: str) -> Callable[["Fact"], Any]:
    """The values of the grabs of a line: a column of a run, or the one value of an event about a grab."""

    def values(fact: "Fact") -> Any:
        event: Any = fact.event
        if isinstance(event, AnyRun):
            return getattr(event, column)
        value = getattr(event, name, None)
        return None if value is None else (value,)

    return values


#: The columns of a file: name, type, and where its value is from. `day` and `shard` are in the path.
_COLUMNS: Final[tuple[tuple[str, str, Callable[["Fact"], Any]], ...]] = (
    ("seq", "int64", lambda fact: fact.event.seq),
    ("seqs", "int32", lambda fact: fact.event.seqs),
    ("type", "string", lambda fact: fact.event.__struct_config__.tag),
    ("offer", "string", lambda fact: fact.event.offer),
    ("offer_seq", "int64", lambda fact: fact.event.offer_seq),
    ("at", "int64", lambda fact: fact.event.at),
    ("at_time", "time", lambda fact: fact.event.at),
    ("command", "string", _value("command")),
    ("operator", "string", _value("operator")),
    ("grabs", "strings", _column("grab", "grabs")),
    ("users", "strings", _column("user", "users")),
    ("quantities", "int64s", _column("quantity", "given")),
    ("amounts", "int64s", _column("amount", "moved")),
    ("asset", "string", _value("asset")),
    ("place", "int64", _value("place")),
    ("payment", "string", _value("payment")),
    ("paid", "int64", _value("paid")),
    ("currency", "string", _value("currency")),
    ("hash", "hash", lambda fact: fact.hash),
    ("body", "string", lambda fact: fact.line),
)
COLUMN_NAMES: Final = tuple(name for name, *_ in _COLUMNS)
#: The fields that Arrow reads: those above as they are, and the single values and columns of grabs.
_FIELDS: Final = {
    "v": "int64", "shard": "int64",
    **{name: kind for name, kind, _ in _COLUMNS if name not in ("seqs", "at_time", "hash", "body")},
    "grab": "string", "user": "string", "quantity": "int64", "amount": "int64",
}  # fmt: skip
#: Those that runs have. To look for the others takes as long again.
_RUN_FIELDS: Final = {"type"} | _FIELDS.keys() & {*GrantedRun.__struct_fields__, *HeldRun.__struct_fields__}
#: Those that every line has.
_ALWAYS: Final = ("offer", "offer_seq", "at")
#: Values that texts leave out, by type and field: the defaults of the decoded events.
_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    str(event.__struct_config__.tag): {
        field.name: field.default
        for field in msgspec.structs.fields(event)
        if field.name in _FIELDS and not field.required and field.default is not None
    }
    for event in get_args(LineEvent)
}


def schema() -> Any:
    """The schema of a file."""
    import pyarrow as arrow

    types = _types()
    return arrow.schema([(name, types[kind]) for name, kind, _ in _COLUMNS])


def _types() -> dict[str, Any]:
    import pyarrow as arrow

    return {
        "int64": arrow.int64(), "int32": arrow.int32(), "string": arrow.string(),
        "time": arrow.timestamp("ms", tz="UTC"), "hash": arrow.binary(HASH_BYTES),
        "strings": arrow.list_(arrow.string()), "int64s": arrow.list_(arrow.int64()),
    }  # fmt: skip


def table_of(part: EventPart) -> Any:
    """The Arrow table of a part; raises Corrupt if a text has another shard or other seqs, if a number has no
    room in its column, or if Arrow cannot read the lines and one of them cannot be decoded.
    """
    table = None if part.set_aside else from_texts(part)
    return from_events(part) if table is None else table


def from_events(part: EventPart) -> Any:
    """The table, from the decoded events; raises Corrupt like `table_of`. A line that was set aside and
    cannot be decoded has its place, hash and text only.
    """
    import pyarrow as arrow

    hashes = [part.hashes[at : at + HASH_BYTES] for at in range(0, len(part.hashes), HASH_BYTES)]
    lines, first_seq = part.text.split(b"\n"), part.before_seq + 1
    if len(lines) != len(hashes):
        raise Corrupt(f"shard {part.shard}: a line of those from seq {first_seq} on is two lines")
    last_seqs = array("q", part.last_seqs).tolist()
    first_seqs = [first_seq, *(seq + 1 for seq in last_seqs[:-1])]
    facts = _facts(part, first_seqs, lines, hashes)
    if any(fact and fact.event.last_seq != seq for fact, seq in zip(facts, last_seqs, strict=True)):
        raise Corrupt(
            f"shard {part.shard}: the lines from seq {first_seq} on carry other numbers in their text"
        )
    types = _types()
    places = {
        "seq": first_seqs, "hash": hashes,
        "seqs": [last - first + 1 for first, last in zip(first_seqs, last_seqs, strict=True)],
    }  # fmt: skip
    try:
        columns = [
            # The cast checks that the text is UTF-8.
            arrow.array(lines, arrow.binary()).cast(arrow.string())
            if name == "body"
            else arrow.array(
                places.get(name) or [None if fact is None else value(fact) for fact in facts], types[kind]
            )
            for name, kind, value in _COLUMNS
        ]
    except (OverflowError, arrow.ArrowInvalid) as error:
        raise Corrupt(f"shard {part.shard}: a line of those from seq {first_seq} on: {error}") from None
    return arrow.Table.from_arrays(columns, schema=schema())


def _facts(
    part: EventPart, first_seqs: Sequence[int], lines: Sequence[bytes], hashes: Sequence[bytes]
) -> "list[Fact | None]":
    """The lines as facts; None for one that was set aside and cannot be decoded."""
    # Imported here, because few parts need it, and its imports take longer than encoding a file.
    from grabstream.streams.history.sources import decode_verified

    facts: list[Fact | None] = []
    while (done := len(facts)) < len(lines):
        found, error = decode_verified("export", part.shard, first_seqs[done], lines[done:], hashes[done:])
        facts += found
        if error is None:
            break
        if first_seqs[len(facts)] not in part.set_aside:
            raise Corrupt(f"{error}. {ONCE_SET_ASIDE}")
        facts.append(None)
    return facts


def from_texts(part: EventPart) -> Any:
    """The table, from the texts of the lines; None if it cannot be made so."""
    import pyarrow as arrow
    import pyarrow.compute as pc

    types, lines = _types(), part.text.split(b"\n")
    found = _read(part.text, lines)
    if found is None or len(lines) != part.lines or not pc.all(_has_current_version(found)).as_py():
        return None
    is_run = pc.is_in(found["type"], arrow.array(RUN_TYPES))
    for type_, defaults in _DEFAULTS.items():
        for name, default in defaults.items():
            lacks = pc.and_(pc.equal(found["type"], type_), pc.is_null(found[name]))
            found[name] = pc.if_else(lacks, arrow.scalar(default, found[name].type), found[name])
    _make_grab_columns(found, is_run)
    seqs = _seqs(part)
    body = _strings(lines)
    if body is None or not _fits(found, is_run, part.shard, seqs):
        return None
    made = found | {
        "seqs": seqs.taken.cast(types["int32"]),
        "at_time": found["at"].cast(types["time"]),
        "hash": _array_of_bytes(types["hash"], part.hashes),
        "body": body,
    }
    return arrow.Table.from_arrays([made[name] for name in COLUMN_NAMES], schema=schema())


def _read(text: bytes, lines: Sequence[bytes]) -> dict[str, Any] | None:
    """The fields of lines, each an array; None if Arrow cannot read them."""
    import pyarrow as arrow
    from pyarrow import json

    are_runs = _lines_that_begin(text, *RUN_BEGINS) == len(lines)
    # Arrow might read a line as two objects, or as none. Every line must begin one, and the numbers of both
    # are compared below.
    if not (are_runs or _lines_that_begin(text, LINE_BEGINS) == len(lines)):
        return None
    types = _types()
    names = _RUN_FIELDS if are_runs else _FIELDS.keys()
    try:
        read = json.read_json(
            arrow.BufferReader(text),
            # One block, so that no line is divided between two.
            read_options=json.ReadOptions(use_threads=False, block_size=len(text) + 1),
            parse_options=json.ParseOptions(
                explicit_schema=arrow.schema([(name, types[_FIELDS[name]]) for name in names]),
                unexpected_field_behavior="ignore",
            ),
        ).combine_chunks()
    except arrow.ArrowInvalid:
        return None
    if read.num_rows != len(lines):
        return None
    return {
        name: read.column(name).combine_chunks() if name in names else arrow.nulls(len(lines), types[kind])
        for name, kind in _FIELDS.items()
    }


def _lines_that_begin(text: bytes, *begins: bytes) -> int:
    """The number of lines that begin with one of some texts, of which none begins with another."""
    return sum(text.startswith(begin) + text.count(b"\n" + begin) for begin in begins)


def _has_current_version(found: dict[str, Any]) -> Any:
    """Which lines are in the version that they are decoded to."""
    import pyarrow as arrow
    import pyarrow.compute as pc

    at = pc.index_in(found["type"], arrow.array(list(LINE_VERSIONS)))
    return pc.fill_null(pc.equal(found["v"], arrow.array(LINE_VERSIONS.values()).take(at)), False)


def _make_grab_columns(found: dict[str, Any], is_run: Any) -> None:
    """Makes the columns of grabs: those of runs, with what is usual where they are absent, and a list of one
    for events about one grab.
    """
    import pyarrow as arrow
    import pyarrow.compute as pc

    grabs = found["grabs"]
    offsets = arrow.array(range(len(grabs) + 1), arrow.int32())
    ones = arrow.repeat(arrow.scalar(1, arrow.int64()), len(grabs.values))
    usual = arrow.ListArray.from_arrays(grabs.offsets, ones, mask=pc.is_null(grabs))
    found["quantities"] = _coalesce(found["quantities"], usual)
    found["amounts"] = _coalesce(found["amounts"], found["quantities"])
    for column, name in (
        ("grabs", "grab"),
        ("users", "user"),
        ("quantities", "quantity"),
        ("amounts", "amount"),
    ):
        values = found[name]
        if values.null_count < len(values):
            singles = arrow.ListArray.from_arrays(offsets, values, mask=pc.is_null(values))
            found[column] = pc.if_else(is_run, found[column], singles)


def _coalesce(values: Any, otherwise: Any) -> Any:
    """The values, and others in place of NULL: quick where all are NULL, or none, as is usual."""
    import pyarrow.compute as pc

    if not values.null_count:
        return values
    return otherwise if values.null_count == len(values) else pc.coalesce(values, otherwise)


class _Seqs(NamedTuple):
    """The first seqs of lines, and how many seqs they take."""

    first: Any
    taken: Any


def _seqs(part: EventPart) -> _Seqs:
    import pyarrow as arrow
    import pyarrow.compute as pc

    last = _array_of_bytes(arrow.int64(), part.last_seqs)
    before = arrow.concat_arrays([arrow.array([part.before_seq], arrow.int64()), last[:-1]])
    return _Seqs(pc.add(before, 1), pc.subtract(last, before))


def _fits(found: dict[str, Any], is_run: Any, shard: int, seqs: _Seqs) -> bool:
    """Whether lines have what every line has, and the numbers of their places in the journal."""
    import pyarrow.compute as pc

    def all_(values: Any) -> bool:
        return bool(pc.all(pc.fill_null(values, False), min_count=0).as_py())

    if any(found[name].null_count for name in _ALWAYS):
        return False
    if not (all_(pc.equal(found["shard"], shard)) and all_(pc.equal(found["seq"], seqs.first))):
        return False
    for column in ("grabs", "users", "quantities", "amounts"):
        fit = pc.equal(pc.list_value_length(found[column]), seqs.taken)
        if found[column].values.null_count or not all_(pc.if_else(is_run, fit, pc.equal(seqs.taken, 1))):
            return False
    return True


def _array_of_bytes(type_: Any, values: bytes) -> Any:
    """An array of values of a fixed width."""
    import pyarrow as arrow

    count = len(values) * 8 // type_.bit_width
    return arrow.Array.from_buffers(type_, count, [None, arrow.py_buffer(values)])


def _strings(texts: Sequence[bytes]) -> Any:
    """Texts as an array of strings, made without an object for each; None if one is not UTF-8."""
    import pyarrow as arrow

    ends = array("i", accumulate(map(len, texts), initial=0))
    made = arrow.StringArray.from_buffers(len(texts), arrow.py_buffer(ends), arrow.py_buffer(b"".join(texts)))
    try:
        made.validate(full=True)
    except arrow.ArrowInvalid:
        return None
    return made
