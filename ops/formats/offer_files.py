"""Files of offers, in YAML, JSON or CSV: read as a whole and checked as a whole before anything is opened.

What people write (`15m`, `2026-11-27T10:00:00+08:00`, `user/day/2`) is brought into the form of a command
here; whether the command is right, `decode_commands` of `models.commands` says. Nothing is guessed: what
could mean two things is refused with its place and a fix.
"""

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice
from pathlib import PurePath
from types import UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from grabstream.models.bounds import quoted, shortened
from grabstream.models.commands import Open, Undecodable, decode_commands
from grabstream.models.identifiers import ID_LENGTH_MAX, ID_PATTERN, is_id
from grabstream.models.money import Invalid
from grabstream.models.offers import Changes, Hours, Limit, Terms, check_changes
from grabstream.ops.formats.strict_text import TWICE, Unreadable, first_twice, read_strictly
from grabstream.ops.formats.written_values import read_duration, read_hours, read_limits, read_time

Form = Literal["yaml", "json", "csv"]

FORM_OF_SUFFIX: Final[Mapping[str, Form]] = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".csv": "csv"}

_is_integer = re.compile(r"[-+]?[0-9]{1,18}\Z").match
_is_located = re.compile(r"(.*) - at `\$\.(.*)`", re.DOTALL).fullmatch
_is_missing = re.compile(r"Object missing required field `(.*)`").fullmatch


#: Problems of a file, and unknown names of one object, that are told.
PROBLEMS_MAX: Final = 10_000
UNKNOWN_NAMES_MAX: Final = 20
#: Characters and values of one term; the longest, `hours`, has some three thousand.
TERM_SIZE_MAX: Final = 10_000


class BadOfferFile(Exception):
    """A file that opens nothing: `problems` are all that is wrong with it, as (place, reason)."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        super().__init__("\n".join(f"{place}: {reason}" for place, reason in problems))
        self.problems = list(problems)


class _Entry(NamedTuple):
    """One entry of a file on its way: `command` is what it says, `reasons` what is wrong with it so far.

    `whole` is false when a header or defaults are wrong: what such an entry seems to lack may only be
    misspelt there.
    """

    place: str
    command: dict[str, Any]
    reasons: list[str]
    whole: bool = True


def form_of(file: str | PurePath, chosen: Form | None = None) -> Form:
    """The form of a file: the chosen one, or what its suffix says; without a suffix, as standard input (`-`),
    YAML.
    """
    if chosen is not None:
        return chosen
    suffix = PurePath(file).suffix.lower()
    if not suffix:
        return "yaml"
    if suffix not in FORM_OF_SUFFIX:
        raise BadOfferFile(
            [
                (
                    "file",
                    f"{suffix} says nothing of its form; name it {', '.join(FORM_OF_SUFFIX)}, or use "
                    "--format",
                )
            ]
        )
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
        problems += [(entry.place, shortened(reason)) for reason in reasons]
        if len(problems) > PROBLEMS_MAX:
            problems.append(("file", "more is wrong than stands here; mend this first"))
            break
    if not problems and not opens:
        problems.append(
            (
                "file",
                "has no offers; give a list of {offer, terms}, {defaults, offers}, or lines of CSV below a "
                "header",
            )
        )
    if problems:
        raise BadOfferFile(problems)
    return opens


def _given_before(entry: _Entry, places: dict[tuple[str, str], str]) -> list[str]:
    for field, fix in (
        ("offer", "an offer is opened once; leave one out"),
        ("id", "give each an id of its own"),
    ):
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
        return _explain(decoded.reason, command)
    if not isinstance(decoded, Open):
        return f"type: must be open, got {quoted(command['type'])}"
    return decoded


# -- what the models know of fields --------------------------------------------------------------------------


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


def _explain(reason: str, given: Any) -> str:
    """What the decoder says of a given value, in the form of our own checks: the field first, then the
    fix.
    """
    located = _is_located(reason)
    if located is None:
        return reason
    said, path = located.groups()
    name = re.sub(r"\[[^][]*\]\Z", "", path).rpartition(".")[2]
    if missing := _is_missing(said):
        field = _TERMS.get(missing[1]) if path == "terms" else None
        return (
            f"{path}.{missing[1]}: is "
            f"missing{f'; it says {_meaning(field)}' if field and _meaning(field) else ''}"
        )
    if said.startswith("Invalid enum value ") and name in _CHOICES:
        return (
            f"{path}: must be one of {', '.join(_CHOICES[name])}; got "
            f"{said.removeprefix('Invalid enum value ')}"
        )
    fix = ""
    if said.startswith("Expected `str") and said.endswith(("got `int`", "got `float`", "got `bool`")):
        fix = "; put it in quotes"
    elif said.startswith("Expected `int") and said.endswith(("got `str`", "got `float`")):
        value = _value_at(given, path)
        # Only digits can have come in quotes: in YAML, a text needs none.
        quotes = " without quotes" if isinstance(value, str) and _is_integer(value) else ""
        return f"{path}: must be a whole number{quotes}, got {quoted(value)}"
    elif said.startswith("Expected `bool"):
        fix = "; give true or false"
    return f"{path}: {said[0].lower()}{said[1:]}{fix}"


def _value_at(given: Any, path: str) -> Any:
    """What stands at the decoder's path, such as `terms.limits[1].max`."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        given = given[int(index)] if index else given[name]
    return given


def _meaning(field: msgspec.structs.FieldInfo) -> str:
    said = [
        one.description
        for one in get_args(field.type)[1:]
        if isinstance(one, msgspec.Meta) and one.description
    ]
    return said[-1] if said else ""


@lru_cache(maxsize=1024)
def _nearest(name: str, known: tuple[str, ...]) -> str:
    return get_close_matches(name, known, n=1, cutoff=0)[0]


def _unknown(where: str, given: Mapping[Any, Any], known: tuple[str, ...]) -> list[str]:
    """A reason for each name that is not known, or was given twice; `where` is empty or ends with a point."""
    return [
        f"{where}{str(given[TWICE])[:ID_LENGTH_MAX]}: is given twice; keep one"
        if name == TWICE
        else f"{where}{str(name)[:ID_LENGTH_MAX]}: there is no such field; the nearest is "
        f"{_nearest(str(name)[:ID_LENGTH_MAX], known)}"
        for name in islice((name for name in given if name not in known), UNKNOWN_NAMES_MAX)
    ]


#: How a field's text becomes what the command has there.
_WRITTEN: Final[Mapping[str, Callable[[str], Any]]] = {
    "opens_at": read_time,
    "closes_at": read_time,
    "valid_until": read_time,
    "hold_ms": read_duration,
    "grace_ms": read_duration,
    "retire_after_ms": read_duration,
    "limits": read_limits,
    "hours": read_hours,
}


def _terms_of(where: str, written: Any) -> tuple[dict[str, Any], list[str]]:
    """Terms as a command has them, and what is wrong with what was written."""
    if not isinstance(written, dict):
        return {}, [
            f"{where}: must be an object of terms such as kind, issuer and total, got {_shown(written)}"
        ]
    reasons = _unknown(f"{where}.", written, _KNOWN_TERMS)
    terms: dict[str, Any] = {}
    for name, value in written.items():
        if name not in _KNOWN_TERMS:
            continue
        if _is_large(value):
            reasons.append(f"{where}.{name}: is longer than any term may be")
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


def _is_large(value: Any) -> bool:
    """Whether a term is longer than any may be; else a default could be written into every entry of a file at
    great cost.
    """
    size, waiting = 0, [value]
    while waiting and size <= TERM_SIZE_MAX:
        one = waiting.pop()
        size += len(one) if isinstance(one, str) else 1
        if isinstance(one, list):
            waiting += one[: TERM_SIZE_MAX + 1]
        elif isinstance(one, dict):
            waiting += islice(one.values(), TERM_SIZE_MAX + 1)
    return size > TERM_SIZE_MAX


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {quoted(str(value))}"


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
            reasons.append(f"offer: must match {ID_PATTERN.strip('^$')}, got {quoted(offer)}")
        elif len(f"open-{offer}") > ID_LENGTH_MAX:
            reasons.append(f"id: open-{offer} would have more than {ID_LENGTH_MAX} characters; give an id")
    if given.get("type", "open") != "open":
        reasons.append(f"type: must be open, got {quoted(given['type'])}; leave it out")
    identified = {} if offer is None else {"id": f"open-{offer}"}
    return _Entry(place, {"type": "open", **identified, **given, "terms": terms}, reasons, whole)


def _wrong_kind(terms: Mapping[str, Any], whole: bool) -> list[str]:
    """What does not fit the kind; without one, only that it is missing, where that can be said."""
    if "kind" not in terms:
        return [f"terms.kind: is missing; give one of {_KINDS}"] if whole else []
    kind = terms["kind"]
    if not isinstance(kind, str) or kind not in _FIELDS_OF_KIND:
        nearest = (
            f"; the nearest is {_nearest(kind, tuple(_FIELDS_OF_KIND))}" if isinstance(kind, str) else ""
        )
        return [f"terms.kind: must be one of {_KINDS}, got {quoted(kind)}{nearest}"]
    return [
        f"terms.{name}: is no field of kind {kind}, only of {' and '.join(_kinds_with(name))}; leave it out"
        for name in terms
        if name != "kind" and name not in _FIELDS_OF_KIND[kind]
    ]


def _kinds_with(name: str) -> list[str]:
    return [kind for kind, fields in _FIELDS_OF_KIND.items() if name in fields]


# -- YAML and JSON -------------------------------------------------------------------------------------------


def _entries(text: str, form: Form) -> Iterator[_Entry]:
    """The entries of YAML or JSON: of a list, of `{defaults, offers}`, or one alone."""
    try:
        value = read_strictly(text, form == "json")
    except Unreadable as error:
        yield _Entry(error.place, {}, [error.reason])
        return
    defaults: dict[str, Any] = {}
    whole = True
    if isinstance(value, dict) and (
        value.keys() & set(_KNOWN_OF_FILE) or not value.keys() & {"offer", "terms"}
    ):
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
        yield _Entry(
            "file",
            {},
            [f"must be a list of {{offer, terms}}, or {{defaults, offers}} with one; got {_shown(value)}"],
        )
        return
    for number, written in enumerate(value, 1):
        yield _entry(f"entry {number}", written, defaults, whole)


# -- CSV -----------------------------------------------------------------------------------------------------


def _rows(text: str) -> Iterator[_Entry]:
    """The entries of CSV: a line each, below a line of column names. Empty lines and empty cells say
    nothing.
    """
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
            yield _Entry(
                place,
                {},
                [
                    f"is no CSV: {error}; a text with a comma or a quote stands in double quotes, its quotes "
                    "doubled"
                ],
            )
            return
        if not any(cells):
            continue
        if columns is not None:
            yield _row(place, columns, cells, whole)
            continue
        columns = cells
        if missing := [name for name in ("offer", "kind") if name not in columns]:
            separated = (
                ""
                if len(columns) > 1 or not re.search("[;\t]", columns[0])
                else "; cells are separated by commas"
            )
            near = (
                [*_unknown("", dict.fromkeys(filter(None, columns)), _KNOWN_COLUMNS)] if not separated else []
            )
            yield _Entry(
                place, {}, [*(f"{name}: the header has no such column{separated}" for name in missing), *near]
            )
            return
        reasons = _unknown("", dict.fromkeys(filter(None, columns)), _KNOWN_COLUMNS)
        if twice := first_twice([name for name in columns if name]):
            reasons.append(f"{twice}: two columns have this name; keep one")
        if reasons:
            whole = False
            yield _Entry(place, {}, reasons)


def _row(place: str, columns: list[str], cells: list[str], whole: bool) -> _Entry:
    if len(cells) != len(columns):
        fix = (
            "a text with a comma stands in double quotes"
            if len(cells) > len(columns)
            else "end it with a comma for each empty cell"
        )
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
            reasons.append(f"{quoted(cell)} stands in a column without a name; name it or empty it")
    entry = _entry(place, written, {}, whole)
    return entry._replace(reasons=[*reasons, *entry.reasons])


def _cell(column: str, cell: str) -> Any:
    """A cell as YAML or JSON would have it, by the type of its field."""
    types = _TYPES.get(column, {str})
    if column in _WRITTEN or str in types:
        return cell
    if bool in types:
        if cell.lower() not in ("true", "false"):
            raise Invalid(f"must be true or false, got {quoted(cell)}")
        return cell.lower() == "true"
    if int in types:
        # `1.2E+12` is what a spreadsheet leaves of a number: digits are lost.
        if not _is_integer(cell):
            raise Invalid(f"must be a whole number in digits alone, got {quoted(cell)}")
        return int(cell)
    return cell


# -- changes -------------------------------------------------------------------------------------------------


def read_changes(written: Sequence[tuple[str, str]]) -> Changes:
    """What `amend` changes, from fields and texts as a CSV file would have them; raises BadOfferFile with all
    that is wrong.

    An empty text takes all limits, or the title, away.
    """
    changes: dict[str, Any] = {}
    reasons: list[str] = []
    if twice := first_twice([name for name, _ in written]):
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
            reasons.append(_explain(str(error), changes))
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
