#!/usr/bin/env bash
# Makes the files of a release in dist/, from the commit: the same commit gives the same wheel and source.
# What is not done here, and why, is in docs/deploying.md.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(.venv/bin/python -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
if [ -n "$(git status --porcelain)" ]; then
    echo "the work tree has changes: commit them, or put them aside" >&2
    exit 1
fi
if ! grep -q "^## \[\?$version\]\? - 20[0-9-]*$" CHANGELOG.md; then
    echo "CHANGELOG.md has no heading '## $version - YYYY-MM-DD': name the version of pyproject.toml and the day of its tag" >&2
    exit 1
fi
if [ ! -f "schemas/released/$version.json" ]; then
    echo "schemas/released/ has no contract of $version: run python scripts/schemas.py --release $version" >&2
    exit 1
fi
if [ ! -f "tests/golden/release-$version/SHA256SUMS" ]; then
    echo "tests/golden/ has no history of $version: run python -m tests.support.release_history, before the schemas are stored" >&2
    exit 1
fi
make lint
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
rm -rf dist && mkdir dist
git archive --prefix="grabstream-$version/" HEAD | gzip -n >"dist/grabstream-$version.tar.gz"
tar -xzf "dist/grabstream-$version.tar.gz" -C "$temporary"
# What the Dockerfile does: packages and wheel in an environment of their own.
python="$temporary/venv/bin/python"
.venv/bin/python -m venv "$temporary/build"
"$temporary/build/bin/pip" install --quiet --require-hashes -r requirements-build.lock
.venv/bin/python -m venv --without-pip "$temporary/venv"
"$temporary/build/bin/pip" --python "$python" install --quiet --require-hashes -r requirements-runtime.lock
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) "$temporary/build/bin/pip" wheel --quiet --no-deps --no-build-isolation \
    --wheel-dir dist "$temporary/grabstream-$version"
"$temporary/build/bin/pip" --python "$python" install --quiet --no-deps dist/*.whl
"$temporary/venv/bin/grabstream" --version
.venv/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type application --output-reproducible \
    --of JSON -o "dist/grabstream-$version.cdx.json" "$python"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
.venv/bin/python scripts/licences.py "dist/grabstream-$version.cdx.json" "$packages" >dist/licences.md
(cd dist && sha256sum -- * >SHA256SUMS)
cat dist/SHA256SUMS
