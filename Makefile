# One entry for everything; `make` lists what there is.
VENV := .venv
PYTHON := $(VENV)/bin/python
GRABSTREAM := $(VENV)/bin/grabstream
STAMP := $(VENV)/complete
# Three on two cores: tests wait on servers, too.
PROCESSES ?= 3# Several hundred processes of a run import the program: its bytecode is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=
# Brokers of tests live for minutes: without the optimizing compiler they take a third less processor time.
TEST_JAVA := JDK_JAVA_OPTIONS="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

.DEFAULT_GOAL := help
.PHONY: help setup up down demo pictures test test-long tiers explore test-cluster drill upgrade lint docs format mutations nightly bench simulate
.PHONY: lock lock-image release clean

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make the virtual environment from the lock file.

$(STAMP): requirements.lock pyproject.toml scripts/setup.sh
	@scripts/setup.sh $(VENV)

up: setup ## Start Redis, Kafka and PostgreSQL.
	@$(GRABSTREAM) up

down: setup ## End the servers that `make up` started.
	@$(GRABSTREAM) down

demo: setup ## Let a crowd grab, watch it live, print a verdict (PICTURES=yes: take those of the README).
ifdef PICTURES
	@scripts/with-servers.sh $(PYTHON) scripts/demo_picture.py docs/images/demo.svg $(ARGS)
	@$(MAKE) pictures ARGS="overview envelope"
else
	@scripts/with-servers.sh $(GRABSTREAM) rehearse $(ARGS)
endif

pictures: setup ## Take the pictures of the pages in docs/images/ (ARGS="webhooks hold" for some).
	@scripts/packages.sh chromium
	@scripts/with-servers.sh $(PYTHON) -m scripts.page_pictures $(ARGS)

test: setup ## Run the tests of every change, on real servers (ARGS="-k name"; PROCESSES=0: one by one).
	@scripts/packages.sh kcat redis-cli:redis-tools node:nodejs npm chromium
	@$(TEST_JAVA) CI=1 TIER=test scripts/with-servers.sh scripts/test.sh $(PROCESSES) $(ARGS)

test-long: setup ## Run the tests that are too long for every change, and draw new cases for properties.
	@scripts/packages.sh kcat redis-cli:redis-tools node:nodejs npm chromium javac:openjdk-17-jdk-headless
	@scripts/packages.sh promtool:prometheus prometheus-redis-exporter
	@$(TEST_JAVA) CI=1 TIER=long scripts/with-servers.sh scripts/test.sh $(PROCESSES) $(ARGS)

tiers: setup ## Print tests and minutes of `make test` and `make test-long`, by folder, and the slowest tests.
	@$(PYTHON) -m tests.tiers $(ARGS)

explore: setup ## Draw new random cases for MINUTES (10), from seeds that no run before has played.
	@scripts/packages.sh redis-cli:redis-tools
	@scripts/with-servers.sh $(PYTHON) -m tests.explore --minutes $(or $(MINUTES),10) $(ARGS)

test-cluster: setup ## Run the tests that need servers on a Redis Cluster and three Kafka brokers.
	@scripts/packages.sh kcat redis-cli:redis-tools promtool:prometheus prometheus-redis-exporter
	@$(TEST_JAVA) CI=1 TIER=day CLUSTER=1 scripts/with-servers.sh $(PYTHON) -m pytest tests/streams tests/connections tests/ops tests/workshop $(ARGS)

drill: setup ## Play the kill matrix, again on a cluster, then test-cluster (ARGS="--list", "--cell redis.*").
	@$(PYTHON) -m tests.drill $(ARGS)
	@if [ -z '$(ARGS)' ]; then $(PYTHON) -m tests.drill --cluster && $(MAKE) test-cluster; fi

lint: setup ## Format, style, types, import contracts, Lua, compose.yaml, pages and their links, schemas.
	@scripts/packages.sh luacheck:lua-check
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports
	@$(PYTHON) scripts/lint_lua.py
	@$(PYTHON) scripts/lint_compose.py
	@$(PYTHON) scripts/lint_kubernetes.py
	@$(PYTHON) -m scripts.generated --check
	@$(PYTHON) scripts/offer_fields.py --check docs/commands.md
	@$(PYTHON) scripts/bounds.py
	@$(PYTHON) scripts/metrics.py --check docs/metrics.md
	@$(PYTHON) scripts/boards.py --check
	@$(PYTHON) scripts/data_dictionary.py --check docs/data.md
	@$(PYTHON) scripts/lint_pages.py
	@$(PYTHON) scripts/schemas.py --check
	@$(PYTHON) scripts/schemas.py --compare

docs: setup ## Build the documentation as a site in site/.
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet && echo "open site/index.html"

format: setup ## Format the code.
	@$(VENV)/bin/ruff check --fix-only -q . ; $(VENV)/bin/ruff format .

upgrade: setup ## Upgrade from a release to this one, under traffic (ARGS=COMMIT).
	@scripts/with-servers.sh $(PYTHON) -m tests.drill.upgrade $(ARGS)

mutations: setup ## Take each guard of the protocol out: does a test notice? (ARGS="word" for some)
	@scripts/packages.sh redis-cli:redis-tools
	@scripts/with-servers.sh $(PYTHON) -m tests.mutations $(ARGS)

nightly: setup ## Play all that is too long for `make test`, with a summary (ARGS="--resume", "--list").
	@scripts/packages.sh kcat redis-cli:redis-tools node:nodejs npm chromium javac:openjdk-17-jdk-headless
	@scripts/packages.sh promtool:prometheus prometheus-redis-exporter wrk
	@$(PYTHON) -m tests.nightly $(ARGS)

simulate: setup ## Simulate the pipeline, faults and all, seed by seed (ARGS="--seconds 60", "--seed N").
	@$(PYTHON) -m tests.simulation $(ARGS)

bench: setup ## Measure against the classic way, as ratios (ARGS="--rows 1,7").
	@scripts/with-servers.sh $(PYTHON) -m bench $(ARGS)

COMPILE := $(VENV)/bin/pip-compile --quiet --generate-hashes --no-emit-index-url --no-emit-find-links --strip-extras --allow-unsafe

lock: setup ## Write requirements.lock anew from pyproject.toml, and those of the image.
	@$(COMPILE) --upgrade --extra server --extra analysts --extra s3 --extra dev -o requirements.lock pyproject.toml
	@$(MAKE) lock-image

lock-image: setup ## Write the locks of the image, with the versions of requirements.lock.
	@rm -f requirements-runtime.lock requirements-archives.lock requirements-build.lock
	@$(COMPILE) -c requirements.lock --extra server -o requirements-runtime.lock pyproject.toml
	@$(COMPILE) -c requirements.lock --extra server --extra analysts --extra s3 -o requirements-archives.lock pyproject.toml
	@$(COMPILE) -c requirements.lock --only-build-deps --all-build-deps -o requirements-build.lock pyproject.toml

release: setup ## Make the files of a release in dist/: wheel, source, bill of materials, licences, checksums.
	@scripts/release.sh

clean: ## Remove the virtual environment, and the servers with their data.
	@if [ -x $(GRABSTREAM) ]; then $(GRABSTREAM) down --remove; fi
	@rm -rf $(VENV)
