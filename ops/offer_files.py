"""Files of offers, in YAML, JSON or CSV: read as a whole and checked as a whole before anything is opened.

What people write (`15m`, `2026-11-27T10:00:00+08:00`, `user/day/2`) is brought into the form of a command here; whether the command
is right, `models.commands.decode_commands` says. Nothing is guessed: what could mean two things is refused with its place and a fix.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from functools import lru_cache
from pathlib import PurePath
from types import UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin
from zoneinfo import ZoneInfo

import msgspec
import yaml

from models.commands import Open, Undecodable, decode_commands
from models.identifiers import ID_LENGTH_MAX, ID_PATTERN, is_id
from models.money import Invalid
from models.offers import ENVELOPE_LIFE_MS, WEEKDAYS, Changes, EnvelopeTerms, Hours, Limit, StockTerms, Terms, asset_of, check_changes

Form = Literal["yaml", "json", "csv"]

FORM_OF_SUFFIX: Final[Mapping[str, Form]] = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".csv": "csv"}
PLAN_COLUMNS: Final = ("offer", "kind", "total", "opens", "closes", "limits", "hold", "audience")

_DAY_MS: Final = 24 * 3_600_000
_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": _DAY_MS}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# Where a mapping was given a name twice, it has this key: parsers drop all but the last, and two totals are a mistake.
_TWICE: Final = "\0given twice"

_is_integer = re.compile(r"[-+]?[0-9]{1,18}\Z").match
_is_milliseconds = re.compile(r"[0-9]{1,18}\Z").match
_is_duration = re.compile(r"([0-9]{1,9})(ms|s|m|h|d)\Z").match
_is_time = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?( ?(Z|z|[-+][0-9]{2}:[0-9]{2}))?\Z"
).match
_is_limit = re.compile(r"([^/\s]+)/([^/\s]+)/([0-9]{1,18})(?:/([^/\s]+))?\Z").match
_is_hours = re.compile(r"(?:([a-z]+(?:\s*,\s*[a-z]+)*)\s+)?([0-9:]+)\s*[-–]\s*([0-9:]+)\Z").match
_is_yaml_integer = re.compile(r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)\Z").match
_is_located = re.compile(r"(.*) - at `\$\.(.*)`", re.DOTALL).fullmatch
_is_missing = re.compile(r"Object missing required field `(.*)`").fullmatch


class BadOfferFile(Exception):
    """A file that opens nothing: `problems` are all that is wrong with it, as (place, reason)."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        super().__init__("\n".join(f"{place}: {reason}" for place, reason in problems))
        self.problems = list(problems)


class _Entry(NamedTuple):
    """One entry of a file on its way: `command` is what it says, `reasons` what is wrong with it so far.

    `whole` is false when a header or defaults are wrong: what such an entry seems to lack may only be misspelt there.
    """

    place: str
    command: dict[str, Any]
    reasons: list[str]
    whole: bool = True


def form_of(file: str | PurePath, chosen: Form | None = None) -> Form:
    """The form of a file: the chosen one, or what its suffix says; without a suffix, as standard input (`-`), YAML."""
    if chosen is not None:
        return chosen
    suffix = PurePath(file).suffix.lower()
    if not suffix:
        return "yaml"
    if suffix not in FORM_OF_SUFFIX:
        raise BadOfferFile([("file", f"{suffix} says nothing of its form; name it {', '.join(FORM_OF_SUFFIX)}, or use --format")])
    return FORM_OF_SUFFIX[suffix]


def read_offers(text: str, form: Form) -> list[Open]:
    """The commands of a file in its order; raises BadOfferFile with all that is wrong, when anything is."""
    text = text.removeprefix("\ufeff")
    opens: list[Open] = []
    problems: list[tuple[str, str]] = []
    places: dict[tuple[str, str], str] = {}
    for entry in _rows(text) if form == "csv" else _entries(text, form):
        reasons = [*entry.reasons, *_given_before(entry, places)]
        if entry.whole and not entry.reasons:
            decoded = _decode(entry.command)
            if isinstance(decoded, Open):
                opens.append(decoded)
            else:
                reasons.append(decoded)
        problems += [(entry.place, reason) for reason in reasons]
    if not problems and not opens:
        problems.append(("file", "has no offers; give a list of {offer, terms}, {defaults, offers}, or lines of CSV below a header"))
    if problems:
        raise BadOfferFile(problems)
    return opens


def _given_before(entry: _Entry, places: dict[tuple[str, str], str]) -> list[str]:
    for field, fix in (("offer", "an offer is opened once; leave one out"), ("id", "give each an id of its own")):
        value = entry.command.get(field)
        if isinstance(value, str):
            first = places.setdefault((field, value), entry.place)
            if first != entry.place:
                # One is enough: the id follows from the offer where none is given.
                return [f"{field}: {value} is already that of {first}; {fix}"]
    return []


def _decode(command: dict[str, Any]) -> Open | str:
    """The command, or why there is none."""
    try:
        [decoded] = decode_commands(msgspec.json.encode(command))
    except (TypeError, ValueError, RecursionError) as error:
        return f"terms: cannot be written as JSON ({error}); use plain texts, numbers, lists and objects"
    if isinstance(decoded, Undecodable):
        return _explain(decoded.reason)
    if not isinstance(decoded, Open):
        return f"type: must be open, got {command['type']!r}"
    return decoded


# -- what the models know of fields -----------------------------------------------------------------------------------


def _plain_types(annotation: Any) -> set[Any]:
    """The types that a field's annotation allows, without what is said about them."""
    if get_origin(annotation) is Annotated:
        return _plain_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*(_plain_types(one) for one in get_args(annotation)))
    if get_origin(annotation) is tuple:
        return _plain_types(get_args(annotation)[0])
    return {annotation}


def _fields(struct: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.encode_name: field for field in msgspec.structs.fields(struct)}


_FIELDS_OF_KIND: Final = {str(struct.__struct_config__.tag): _fields(struct) for struct in get_args(Terms)}
_TERMS: Final = {name: field for fields in _FIELDS_OF_KIND.values() for name, field in fields.items()}
_TYPES: Final = {name: _plain_types(field.type) for name, field in _TERMS.items()}
_PARTS: Final = {"limits": _fields(Limit), "hours": _fields(Hours)}
_CHOICES: Final = {
    name: get_args(one)
    for name, field in [item for fields in (_TERMS, *_PARTS.values()) for item in fields.items()]
    for one in _plain_types(field.type)
    if get_origin(one) is Literal
}
_KNOWN_TERMS: Final = ("kind", *_TERMS)
_KNOWN_OF_ENTRY: Final = ("offer", "terms", "id", "type")
_KNOWN_OF_FILE: Final = ("defaults", "offers")
_KNOWN_COLUMNS: Final = ("offer", "id", *_KNOWN_TERMS)
_KNOWN_CHANGES: Final = tuple(_fields(Changes))
_KINDS: Final = ", ".join(_FIELDS_OF_KIND)


def _explain(reason: str) -> str:
    """What the decoder says, in the form of our own checks: the field first, then the fix."""
    located = _is_located(reason)
    if located is None:
        return reason
    said, path = located.groups()
    name = re.sub(r"\[[^][]*\]\Z", "", path).rpartition(".")[2]
    if missing := _is_missing(said):
        field = _TERMS.get(missing[1]) if path == "terms" else None
        return f"{path}.{missing[1]}: is missing{f'; it says {_meaning(field)}' if field and _meaning(field) else ''}"
    if said.startswith("Invalid enum value ") and name in _CHOICES:
        return f"{path}: must be one of {', '.join(_CHOICES[name])}; got {said.removeprefix('Invalid enum value ')}"
    fix = ""
    if said.startswith("Expected `str") and said.endswith(("got `int`", "got `float`", "got `bool`")):
        fix = "; put it in quotes"
    elif said.startswith("Expected `int") and said.endswith(("got `str`", "got `float`")):
        fix = "; give a whole number without quotes"
    elif said.startswith("Expected `bool"):
        fix = "; give true or false"
    return f"{path}: {said[0].lower()}{said[1:]}{fix}"


def _meaning(field: msgspec.structs.FieldInfo) -> str:
    said = [one.description for one in get_args(field.type)[1:] if isinstance(one, msgspec.Meta) and one.description]
    return said[-1] if said else ""


@lru_cache(maxsize=1024)
def _nearest(name: str, known: tuple[str, ...]) -> str:
    return get_close_matches(name, known, n=1, cutoff=0)[0]


def _unknown(where: str, given: Mapping[Any, Any], known: tuple[str, ...]) -> list[str]:
    """A reason for each name that is not known, or was given twice; `where` is empty or ends with a point."""
    return [
        f"{where}{given[_TWICE]}: is given twice; keep one"
        if name == _TWICE
        else f"{where}{name}: there is no such field; the nearest is {_nearest(str(name), known)}"
        for name in given
        if name not in known
    ]


# -- what people write ------------------------------------------------------------------------------------------------


def read_time(text: str) -> int:
    """Milliseconds since 1970 UTC, from RFC 3339 with its zone or as they are; raises Invalid with the fix."""
    if _is_milliseconds(text):
        return int(text)
    wanted = "a time such as 2026-11-27T10:00:00+08:00, or milliseconds since 1970 UTC"
    form = _is_time(text)
    if form is None:
        raise Invalid(f"must be {wanted}; got {text!r}")
    if form[3] is None:
        raise Invalid(f"{text} is another time in every zone; give the zone: {text}+08:00, or {text}Z for UTC")
    try:
        moment = datetime.fromisoformat(text.upper().replace(" ", "T", 1).replace(" ", ""))
    except ValueError as error:
        raise Invalid(f"{text} is no time ({error}); give {wanted}") from None
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def read_duration(text: str) -> int:
    """Milliseconds, from `15m` and the like or as they are; raises Invalid with the fix."""
    if _is_milliseconds(text):
        return int(text)
    form = _is_duration(text)
    if form is None:
        raise Invalid(f"must be a duration such as 30s, 15m, 2h or 7d, or milliseconds; got {text!r}")
    return int(form[1]) * _UNITS_MS[form[2]]


def _limits(text: str) -> list[dict[str, Any]]:
    limits = []
    for written in filter(None, map(str.strip, text.split(";"))):
        form = _is_limit(written)
        if form is None:
            raise Invalid(f"must be by/per/max with a semicolon between, such as user/day/2; device/offer/1/campaign; got {written!r}")
        limits.append({"by": form[1], "per": form[2], "max": int(form[3])} | ({"scope": form[4]} if form[4] else {}))
    return limits


def _hours(text: str) -> list[dict[str, Any]]:
    hours = []
    for written in filter(None, map(str.strip, text.lower().split(";"))):
        form = _is_hours(written)
        if form is None:
            raise Invalid(f"must be days and hours with a semicolon between, such as fri 10:00-12:00; sat,sun 09:00-18:00; got {written!r}")
        days = {"weekdays": [day.strip() for day in form[1].split(",")]} if form[1] else {}
        hours.append({**days, "from": form[2], "until": form[3]})
    return hours


#: How a field's text becomes what the command has there.
_WRITTEN: Final[Mapping[str, Callable[[str], Any]]] = {
    "opens_at": read_time,
    "closes_at": read_time,
    "valid_until": read_time,
    "hold_ms": read_duration,
    "grace_ms": read_duration,
    "retire_after_ms": read_duration,
    "limits": _limits,
    "hours": _hours,
}


def _terms_of(where: str, written: Any) -> tuple[dict[str, Any], list[str]]:
    """Terms as a command has them, and what is wrong with what was written."""
    if not isinstance(written, dict):
        return {}, [f"{where}: must be an object of terms such as kind, issuer and total, got {_shown(written)}"]
    reasons = _unknown(f"{where}.", written, _KNOWN_TERMS)
    terms: dict[str, Any] = {}
    for name, value in written.items():
        if name not in _KNOWN_TERMS:
            continue
        terms[name] = value
        if isinstance(value, str) and name in _WRITTEN:
            try:
                terms[name] = _WRITTEN[name](value)
            except Invalid as error:
                reasons.append(f"{where}.{name}: {error}")
        elif isinstance(value, list) and name in _PARTS:
            for index, part in enumerate(value):
                if isinstance(part, dict):
                    reasons += _unknown(f"{where}.{name}[{index}].", part, tuple(_PARTS[name]))
    return terms, reasons


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def _entry(place: str, written: Any, defaults: dict[str, Any], whole: bool) -> _Entry:
    """An entry with its defaults, and all that is wrong with it before its values are looked at."""
    if not isinstance(written, dict):
        return _Entry(place, {}, [f"must be an object {{offer, terms}}, got {_shown(written)}"])
    reasons = _unknown("", written, _KNOWN_OF_ENTRY)
    if "offer" not in written:
        reasons.append("offer: is missing; give the id of the offer")
    if "terms" not in written and not defaults and whole:
        reasons.append("terms: is missing; give kind, issuer, total …")
    terms, wrong = _terms_of("terms", written.get("terms", {}))
    reasons += wrong
    if not wrong or terms:
        terms = {**defaults, **terms}
        reasons += _wrong_kind(terms, whole and ("terms" in written or bool(defaults)))
    offer = written.get("offer")
    given = {name: written[name] for name in _KNOWN_OF_ENTRY if name in written}
    if "id" not in given and isinstance(offer, str):  # then a wrong id would be told of, that nobody wrote
        if not is_id(offer):
            reasons.append(f"offer: must match {ID_PATTERN.strip('^$')}, got {offer!r}")
        elif len(f"open-{offer}") > ID_LENGTH_MAX:
            reasons.append(f"id: open-{offer} would have more than {ID_LENGTH_MAX} characters; give an id")
    if given.get("type", "open") != "open":
        reasons.append(f"type: must be open, got {given['type']!r}; leave it out")
    identified = {} if offer is None else {"id": f"open-{offer}"}
    return _Entry(place, {"type": "open", **identified, **given, "terms": terms}, reasons, whole)


def _wrong_kind(terms: Mapping[str, Any], whole: bool) -> list[str]:
    """What does not fit the kind; without one, only that it is missing, where that can be said."""
    if "kind" not in terms:
        return [f"terms.kind: is missing; give one of {_KINDS}"] if whole else []
    kind = terms["kind"]
    if not isinstance(kind, str) or kind not in _FIELDS_OF_KIND:
        nearest = f"; the nearest is {_nearest(kind, tuple(_FIELDS_OF_KIND))}" if isinstance(kind, str) else ""
        return [f"terms.kind: must be one of {_KINDS}, got {kind!r}{nearest}"]
    return [
        f"terms.{name}: is no field of kind {kind}, only of {' and '.join(_kinds_with(name))}; leave it out"
        for name in terms
        if name != "kind" and name not in _FIELDS_OF_KIND[kind]
    ]


def _kinds_with(name: str) -> list[str]:
    return [kind for kind, fields in _FIELDS_OF_KIND.items() if name in fields]


# -- YAML and JSON ----------------------------------------------------------------------------------------------------


def _entries(text: str, form: Form) -> Iterator[_Entry]:
    """The entries of YAML or JSON: of a list, of `{defaults, offers}`, or one alone."""
    try:
        value = _parse(text, form)
    except BadOfferFile as error:
        yield from (_Entry(place, {}, [reason]) for place, reason in error.problems)
        return
    defaults: dict[str, Any] = {}
    whole = True
    if isinstance(value, dict) and (value.keys() & set(_KNOWN_OF_FILE) or not value.keys() & {"offer", "terms"}):
        reasons = _unknown("", value, _KNOWN_OF_FILE)
        written = value.get("defaults")
        if written is not None:
            defaults, wrong = _terms_of("defaults", written)
            reasons += wrong
        if reasons:
            whole = False
            yield _Entry("file", {}, reasons)
        value = value.get("offers", [])
    elif isinstance(value, dict):
        value = [value]
    if value is None:
        return
    if not isinstance(value, list):
        yield _Entry("file", {}, [f"must be a list of {{offer, terms}}, or {{defaults, offers}} with one; got {_shown(value)}"])
        return
    for number, written in enumerate(value, 1):
        yield _entry(f"entry {number}", written, defaults, whole)


def _parse(text: str, form: Form) -> Any:
    # JSON is YAML too, but much quicker read as what it is; and where the two differ (tabs, escapes of emoji) it means JSON.
    if form == "json" or text.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
        except json.JSONDecodeError as error:
            if form == "json":
                raise BadOfferFile([(f"line {error.lineno}", f"is no JSON: {error.msg} at column {error.colno}")]) from None
        except (ValueError, RecursionError) as error:
            if form == "json":
                raise BadOfferFile([("file", f"is no JSON: {error}")]) from None
    try:
        return _read_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        since = f" that begins in line {error.context_mark.line + 1}" if error.context_mark else ""
        said = "; ".join(filter(None, (error.problem, error.context and error.context + since)))
        raise BadOfferFile([(f"line {mark.line + 1}" if mark else "file", f"is no YAML: {said}")]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadOfferFile([("file", f"is no YAML: {' '.join(str(error).split())}")]) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs) and (twice := _first_twice([name for name, _ in pairs])):
        made[_TWICE] = twice
    return made


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _first_twice(names: Collection[str]) -> str | None:
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
            own[_TWICE] = name
        own[name] = value
    return {**merged, **own} if merged else own


def _wrong_yaml(event: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


# -- CSV --------------------------------------------------------------------------------------------------------------


def _rows(text: str) -> Iterator[_Entry]:
    """The entries of CSV: a line each, below a line of column names. Empty lines and empty cells say nothing."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: list[str] | None = None
    whole = True
    while True:
        place = f"line {reader.line_num + 1}"  # where it begins: a quoted cell may go over several
        try:
            cells = [cell.strip() for cell in next(reader)]
        except StopIteration:
            return
        except csv.Error as error:
            yield _Entry(place, {}, [f"is no CSV: {error}; a text with a comma or a quote stands in double quotes, its quotes doubled"])
            return
        if not any(cells):
            continue
        if columns is not None:
            yield _row(place, columns, cells, whole)
            continue
        columns = cells
        if missing := [name for name in ("offer", "kind") if name not in columns]:
            separated = "" if len(columns) > 1 or not re.search("[;\t]", columns[0]) else "; cells are separated by commas"
            near = [*_unknown("", dict.fromkeys(filter(None, columns)), _KNOWN_COLUMNS)] if not separated else []
            yield _Entry(place, {}, [*(f"{name}: the header has no such column{separated}" for name in missing), *near])
            return
        reasons = _unknown("", dict.fromkeys(filter(None, columns)), _KNOWN_COLUMNS)
        if twice := _first_twice([name for name in columns if name]):
            reasons.append(f"{twice}: two columns have this name; keep one")
        if reasons:
            whole = False
            yield _Entry(place, {}, reasons)


def _row(place: str, columns: list[str], cells: list[str], whole: bool) -> _Entry:
    if len(cells) != len(columns):
        fix = "a text with a comma stands in double quotes" if len(cells) > len(columns) else "end it with a comma for each empty cell"
        return _Entry(place, {}, [f"has {len(cells)} cells, the header {len(columns)}; {fix}"])
    written: dict[str, Any] = {"terms": {}}
    reasons = []
    for column, cell in zip(columns, cells, strict=True):
        if not cell:
            continue
        if column in ("offer", "id"):
            written[column] = cell
        elif column in _KNOWN_TERMS:
            try:
                written["terms"][column] = _cell(column, cell)
            except Invalid as error:
                reasons.append(f"terms.{column}: {error}")
        elif not column:
            reasons.append(f"{cell!r} stands in a column without a name; name it or empty it")
    entry = _entry(place, written, {}, whole)
    return entry._replace(reasons=[*reasons, *entry.reasons])


def _cell(column: str, cell: str) -> Any:
    """A cell as YAML or JSON would have it, by the type of its field."""
    types = _TYPES.get(column, {str})
    if column in _WRITTEN or str in types:
        return cell
    if bool in types:
        if cell.lower() not in ("true", "false"):
            raise Invalid(f"must be true or false, got {cell!r}")
        return cell.lower() == "true"
    if int in types:
        # `1.2E+12` is what a spreadsheet leaves of a number: digits are lost.
        if not _is_integer(cell):
            raise Invalid(f"must be a whole number in digits alone, got {cell!r}")
        return int(cell)
    return cell


# -- changes ----------------------------------------------------------------------------------------------------------


def read_changes(written: Sequence[tuple[str, str]]) -> Changes:
    """What `amend` changes, from fields and texts as a CSV file would have them; raises BadOfferFile with all that is wrong.

    An empty text takes all limits, or the title, away.
    """
    changes: dict[str, Any] = {}
    reasons: list[str] = []
    if twice := _first_twice([name for name, _ in written]):
        reasons.append(f"{twice}: is given twice; keep one")
    for name, text in written:
        if name not in _KNOWN_CHANGES:
            reasons.append(_unchangeable(name))
            continue
        try:
            cell = _cell(name, text)
            changes[name] = _WRITTEN[name](cell) if name in _WRITTEN else cell
            # One by one, so that all that is wrong is told.
            msgspec.convert({name: changes[name]}, Changes)
        except msgspec.ValidationError as error:
            reasons.append(_explain(str(error)))
        except Invalid as error:
            reasons.append(f"{name}: {error}")
    if not reasons:
        made = msgspec.convert(changes, Changes)
        try:
            check_changes(made)
            return made
        except Invalid as error:
            reasons.append(re.sub(r"\A(?:changes|terms)\.", "", str(error)))
    raise BadOfferFile([("changes", reason) for reason in reasons])


def _unchangeable(name: str) -> str:
    if name in _KNOWN_TERMS:
        return f"{name}: stays as it was opened; what may be amended is {', '.join(_KNOWN_CHANGES)}"
    return f"{name}: there is no such field; the nearest is {_nearest(name, _KNOWN_CHANGES)}"


# -- the plan ---------------------------------------------------------------------------------------------------------


def plan_rows(opens: Sequence[Open]) -> list[tuple[str, ...]]:
    """What opening them would do, a row an offer with PLAN_COLUMNS, for people; times are those of the offer's zone."""
    return [_plan_row(command.offer, command.terms) for command in opens]


def _plan_row(offer: str, terms: Terms) -> tuple[str, ...]:
    envelope = isinstance(terms, EnvelopeTerms)
    opens = _shown_time(terms.opens_at, terms.timezone) if terms.opens_at else "at once"
    if terms.hours:
        opens += "; " + "; ".join(_shown_hours(one) for one in terms.hours)
    if terms.closes_at:
        closes = _shown_time(terms.closes_at, terms.timezone)
    elif envelope:
        closes = (
            _shown_time(terms.opens_at + ENVELOPE_LIFE_MS, terms.timezone)
            if terms.opens_at
            else f"{_shown_duration(ENVELOPE_LIFE_MS)} after opening"
        )
    else:
        closes = "never"
    if isinstance(terms, EnvelopeTerms):
        limits, hold = "1 a user", "–"
    else:
        limits = "; ".join(_shown_limit(limit) for limit in terms.limits) or "–"
        hold = _shown_duration(terms.hold_ms) if terms.hold_ms else "–"
    return (offer, str(terms.__struct_config__.tag), _shown_total(offer, terms), opens, closes, limits, hold, terms.audience)


def _shown_total(offer: str, terms: Terms) -> str:
    # The amount of a currency is in minor units: `1,000 CNY` alone would be read as a hundred times the money.
    if isinstance(terms, EnvelopeTerms):
        return f"{terms.total:,} minor units of {terms.asset} in {terms.parts:,} part{'s' if terms.parts != 1 else ''}"
    what = asset_of(offer, terms) if isinstance(terms, StockTerms) else "coupon" if terms.total == 1 else "coupons"
    price = f", {terms.price:,} minor units of {terms.currency} each" if terms.price is not None else ""
    return f"{terms.total:,} {what}{price}"


def _shown_limit(limit: Limit) -> str:
    period = "in all" if limit.per == "offer" else f"{'an' if limit.per == 'hour' else 'a'} {limit.per}"
    return f"{limit.max:,} a {limit.by} {period}{' over the campaign' if limit.scope == 'campaign' else ''}"


def _shown_hours(hours: Hours) -> str:
    days = "" if hours.weekdays == WEEKDAYS else f"{','.join(hours.weekdays)} "
    return f"{days}{hours.from_}-{hours.until}"


def _shown_time(at_ms: int, timezone: str) -> str:
    moment = (_EPOCH + timedelta(milliseconds=at_ms)).astimezone(ZoneInfo(timezone))
    exact = "milliseconds" if at_ms % 1000 else "seconds" if at_ms % 60_000 else "minutes"
    return moment.isoformat(" ", exact)


def _shown_duration(duration_ms: int) -> str:
    unit = next(unit for unit in ("d", "h", "m", "s", "ms") if duration_ms % _UNITS_MS[unit] == 0)
    return f"{duration_ms // _UNITS_MS[unit]:,}{unit}"
