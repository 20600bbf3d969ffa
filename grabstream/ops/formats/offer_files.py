"""Files of offers in YAML, JSON or CSV. The whole file is read and checked before any offer is opened.

This module converts what people write (`15m`, `2026-11-27T10:00:00+08:00`, `user/day/2`) to the form of a
command; `decode_commands` of `models.commands` then checks the command. Nothing is guessed: a value that
could mean two things is refused, with its place and a fix.
"""

import csv
import io
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice
from pathlib import PurePath
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin

import msgspec

from grabstream.models.bounds import quoted, shortened
from grabstream.models.commands import Open, Undecodable, decode_commands
from grabstream.models.decoding_words import fields_of, plain_types, without_what_may_be
from grabstream.models.identifiers import ID_LENGTH_MAX, ID_PATTERN, is_id
from grabstream.models.money import Invalid
from grabstream.models.offers import Changes, Hours, Limit, Terms, check_changes
from grabstream.ops.formats.strict_text import TWICE, UnreadableText, first_twice, read_strictly
from grabstream.ops.formats.weekly_plan import WeeklyPlan, monday_of, read_week_time
from grabstream.ops.formats.written_values import read_duration, read_hours, read_limits, read_time

Form = Literal["yaml", "json", "csv"]

FORM_OF_SUFFIX: Final[Mapping[str, Form]] = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".csv": "csv"}

_is_integer = re.compile(r"[-+]?[0-9]{1,18}\Z").match
_is_located = re.compile(r"(.*) - at `\$\.(.*)`", re.DOTALL).fullmatch
_is_missing = re.compile(r"Object missing required field `(.*)`").fullmatch


#: The most problems of a file, and unknown names of one object, that are reported.
PROBLEMS_MAX: Final = 10_000
UNKNOWN_NAMES_MAX: Final = 20
#: Characters and values that one term may have; the longest, `hours`, has some three thousand.
TERM_SIZE_MAX: Final = 10_000


class BadOfferFile(Exception):
    """The file is wrong, and none of its offers is opened. `problems` has all problems as (place, reason)."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        super().__init__("\n".join(f"{place}: {reason}" for place, reason in problems))
        self.problems = list(problems)


class _FileEntry(NamedTuple):
    """One entry of a file: the `command` that it describes, and the `reasons` found why it is wrong.

    `whole` is false when the header or the defaults are wrong: a field that the entry seems to lack may only
    be misspelt there.
    """

    place: str
    command: dict[str, Any]
    reasons: list[str]
    whole: bool = True


def form_of(file: str | PurePath, chosen: Form | None = None) -> Form:
    """The form of a file: the chosen form, or that of its suffix, or YAML without a suffix, as for standard
    input (`-`).
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
                    f"the suffix {suffix} is unknown; use one of {', '.join(FORM_OF_SUFFIX)}, or give "
                    "--format",
                )
            ]
        )
    return FORM_OF_SUFFIX[suffix]


def read_offers(text: str, form: Form, plan: WeeklyPlan | None = None) -> list[Open]:
    """The commands of a file, in its order; raises BadOfferFile with all problems. `plan` chooses the week of
    a plan of weeks; without it, the next one.
    """
    text = text.removeprefix("\ufeff")
    plan = plan or WeeklyPlan(None, time.time_ns() // 1_000_000)
    opens: list[Open] = []
    problems: list[tuple[str, str]] = []
    places: dict[tuple[str, str], str] = {}
    for entry in _rows(text, plan) if form == "csv" else _entries(text, form, plan):
        reasons = [*entry.reasons, *_given_before(entry, places)]
        if entry.whole and not entry.reasons:
            decoded = _decode(entry.command)
            if isinstance(decoded, Open):
                opens.append(decoded)
            else:
                reasons.append(decoded)
        problems += [(entry.place, shortened(reason)) for reason in reasons]
        if len(problems) > PROBLEMS_MAX:
            problems.append(("file", "there are more problems; correct these first"))
            break
    if not problems:
        problems += [("file", reason) for reason in plan.problems()]
    if not problems and not opens:
        problems.append(
            (
                "file",
                "has no offers; give a list of {offer, terms}, {defaults, offers}, or a CSV header and lines",
            )
        )
    if problems:
        raise BadOfferFile(problems)
    return opens


def _given_before(entry: _FileEntry, places: dict[tuple[str, str], str]) -> list[str]:
    for field, fix in (
        ("offer", "an offer is opened only once; leave one out"),
        ("id", "give each command a different id"),
    ):
        value = entry.command.get(field)
        if isinstance(value, str):
            first = places.setdefault((field, value), entry.place)
            if first != entry.place:
                # Reports one of the two fields only: an id that is not given follows from the offer.
                return [f"{field}: {value} is already used in {first}; {fix}"]
    return []


def _decode(command: dict[str, Any]) -> Open | str:
    """The command, or the reason why it cannot be decoded."""
    try:
        [decoded] = decode_commands(msgspec.json.encode(command))
    except (TypeError, ValueError, RecursionError) as error:
        return f"terms: cannot be written as JSON ({error}); use plain texts, numbers, lists and objects"
    if isinstance(decoded, Undecodable):
        return _explain(decoded.reason, command)
    if not isinstance(decoded, Open):
        return f"type: must be open, got {quoted(command['type'])}"
    return decoded


# -- the fields of the models --------------------------------------------------------------------------------


_FIELDS_OF_KIND: Final = {str(struct.__struct_config__.tag): fields_of(struct) for struct in get_args(Terms)}
_TERMS: Final = {name: field for fields in _FIELDS_OF_KIND.values() for name, field in fields.items()}
_TYPES: Final = {name: plain_types(field.type) for name, field in _TERMS.items()}
_PARTS: Final = {"limits": fields_of(Limit), "hours": fields_of(Hours)}
_CHOICES: Final = {
    name: get_args(type_)
    for name, field in [item for fields in (_TERMS, *_PARTS.values()) for item in fields.items()]
    for type_ in plain_types(field.type)
    if get_origin(type_) is Literal
}
_KNOWN_TERMS: Final = ("kind", *_TERMS)
_KNOWN_OF_ENTRY: Final = ("offer", "terms", "id", "type")
_KNOWN_OF_FILE: Final = ("defaults", "offers", "weeks")
_KNOWN_COLUMNS: Final = ("offer", "id", *_KNOWN_TERMS)
_KNOWN_CHANGES: Final = tuple(fields_of(Changes))
_KINDS: Final = ", ".join(_FIELDS_OF_KIND)


def _explain(reason: str, given: Any) -> str:
    """The decoder's reason, in the form of the other reasons: the field first, then the fix."""
    located = _is_located(reason)
    if located is None:
        return reason
    problem, path = without_what_may_be(located[1]), located[2]
    name = re.sub(r"\[[^][]*\]\Z", "", path).rpartition(".")[2]
    if missing := _is_missing(problem):
        field = _TERMS.get(missing[1]) if path == "terms" else None
        meaning = f"; it says {_meaning(field)}" if field and _meaning(field) else ""
        return f"{path}.{missing[1]}: is missing{meaning}"
    if problem.startswith("Invalid enum value ") and name in _CHOICES:
        value = problem.removeprefix("Invalid enum value ")
        return f"{path}: must be one of {', '.join(_CHOICES[name])}; got {value}"
    fix = ""
    if problem.startswith("Expected `str") and problem.endswith(("got `int`", "got `float`", "got `bool`")):
        fix = "; put it in quotes"
    elif problem.startswith("Expected `int") and problem.endswith(("got `str`", "got `float`")):
        value = _value_at(given, path)
        # A text of digits was written with quotes: YAML reads digits without quotes as a number.
        quotes = " without quotes" if isinstance(value, str) and _is_integer(value) else ""
        return f"{path}: must be a whole number{quotes}, got {quoted(value)}"
    elif problem.startswith("Expected `bool"):
        fix = "; give true or false"
    return f"{path}: {problem[0].lower()}{problem[1:]}{fix}"


def _value_at(given: Any, path: str) -> Any:
    """The value at a path of the decoder, such as `terms.limits[1].max`."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        given = given[int(index)] if index else given[name]
    return given


def _meaning(field: msgspec.structs.FieldInfo) -> str:
    descriptions = [
        metadata.description
        for metadata in get_args(field.type)[1:]
        if isinstance(metadata, msgspec.Meta) and metadata.description
    ]
    return descriptions[-1] if descriptions else ""


@lru_cache(maxsize=1024)
def _nearest(name: str, known: tuple[str, ...]) -> str:
    return get_close_matches(name, known, n=1, cutoff=0)[0]


def _unknown(where: str, given: Mapping[Any, Any], known: tuple[str, ...]) -> list[str]:
    """A reason for each name that is unknown or given twice. `where` is empty or ends with a dot."""
    return [
        f"{where}{str(given[TWICE])[:ID_LENGTH_MAX]}: is given twice; keep one"
        if name == TWICE
        else f"{where}{str(name)[:ID_LENGTH_MAX]}: there is no such field; the nearest is "
        f"{_nearest(str(name)[:ID_LENGTH_MAX], known)}"
        for name in islice((name for name in given if name not in known), UNKNOWN_NAMES_MAX)
    ]


#: What converts the text of a field to its value in the command.
_CONVERTERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "opens_at": read_time,
    "closes_at": read_time,
    "valid_until": read_time,
    "hold_ms": read_duration,
    "grace_ms": read_duration,
    "retire_after_ms": read_duration,
    "limits": read_limits,
    "hours": read_hours,
}


def _terms_of(where: str, written: Any, weekly: bool = False) -> tuple[dict[str, Any], list[str]]:
    """The terms of a command, and the reasons why what was written is wrong. With `weekly`, a time may be one
    of a week, which stays a WeekTime.
    """
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
            reasons.append(f"{where}.{name}: is longer than any term may be ({TERM_SIZE_MAX:,} characters)")
            continue
        terms[name] = value
        if isinstance(value, str) and name in _CONVERTERS:
            try:
                week_time = read_week_time(value) if weekly and _CONVERTERS[name] is read_time else None
                terms[name] = week_time or _CONVERTERS[name](value)
            except Invalid as error:
                reasons.append(f"{where}.{name}: {error}")
        elif isinstance(value, list) and name in _PARTS:
            terms[name], wrong = _parts_of(f"{where}.{name}", name, value)
            reasons += wrong
    return terms, reasons


def _parts_of(where: str, name: str, written: list[Any]) -> tuple[list[Any], list[str]]:
    """Limits or hours from a list of texts and objects, and the reasons why some are wrong."""
    parts: list[Any] = []
    reasons: list[str] = []
    for index, part in enumerate(written):
        if isinstance(part, str):
            try:
                parts += _CONVERTERS[name](part)
            except Invalid as error:
                reasons.append(f"{where}[{index}]: {error}")
            continue
        if isinstance(part, dict):
            reasons += _unknown(f"{where}[{index}].", part, tuple(_PARTS[name]))
        parts.append(part)
    return parts, reasons


def _is_large(value: Any) -> bool:
    """Whether a term has more than TERM_SIZE_MAX characters and values. Without this bound, a huge default
    would be copied into every entry of a file.
    """
    size, waiting = 0, [value]
    while waiting and size <= TERM_SIZE_MAX:
        part = waiting.pop()
        size += len(part) if isinstance(part, str) else 1
        if isinstance(part, list):
            waiting += part[: TERM_SIZE_MAX + 1]
        elif isinstance(part, dict):
            waiting += islice(part.values(), TERM_SIZE_MAX + 1)
    return size > TERM_SIZE_MAX


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {quoted(str(value))}"


def _entry(place: str, written: Any, defaults: dict[str, Any], whole: bool, plan: WeeklyPlan) -> _FileEntry:
    """An entry with the defaults filled in, and the problems that show before its values are checked."""
    if not isinstance(written, dict):
        return _FileEntry(place, {}, [f"must be an object {{offer, terms}}, got {_shown(written)}"])
    reasons = _unknown("", written, _KNOWN_OF_ENTRY)
    if "offer" not in written:
        reasons.append("offer: is missing; give the id of the offer")
    if "terms" not in written and not defaults and whole:
        reasons.append("terms: is missing; give kind, issuer, total …")
    terms, wrong = _terms_of("terms", written.get("terms", {}), weekly=True)
    reasons += wrong
    if not wrong or terms:
        terms = {**defaults, **terms}
        written, terms, wrong = plan.in_week(written, terms)
        reasons += wrong
        reasons += _wrong_kind(terms, whole and ("terms" in written or bool(defaults)))
    offer = written.get("offer")
    given = {name: written[name] for name in _KNOWN_OF_ENTRY if name in written}
    if "id" not in given and isinstance(offer, str):  # else an error would name an id that the file lacks
        if not is_id(offer):
            reasons.append(f"offer: must match {ID_PATTERN.strip('^$')}, got {quoted(offer)}")
        elif len(f"open-{offer}") > ID_LENGTH_MAX:
            reasons.append(f"id: open-{offer} would have more than {ID_LENGTH_MAX} characters; give an id")
    if given.get("type", "open") != "open":
        reasons.append(f"type: must be open, got {quoted(given['type'])}; leave it out")
    identified = {} if offer is None else {"id": f"open-{offer}"}
    return _FileEntry(place, {"type": "open", **identified, **given, "terms": terms}, reasons, whole)


def _wrong_kind(terms: Mapping[str, Any], whole: bool) -> list[str]:
    """The terms that do not fit the kind; or that the kind is missing, if the entry is `whole`."""
    if "kind" not in terms:
        return [f"terms.kind: is missing; give one of {_KINDS}"] if whole else []
    kind = terms["kind"]
    if not isinstance(kind, str) or kind not in _FIELDS_OF_KIND:
        nearest = (
            f"; the nearest is {_nearest(kind, tuple(_FIELDS_OF_KIND))}" if isinstance(kind, str) else ""
        )
        return [f"terms.kind: must be one of {_KINDS}, got {quoted(kind)}{nearest}"]
    return [
        f"terms.{name}: kind {kind} has no such field, only {' and '.join(_kinds_with(name))}; leave it out"
        for name in terms
        if name != "kind" and name not in _FIELDS_OF_KIND[kind]
    ]


def _kinds_with(name: str) -> list[str]:
    return [kind for kind, fields in _FIELDS_OF_KIND.items() if name in fields]


# -- YAML and JSON -------------------------------------------------------------------------------------------


def _entries(text: str, form: Form, plan: WeeklyPlan) -> Iterator[_FileEntry]:
    """The entries of YAML or JSON: of a list, of `{defaults, offers, weeks}`, or a single entry."""
    try:
        value = read_strictly(text, form == "json")
    except UnreadableText as error:
        yield _FileEntry(error.place, {}, [error.reason])
        return
    defaults: dict[str, Any] = {}
    whole = True
    if isinstance(value, dict) and (
        value.keys() & set(_KNOWN_OF_FILE) or not value.keys() & {"offer", "terms"}
    ):
        reasons = _unknown("", value, _KNOWN_OF_FILE)
        written = value.get("defaults")
        if written is not None:
            defaults, wrong = _terms_of("defaults", written, weekly=True)
            reasons += wrong
        plan.exceptions, wrong = _exceptions(value.get("weeks"))
        reasons += wrong
        if reasons:
            whole = False
            yield _FileEntry("file", {}, reasons)
        value = value.get("offers", [])
    elif isinstance(value, dict):
        value = [value]
    if value is None:
        return
    if not isinstance(value, list):
        yield _FileEntry(
            "file",
            {},
            [
                "must be a list of {offer, terms}, or {defaults, offers} with such a list; got "
                f"{_shown(value)}"
            ],
        )
        return
    for number, written in enumerate(value, 1):
        yield _entry(f"entry {number}", written, defaults, whole, plan)


def _exceptions(written: Any) -> tuple[dict[str, dict[str, dict[str, Any]]], list[str]]:
    """The terms of some offers in some weeks, by week and offer, and the reasons why they are wrong."""
    exceptions: dict[str, dict[str, dict[str, Any]]] = {}
    reasons: list[str] = []
    wanted = "must be an object {WEEK: {OFFER: terms}}"
    if written is None:
        return exceptions, reasons
    if not isinstance(written, dict):
        return exceptions, [f"weeks: {wanted}, got {_shown(written)}"]
    for week, offers in written.items():
        try:
            monday_of(str(week)[:ID_LENGTH_MAX])
        except Invalid as error:
            reasons.append(f"weeks: {error}")
            continue
        if not isinstance(offers, dict):
            reasons.append(f"weeks.{week}: {wanted}, got {_shown(offers)}")
            continue
        for offer, terms in offers.items():
            where = f"weeks.{week}.{str(offer)[:ID_LENGTH_MAX]}"
            exceptions.setdefault(week, {})[str(offer)], wrong = _terms_of(where, terms, weekly=True)
            reasons += wrong
    return exceptions, reasons


# -- CSV -----------------------------------------------------------------------------------------------------


def _rows(text: str, plan: WeeklyPlan) -> Iterator[_FileEntry]:
    """The entries of CSV: one in each line after the header, which names the columns. Empty lines and empty
    cells are ignored.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: list[str] | None = None
    whole = True
    while True:
        place = f"line {reader.line_num + 1}"  # the entry's first line: a quoted cell may have several
        try:
            cells = [cell.strip() for cell in next(reader)]
        except StopIteration:
            return
        except csv.Error as error:
            yield _FileEntry(
                place,
                {},
                [
                    f"is not CSV: {error}; put a text with a comma or a quote in double quotes, and double "
                    "the quotes in it"
                ],
            )
            return
        if not any(cells):
            continue
        if columns is not None:
            yield _row(place, columns, cells, whole, plan)
            continue
        columns = cells
        if missing := [name for name in ("offer", "kind") if name not in columns]:
            separated = (
                ""
                if len(columns) > 1 or not re.search("[;\t]", columns[0])
                else "; separate cells with commas"
            )
            near = (
                [*_unknown("", dict.fromkeys(filter(None, columns)), _KNOWN_COLUMNS)] if not separated else []
            )
            yield _FileEntry(
                place, {}, [*(f"{name}: the header has no such column{separated}" for name in missing), *near]
            )
            return
        reasons = _unknown("", dict.fromkeys(filter(None, columns)), _KNOWN_COLUMNS)
        if twice := first_twice([name for name in columns if name]):
            reasons.append(f"{twice}: two columns have this name; keep one of them")
        if reasons:
            whole = False
            yield _FileEntry(place, {}, reasons)


def _row(place: str, columns: list[str], cells: list[str], whole: bool, plan: WeeklyPlan) -> _FileEntry:
    if len(cells) != len(columns):
        fix = (
            "put a text with a comma in double quotes"
            if len(cells) > len(columns)
            else "end it with a comma for each empty cell"
        )
        return _FileEntry(place, {}, [f"has {len(cells)} cells, the header {len(columns)}; {fix}"])
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
            reasons.append(f"{quoted(cell)} is in a column without a name; name the column or empty it")
    entry = _entry(place, written, {}, whole, plan)
    return entry._replace(reasons=[*reasons, *entry.reasons])


def _cell(column: str, cell: str) -> Any:
    """The value that YAML or JSON would have for a cell, by the type of its field."""
    types = _TYPES.get(column, [str])
    if column in _CONVERTERS or str in types:
        return cell
    if bool in types:
        if cell.lower() not in ("true", "false"):
            raise Invalid(f"must be true or false, got {quoted(cell)}")
        return cell.lower() == "true"
    if int in types:
        # Spreadsheets write long numbers as `1.2E+12`, and lose digits.
        if not _is_integer(cell):
            raise Invalid(f"must be a whole number, written with digits only, got {quoted(cell)}")
        return int(cell)
    return cell


# -- changes -------------------------------------------------------------------------------------------------


def read_changes(texts: Sequence[tuple[str, str]]) -> Changes:
    """The changes of `amend`, from fields and texts as in a CSV file; raises BadOfferFile with all problems.

    An empty text removes all limits, or the title.
    """
    changes: dict[str, Any] = {}
    reasons: list[str] = []
    if twice := first_twice([name for name, _ in texts]):
        reasons.append(f"{twice}: is given twice; keep one")
    for name, text in texts:
        if name not in _KNOWN_CHANGES:
            reasons.append(_unchangeable(name))
            continue
        try:
            cell = _cell(name, text)
            changes[name] = _CONVERTERS[name](cell) if name in _CONVERTERS else cell
            # Each field separately, so that all problems are reported.
            msgspec.convert({name: changes[name]}, Changes)
        except msgspec.ValidationError as error:
            reasons.append(_explain(str(error), changes))
        except Invalid as error:
            reasons.append(f"{name}: {error}")
    if not reasons:
        converted = msgspec.convert(changes, Changes)
        try:
            check_changes(converted)
            return converted
        except Invalid as error:
            reasons.append(re.sub(r"\A(?:changes|terms)\.", "", str(error)))
    raise BadOfferFile([("changes", reason) for reason in reasons])


def _unchangeable(name: str) -> str:
    if name in _KNOWN_TERMS:
        return f"{name}: cannot be amended; only {', '.join(_KNOWN_CHANGES)} can"
    return f"{name}: there is no such field; the nearest is {_nearest(name, _KNOWN_CHANGES)}"


# -- terms alone ->------------------------------------------------------------------------------------


def read_terms(document: Any) -> tuple[dict[str, Any], list[str]]:
    """Some terms, by name, as values of their fields, and the reasons why input is wrong. Whether they fit
    together depends on the offer.
    """
    terms, reasons = _terms_of("terms", document)
    converted = {}
    for name, value in terms.items():
        if name == "kind":
            converted[name] = value
            continue
        if any(reason.startswith(f"terms.{name}: ") for reason in reasons):
            continue
        try:
            # The error then begins with the place in the value, which is that of the term.
            converted[name] = msgspec.convert(value, _TERMS[name].type)
        except msgspec.ValidationError as error:
            text = str(error)
            text = text.replace("`$", f"`$.{name}") if "`$" in text else f"{text} - at `$.{name}`"
            reason = _explain(text, {name: value})
            reasons.append(f"terms.{reason}")
    return converted, reasons
