"""Checks the Lua scripts: runs the loader's checks, then luacheck and the compiler of Lua 5.1 on the text of
each script, and of the function library, as sent to Redis. The compiler knows how many variables a chunk may
have, and how many outer ones a function may use.
"""

import subprocess
import sys

from grabstream.lua.library import library
from grabstream.lua.loader import assemble, script_names

texts = {name: assemble(name) for name in script_names()}
texts["library"] = library().text
failed = False
for name, text in texts.items():
    for command in (
        ["luacheck", "--no-color", "--ignore", "211", "212", "--filename", f"grabstream/lua/{name}.lua", "-"],
        ["luac5.1", "-p", "-"],  # of the package on which luacheck depends
    ):
        # The first line is a shebang for Redis, which is not Lua.
        done = subprocess.run(command, input="--" + text, text=True, capture_output=True)
        if done.returncode != 0:
            failed = True
            sys.stdout.write(f"{done.stdout}{name}: {done.stderr}" if done.stderr else done.stdout)
sys.stdout.write("Lua: scripts break the rules\n" if failed else f"luacheck: {len(texts)} scripts\n")
sys.exit(failed)
