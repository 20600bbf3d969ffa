"""The results of the verbs of `rebuild`: in JSON, and in words with a table of differences."""

from typing import Any

import msgspec

from grabstream.ops.console.output import console, say, table
from grabstream.projections.checking.difference import TableDifference
from grabstream.projections.versions import Version


class RebuildResult(msgspec.Struct, kw_only=True):
    """The result for a read model: the version that was live before, and the one that was built or shown.

    `set_aside` describes records that may explain rows only in the new version.
    """

    projection: str
    before: Version | None = None
    new: Version | None = None
    done: str
    refused: bool = False
    difference: list[TableDifference] = []
    build_seconds: float | None = None
    set_aside: list[str] = []

    def as_json(self) -> dict[str, Any]:
        """The result in types that JSON has, with the fields of versions by name."""
        named = {"before": self.before, "new": self.new}
        versions = {name: version and version._asdict() for name, version in named.items()}
        converted: dict[str, Any] = msgspec.to_builtins(self)
        return converted | versions


def print_result(result: RebuildResult) -> None:
    """Prints a result for people."""
    tables, projection = result.difference, result.projection
    if any(difference.undeclared or difference.declared for difference in tables):
        _print_difference(projection, tables)
    elif tables:
        counts = ", ".join(f"{difference.rows_new:,} of {difference.table}" for difference in tables)
        say(f"{projection}: old and new version are equal in every row: {counts}.")
    seconds = "" if result.build_seconds is None else f" It was built in {result.build_seconds:,.1f} s."
    say(f"{projection}: {result.done}.{seconds}")
    if result.refused:
        say(
            f"  `grabstream rebuild switch {projection} --accept` switches anyway; `grabstream rebuild drop "
            f"{projection} unfinished` drops the new version."
        )
        for words in result.set_aside:
            say(
                "  Rows that only the new version has may be from a record that was set aside; then use "
                f"--accept: {words}"
            )


def _print_difference(projection: str, tables: list[TableDifference]) -> None:
    rows = []
    for difference in tables:
        declared = ", ".join(f"{name} {count:,}" for name, count in difference.declared.items())
        changed = ", ".join(f"{name} {count:,}" for name, count in difference.changed.items())
        changed += "".join(f" {name}: {where}" for name, where in difference.columns.items())
        rows.append(
            (
                difference.table, difference.rows_old, difference.rows_new, difference.missing,
                difference.extra, difference.rows_changed, changed, declared,
            )
        )  # fmt: skip
    columns = (
        "table", "rows old", "rows new", "missing", "extra", "changed", "columns changed", "as declared",
    )  # fmt: skip
    console.print(table(f"{projection}: old and new version compared", columns, rows))
    for difference in tables:
        for example in msgspec.to_builtins(difference.examples):
            key = ", ".join(f"{name} {value}" for name, value in example["key"].items())
            if "only" in example:
                what = f"only in the {example['only']} version"
            else:
                what = ", ".join(
                    f"{name}: {before!r} → {after!r}" for name, (before, after) in example["changed"].items()
                )
            say(f"  {difference.table}, {key}: {what}")
