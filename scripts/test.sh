#!/usr/bin/env bash
# Runs tests in several processes: `scripts/test.sh PROCESSES [options of pytest]`; with PROCESSES=0 in one, one
# test after the other. The servers run already.
set -euo pipefail
processes=$1
shift
python=.venv/bin/python
compiled=.pytest_cache/compiled
# pytest compiles tests when it collects them, and keeps the result. Where that is to be done, two processes do it
# here, each one half; otherwise all processes of the run would compile everything, at the same time.
if [ "$processes" -gt 1 ] && { [ ! -e $compiled ] || [ -n "$(find tests -name '*.py' -newer $compiled)" ]; }; then
    mkdir -p .pytest_cache
    touch $compiled.new
    for half in "tests/ops tests/streams" "$(find tests -mindepth 1 -maxdepth 1 ! -name ops ! -name streams \
        \( -type d ! -name __pycache__ -o -name 'test_*.py' \) | tr '\n' ' ')"; do
        # shellcheck disable=SC2086  # a list of paths; errors are for the run
        $python -m pytest --collect-only -qq -p no:cacheprovider $half >/dev/null 2>&1 || true &
    done
    wait
    mv $compiled.new $compiled
fi
exec $python -m pytest -n "$processes" "$@"
