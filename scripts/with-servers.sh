#!/usr/bin/env bash
# Runs a command with the local servers running (with CLUSTER=1, those of the cluster), and ends them afterwards
# unless they were running before. Where other programs have their ports, they get free ones. Exits with the exit
# code of the command.
set -uo pipefail
CLUSTER=${CLUSTER:-}
grabstream=.venv/bin/grabstream
which=${CLUSTER:+cluster}
which=${which:-single}
before=$("$grabstream" down "$which" --dry-run)
if [ -z "$before$CLUSTER" ]; then
    ports=$(.venv/bin/python -m scripts.ports) || exit $?
    eval "$ports"
fi
"$grabstream" up --temporary ${CLUSTER:+--cluster} || exit $?
if [ -n "$CLUSTER" ]; then . .services/cluster.env; fi
code=0
finish() {
    if [ -z "$before" ]; then "$grabstream" down "$which"; fi
    exit "$code"
}
trap finish EXIT
"$@" &
child=$!
# The command gets Ctrl-C and SIGTERM too. Wait until it has cleaned up.
trap 'kill -TERM $child 2>/dev/null' INT TERM
wait $child
code=$?
while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
