"""Strict reading of JSON and YAML: what could mean two things is refused, or is left a text for whoever knows
what it has to be.

Two equal names in one object are an error, and so is what only looks like a number or a time.
"""

import json
import re
from collections.abc import Collection
from typing import Any, Final

import yaml  # what people write offers in; its parser's events are read here, without its guesses

from grabstream.models.bounds import FILE_VALUES_MAX, shortened

#: Where a mapping was given a name twice, it has this key: parsers drop all but the last, and two totals are
#: a mistake.
TWICE: Final = "\0given twice"

#: What separates values in JSON; it stands in texts too, and an object has a name for each value.
JSON_SIGNS_MAX: Final = 3 * FILE_VALUES_MAX

_is_yaml_integer = re.compile(r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)\Z").match


class Unreadable(Exception):
    """A text that is no JSON or YAML: where, and why."""

    def __init__(self, place: str, reason: str) -> None:
        self.place = place
        self.reason = shortened(reason)
        super().__init__(f"{place}: {self.reason}")


def read_strictly(text: str, is_json: bool) -> Any:
    """The value of a JSON or YAML text; raises Unreadable."""
    # JSON is YAML too, but much quicker read as what it is; and where the two differ (tabs, escapes of emoji)
    # it means JSON.
    if is_json or text.lstrip()[:1] in ("[", "{"):
        # Every value but the first stands behind a comma, a colon or an opening bracket.
        if sum(map(text.count, ",:[{")) > JSON_SIGNS_MAX:
            raise Unreadable("file", f"has more than {FILE_VALUES_MAX:,} values; make several files of it")
        try:
            return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
        except json.JSONDecodeError as error:
            if is_json:
                raise Unreadable(
                    f"line {error.lineno}", f"is no JSON: {error.msg} at column {error.colno}"
                ) from None
        except (ValueError, RecursionError) as error:
            if is_json:
                raise Unreadable("file", f"is no JSON: {error}") from None
    try:
        return _read_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        since = f" that begins in line {error.context_mark.line + 1}" if error.context_mark else ""
        said = "; ".join(filter(None, (error.problem, error.context and error.context + since)))
        raise Unreadable(f"line {mark.line + 1}" if mark else "file", f"is no YAML: {said}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Unreadable("file", f"is no YAML: {' '.join(str(error).split())}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs) and (twice := first_twice([name for name, _ in pairs])):
        made[TWICE] = twice
    return made


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def first_twice(names: Collection[str]) -> str | None:
    """The first of the names that stood there before, or None."""
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]


# The parser in C is ten times as fast; a PyYAML built without it still reads the same.
_Parser: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CONSTANTS: Final = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_TAGS: Final = {"!", *(f"tag:yaml.org,2002:{name}" for name in ("str", "seq", "map"))}


def _read_yaml(text: str) -> Any:
    """YAML with null, true, false, whole numbers and texts, straight from the parser's events.

    The usual loader reads `10:00` as 600, `no` as false, and drops all but the last of two equal names. Here
    what is no plain number stays a text, also a time: `read_time` says what is wrong with it, entry by entry.
    There are no fractions in an offer, and `12e45` is the head of a seed. Without the loader's tree of nodes
    it is also twice as quick.
    """
    return _Builder(text).document()


class _Builder:
    """Builds a document's value from the parser's events; what an alias repeats counts again, so that a short
    text stays a small value.
    """

    def __init__(self, text: str) -> None:
        self._events = yaml.parse(text, Loader=_Parser)
        #: Values of anchors, and how many values each holds.
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._values = 0

    def document(self) -> Any:
        events = self._events
        next(events)
        if isinstance(next(events), yaml.StreamEndEvent):
            return None
        value = self._built(next(events))
        next(events)
        if not isinstance(following := next(events), yaml.StreamEndEvent):
            raise _wrong_yaml(following, "a second document begins; make a file of each")
        return value

    def _count(self, event: Any, values: int) -> None:
        self._values += values
        if self._values > FILE_VALUES_MAX:
            raise _wrong_yaml(
                event,
                f"more than {FILE_VALUES_MAX:,} values, those that aliases repeat counted again; make "
                "several files of it",
            )

    def _built(self, event: Any) -> Any:
        """The value that begins with an event; takes the rest of it from the events."""
        if isinstance(event, yaml.AliasEvent):
            # An anchor counts from its value's end on, so nothing can contain itself.
            if event.anchor not in self._anchors:
                raise _wrong_yaml(event, f"*{event.anchor} stands before the end of &{event.anchor}")
            value, size = self._anchors[event.anchor]
            self._count(event, size)
            return value
        if event.tag is not None and event.tag not in _TAGS:
            raise _wrong_yaml(event, f"tag {event.tag} is not read; leave it out")
        before = self._values
        self._count(event, 1)
        if isinstance(event, yaml.ScalarEvent):
            value = _scalar(event.value) if event.implicit[0] else event.value
        elif isinstance(event, yaml.SequenceStartEvent):
            value = []
            while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
                value.append(self._built(item))
        else:
            value = self._mapping()
        if event.anchor is not None:
            self._anchors[event.anchor] = (value, self._values - before)
        return value

    def _mapping(self) -> dict[Any, Any]:
        own: dict[Any, Any] = {}
        merged: dict[Any, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            name = self._built(event)
            if isinstance(name, list | dict):
                raise _wrong_yaml(event, "a list or an object is no name of a field")
            value = self._built(next(self._events))
            if name == "<<" and isinstance(event, yaml.ScalarEvent) and event.implicit[0]:
                for one in value if isinstance(value, list) else [value]:
                    if not isinstance(one, dict):
                        raise _wrong_yaml(event, "<< takes an object or a list of objects")
                    merged = {**one, **merged}
                continue
            if name in own:
                own[TWICE] = name
            own[name] = value
        return {**merged, **own} if merged else own


def _scalar(text: str) -> Any:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    return int(text) if _is_yaml_integer(text) else text


def _wrong_yaml(event: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
