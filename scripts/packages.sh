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
# The programs are wanted, not the services that some packages start: this file keeps Debian from starting them.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
