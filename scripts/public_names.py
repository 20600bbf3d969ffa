"""The stub `grabstream/__init__.pyi`: the public names, as type checkers read them. At run time, each is
imported when it is first used.
"""

import grabstream


def source() -> str:
    """The text of the stub."""
    lines = ["# Made from `_NAMES` in __init__.py by `python -m scripts.generated`."]
    for module, names in {**grabstream._NAMES, "extras": ("MissingExtra",)}.items():
        for name in names:
            there = grabstream._NAMES_IN_MODULES.get(name, name)
            lines.append(f"from grabstream.{module} import {there} as {name}")
    return "\n".join([*lines, "", f"__all__ = {grabstream.__all__!r}", ""])
