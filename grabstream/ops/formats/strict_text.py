"""Strict reading of JSON and YAML. A value that could mean two things is refused, or stays a text until its
field is known.

Two equal names in one object are an error.
"""

import json
import re
from collections.abc import Collection
from typing import Any, Final

import yaml  # what people write offers in; its parser's events are read here, without its guesses

from grabstream.models.bounds import FILE_VALUES_MAX, shortened

#: The key of the name that a mapping has twice. Parsers drop all values but the last, but two totals are a
#: mistake.
TWICE: Final = "\0given twice"

#: Separators that a JSON text may have. Texts contain them too, and an object has a name for each value.
JSON_SIGNS_MAX: Final = 3 * FILE_VALUES_MAX

_is_yaml_integer = re.compile(r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)\Z").match


class UnreadableText(Exception):
    """The text is not JSON or YAML: `place` says where, `reason` why."""

    def __init__(self, place: str, reason: str) -> None:
        self.place = place
        self.reason = shortened(reason)
        super().__init__(f"{place}: {self.reason}")


def read_strictly(text: str, is_json: bool) -> Any:
    """The value of a JSON or YAML text; raises Unreadable."""
    # JSON is YAML too, but a JSON parser is much faster. Where the two differ (tabs, escapes of emoji), a
    # text that begins like JSON means JSON.
    if is_json or text.lstrip()[:1] in ("[", "{"):
        # Every value but the first follows a comma, a colon or an opening bracket.
        if sum(map(text.count, ",:[{")) > JSON_SIGNS_MAX:
            raise UnreadableText(
                "file", f"has more than {FILE_VALUES_MAX:,} values; split it into several files"
            )
        try:
            return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
        except json.JSONDecodeError as error:
            if is_json:
                raise UnreadableText(
                    f"line {error.lineno}", f"is not JSON: {error.msg} at column {error.colno}"
                ) from None
        except (ValueError, RecursionError) as error:
            if is_json:
                raise UnreadableText("file", f"is not JSON: {error}") from None
    try:
        return _read_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        since = f" that begins in line {error.context_mark.line + 1}" if error.context_mark else ""
        said = "; ".join(filter(None, (error.problem, error.context and error.context + since)))
        raise UnreadableText(f"line {mark.line + 1}" if mark else "file", f"is not YAML: {said}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UnreadableText("file", f"is not YAML: {' '.join(str(error).split())}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs) and (twice := first_twice([name for name, _ in pairs])):
        made[TWICE] = twice
    return made


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def first_twice(names: Collection[str]) -> str | None:
    """The first name that repeats an earlier one, or None."""
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]


# The parser in C is ten times as fast; a PyYAML that was built without it reads the same.
_Parser: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CONSTANTS: Final = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_TAGS: Final = {"!", *(f"tag:yaml.org,2002:{name}" for name in ("str", "seq", "map"))}


def _read_yaml(text: str) -> Any:
    """The value of a YAML text of null, true, false, whole numbers and texts, built from the parser's events.

    The usual loader reads `10:00` as 600 and `no` as false, and drops all but the last of two equal names.
    Here everything but a plain whole number stays a text: times, so that `read_time` reports what is wrong
    for each entry; and `12e45`, because offers have no fractions, but seeds begin like that. Building no tree
    of nodes also makes it twice as fast.
    """
    return _Builder(text).document()


class _Builder:
    """Builds a document's value from the parser's events. It counts the values that an alias repeats again,
    so that a short text cannot become a huge value.
    """

    def __init__(self, text: str) -> None:
        self._events = yaml.parse(text, Loader=_Parser)
        #: The value of each anchor, and how many values it contains.
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
            raise _wrong_yaml(following, "a second document begins; write each document to a file of its own")
        return value

    def _count(self, event: Any, values: int) -> None:
        self._values += values
        if self._values > FILE_VALUES_MAX:
            raise _wrong_yaml(
                event,
                f"more than {FILE_VALUES_MAX:,} values, counting what aliases repeat each time; split the "
                "file",
            )

    def _built(self, event: Any) -> Any:
        """The value that begins with an event. Consumes the events of the value."""
        if isinstance(event, yaml.AliasEvent):
            # An anchor is known only after the end of its value, so that no value can contain itself.
            if event.anchor not in self._anchors:
                raise _wrong_yaml(event, f"*{event.anchor} is used before the end of &{event.anchor}")
            value, size = self._anchors[event.anchor]
            self._count(event, size)
            return value
        if event.tag is not None and event.tag not in _TAGS:
            raise _wrong_yaml(event, f"tag {event.tag} is not supported; leave it out")
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
        direct: dict[Any, Any] = {}
        merged: dict[Any, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            name = self._built(event)
            if isinstance(name, list | dict):
                raise _wrong_yaml(event, "a list or an object cannot be the name of a field")
            value = self._built(next(self._events))
            if name == "<<" and isinstance(event, yaml.ScalarEvent) and event.implicit[0]:
                for source in value if isinstance(value, list) else [value]:
                    if not isinstance(source, dict):
                        raise _wrong_yaml(event, "<< takes an object or a list of objects")
                    merged = {**source, **merged}
                continue
            if name in direct:
                direct[TWICE] = name
            direct[name] = value
        return {**merged, **direct} if merged else direct


def _scalar(text: str) -> Any:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    return int(text) if _is_yaml_integer(text) else text


def _wrong_yaml(event: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
