"""Definitions of read models: the complete current form of each, as SQL in parts, with a number that
increases with each change.

A file starts with `--- definition N`. `--- changes N: table.column …` declares the columns whose values
definition N changes (`table.*`: all columns and the rows of a table); a rebuild counts differences there
separately. `--- compared view (keys): tables` names a view that is compared, by its keys, in place of tables:
those that had the same content in another form. Parts: `tables` (without the constraints that a build adds
faster when it has loaded them), `staging` (tables that only a build needs), `checks` (of sums, which a build
adds before it writes them), `constraints` (the others, and indexes), `views` (what users read).
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

#: The projections whose read models are in PostgreSQL and are rebuilt. `events` is not one: it writes a
#: topic.
PROJECTIONS: Final = ("ledger", "balances", "audit")
PARTS: Final = ("tables", "staging", "checks", "constraints", "views")

_number = re.compile(r"^--- definition (\d+)$", re.MULTILINE)
_compared = re.compile(r"^--- compared (\w+) \(([^)]+)\): (.+)$", re.MULTILINE)
_changes = re.compile(r"^--- changes (\d+): (.+)$", re.MULTILINE)
_table = re.compile(r"^CREATE TABLE (\w+)", re.MULTILINE)
_part = re.compile(r"^--- part ([a-z]+)$", re.MULTILINE)


class BadDefinition(Exception):
    """A definition file without a number, or with an unknown part."""


class ComparedView(NamedTuple):
    """A view that is compared by its keys, in place of tables."""

    keys: tuple[str, ...]
    tables: frozenset[str]


class Definition(NamedTuple):
    """A definition: its number, the columns that each number declares as changed, its SQL by part, and the
    views that are compared in place of tables.
    """

    projection: str
    number: int
    changes: Mapping[int, frozenset[str]]
    parts: Mapping[str, str]
    compared_views: Mapping[str, ComparedView] = {}

    @property
    def tables(self) -> list[str]:
        """The names of its tables."""
        return _table.findall(self.parts["tables"])

    @property
    def staging(self) -> list[str]:
        """The names of the tables that only a build has."""
        return _table.findall(self.parts["staging"])

    @property
    def compared(self) -> list[str]:
        """The names of the tables and views that are compared."""
        replaced = {table for view in self.compared_views.values() for table in view.tables}
        return [*(table for table in self.tables if table not in replaced), *self.compared_views]

    def declared_since(self, number: int) -> frozenset[str]:
        """The columns, as `table.column`, that definitions after `number` declare as changed."""
        return frozenset(
            column for since, columns in self.changes.items() if since > number for column in columns
        )


def parse(projection: str, text: str) -> Definition:
    """Parses the SQL of a definition; raises BadDefinition with the problem."""
    match = _number.search(text)
    if match is None:
        raise BadDefinition(f"{projection}: no line `--- definition N`")
    number = int(match[1])
    changes = {int(since): frozenset(columns.split()) for since, columns in _changes.findall(text)}
    if any(since > number for since in changes):
        raise BadDefinition(f"{projection}: changes of a definition above {number}")
    pieces = _part.split(text)[1:]
    parts = dict(zip(pieces[::2], pieces[1::2], strict=True))
    if unknown := parts.keys() - set(PARTS):
        raise BadDefinition(
            f"{projection}: parts must be {', '.join(PARTS)}, got {', '.join(sorted(unknown))}"
        )
    views = {
        view: ComparedView(tuple(re.findall(r"\w+", keys)), frozenset(tables.split()))
        for view, keys, tables in _compared.findall(text)
    }
    return Definition(projection, number, changes, {part: parts.get(part, "") for part in PARTS}, views)


@cache
def definition_of(projection: str) -> Definition:
    """This code's definition of a projection. `events` has an empty one: only cursors."""
    if projection not in PROJECTIONS:
        return Definition(projection, 1, {}, dict.fromkeys(PARTS, ""))
    return parse(projection, sql_text(projection))


def cursor_tables() -> str:
    """The SQL of the tables that every version has: its cursors and its stops."""
    return sql_text("cursors")


@cache
def sql_text(name: str) -> str:
    """The text of the SQL file of this name, in this folder."""
    return (files(__name__) / f"{name}.sql").read_text()
