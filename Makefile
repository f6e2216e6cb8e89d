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
# Recipes read these from the environment, as they were typed: quotes, spaces and dollar signs in them are harmless.
override CHECKPOINT := $(value CHECKPOINT)
override PROMPT := $(value PROMPT)
export CHECKPOINT DTYPE OUT PROMPT

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

setup-dev: $(VENV)/.setup-dev

demo: export  ## Export the bundled model and let it write a text
	@$(BIN)/ortgpt generate "$$OUT" "$$PROMPT" --echo --max-new-tokens 160 --temperature 0.8 --top-p 0.95 --seed 1

export: $(VENV)/.setup  ## Export CHECKPOINT=folder to OUT=folder (DTYPE=float32), unless that is done
	@folder=$$CHECKPOINT; [ "$$folder" != austen ] || folder=models/ortgpt_models/checkpoints/austen; \
	made="$$(dirname "$$OUT")/.$$(basename "$$OUT").made"; from="$$(realpath "$$folder" 2>/dev/null || true) $$DTYPE"; \
	if [ -f "$$OUT/ortgpt.json" ] && [ -f "$$made" ] && [ "$$(cat "$$made")" != "$$from" ]; then \
		echo "$$OUT was made from $$(cat "$$made"), not from $$from: name another OUT=, or remove it" >&2; exit 1; fi; \
	if [ -f "$$OUT/ortgpt.json" ] && [ -f "$$made" ] && [ -d "$$folder" ] && \
		[ -z "$$(find "$$folder" exporter models runtime -type f ! -name '*.pyc' -newercm "$$made" -print -quit)" ]; \
	then echo "$$OUT is up to date" >&2; \
	else $(BIN)/ortgpt export "$$CHECKPOINT" -o "$$OUT" --dtype "$$DTYPE" $$([ ! -f "$$made" ] || echo --force); \
		echo "$$from" > "$$made"; fi

generate: export  ## Continue PROMPT="..." with the bundle OUT=folder
	@$(BIN)/ortgpt generate "$$OUT" "$$PROMPT" --echo --temperature 0.8 --top-p 0.95

bench: $(VENV)/.setup-dev  ## Compare with transformers on this machine (a random GPT-2 small, minutes)
	@$(BIN)/python benchmarks/against_transformers.py

lint: $(VENV)/.setup-dev  ## Check style and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

type: $(VENV)/.setup-dev  ## Check types
	@$(BIN)/mypy

test: $(VENV)/.setup-dev  ## Run the tests
	@$(BIN)/pytest

test-oldest: export $(OLDEST)/.setup  ## Run the runtime on its oldest dependencies; it must give the same tokens
	@diff <($(BIN)/python tests/greedy.py "$$OUT") <($(OLDEST)/bin/python tests/greedy.py "$$OUT")
	@echo "the oldest dependencies give the same tokens"

$(OLDEST)/.setup: pyproject.toml constraints-oldest.txt
	@echo "Installing into $(OLDEST) ..." >&2
	@$(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints-oldest.txt -e '.[cpu]'
	@touch $@

clean:  ## Remove what was built; keeps $(VENV)
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
