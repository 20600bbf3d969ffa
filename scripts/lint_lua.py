"""Checks the Lua scripts: the loader's own checks on every script, and luacheck on each as it is sent to
Redis.
"""

import subprocess
import sys

from grabstream.lua.loader import assemble, script_names

failed = False
for name in script_names():
    # Redis takes the first line for itself; to luacheck it is no Lua.
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
    "luacheck: scripts differ from the rules\n" if failed else f"luacheck: {len(script_names())} scripts\n"
)
sys.exit(failed)
