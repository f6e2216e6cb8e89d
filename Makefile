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
NEWEST := $(VENV)-newest
CUDA := $(VENV)-cuda
OTHERS := $(VENV)-others
PYTHONS ?= python3.10 python3.11 python3.12 python3.13
PINS := pyproject.toml constraints.txt

CHECKPOINT ?= austen
DTYPE ?= float32
FLAVOUR ?= native
TARGET ?= cpu
TOKENIZER ?=
ADAPTER ?=
REVISION ?=
ACTIVATION ?=
EXTERNAL_DATA ?=
FAST_PREFILL ?=
OUT ?= build/$(notdir $(CHECKPOINT:/=))-$(DTYPE)
PROMPT ?= It is a truth universally acknowledged,
TEXT ?=
CALIBRATION ?=
# What was typed is taken as typed, and recipes read it from the environment: quotes, spaces and dollar signs in it are
# harmless.
GIVEN := $(filter command environment,$(origin CHECKPOINT))
FORM := DTYPE FLAVOUR TARGET TOKENIZER ADAPTER REVISION ACTIVATION EXTERNAL_DATA FAST_PREFILL
$(foreach name,CHECKPOINT OUT PROMPT TEXT CALIBRATION $(FORM),$(if $(filter file,$(origin $(name))),,$(eval override $(name) := $$(value $(name)))))
export CHECKPOINT OUT PROMPT TEXT CALIBRATION GIVEN $(FORM)

.PHONY: help setup setup-dev demo export generate bench bench-peers bench-export bench-quality lint type test fuzz soak test-faults test-oldest test-newest \
	test-pythons audit test-large test-dialects test-portable test-avx2 test-cuda clean

help:  ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

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

# Beside OUT a file says what it was made from: the checkpoint's path and the options, and a hash of its files and of
# this toolkit. What a hub id stands for is not asked again.
export: $(VENV)/.setup  ## Export CHECKPOINT=folder|id|ckpt.pt to OUT=folder, unless done (DTYPE FLAVOUR TARGET TOKENIZER ADAPTER)
	@folder=$$CHECKPOINT; [ "$$folder" != austen ] || folder=models/ortgpt_models/checkpoints/austen; \
	made="$$(dirname "$$OUT")/.$$(basename "$$OUT").made"; \
	from="$$(realpath -e "$$folder" 2>/dev/null || printf '%s' "$$CHECKPOINT")"; \
	for name in $(FORM); do from="$$from $${!name}"; done; \
	hash="$$({ find -L "$$folder" "$${TOKENIZER:-exporter}" "$${ADAPTER:-exporter}" exporter models runtime \
		-type f ! -name '*.pyc' -print0 2>/dev/null || true; } | sort -z | xargs -0 sha256sum | sha256sum)"; \
	if [ -f "$$OUT/ortgpt.json" ] && [ -f "$$made" ] && [ "$$(head -n 1 "$$made")" != "$$from" ]; then \
		echo "$$OUT was made from $$(head -n 1 "$$made"), not from $$from: name another OUT=" >&2; exit 1; fi; \
	if [ -f "$$OUT/ortgpt.json" ] && [ -f "$$made" ] && [ "$$(tail -n 1 "$$made")" = "$$hash" ]; \
	then echo "$$OUT is up to date" >&2; \
	else $(BIN)/ortgpt export "$$CHECKPOINT" -o "$$OUT" --dtype "$$DTYPE" --flavour "$$FLAVOUR" --target "$$TARGET" \
		$${TOKENIZER:+--tokenizer "$$TOKENIZER"} $${ADAPTER:+--adapter "$$ADAPTER"} \
		$${REVISION:+--revision "$$REVISION"} $${ACTIVATION:+--activation "$$ACTIVATION"} \
		$${EXTERNAL_DATA:+--external-data} $${FAST_PREFILL:+--fast-prefill} \
		$$([ ! -f "$$made" ] || echo --force); \
		printf '%s\n' "$$from" "$$hash" > "$$made"; fi

generate: $(VENV)/.setup  ## Continue PROMPT="..." with the bundle OUT=folder (exported first, where CHECKPOINT= is given)
	@if [ -n "$$GIVEN" ] || [ ! -f "$$OUT/ortgpt.json" ]; then $(MAKE) export; fi
	@$(BIN)/ortgpt generate "$$OUT" --echo --temperature 0.8 --top-p 0.95 -- "$$PROMPT"

bench: $(VENV)/.setup  ## Measure the bundle OUT=folder on this machine (exported first, where CHECKPOINT= is given)
	@if [ -n "$$GIVEN" ] || [ ! -f "$$OUT/ortgpt.json" ]; then $(MAKE) export; fi
	@$(BIN)/ortgpt bench "$$OUT"

# A program that cannot be installed is listed as missing, so the others' environments are no prerequisites.
bench-peers: $(VENV)/.setup-dev  ## Compare with llama.cpp, OpenVINO, CTranslate2, Optimum and transformers (builds llama.cpp first)
	@for peer in llama openvino ctranslate2 optimum; do \
		$(MAKE) $(OTHERS)/$$peer/.setup || rm -rf "$(OTHERS)/$$peer"; done
	@mkdir -p build && rm -rf build/compare
	@$(BIN)/python benchmarks/compare.py build/compare llama.cpp=$(OTHERS)/llama/bin/python \
		openvino-genai=$(OTHERS)/openvino/bin/python ctranslate2=$(OTHERS)/ctranslate2/bin/python \
		optimum-onnx=$(OTHERS)/optimum/bin/python

bench-export: $(VENV)/.setup-dev  ## Measure memory and time of the export of each size of GPT-2 (20 GB of disk, long)
	@mkdir -p build
	@$(BIN)/python benchmarks/export_memory.py

bench-quality: $(VENV)/.setup-dev $(OTHERS)/llama/.setup $(OTHERS)/openvino/.setup  ## Compare the loss of quantisation with llama.cpp's and OpenVINO's on TEXT=file [CALIBRATION=file] (builds llama.cpp first)
	@[ -n "$$TEXT" ] || { echo "make bench-quality wants TEXT=file, a UTF-8 text that the bundled model has not seen" >&2; exit 2; }
	@mkdir -p build
	@$(BIN)/python benchmarks/quality.py "$$TEXT" "$$CALIBRATION" build/quality \
		$(OTHERS)/llama/bin/python $(OTHERS)/openvino/bin/python

$(OTHERS)/llama/.setup: Makefile
	@echo "Building llama.cpp into $(OTHERS) ..." >&2
	@$(PYTHON) -m venv $(OTHERS)/llama
	@$(OTHERS)/llama/bin/python -m pip --disable-pip-version-check --quiet install llama-cpp-python==0.3.36 gguf==0.19.0 safetensors
	@touch $@

# optimum-intel brings a torchvision that is made for another torch, and cannot then be imported.
$(OTHERS)/openvino/.setup: Makefile
	@echo "Installing OpenVINO into $(OTHERS) ..." >&2
	@$(PYTHON) -m venv $(OTHERS)/openvino
	@$(OTHERS)/openvino/bin/python -m pip --disable-pip-version-check --quiet install torch==2.13.0 openvino-genai==2026.4.1 optimum-intel==2.2.0 nncf==3.4.0
	@$(OTHERS)/openvino/bin/python -m pip --disable-pip-version-check --quiet uninstall -y torchvision
	@touch $@

$(OTHERS)/ctranslate2/.setup: Makefile
	@echo "Installing CTranslate2 into $(OTHERS) ..." >&2
	@$(PYTHON) -m venv $(OTHERS)/ctranslate2
	@$(OTHERS)/ctranslate2/bin/python -m pip --disable-pip-version-check --quiet install torch==2.13.0 ctranslate2==4.8.5 transformers==5.24.0
	@touch $@

lint: $(VENV)/.setup-dev  ## Check style and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

type: $(VENV)/.setup-dev  ## Check types
	@$(BIN)/mypy

test: $(VENV)/.setup-dev  ## Run the tests
	@$(BIN)/pytest

fuzz: $(VENV)/.setup-dev  ## Damage bundles, manifests and tokenizers in 20,000 ways; each must be refused or serve (2 minutes)
	@$(BIN)/python tests/fuzz/run.py

soak: $(VENV)/.setup-dev  ## 2,000 calls in one process, then 16 threads: memory flat, answers the same (minutes)
	@$(BIN)/python tests/soak.py

test-faults: $(VENV)/.setup-dev  ## Kill export, quantize and train, and fill the disk, at random moments: nothing may be lost (minutes)
	@unshare --user --map-root-user --mount $(BIN)/python tests/faults.py

# The exporter's own packages want a newer click than the runtime does, which nothing here notices.
test-oldest: $(OLDEST)/.setup  ## Run the runtime's tests with the oldest dependencies that it allows
	@$(OLDEST)/bin/pytest tests/runtime

test-newest: $(NEWEST)/.setup  ## Run the runtime's tests with the newest dependencies that there are, torch apart
	@$(NEWEST)/bin/pytest tests/runtime

# The exporter wants 3.11; its bundle is what the runtime opens under each.
test-pythons: $(VENV)/.setup-dev  ## Run the runtime under each of PYTHONS="python3.10 ..."; it must give the same tokens
	@$(MAKE) export CHECKPOINT=austen DTYPE=float32 OUT=build/austen-float32
	@$(BIN)/python tests/greedy.py build/austen-float32 > build/greedy.json
	@for python in $(PYTHONS); do \
		command -v $$python > /dev/null || { echo "$$python is not on the PATH" >&2; exit 1; }; \
		rm -rf $(VENV)-python && $$python -m venv $(VENV)-python && \
		$(VENV)-python/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt -e '.[cpu,grammar]' && \
		$(VENV)-python/bin/python tests/greedy.py build/austen-float32 > build/greedy-python.json && \
		cmp build/greedy.json build/greedy-python.json && \
		$(VENV)-python/bin/ortgpt doctor > /dev/null && echo "$$python gives the same tokens" || exit 1; done
	@rm -rf $(VENV)-python

$(OLDEST)/.setup: pyproject.toml constraints.txt constraints-oldest.txt
	@echo "Installing into $(OLDEST) ..." >&2
	@$(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt -e '.[cpu,export,dev]'
	@$(OLDEST)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r constraints-oldest.txt
	@touch $@

$(NEWEST)/.setup: pyproject.toml constraints.txt
	@echo "Installing into $(NEWEST) ..." >&2
	@$(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt -e '.[cpu,export,dev]'
	@$(NEWEST)/bin/python -m pip --disable-pip-version-check --quiet install --upgrade -e '.[cpu,grammar]' numpy tiktoken click onnxruntime llguidance
	@touch $@

audit: $(OTHERS)/audit/.setup  ## Ask PyPI for known vulnerabilities of what the runtime installs; needs the network
	@$(OTHERS)/audit/bin/python -m pip freeze --exclude-editable --path $(OTHERS)/audit/runtime | grep -v '^ortgpt' > $(OTHERS)/audit/runtime.txt
	@$(OTHERS)/audit/bin/pip-audit --strict --disable-pip --no-deps -r $(OTHERS)/audit/runtime.txt

$(OTHERS)/audit/.setup: pyproject.toml constraints.txt
	@echo "Installing pip-audit, and what it looks at, into $(OTHERS) ..." >&2
	@$(PYTHON) -m venv $(OTHERS)/audit
	@$(OTHERS)/audit/bin/python -m pip --disable-pip-version-check --quiet install pip-audit
	@$(OTHERS)/audit/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt --target $(OTHERS)/audit/runtime --upgrade '.[cpu,grammar]'
	@touch $@

test-large: $(VENV)/.setup-dev  ## Export and verify gpt2-xl within 20 GB of memory (minutes)
	@$(BIN)/pytest -m slow

# The stand-ins are written anew each time, so each bundle is, too.
test-dialects: $(VENV)/.setup-dev  ## Write a stand-in of every dialect of checkpoint, and `make export` each
	@rm -rf build/dialects && mkdir -p build
	@$(BIN)/python tests/dialects.py build/dialects | while read -r variables; do \
		eval "$(MAKE) export $$variables" < /dev/null 2>&1 | tail -n 1; done

test-portable: $(VENV)/.setup-dev $(OTHERS)/optimum/.setup $(OTHERS)/genai/.setup $(OTHERS)/node/.setup  ## Open portable bundles in Optimum, onnxruntime-genai and Transformers.js (Node)
	@$(BIN)/python tests/portable/run.py build $(OTHERS)/optimum/bin/python $(OTHERS)/genai/bin/python $(OTHERS)/node

# Optimum wants an older transformers than the tests do; none of the three shares an environment with the toolkit.
$(OTHERS)/optimum/.setup: Makefile pyproject.toml
	@echo "Installing Optimum into $(OTHERS) ..." >&2
	@$(PYTHON) -m venv $(OTHERS)/optimum
	@$(OTHERS)/optimum/bin/python -m pip --disable-pip-version-check --quiet install torch==2.13.0 'optimum-onnx[onnxruntime]==0.1.0' -e '.[cpu,optimum]'
	@touch $@

$(OTHERS)/genai/.setup: Makefile
	@echo "Installing onnxruntime-genai into $(OTHERS) ..." >&2
	@$(PYTHON) -m venv $(OTHERS)/genai
	@$(OTHERS)/genai/bin/python -m pip --disable-pip-version-check --quiet install onnxruntime-genai==0.18.0
	@touch $@

# Without its install scripts: that of onnxruntime-node fetches CUDA libraries from elsewhere.
$(OTHERS)/node/.setup: Makefile
	@echo "Installing Transformers.js into $(OTHERS) ..." >&2
	@mkdir -p $(OTHERS)/node
	@npm install --silent --no-fund --no-audit --ignore-scripts --prefix $(OTHERS)/node @huggingface/transformers@4.3.2
	@touch $@

test-avx2: $(VENV)/.setup-dev  ## Check products of integers under an emulated CPU without VNNI (wants qemu-x86_64, of qemu-user)
	@command -v qemu-x86_64 > /dev/null || { echo "make test-avx2 wants qemu-x86_64: apt-get install qemu-user" >&2; exit 2; }
	@mkdir -p build
	@$(BIN)/python tests/avx2/run.py build/avx2 qemu-x86_64 -cpu Haswell

test-cuda: $(CUDA)/.setup  ## On a machine with an NVIDIA GPU: parity, ragged batches, speed, memory (five minutes)
	@$(CUDA)/bin/pytest -m cuda
	@mkdir -p build
	@$(CUDA)/bin/python tests/cuda/run.py build

$(CUDA)/.setup: pyproject.toml Makefile
	@echo "Installing the CUDA builds into $(CUDA) (several GB) ..." >&2
	@$(PYTHON) -m venv $(CUDA)
	@$(CUDA)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt -e '.[cuda,export,dev]'
	@touch $@

clean:  ## Remove what was built; keeps $(VENV)
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
