"""Assembles the Lua scripts: inserts each include once and checks headers, so that a wrong script is detected
at start-up.

Each script is one file in `commands/`, `sweeping/` or `ownership/`. Its header states purpose, `KEYS`, `ARGV`
and what it returns; a deciding script also states `Command`, `Outcomes` and `Events`. `--- @include "name"`
inserts `includes/name.lua`; a cycle or a missing file is an error.
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
    """The header, an include or an argument of a script is wrong."""


class Script(NamedTuple):
    """An assembled script: its text for EVAL, and its SHA-1 for EVALSHA."""

    name: str
    text: str
    sha: str


class ScriptParts(NamedTuple):
    """The text of a script without its includes, and the text of those includes, each inserted once."""

    text: str
    includes: str


def assemble(name: str, folder: Path = SCRIPTS) -> str:
    """Returns the text of a script with its includes; raises BadScript with file and reason."""
    text = _read(name, folder)
    pasted: list[str] = []
    return _include.sub(lambda match: _paste(match.group(1), folder, pasted, (name,)), text)


def parts(name: str, folder: Path, pasted: list[str]) -> ScriptParts:
    """Returns a script apart from its includes, without those in `pasted`; adds them there. Raises BadScript
    with file and reason.
    """
    text = _read(name, folder)
    includes = [_paste(match.group(1), folder, pasted, (name,)) for match in _include.finditer(text)]
    return ScriptParts(_include.sub("", text), "".join(includes))


def _read(name: str, folder: Path) -> str:
    text = script_path(name, folder).read_text()
    _check_header(name, text)
    return text


def script_path(name: str, folder: Path = SCRIPTS) -> Path:
    """Returns the file of a script, in whichever folder it is; raises BadScript unless exactly one exists."""
    paths = [path for path in _scripts(folder) if path.stem == name]
    if len(paths) != 1:
        raise BadScript(f"{name}: there are {len(paths)} scripts of this name")
    return paths[0]


def _scripts(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.lua") if path.parent.name != "includes"]


def _paste(include: str, folder: Path, pasted: list[str], inside: tuple[str, ...]) -> str:
    if include in inside:
        raise BadScript(f"{' -> '.join(inside)} -> {include}: includes form a cycle")
    if include in pasted:
        return ""
    pasted.append(include)
    path = folder / "includes" / f"{include}.lua"
    if not path.is_file():
        raise BadScript(f'{inside[-1]}: @include "{include}": there is no {path.name} in includes')
    return _include.sub(
        lambda match: _paste(match.group(1), folder, pasted, (*inside, include)), path.read_text()
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
    """Returns a script of this package, assembled and checked once."""
    text = assemble(name)
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())


def script_names(folder: Path = SCRIPTS) -> list[str]:
    """Returns the names of all scripts, sorted."""
    return sorted(path.stem for path in _scripts(folder))
