"""Checks the Lua scripts: runs the loader's checks, and luacheck on the text of each script, and of the
function library, as they are sent to Redis.
"""

import subprocess
import sys

from grabstream.lua.library import library
from grabstream.lua.loader import assemble, script_names

texts = {name: assemble(name) for name in script_names()}
texts["library"] = library().text
failed = False
for name, text in texts.items():
    done = subprocess.run(
        ["luacheck", "--no-color", "--ignore", "211", "212", "--filename", f"lua/{name}.lua", "-"],
        # The first line is a shebang for Redis, which luacheck would not accept as Lua.
        input="--" + text,
        text=True,
        capture_output=True,
    )
    if done.returncode != 0:
        failed = True
        sys.stdout.write(done.stdout)
sys.stdout.write("luacheck: scripts break its rules\n" if failed else f"luacheck: {len(texts)} scripts\n")
sys.exit(failed)
