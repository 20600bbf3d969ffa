"""The Redis functions of this release: one library that has every include once and every script as a
function. A script of 66 KB makes its tables and functions again in each call; a library makes them once.

The library's name, which begins every function's name, has the key layout and a digest of its text, so the
libraries of several releases exist side by side on a server. Only `grabstream init` and a takeover of a shard
load it (`provide`). Where functions cannot be used, the same sources run as plain scripts
(lua/running.py).

What an include creates on loading lasts as long as the library. State of a single call is marked in the
include: `--- @each_call` stands before one line `local name = value`, which then runs at the beginning of
each call, also after a call that raised. `KEYS` and `ARGV` are set there too. The body of a script runs in
each call as a whole.
"""

import re
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

from redis.exceptions import OutOfMemoryError, ResponseError

from grabstream.lua.keys import LAYOUT
from grabstream.lua.loader import SCRIPTS, BadScript, parts, script_names

#: The names of the libraries of all releases begin so.
PREFIX: Final = "grabstream_"
#: Returned by `missing_or_unusable` when a takeover would load the library.
MISSING: Final = "missing"
_DIGEST_CHARACTERS: Final = 16
_flags = re.compile(r"^#!lua(?: flags=([a-z,-]+))?$")
_mark = re.compile(r"^--- @each_call$", re.MULTILINE)
_each_call = re.compile(r"^--- @each_call\nlocal ([a-z_]+)(?: = (.+))?$", re.MULTILINE)
_comment = re.compile(r"^ *--(?!-).*\n|\n(?=\n)", re.MULTILINE)


class Library(NamedTuple):
    """A library: its name, its text for FUNCTION LOAD, and the function of each script."""

    name: str
    text: str
    functions: Mapping[str, str]


class LibraryMissing(ResponseError):  # type: ignore[misc]
    """The server of a shard does not have the library, although its owner has not reported that functions
    cannot be used there: the call did nothing. The next takeover loads it.
    """


def assemble_library(folder: Path = SCRIPTS) -> Library:
    """Returns the library of all scripts; raises BadScript with file and reason."""
    pasted: list[str] = []
    includes, functions = "", ""
    names = script_names(folder)
    for name in names:
        script = parts(name, folder, pasted)
        includes += script.includes
        functions += _registered(name, script.text)
    made_anew = _each_call.findall(includes)
    if len(made_anew) != len(_mark.findall(includes)):
        raise BadScript("@each_call must stand before one line `local name` or `local name = value`")
    variables = ", ".join(["KEYS", "ARGV", *(name for name, _ in made_anew)])
    values = ", ".join(["keys", "arguments", *(value or "nil" for _, value in made_anew)])
    includes = _each_call.sub(r"local \1", includes)
    wrapper = (
        "local function each_call(body)\n  return function(keys, arguments)\n"
        f"    {variables} = {values}\n    return body()\n  end\nend\n"
    )
    body = _comment.sub("", f"local KEYS, ARGV\n{includes}\n{wrapper}\n{functions}")
    digest = sha256(body.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    library = f"{PREFIX}{LAYOUT}_{digest}"
    return Library(
        library,
        f"#!lua name={library}\n{body.replace('@library', library)}",
        {name: f"{library}_{name}" for name in names},
    )


def _registered(name: str, text: str) -> str:
    """The registration of a script, of which `text` is the first line and the body."""
    shebang, _, body = text.partition("\n")
    flags = _flags.match(shebang)
    if flags is None:
        raise BadScript(f"{name}: the first line is not `#!lua` or `#!lua flags=…`")
    if _mark.search(body):
        raise BadScript(f"{name}: @each_call stands in an include; the body of a script runs in each call")
    listed = ", ".join(f"'{flag}'" for flag in (flags[1] or "").split(",") if flag)
    return (
        f"redis.register_function{{function_name = '@library_{name}', flags = {{{listed}}},\n"
        f"callback = each_call(function()\n{body.strip()}\nend)}}\n\n"
    )


@cache
def library() -> Library:
    """Returns the library of this package, assembled once."""
    return assemble_library()


def is_missing(error: ResponseError) -> bool:
    """Whether FCALL failed because the server does not have the function."""
    return str(error).startswith("Function not found")


def why_unusable(error: ResponseError) -> str:
    """Why functions cannot be used, in words, if that is what an error of FCALL or FUNCTION says; else ''."""
    text = str(error)
    lower = text.lower()
    is_about_functions = any(f"{quote}f{rest}" in lower for quote in "'`" for rest in ("call", "unction"))
    if is_about_functions and ("no permissions to run" in lower or "unknown command" in lower):
        return text
    return ""


async def missing_or_unusable(redis: Any, key: str) -> str:
    """Returns '' if the server that has a key has the library; MISSING; or why functions cannot be used, in
    words. Raises the client's errors.
    """
    try:
        await redis.execute_command("FCALL", library().functions["time"], 1, key)
    except ResponseError as error:
        if is_missing(error):
            return MISSING
        if reason := why_unusable(error):
            return reason
        raise
    return ""


async def provide(redis: Any, key: str) -> str:
    """Loads the library on the server that has a key, unless it is loaded. Returns '' or, when functions
    cannot be used there now, the reason in words.

    Raises the client's errors. Called only by the worker that takes a shard over.
    """
    reason = await missing_or_unusable(redis, key)
    if reason != MISSING:
        return reason
    # A cluster has no server for a command without a key.
    return await load(await redis.client_of(key) if hasattr(redis, "client_of") else redis)


async def load(server: Any) -> str:
    """Loads the library on one server. Returns '', also when the server has it; or why functions cannot be
    used, in words. Raises the client's errors.
    """
    try:
        await server.execute_command("FUNCTION", "LOAD", library().text)
    except OutOfMemoryError:
        return "the memory of Redis is full, so the function library cannot be loaded"
    except ResponseError as error:
        if reason := why_unusable(error):
            return reason
        if "already exists" not in str(error):
            raise
    return ""
