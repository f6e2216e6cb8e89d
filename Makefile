# Every target sets up what it needs in $(VENV); a second run finds it done.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
OLDEST := $(VENV)-oldest
PINS := pyproject.toml constraints.txt

CHECKPOINT ?= austen
DTYPE ?= float32
OUT ?= build/$(notdir $(CHECKPOINT:/=))-$(DTYPE)
PROMPT ?= It is a truth universally acknowledged,
# What was typed is taken as typed, and recipes read it from the environment: quotes, spaces and dollar signs in it are
# harmless.
GIVEN := $(filter command environment,$(origin CHECKPOINT))
$(foreach name,CHECKPOINT DTYPE OUT PROMPT,$(if $(filter file,$(origin $(name))),,$(eval override $(name) := $$(value $(name)))))
export CHECKPOINT DTYPE OUT PROMPT GIVEN

.PHONY: help setup setup-dev demo export generate bench lint type test test-oldest clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.setup  ## Install the toolkit and what export needs into $(VENV)

$(VENV)/.venv-made:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(f"Python {v[0]}.{v[1]} found; 3.11 or newer is needed: make PYTHON=python3.11") if v < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.setup: $(PINS) | $(VENV)/.venv-made
	@echo "Installing into $(VENV) (the first time takes minutes) ..." >&2
	@$(PIP) install -c constraints.txt -e '.[cpu,export]'
	@touch $@

$(VENV)/.setup-dev: $(PINS) $(VENV)/.setup
	@echo "Installing what the tests need into $(VENV) ..." >&2
	@$(PIP) install -c constraints.txt -e '.[cpu,export,dev]'
	@touch $@

setup-dev: $(VENV)/.setup-dev  ## Install what the tests need, too

demo: $(VENV)/.setup  ## Export the bundled model and let it write a text
	@$(MAKE) export CHECKPOINT=austen DTYPE=float32 OUT=build/austen-float32
	@$(BIN)/ortgpt generate build/austen-float32 --echo --max-new-tokens 160 --temperature 0.8 --top-p 0.95 --seed 1 \
		-- "$$PROMPT"

# Beside OUT a file says what it was made from: the folder's path, and a hash of its files and of this toolkit.
export: $(VENV)/.setup  ## Export CHECKPOINT=folder to OUT=folder (DTYPE=float32), unless that is done
	@folder=$$CHECKPOINT; [ "$$folder" != austen ] || folder=models/ortgpt_models/checkpoints/austen; \
	made="$$(dirname "$$OUT")/.$$(basename "$$OUT").made"; from="$$(realpath "$$folder" 2>/dev/null || true) $$DTYPE"; \
	hash="$$(find -L "$$folder" exporter models runtime -type f ! -name '*.pyc' -print0 2>/dev/null | sort -z | \
		xargs -0 sha256sum | sha256sum)"; \
	if [ -f "$$OUT/ortgpt.json" ] && [ -f "$$made" ] && [ "$$(head -n 1 "$$made")" != "$$from" ]; then \
		echo "$$OUT was made from $$(head -n 1 "$$made"), not from $$from: name another OUT=" >&2; exit 1; fi; \
	if [ -f "$$OUT/ortgpt.json" ] && [ -f "$$made" ] && [ "$$(tail -n 1 "$$made")" = "$$hash" ]; \
	then echo "$$OUT is up to date" >&2; \
	else $(BIN)/ortgpt export "$$CHECKPOINT" -o "$$OUT" --dtype "$$DTYPE" $$([ ! -f "$$made" ] || echo --force); \
		printf '%s\n' "$$from" "$$hash" > "$$made"; fi

generate: $(VENV)/.setup  ## Continue PROMPT="..." with the bundle OUT=folder (exported first, where CHECKPOINT= is given)
	@if [ -n "$$GIVEN" ] || [ ! -f "$$OUT/ortgpt.json" ]; then $(MAKE) export; fi
	@$(BIN)/ortgpt generate "$$OUT" --echo --temperature 0.8 --top-p 0.95 -- "$$PROMPT"

bench: $(VENV)/.setup-dev  ## Compare with transformers on this machine (a random GPT-2 small, minutes)
	@$(BIN)/python benchmarks/against_transformers.py

lint: $(VENV)/.setup-dev  ## Check style and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

type: $(VENV)/.setup-dev  ## Check types
	@$(BIN)/mypy

test: $(VENV)/.setup-dev  ## Run the tests
	@$(BIN)/pytest

test-oldest: $(VENV)/.setup $(OLDEST)/.setup  ## Run the runtime on its oldest dependencies; it must give the same tokens
	@$(MAKE) export CHECKPOINT=austen DTYPE=float32 OUT=build/austen-float32
	@diff <($(BIN)/python tests/greedy.py build/austen-float32) <($(OLDEST)/bin/python tests/greedy.py build/austen-float32)
	@echo "the oldest dependencies give the same tokens"

$(OLDEST)/.setup: pyproject.toml constraints-oldest.txt
	@echo "Installing into $(OLDEST) ..." >&2
	@$(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints-oldest.txt -e '.[cpu]'
	@touch $@

clean:  ## Remove what was built; keeps $(VENV)
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
