"""Checks the Lua scripts: runs the loader's checks, and luacheck on the text of each script as it is sent to
Redis.
"""

import subprocess
import sys

from grabstream.lua.loader import assemble, script_names

failed = False
for name in script_names():
    # The first line is a shebang for Redis, which luacheck would not accept as Lua.
    text = "--" + assemble(name)
    done = subprocess.run(
        ["luacheck", "--no-color", "--ignore", "211", "212", "--filename", f"lua/{name}.lua", "-"],
        input=text,
        text=True,
        capture_output=True,
    )
    if done.returncode != 0:
        failed = True
        sys.stdout.write(done.stdout)
sys.stdout.write(
    "luacheck: scripts break its rules\n" if failed else f"luacheck: {len(script_names())} scripts\n"
)
sys.exit(failed)
