"""Strict reading of JSON and YAML: what could mean two things is refused, or is left a text for whoever knows what it has to be.

Two equal names in one object are an error, and so is what only looks like a number or a time.
"""

import json
import re
from collections.abc import Collection, Iterator
from typing import Any, Final

import yaml  # what people write offers in; its parser's events are read here, without its guesses

#: Where a mapping was given a name twice, it has this key: parsers drop all but the last, and two totals are a mistake.
TWICE: Final = "\0given twice"

_is_yaml_integer = re.compile(r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)\Z").match


class Unreadable(Exception):
    """A text that is no JSON or YAML: where, and why."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place
        self.reason = reason


def read_strictly(text: str, is_json: bool) -> Any:
    """The value of a JSON or YAML text; raises Unreadable."""
    # JSON is YAML too, but much quicker read as what it is; and where the two differ (tabs, escapes of emoji) it means JSON.
    if is_json or text.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
        except json.JSONDecodeError as error:
            if is_json:
                raise Unreadable(f"line {error.lineno}", f"is no JSON: {error.msg} at column {error.colno}") from None
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

    The usual loader reads `10:00` as 600, `no` as false, and drops all but the last of two equal names. Here what is no plain number
    stays a text, also a time: `read_time` says what is wrong with it, entry by entry. There are no fractions in an offer, and `12e45` is
    the head of a seed. Without the loader's tree of nodes it is also twice as quick.
    """
    events = yaml.parse(text, Loader=_Parser)
    next(events)
    if isinstance(next(events), yaml.StreamEndEvent):
        return None
    value = _built(next(events), events, {})
    next(events)
    if not isinstance(following := next(events), yaml.StreamEndEvent):
        raise _wrong_yaml(following, "a second document begins; make a file of each")
    return value


def _built(event: Any, events: Iterator[Any], anchors: dict[str, Any]) -> Any:
    """The value that begins with an event; takes the rest of it from the events."""
    if isinstance(event, yaml.AliasEvent):
        # An anchor counts from its value's end on, so nothing can contain itself.
        if event.anchor not in anchors:
            raise _wrong_yaml(event, f"*{event.anchor} stands before the end of &{event.anchor}")
        return anchors[event.anchor]
    if event.tag is not None and event.tag not in _TAGS:
        raise _wrong_yaml(event, f"tag {event.tag} is not read; leave it out")
    value: Any
    if isinstance(event, yaml.ScalarEvent):
        value = _scalar(event.value) if event.implicit[0] else event.value
    elif isinstance(event, yaml.SequenceStartEvent):
        value = []
        while not isinstance(item := next(events), yaml.SequenceEndEvent):
            value.append(_built(item, events, anchors))
    else:
        value = _mapping(events, anchors)
    if event.anchor is not None:
        anchors[event.anchor] = value
    return value


def _scalar(text: str) -> Any:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    return int(text) if _is_yaml_integer(text) else text


def _mapping(events: Iterator[Any], anchors: dict[str, Any]) -> dict[Any, Any]:
    own: dict[Any, Any] = {}
    merged: dict[Any, Any] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        name = _built(event, events, anchors)
        if isinstance(name, list | dict):
            raise _wrong_yaml(event, "a list or an object is no name of a field")
        value = _built(next(events), events, anchors)
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


def _wrong_yaml(event: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
