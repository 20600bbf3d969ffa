"""Assembles the Lua scripts: includes pasted once each, headers checked, so that a wrong script is found at
start-up.

Each script is one file in `commands/`, `sweeping/` or `ownership/`; its header says purpose, `KEYS`, `ARGV`,
what it returns, and, when it decides, `Outcomes` and `Events`. `--- @include "name"` pastes
`includes/name.lua`; a cycle or a missing file is an error.
"""

import re
from functools import cache
from hashlib import sha1
from importlib.resources import files
from pathlib import Path
from typing import Final, NamedTuple

SCRIPTS: Final = Path(str(files("grabstream.lua")))

_include = re.compile(r'^--- @include "([a-z_]+)"$', re.MULTILINE)
_key_use = re.compile(r"KEYS\[(\d+)\]")
_argument_use = re.compile(r"ARGV\[(\d+)\]")


class BadScript(Exception):
    """A script whose header, includes or arguments are not what they have to be."""


class Script(NamedTuple):
    """An assembled script: what EVAL gets, and the SHA-1 that EVALSHA names it by."""

    name: str
    text: str
    sha: str


def assemble(name: str, folder: Path = SCRIPTS) -> str:
    """The text of a script with its includes pasted in; raises BadScript with file and reason."""
    text = script_path(name, folder).read_text()
    _check_header(name, text)
    pasted: list[str] = []
    return _include.sub(lambda found: _paste(found.group(1), folder, pasted, (name,)), text)


def script_path(name: str, folder: Path = SCRIPTS) -> Path:
    """The file of a script, in whatever room it is; raises BadScript when there is none, or more than one."""
    found = [path for path in _scripts(folder) if path.stem == name]
    if len(found) != 1:
        raise BadScript(f"{name}: there are {len(found)} scripts of this name")
    return found[0]


def _scripts(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.lua") if path.parent.name != "includes"]


def _paste(include: str, folder: Path, pasted: list[str], inside: tuple[str, ...]) -> str:
    if include in inside:
        raise BadScript(f"{' -> '.join(inside)} -> {include}: includes go round in a circle")
    if include in pasted:
        return ""
    pasted.append(include)
    path = folder / "includes" / f"{include}.lua"
    if not path.is_file():
        raise BadScript(f'{inside[-1]}: @include "{include}": there is no {path.name} in includes')
    return _include.sub(
        lambda found: _paste(found.group(1), folder, pasted, (*inside, include)), path.read_text()
    )


def _check_header(name: str, text: str) -> None:
    lines = text.splitlines()
    if not lines or not lines[0].startswith("#!lua"):
        raise BadScript(
            f"{name}: the first line must be #!lua, so that Redis refuses it before its first write when "
            "memory is full"
        )
    header = "\n".join(line for line in lines[1:] if line.startswith("-- "))
    body = "\n".join(line for line in lines[1:] if not line.startswith("--"))
    for word in ("KEYS[1]", "Returns"):
        if word not in header:
            raise BadScript(f"{name}: the header does not say {word}")
    if '@include "decide"' in text:
        for word in ("Command:", "Outcomes:", "Events:"):
            if word not in header:
                raise BadScript(f"{name}: it decides, but the header does not say {word}")
    for used, kind in ((_key_use, "KEYS"), (_argument_use, "ARGV")):
        for number in sorted(set(used.findall(body))):
            if f"{kind}[{number}]" not in header:
                raise BadScript(f"{name}: {kind}[{number}] is used but not in the header")


@cache
def load(name: str) -> Script:
    """A script of this package, assembled and checked once."""
    text = assemble(name)
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())


def script_names(folder: Path = SCRIPTS) -> list[str]:
    """The names of all scripts, for a check at start-up and for lint."""
    return sorted(path.stem for path in _scripts(folder))
