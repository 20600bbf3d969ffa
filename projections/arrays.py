"""Array literals for `unnest`: psycopg looks at every element of a list by itself, which costs more than all the rest of a row."""

from collections.abc import Iterable, Sequence


def text_array(values: Sequence[str]) -> str:
    """The literal of a `text[]`; pass it with a cast, `%s::text[]`."""
    inside = '","'.join(values)
    # Names of accounts, users and assets need no escaping by construction; one that does must still not become two.
    if "\\" in inside or inside.count('"') != 2 * (len(values) - 1):
        inside = '","'.join(value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return f'{{"{inside}"}}' if values else "{}"


def integer_array(values: Iterable[int]) -> str:
    """The literal of a `bigint[]`; pass it with a cast, `%s::bigint[]`."""
    return f"{{{','.join(map(str, values))}}}"


def copy_text(value: str) -> str:
    """A value as a field of COPY's text form. JSON has no raw tabs or newlines: a backslash is all that COPY would take for its own."""
    return value.replace("\\", "\\\\")
