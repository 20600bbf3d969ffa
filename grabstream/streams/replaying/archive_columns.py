"""The columns of an archive's files (`archive_sink.py`): what an analyst asks for, beside the text of a line.

Arrow reads the fields from the texts, in C++ and beside the thread that reads on: it makes no Python objects,
and takes a fifth of the time. It knows neither upcasters nor versions to come. So it reads only lines of the
versions whose texts have the fields of the decoded events under the same names; a part of a file that has any
other line is made from the decoded events. Both ways give the same values (`test_archive_columns.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, get_args

import msgspec

from grabstream.models.events import LineEvent
from grabstream.models.journal import Corrupt
from grabstream.models.runs import LINE_VERSIONS, RUN_TYPES, AnyRun
from grabstream.projections.cursors import Fact


def _value(name: str) -> Callable[[Fact], Any]:
    return lambda fact: getattr(fact.event, name, None)


def _column(name: str, column: str) -> Callable[[Fact], Any]:
    """The values of the grabs of a line: a column of a run, or the one value of an event about a grab."""

    def values(fact: Fact) -> Any:
        event: Any = fact.event
        if isinstance(event, AnyRun):
            return getattr(event, column)
        value = getattr(event, name, None)
        return None if value is None else (value,)

    return values


#: The columns of a file: name, type, and where its value is from. `day` and `shard` are in the path.
_COLUMNS: Final[tuple[tuple[str, str, Callable[[Fact], Any]], ...]] = (
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
    "v": "int64",
    **{name: kind for name, kind, _ in _COLUMNS if name not in ("seqs", "at_time", "hash", "body")},
    "grab": "string", "user": "string", "quantity": "int64", "amount": "int64",
}  # fmt: skip
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
        "time": arrow.timestamp("ms", tz="UTC"), "hash": arrow.binary(32),
        "strings": arrow.list_(arrow.string()), "int64s": arrow.list_(arrow.int64()),
    }  # fmt: skip


def table_of(facts: Sequence[Fact]) -> Any:
    """The Arrow table of consecutive lines; raises Corrupt if they do not follow each other."""
    import pyarrow.compute as pc

    table = from_texts(facts)
    if table is None:
        table = from_events(facts)
    seqs = table.column("seq")
    ends = pc.add(seqs, table.column("seqs").cast(seqs.type))
    if not pc.all(pc.equal(seqs.slice(1), ends.slice(0, len(facts) - 1)), min_count=0).as_py():
        raise Corrupt(f"lines are missing after seq {facts[0].event.seq} in what was read")
    return table


def from_events(facts: Sequence[Fact]) -> Any:
    """The table, from the decoded events."""
    import pyarrow as arrow

    types = _types()
    columns = [
        # JSON that was decoded is UTF-8; the cast checks it again.
        arrow.array([fact.line for fact in facts], arrow.binary()).cast(arrow.string())
        if name == "body"
        else arrow.array(map(value, facts), types[kind], size=len(facts))
        for name, kind, value in _COLUMNS
    ]
    return arrow.Table.from_arrays(columns, schema=schema())


def from_texts(facts: Sequence[Fact]) -> Any:
    """The table, from the texts of the lines; None if it cannot be made so."""
    import pyarrow as arrow
    import pyarrow.compute as pc
    from pyarrow import json

    types = _types()
    lines = [fact.line for fact in facts]
    text = b"\n".join(lines)
    try:
        read = json.read_json(
            arrow.BufferReader(text),
            # One block, so that no line is divided between two.
            read_options=json.ReadOptions(use_threads=False, block_size=len(text) + 1),
            parse_options=json.ParseOptions(
                explicit_schema=arrow.schema([(name, types[kind]) for name, kind in _FIELDS.items()]),
                unexpected_field_behavior="ignore",
            ),
        ).combine_chunks()
    except arrow.ArrowInvalid:
        return None
    # A line may be what Arrow takes for two, or for none.
    if read.num_rows != len(facts):
        return None
    found = {name: read.column(name).combine_chunks() for name in _FIELDS}
    if not pc.all(_has_current_version(found)).as_py():
        return None
    is_run = pc.is_in(found["type"], arrow.array(RUN_TYPES))
    for type_, defaults in _DEFAULTS.items():
        for name, default in defaults.items():
            lacks = pc.and_(pc.equal(found["type"], type_), pc.is_null(found[name]))
            found[name] = pc.if_else(lacks, arrow.scalar(default, found[name].type), found[name])
    _of_grabs(found, is_run)
    counts = pc.if_else(is_run, pc.list_value_length(found["grabs"]), arrow.scalar(1, arrow.int32()))
    made = found | {
        "seqs": counts,
        "at_time": found["at"].cast(types["time"]),
        "hash": arrow.array([fact.hash for fact in facts], types["hash"]),
        "body": arrow.array(lines, arrow.binary()).cast(arrow.string()),
    }
    return arrow.Table.from_arrays([made[name] for name in COLUMN_NAMES], schema=schema())


def _has_current_version(found: dict[str, Any]) -> Any:
    """Which lines are in the version that they are decoded to."""
    import pyarrow as arrow
    import pyarrow.compute as pc

    at = pc.index_in(found["type"], arrow.array(list(LINE_VERSIONS)))
    return pc.fill_null(pc.equal(found["v"], arrow.array(LINE_VERSIONS.values()).take(at)), False)


def _of_grabs(found: dict[str, Any], is_run: Any) -> None:
    """Makes the columns of grabs: those of runs, with what is usual where they are absent, and a list of one
    for events about one grab.
    """
    import pyarrow as arrow
    import pyarrow.compute as pc

    grabs = found["grabs"]
    offsets = arrow.array(range(len(grabs) + 1), arrow.int32())
    ones = arrow.repeat(arrow.scalar(1, arrow.int64()), len(grabs.values))
    usual = arrow.ListArray.from_arrays(grabs.offsets, ones, mask=pc.is_null(grabs))
    found["quantities"] = pc.coalesce(found["quantities"], usual)
    found["amounts"] = pc.coalesce(found["amounts"], found["quantities"])
    for column, name in (
        ("grabs", "grab"),
        ("users", "user"),
        ("quantities", "quantity"),
        ("amounts", "amount"),
    ):
        values = found[name]
        singles = arrow.ListArray.from_arrays(offsets, values, mask=pc.is_null(values))
        found[column] = pc.if_else(is_run, found[column], singles)
