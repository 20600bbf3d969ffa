#!/usr/bin/env bash
# Runs a command with the local servers running (with CLUSTER=1, those of the cluster), and ends them afterwards
# unless they were running before. Where other programs have their ports, they get free ones. Exits with the
# exit code of the command.
set -uo pipefail
CLUSTER=${CLUSTER:-}
grabstream=.venv/bin/grabstream
which=${CLUSTER:+cluster}
which=${which:-single}
# Exists while servers of such a run have other ports than usual; afterwards, if the run was killed.
ports=.services/ports.env
[ -n "$CLUSTER${GRAB_REDIS_URL:-}${GRAB_KAFKA:-}${GRAB_POSTGRES:-}" ] && ports=/dev/null
if [ -s "$ports" ]; then
    (. "./$ports" && "$grabstream" down "$which") || exit $?
    rm "$ports"
fi
before=$("$grabstream" down "$which" --dry-run)
if [ -z "$before$CLUSTER" ]; then
    chosen=$(.venv/bin/python -m scripts.ports) || exit $?
    if [ -n "$chosen" ]; then
        mkdir -p .services
        echo "$chosen" >"$ports"
        eval "$chosen"
    fi
fi
"$grabstream" up --temporary ${CLUSTER:+--cluster} || exit $?
if [ -n "$CLUSTER" ]; then . .services/cluster.env; fi
code=0
finish() {
    if [ -z "$before" ]; then
        "$grabstream" down "$which"
        [ -s "$ports" ] && rm "$ports"
    fi
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
