"""What a change of a JSON Schema means for other programs.

It depends on the direction. `reads`: grabstream reads what others wrote by the old schema (commands of
senders that do not know the change; old events of the journal), so every value that was valid must stay
valid. `writes`: others read by the old schema what grabstream writes by the new one (answers, events), so no
value may be written that the old schema does not allow; readers ignore unknown fields.

Only the keywords that the schemas of this project use are supported. A difference in any other keyword counts
as breaking.
"""

from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple

Direction = Literal["reads", "writes"]
Verdict = Literal["compatible", "warning", "breaking"]
Schema = dict[str, Any]
VERDICTS: Final[tuple[Verdict, ...]] = ("compatible", "warning", "breaking")

#: Kind of difference → its verdict in the direction `reads`, and in the direction `writes`.
MEANING: Final[dict[str, tuple[Verdict, Verdict]]] = {
    "field added": ("compatible", "compatible"),
    "required field added": ("breaking", "compatible"),
    "field removed": ("breaking", "breaking"),
    "became required": ("breaking", "compatible"),
    "became optional": ("compatible", "breaking"),
    # A field that is left out means the default of the schema that the other program knows.
    "default changed": ("breaking", "breaking"),
    "value added": ("compatible", "warning"),
    "value removed": ("breaking", "compatible"),
    "alternative added": ("compatible", "warning"),
    "alternative removed": ("breaking", "compatible"),
    "type changed": ("breaking", "breaking"),
    "widened": ("compatible", "breaking"),
    "narrowed": ("breaking", "compatible"),
    "unknown fields are refused": ("breaking", "compatible"),
    "unknown fields are allowed": ("compatible", "compatible"),
    "cannot be compared": ("breaking", "breaking"),
}
#: Keywords that constrain nothing.
_NOTES: Final = frozenset(
    {"$schema", "$id", "$defs", "title", "description", "discriminator", "$comment", "examples"}
)
_LEAST: Final = ("minimum", "minLength", "minItems", "minProperties")
_MOST: Final = ("maximum", "maxLength", "maxItems", "maxProperties")
_UNDERSTOOD: Final = _NOTES | {
    "type", "enum", "const", "anyOf", "$ref", "default", "pattern", "properties", "required",
    "additionalProperties", "propertyNames",
    "items", "prefixItems", "format", *_LEAST, *_MOST,
}  # fmt: skip

_SIMPLE: Final = ("string", "integer", "number", "boolean", "null", "array", "choice", "anything")
#: Types that contain each other: text and a choice of texts, any number and whole numbers.
_RELATED: Final = {
    ("string", "choice"): "narrowed", ("choice", "string"): "widened", ("integer", "number"): "widened",
    ("number", "integer"): "narrowed",
}  # fmt: skip
_ABSENT: Final = "nothing"


class SchemaDifference(NamedTuple):
    """A difference: where it is (`$.terms.price`), its kind (a key of MEANING), and a text with the old and
    the new value.
    """

    where: str
    kind: str
    words: str

    def verdict(self, *directions: Direction) -> Verdict:
        """The worst verdict in these directions."""
        verdicts = [MEANING[self.kind][0 if direction == "reads" else 1] for direction in directions]
        return max(verdicts, key=VERDICTS.index)


def differences(old: Schema, new: Schema) -> list[SchemaDifference]:
    """Every difference between two schemas, in the order of their fields."""
    return list(_Comparison(old, new).compare("$", old, new))


class _Comparison:
    """Walks through two schemas in parallel, and follows their references."""

    def __init__(self, old: Schema, new: Schema) -> None:
        self._old_root, self._new_root = old, new

    def compare(self, where: str, old: Schema, new: Schema) -> Iterator[SchemaDifference]:
        old, new = _resolved(self._old_root, old), _resolved(self._new_root, new)
        if old == new and "$defs" not in old and not _refers(old):
            return
        yield from _not_understood(where, old, new)
        olds, news = _alternatives(self._old_root, old), _alternatives(self._new_root, new)
        yield from _other_alternatives(where, olds, news)
        for name in (name for name in olds if name in news):
            yield from self._one(
                where if name in ("object", *_SIMPLE) else f"{where}({name})", olds[name], news[name]
            )

    def _one(self, where: str, old: Schema, new: Schema) -> Iterator[SchemaDifference]:
        """Two schemas of one type."""
        yield from _values(where, old, new)
        yield from _bounds(where, old, new)
        yield from self._members(where, old, new)
        yield from self._fields(where, old, new)

    def _fields(self, where: str, old: Schema, new: Schema) -> Iterator[SchemaDifference]:
        olds, news = old.get("properties", {}), new.get("properties", {})
        for field, schema in olds.items():
            inside = f"{where}.{field}"
            if field not in news:
                yield SchemaDifference(inside, "field removed", "the new schema lacks it")
                continue
            was, is_ = field in old.get("required", ()), field in new.get("required", ())
            if was != is_:
                yield SchemaDifference(
                    inside,
                    *(
                        ("became required", "can no longer be left out")
                        if is_
                        else ("became optional", "may be left out")
                    ),
                )
            elif not was and schema.get("default", _ABSENT) != news[field].get("default", _ABSENT):
                defaults = [either.get("default", _ABSENT) for either in (schema, news[field])]
                yield SchemaDifference(
                    inside, "default changed", f"left out, it meant {defaults[0]!r}, now {defaults[1]!r}"
                )
            yield from self.compare(inside, schema, news[field])
        for field in (field for field in news if field not in olds):
            required = field in new.get("required", ())
            yield SchemaDifference(
                f"{where}.{field}", "required field added" if required else "field added", "a new field"
            )

    def _members(self, where: str, old: Schema, new: Schema) -> Iterator[SchemaDifference]:
        """The members of a list or of a map."""
        for word, inside in (
            ("items", f"{where}[]"),
            ("additionalProperties", f"{where}.*"),
            ("propertyNames", f"{where}.*(name)"),
        ):
            was, is_ = old.get(word, True), new.get(word, True)
            if isinstance(was, dict) and isinstance(is_, dict):
                yield from self.compare(inside, was, is_)
            elif (
                isinstance(was, dict)
                or isinstance(is_, dict)
                or (was != is_ and word != "additionalProperties")
            ):
                yield SchemaDifference(inside, "cannot be compared", f"{word}: {was} → {is_}")
            elif was != is_:
                kind = "unknown fields are allowed" if is_ else "unknown fields are refused"
                yield SchemaDifference(where, kind, kind)
        olds, news = old.get("prefixItems", []), new.get("prefixItems", [])
        if len(olds) != len(news):
            yield SchemaDifference(where, "type changed", f"{len(olds)} members → {len(news)}")
            return
        for index, (was, is_) in enumerate(zip(olds, news, strict=True)):
            yield from self.compare(f"{where}[{index}]", was, is_)


def _refers(schema: Any) -> bool:
    """Whether a schema refers to others, which may differ although the schema itself does not."""
    if isinstance(schema, dict):
        return "$ref" in schema or any(map(_refers, schema.values()))
    return isinstance(schema, list) and any(map(_refers, schema))


def _resolved(root: Schema, schema: Schema) -> Schema:
    """The schema that a reference leads to, with the keywords next to the reference."""
    while "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        schema = {**root["$defs"][name], **{word: value for word, value in schema.items() if word != "$ref"}}
    return schema


def _alternatives(root: Schema, schema: Schema) -> dict[str, Schema]:
    """The alternatives of a value by type; alternatives that are objects, by the value of their tag."""
    if "anyOf" not in schema:
        return {
            "choice" if "enum" in schema or "const" in schema else str(schema.get("type", "anything")): schema
        }
    tag = schema.get("discriminator", {}).get("propertyName")
    alternatives: dict[str, Schema] = {}
    for member in schema["anyOf"]:
        for name, alternative in _alternatives(root, _resolved(root, member)).items():
            label = f"{tag} {_enum(alternative['properties'][tag])[0]}" if tag else name
            alternatives[label if label not in alternatives else f"{label} {len(alternatives)}"] = alternative
    return alternatives


def _enum(schema: Schema) -> list[Any]:
    return [schema["const"]] if "const" in schema else list(schema["enum"])


def _not_understood(where: str, old: Schema, new: Schema) -> Iterator[SchemaDifference]:
    for word in sorted((old.keys() | new.keys()) - _UNDERSTOOD):
        if old.get(word) != new.get(word):
            yield SchemaDifference(where, "cannot be compared", f"{word}: {old.get(word)} → {new.get(word)}")


def _other_alternatives(
    where: str, old: dict[str, Schema], new: dict[str, Schema]
) -> Iterator[SchemaDifference]:
    removed = [name for name in old if name not in new]
    added = [name for name in new if name not in old]
    if removed and added:
        kind = (
            _RELATED.get((removed[0], added[0]), "type changed")
            if len(removed) == len(added) == 1
            else "type changed"
        )
        yield SchemaDifference(where, kind, f"{', '.join(removed)} → {', '.join(added)}")
        return
    for name in removed:
        kind = "narrowed" if name in _SIMPLE else "alternative removed"
        yield SchemaDifference(where, kind, f"{name} is no longer allowed")
    for name in added:
        kind = "widened" if name in _SIMPLE else "alternative added"
        yield SchemaDifference(where, kind, f"{name} is allowed too")


def _values(where: str, old: Schema, new: Schema) -> Iterator[SchemaDifference]:
    if not ({"enum", "const"} & old.keys() and {"enum", "const"} & new.keys()):
        return
    was, is_ = _enum(old), _enum(new)
    if not any(value in is_ for value in was):
        yield SchemaDifference(where, "type changed", f"{was} → {is_}")
        return
    for value in was:
        if value not in is_:
            yield SchemaDifference(where, "value removed", f"{value!r} is no longer allowed")
    for value in is_:
        if value not in was:
            yield SchemaDifference(where, "value added", f"{value!r} is allowed too")


def _bounds(where: str, old: Schema, new: Schema) -> Iterator[SchemaDifference]:
    for words, sign in ((_LEAST, 1), (_MOST, -1)):
        for word in words:
            was, is_ = old.get(word), new.get(word)
            if was == is_:
                continue
            narrower = is_ is not None and (was is None or (is_ - was) * sign > 0)
            yield SchemaDifference(
                where, "narrowed" if narrower else "widened", f"{word} {_shown(was)} → {_shown(is_)}"
            )
    for word in ("pattern", "format"):
        was, is_ = old.get(word), new.get(word)
        if was != is_:
            kind = "narrowed" if was is None else "widened" if is_ is None else "cannot be compared"
            yield SchemaDifference(where, kind, f"{word} {_shown(was)} → {_shown(is_)}")


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
