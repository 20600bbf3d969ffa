#!/usr/bin/env bash
# Runs a command with the local servers up; ends them afterwards, unless they were up before. The command's exit code is kept.
set -uo pipefail
grabstream=.venv/bin/grabstream
before=$($grabstream down --dry-run)
"$grabstream" up --temporary || exit $?
code=0
finish() {
    if [ -z "$before" ]; then "$grabstream" down; fi
    exit "$code"
}
trap finish EXIT
"$@" &
child=$!
# The command gets Ctrl-C and SIGTERM too; we wait until it has cleaned up.
trap 'kill -TERM $child 2>/dev/null' INT TERM
wait $child
code=$?
while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
