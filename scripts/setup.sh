#!/usr/bin/env bash
# Makes the virtual environment from the lock file: `scripts/setup.sh .venv`.
set -euo pipefail
venv=$1
python=$(command -v python3.11 || command -v python3 || true)
if [ -z "$python" ] || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "grabstream needs Python 3.11 or newer: on Debian run 'apt-get install python3 python3-venv'" >&2
    exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    "$(dirname "$0")/packages.sh" :python3-venv
fi
echo "setting up $venv"
"$python" -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
# setuptools warns that the packages are in the working tree, as intended by an editable install.
PYTHONWARNINGS=ignore "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
touch "$venv/complete"
