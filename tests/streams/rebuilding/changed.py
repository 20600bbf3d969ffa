"""The command line of another release, in which the balances have definition 2: titles of offers are in upper
case with an exclamation mark. `python -m tests.streams.rebuilding.changed …`.

In the same database as this release, its workers write another version of the read model.
"""

from typing import Any

import msgspec

from grabstream.ops.cli import main
from grabstream.projections import definitions
from grabstream.projections.balances import offers
from grabstream.projections.balances.offers import _terms as as_before


def install() -> None:
    """Makes this process one of the other release."""
    parse = definitions.parse

    def parse_changed(projection: str, text: str) -> definitions.Definition:
        if projection == "balances":
            text = text.replace("--- definition 1", "--- definition 2\n--- changes 2: offers_1.title")
        return parse(projection, text)

    def shouted(raw: Any) -> Any:
        terms = as_before(raw)
        return msgspec.structs.replace(terms, title=terms.title.upper() + "!")

    definitions.parse = parse_changed
    definitions.definition_of.cache_clear()
    offers._terms = shouted


if __name__ == "__main__":
    install()
    main()
