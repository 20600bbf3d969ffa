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
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps)

# uv needs 15 s for what takes pip over two minutes. It gets the index and the certificates that pip is
# configured with; whatever else keeps it from working, pip does the work.
install_with_uv() {
    local folder index certificates
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' RETURN
    awk '/^[^ ]/ { is_uv = /^uv==/ } is_uv' requirements.lock >"$folder/uv.lock"
    "${pip[@]}" --require-hashes -r "$folder/uv.lock" || return 1
    setting() { "$venv/bin/python" -m pip config list | sed -n "s/^\(global\|install\|:env:\)\.$1='\(.*\)'$/\2/p" | tail -n 1; }
    index=$(setting index-url)
    certificates=$(setting cert)
    env ${index:+"UV_DEFAULT_INDEX=$index"} ${certificates:+"SSL_CERT_FILE=$certificates"} \
        "$venv/bin/uv" pip install --quiet --no-config --no-cache --no-deps --require-hashes \
        --python "$venv/bin/python" -r requirements.lock
}
install_with_uv || {
    echo "uv could not install the packages: pip does, which takes some minutes"
    "${pip[@]}" --require-hashes -r requirements.lock
}
# setuptools warns that the packages are in the working tree, as intended by an editable install.
PYTHONWARNINGS=ignore "${pip[@]}" --no-build-isolation -e .
touch "$venv/complete"
