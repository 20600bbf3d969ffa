#!/usr/bin/env bash
# Installs missing programs: `scripts/packages.sh program[:package] …`. An empty program name always installs
# its package.
set -euo pipefail
missing=()
for wanted in "$@"; do
    program=${wanted%%:*}
    package=${wanted##*:}
    if [ -z "$program" ] || ! command -v "$program" >/dev/null; then missing+=("$package"); fi
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing: ${missing[*]}. Install them first, on Debian: sudo apt-get install ${missing[*]}" >&2
    exit 1
fi
echo "installing ${missing[*]}"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
