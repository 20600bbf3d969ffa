"""The names of metrics and labels in a query of Prometheus. It reads only what our boards and alerts use; a
real Prometheus says whether a query is right.
"""

import re
from typing import Final, NamedTuple

_tokens = re.compile(
    r'"(?:[^"\\]|\\.)*"|\$\w+|\d+(?:\.\d+)?(?:[smhdw]\b|\b)|[a-zA-Z_:][\w:]*|=~|!~|!=|<=|>=|==|\S'
).findall
_GROUPING: Final = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
_WORDS: Final = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan"})


class Names(NamedTuple):
    """Metrics by name, each with the labels that are selected; and the labels that are grouped by."""

    metrics: dict[str, set[str]]
    grouped: set[str]


def names_in(query: str) -> Names:
    """The names in a query."""
    tokens = _tokens(query)
    found = Names({}, set())
    index, metric = 0, ""
    while index < len(tokens):
        token, following = tokens[index], tokens[index + 1] if index + 1 < len(tokens) else ""
        if token in _GROUPING:
            end = tokens.index(")", index)
            found.grouped.update(name for name in tokens[index + 2 : end] if name != ",")
            index = end
        elif token == "{":
            end = tokens.index("}", index)
            found.metrics[metric].update(
                name for name, sign in zip(tokens[index:end], tokens[index + 1 : end], strict=False)
                if sign in ("=", "=~", "!=", "!~")
            )  # fmt: skip
            index = end
        elif token == "[":
            index = tokens.index("]", index)
        elif (
            re.match(r"[a-zA-Z_:]", token)
            and token.lower() not in _WORDS
            # A function, or an aggregation, is followed by a bracket or by its grouping.
            and following not in {"(", *_GROUPING}
        ):
            metric = token
            found.metrics.setdefault(metric, set())
        index += 1
    return found
