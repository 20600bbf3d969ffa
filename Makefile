# One entry for everything; `make` lists what there is.
VENV := .venv
PYTHON := $(VENV)/bin/python
GRABSTREAM := $(VENV)/bin/grabstream
STAMP := $(VENV)/complete
# Three on two cores: most tests wait on servers.
PROCESSES ?= 3

.DEFAULT_GOAL := help
.PHONY: help setup up down demo test test-cluster drill upgrade lint docs format mutations nightly bench simulate
.PHONY: lock clean

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make the virtual environment from the lock file.

$(STAMP): requirements.lock pyproject.toml scripts/setup.sh
	@scripts/setup.sh $(VENV)

up: setup ## Start Redis, Kafka and PostgreSQL.
	@$(GRABSTREAM) up

down: setup ## End the servers that `make up` started.
	@$(GRABSTREAM) down

demo: setup ## Let a crowd grab, watch it live, and print a verdict; leaves nothing running.
	@scripts/with-servers.sh $(GRABSTREAM) rehearse $(ARGS)

test: setup ## Run all tests on real servers (ARGS="-k name" for some; PROCESSES=0 for one after the other).
	@scripts/packages.sh kcat redis-cli:redis-tools node:nodejs npm
	@CI=1 scripts/with-servers.sh $(PYTHON) -m pytest -n $(PROCESSES) --dist loadfile $(ARGS)

test-cluster: setup ## Run the tests that need servers on a Redis Cluster and three Kafka brokers.
	@scripts/packages.sh kcat redis-cli:redis-tools
	@CI=1 CLUSTER=1 scripts/with-servers.sh $(PYTHON) -m pytest tests/streams tests/ops $(ARGS)

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
	@$(PYTHON) scripts/offer_fields.py --check docs/commands.md
	@$(PYTHON) scripts/limits.py --check docs/limits.md
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
	@scripts/packages.sh kcat redis-cli:redis-tools node:nodejs npm
	@$(PYTHON) -m tests.nightly $(ARGS)

simulate: setup ## Simulate the pipeline, faults and all, seed by seed (ARGS="--seconds 60", "--seed N").
	@$(PYTHON) -m tests.simulation $(ARGS)

bench: setup ## Measure against the classic way, as ratios (ARGS="--rows 1,7").
	@scripts/with-servers.sh $(PYTHON) -m bench $(ARGS)

lock: setup ## Write requirements.lock anew from pyproject.toml.
	@$(VENV)/bin/pip-compile --quiet --upgrade --generate-hashes --no-emit-index-url --no-emit-find-links --strip-extras --allow-unsafe --extra server --extra dev -o requirements.lock pyproject.toml

clean: ## Remove the virtual environment, and the servers with their data.
	@if [ -x $(GRABSTREAM) ]; then $(GRABSTREAM) down --remove; fi
	@rm -rf $(VENV)
