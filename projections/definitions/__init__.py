"""Definitions of read models: the complete current form of each, as SQL in parts, under a number that grows
when it changes.

A file begins with `--- definition N`. `--- changes N: table.column …` names the columns whose values
definition N means to change (`table.*`: all of a table, its rows too): a rebuild counts differences there
apart. Parts: `tables` (bare, so that a build can load them at bulk speed), `staging` (what a build needs
until it is finished), `constraints` (and indexes), `views` (what people read).
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

#: The read models that are rebuilt. What is published on `grab.events` is none: its read model is a topic.
PROJECTIONS: Final = ("ledger", "balances", "audit")
PARTS: Final = ("tables", "staging", "constraints", "views")

_number = re.compile(r"^--- definition (\d+)$", re.MULTILINE)
_changes = re.compile(r"^--- changes (\d+): (.+)$", re.MULTILINE)
_table = re.compile(r"^CREATE TABLE (\w+)", re.MULTILINE)
_part = re.compile(r"^--- part ([a-z]+)$", re.MULTILINE)


class BadDefinition(Exception):
    """A definition file that lacks its number, or has a part that does not exist."""


class Definition(NamedTuple):
    """A read model's form: its number, the columns each number meant to change, and its SQL by part."""

    projection: str
    number: int
    changes: Mapping[int, frozenset[str]]
    parts: Mapping[str, str]

    @property
    def tables(self) -> list[str]:
        """The names of its tables."""
        return _table.findall(self.parts["tables"])

    @property
    def staging(self) -> list[str]:
        """The names of the tables that only a build has."""
        return _table.findall(self.parts["staging"])

    def declared_since(self, number: int) -> frozenset[str]:
        """The columns, as `table.column`, that definitions after a number meant to change."""
        return frozenset(
            column for since, columns in self.changes.items() if since > number for column in columns
        )


def parse(projection: str, text: str) -> Definition:
    """A definition from its SQL; raises BadDefinition with what is wrong."""
    found = _number.search(text)
    if found is None:
        raise BadDefinition(f"{projection}: no line `--- definition N`")
    number = int(found[1])
    changes = {int(since): frozenset(columns.split()) for since, columns in _changes.findall(text)}
    if any(since > number for since in changes):
        raise BadDefinition(f"{projection}: changes of a definition above {number}")
    pieces = _part.split(text)[1:]
    parts = dict(zip(pieces[::2], pieces[1::2], strict=True))
    if unknown := parts.keys() - set(PARTS):
        raise BadDefinition(
            f"{projection}: parts must be {', '.join(PARTS)}, got {', '.join(sorted(unknown))}"
        )
    return Definition(projection, number, changes, {part: parts.get(part, "") for part in PARTS})


@cache
def definition_of(projection: str) -> Definition:
    """The definition this code has of a projection; what is published has none but cursors."""
    if projection not in PROJECTIONS:
        return Definition(projection, 1, {}, dict.fromkeys(PARTS, ""))
    return parse(projection, (files("grabstream.projections.definitions") / f"{projection}.sql").read_text())


@cache
def cursor_tables() -> str:
    """The SQL of the tables that every version has: how far it is, and where it stopped."""
    return (files("grabstream.projections.definitions") / "cursors.sql").read_text()
