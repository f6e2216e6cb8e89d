# Every target sets up what it needs in $(VENV); a second run finds it done.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := -m pip --disable-pip-version-check --quiet
OLDEST := $(VENV)-oldest
NEWEST := $(VENV)-newest
CUDA := $(VENV)-cuda
DOCS := $(VENV)-docs
OTHERS := $(VENV)-others
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
PINS := pyproject.toml constraints.txt

CHECKPOINT ?= austen
DTYPE ?= float32
FLAVOUR ?= native
TARGET ?= cpu
TOKENIZER ?=
ADAPTER ?=
REVISION ?=
ACTIVATION ?=
BOS_TOKEN_ID ?=
EOS_TOKEN_ID ?=
EXTERNAL_DATA ?=
OUT ?= build/$(notdir $(CHECKPOINT:/=))-$(DTYPE)
PROMPT ?= It is a truth universally acknowledged,
TEXT ?=
CALIBRATION ?=
INTEGERS = $(if $(filter file,$(origin DTYPE)),int8,$$DTYPE)
QUANTIZED = $(if $(filter file,$(origin OUT)),build/$(notdir $(CHECKPOINT:/=))-$(INTEGERS),$$OUT)
# Recipes read these from the environment, exactly as typed, so quotes, spaces and dollar signs in them are harmless.
GIVEN := $(filter command environment,$(origin CHECKPOINT)) $(filter file,$(origin OUT))
FORMAT := DTYPE FLAVOUR TARGET TOKENIZER ADAPTER REVISION ACTIVATION BOS_TOKEN_ID EOS_TOKEN_ID EXTERNAL_DATA
$(foreach name,CHECKPOINT OUT PROMPT TEXT CALIBRATION $(FORMAT),$(if $(filter file,$(origin $(name))),,$(eval override $(name) := $$(value $(name)))))
export CHECKPOINT OUT PROMPT TEXT CALIBRATION GIVEN $(FORMAT)

# For users

.PHONY: help setup demo export generate quantize bench docs
help:  ## Show this list
	@awk 'BEGIN { FS = ":.*## " } /^# For / { printf "\n%s:\n", substr($$0, 3) } /^[a-z0-9-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.setup  ## Install the toolkit, with all that export needs, into $(VENV)

demo: $(VENV)/.setup  ## Export the bundled model, write a text with it, and say what to try next
	@$(MAKE) export CHECKPOINT=austen DTYPE=float32 OUT=build/austen-float32
	@$(BIN)/ortgpt generate build/austen-float32 --echo --max-new-tokens 160 --temperature 0.8 --top-p 0.95 --seed 1 \
		-- "$$PROMPT"
	@printf '\nNext:\n  %s\n  %s\n  %s\n' \
		"make generate PROMPT='My dear Jane'                       another text" \
		"make quantize DTYPE=int8                                  a bundle a quarter the size" \
		"make export CHECKPOINT=path/to/gpt2 OUT=build/my-gpt2     your own model" >&2

# Beside OUT, a file records what it was made from: the checkpoint's path and the options, and a hash of its files and of
# this toolkit. A hub id is not looked up again.
export: $(VENV)/.setup  ## Export CHECKPOINT=folder|id|ckpt.pt to OUT=folder (DTYPE FLAVOUR TARGET TOKENIZER ADAPTER ...)
	@folder=$$CHECKPOINT; [ "$$folder" != austen ] || [ -d austen ] || folder=models/ortgpt_models/checkpoints/austen; \
	made="$$(dirname "$$OUT")/.$$(basename "$$OUT").made"; \
	from="$$(realpath -e "$$folder" 2>/dev/null || printf '%s' "$$CHECKPOINT")"; \
	for name in $(FORMAT); do [ -z "$${!name}" ] || from="$$from $$name=$${!name}"; done; \
	hash="$$({ find -L "$$folder" "$${TOKENIZER:-exporter}" "$${ADAPTER:-exporter}" exporter models runtime \
		-type f ! -name '*.pyc' -print0 2>/dev/null || true; } | sort -z | xargs -0 sha256sum | sha256sum)"; \
	if [ -f "$$OUT/ortgpt.json" ] && [ -f "$$made" ] && [ "$$(head -n 1 "$$made")" != "$$from" ]; then \
		echo "$$OUT was made from $$(head -n 1 "$$made"), not from $$from: name another OUT=" >&2; exit 1; fi; \
	if [ -f "$$OUT/ortgpt.json" ] && [ -f "$$made" ] && [ "$$(tail -n 1 "$$made")" = "$$hash" ]; \
	then echo "$$OUT is up to date" >&2; \
	else $(BIN)/ortgpt export "$$CHECKPOINT" -o "$$OUT" --dtype "$$DTYPE" --flavour "$$FLAVOUR" --target "$$TARGET" \
		$${TOKENIZER:+--tokenizer "$$TOKENIZER"} $${ADAPTER:+--adapter "$$ADAPTER"} \
		$${REVISION:+--revision "$$REVISION"} $${ACTIVATION:+--activation "$$ACTIVATION"} \
		$${BOS_TOKEN_ID:+--bos-token-id "$$BOS_TOKEN_ID"} $${EOS_TOKEN_ID:+--eos-token-id "$$EOS_TOKEN_ID"} \
		$${EXTERNAL_DATA:+--external-data} \
		$$([ ! -f "$$made" ] || echo --force); \
		printf '%s\n' "$$from" "$$hash" > "$$made"; fi

generate: $(VENV)/.setup  ## Continue PROMPT="..." with the bundle OUT=folder (without OUT=, export CHECKPOINT first)
	@[ -z "$${GIVEN// /}" ] || $(MAKE) export
	@$(BIN)/ortgpt generate "$$OUT" --echo --temperature 0.8 --top-p 0.95 -- "$$PROMPT"

quantize: $(VENV)/.setup  ## Export CHECKPOINT=... in int8 or, with DTYPE=int4, in int4, and show what that costs
	@case "$(INTEGERS)" in int8|int4) ;; *) \
		echo "make quantize DTYPE=$(INTEGERS) (accepted: int8, which is the default, and int4)" >&2; exit 2 ;; esac
	@$(MAKE) export DTYPE="$(INTEGERS)" OUT="$(QUANTIZED)"
	@$(BIN)/ortgpt info "$(QUANTIZED)"

bench: $(VENV)/.setup  ## Measure the bundle OUT=folder on this machine (without OUT=, export CHECKPOINT first)
	@[ -z "$${GIVEN// /}" ] || $(MAKE) export
	@$(BIN)/ortgpt bench "$$OUT"

docs: $(DOCS)/.setup  ## Build the documentation into build/site
	@$(DOCS)/bin/python docs/write_generated.py --check
	@PATH="$(CURDIR)/$(DOCS)/bin:$$PATH" zensical build --strict --clean
	@$(DOCS)/bin/python docs/check_site.py build/site

# For maintainers

.PHONY: setup-dev test lint type bench-peers bench-quality bench-export check-oldest check-newest check-pythons check-large \
	check-audit check-portable check-dialects check-avx2 check-cuda check-fuzz check-soak check-faults check-limits check-examples check-family check-eval clean

setup-dev: $(VENV)/.setup-dev  ## Install what the tests need, too

test: $(VENV)/.setup-dev  ## Run the tests
	@$(BIN)/pytest

lint: $(VENV)/.setup-dev  ## Check style and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

type: $(VENV)/.setup-dev  ## Check types
	@$(BIN)/mypy

# A program that cannot be installed is listed as missing, so the others' environments are no prerequisites.
bench-peers: $(VENV)/.setup-dev  ## Compare with llama.cpp, OpenVINO, CTranslate2, Optimum and transformers (builds llama.cpp)
	@for peer in llama openvino ctranslate2 optimum; do \
		$(MAKE) $(OTHERS)/$$peer/.setup || rm -rf "$(OTHERS)/$$peer"; done
	@mkdir -p build && rm -rf build/compare
	@$(BIN)/python benchmarks/compare.py build/compare llama.cpp=$(OTHERS)/llama/bin/python \
		openvino-genai=$(OTHERS)/openvino/bin/python ctranslate2=$(OTHERS)/ctranslate2/bin/python \
		optimum-onnx=$(OTHERS)/optimum/bin/python
	@$(BIN)/python benchmarks/publish.py build/compare

bench-quality: $(VENV)/.setup-dev $(OTHERS)/llama/.setup $(OTHERS)/openvino/.setup  ## Compare the loss of quantisation on TEXT=file [CALIBRATION=file] with llama.cpp's and OpenVINO's
	@[ -n "$$TEXT" ] || { echo "make bench-quality needs TEXT=file, a UTF-8 text that the bundled model has not seen" >&2; exit 2; }
	@mkdir -p build
	@$(BIN)/python benchmarks/quality.py "$$TEXT" "$$CALIBRATION" build/quality \
		$(OTHERS)/llama/bin/python $(OTHERS)/openvino/bin/python

bench-export: $(VENV)/.setup-dev  ## Measure memory and time of the export of each size of GPT-2 (20 GB of disk, long)
	@mkdir -p build
	@$(BIN)/python benchmarks/export_memory.py

# The exporter's own packages need a newer click than the runtime does, which nothing here notices.
check-oldest: $(OLDEST)/.setup  ## Run the runtime's tests with the oldest dependencies that it allows
	@$(OLDEST)/bin/pytest tests/runtime

check-newest: $(NEWEST)/.setup  ## Run the runtime's tests with the newest dependencies, except torch
	@$(NEWEST)/bin/pytest tests/runtime

check-pythons: $(VENV)/.setup-dev  ## Run the runtime under each of PYTHONS="python3.12 ..." that is installed: same tokens
	@$(MAKE) export CHECKPOINT=austen DTYPE=float32 OUT=build/austen-float32
	@$(BIN)/python checks/greedy.py build/austen-float32 > build/greedy.json
	@count=0; for python in $(PYTHONS); do \
		command -v $$python > /dev/null && $$python -c '' 2> /dev/null || { echo "$$python is not installed here" >&2; continue; }; \
		rm -rf $(VENV)-python && $$python -m venv $(VENV)-python && \
		$(VENV)-python/bin/python $(PIP) install -c constraints.txt -e '.[cpu,grammar]' && \
		$(VENV)-python/bin/python checks/greedy.py build/austen-float32 > build/greedy-python.json && \
		cmp build/greedy.json build/greedy-python.json && \
		$(VENV)-python/bin/ortgpt doctor > /dev/null && echo "$$python gives the same tokens" || exit 1; \
		count=$$((count + 1)); done; \
	rm -rf $(VENV)-python; [ $$count -gt 0 ] || { echo "none of $(PYTHONS) is installed" >&2; exit 1; }

check-large: $(VENV)/.setup-dev  ## Export and verify gpt2-xl within 20 GB of memory (minutes)
	@$(BIN)/pytest -m slow

check-audit: $(OTHERS)/audit/.setup  ## Ask PyPI for known vulnerabilities of the runtime's packages; needs the network
	@$(OTHERS)/audit/bin/python -m pip freeze --exclude-editable --path $(OTHERS)/audit/runtime | grep -v '^ortgpt' > $(OTHERS)/audit/runtime.txt
	@$(OTHERS)/audit/bin/pip-audit --strict --disable-pip --no-deps -r $(OTHERS)/audit/runtime.txt

check-portable: $(VENV)/.setup-dev $(OTHERS)/optimum/.setup $(OTHERS)/genai/.setup $(OTHERS)/node/.setup  ## Open portable bundles in Optimum, onnxruntime-genai and Transformers.js (Node)
	@$(BIN)/python checks/portable/run.py build $(OTHERS)/optimum/bin/python $(OTHERS)/genai/bin/python $(OTHERS)/node

check-dialects: $(VENV)/.setup-dev  ## Write a stand-in of every dialect of checkpoint, and `make export` each
	@rm -rf build/dialects && mkdir -p build
	@PYTHONPATH=tests $(BIN)/python checks/dialects.py build/dialects | while read -r variables; do \
		eval "$(MAKE) export $$variables" < /dev/null 2>&1 | tail -n 1; done

check-family: $(VENV)/.setup-dev  ## Run the commands of docs/family.md on stand-ins of the published checkpoints (25 minutes, 20 GB of memory)
	@PYTHONPATH=tests $(BIN)/python checks/family.py

check-eval: $(OTHERS)/lm-eval/.setup  ## Run lm-evaluation-harness with its model hf and with ours: same figures (2 minutes)
	@mkdir -p build
	@PYTHONPATH=tests $(OTHERS)/lm-eval/bin/python checks/evaluation.py

check-avx2: $(VENV)/.setup-dev  ## Check products of integers under an emulated CPU without VNNI (needs qemu-x86_64)
	@command -v qemu-x86_64 > /dev/null || { echo "make check-avx2 needs qemu-x86_64: apt-get install qemu-user" >&2; exit 2; }
	@mkdir -p build
	@$(BIN)/python checks/avx2/run.py build/avx2 qemu-x86_64 -cpu Haswell

check-cuda: $(CUDA)/.setup  ## On a machine with an NVIDIA GPU: parity, ragged batches, speed, memory (five minutes)
	@$(CUDA)/bin/pytest -m cuda
	@mkdir -p build
	@$(CUDA)/bin/python checks/cuda/run.py build

check-fuzz: $(VENV)/.setup-dev  ## Damage bundles, manifests and tokenizers in 20,000 ways; each must be refused or serve (2 minutes)
	@$(BIN)/python checks/fuzz/run.py

check-soak: $(VENV)/.setup-dev  ## 2,000 calls in one process, then 16 threads: memory flat, answers the same (minutes)
	@$(BIN)/python checks/soak.py

check-faults: $(VENV)/.setup-dev  ## Kill export, quantize and train, and fill the disk, at random moments: nothing may be lost (minutes)
	@unshare --user --map-root-user --mount $(BIN)/python checks/faults.py

check-limits: $(VENV)/.setup-dev  ## Run where a control group allows 1 to 12 threads: it works with fewer, or says so (2 minutes)
	@$(BIN)/python checks/limits.py

check-examples: $(VENV)/.setup-dev  ## Run every program of examples/ in an environment of its own (minutes, gigabytes)
	@$(BIN)/python checks/examples.py

clean:  ## Remove what was built; keeps $(VENV)
	@rm -rf build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Environments

$(VENV)/.venv-made:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(f"Python {v[0]}.{v[1]} found; 3.11 or newer is needed: make PYTHON=python3.11") if v < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.setup: $(PINS) | $(VENV)/.venv-made
	@echo "Installing into $(VENV) (the first time takes minutes) ..." >&2
	@$(BIN)/python $(PIP) install -c constraints.txt -e '.[cpu,export,lora]'
	@touch $@

$(VENV)/.setup-dev: $(PINS) $(VENV)/.setup
	@echo "Installing what the tests need into $(VENV) ..." >&2
	@$(BIN)/python $(PIP) install -c constraints.txt -e '.[cpu,export,lora,dev]'
	@touch $@

$(OLDEST)/.setup: $(PINS) constraints-oldest.txt
	@echo "Installing into $(OLDEST) ..." >&2
	@$(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python $(PIP) install -c constraints.txt -e '.[cpu,export,lora,dev]'
	@$(OLDEST)/bin/python $(PIP) install --no-deps -r constraints-oldest.txt
	@touch $@

$(NEWEST)/.setup: $(PINS)
	@echo "Installing into $(NEWEST) ..." >&2
	@$(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python $(PIP) install -c constraints.txt -e '.[cpu,export,lora,dev]'
	@$(NEWEST)/bin/python $(PIP) install --upgrade -e '.[cpu,grammar,tokenizers]' numpy tiktoken click onnxruntime llguidance tokenizers
	@touch $@

$(DOCS)/.setup: $(PINS)
	@echo "Installing what builds the documentation into $(DOCS) ..." >&2
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python $(PIP) install -c constraints.txt -e '.[cpu,docs]'
	@touch $@

$(CUDA)/.setup: $(PINS)
	@echo "Installing the CUDA builds into $(CUDA) (several GB) ..." >&2
	@$(PYTHON) -m venv $(CUDA)
	@$(CUDA)/bin/python $(PIP) install -c constraints.txt -e '.[cuda,export,lora,dev]'
	@touch $@

$(OTHERS)/llama/.setup: Makefile
	@echo "Building llama.cpp into $(OTHERS) ..." >&2
	@$(PYTHON) -m venv $(OTHERS)/llama
	@$(OTHERS)/llama/bin/python $(PIP) install llama-cpp-python==0.3.36 gguf==0.19.0 safetensors
	@touch $@

# optimum-intel brings a torchvision that was made for another torch, and cannot be imported with it.
$(OTHERS)/openvino/.setup: Makefile
	@echo "Installing OpenVINO into $(OTHERS) ..." >&2
	@$(PYTHON) -m venv $(OTHERS)/openvino
	@$(OTHERS)/openvino/bin/python $(PIP) install torch==2.13.0 openvino-genai==2026.4.1 optimum-intel==2.2.0 nncf==3.4.0
	@$(OTHERS)/openvino/bin/python $(PIP) uninstall -y torchvision
	@touch $@

$(OTHERS)/ctranslate2/.setup: Makefile
	@echo "Installing CTranslate2 into $(OTHERS) ..." >&2
	@$(PYTHON) -m venv $(OTHERS)/ctranslate2
	@$(OTHERS)/ctranslate2/bin/python $(PIP) install torch==2.13.0 ctranslate2==4.8.5 transformers==5.24.0
	@touch $@

# Optimum needs an older transformers than the tests do; none of the three shares an environment with the toolkit.
$(OTHERS)/optimum/.setup: Makefile pyproject.toml
	@echo "Installing Optimum into $(OTHERS) ..." >&2
	@$(PYTHON) -m venv $(OTHERS)/optimum
	@$(OTHERS)/optimum/bin/python $(PIP) install torch==2.13.0 'optimum-onnx[onnxruntime]==0.1.0' -e '.[cpu,optimum]'
	@touch $@

$(OTHERS)/genai/.setup: Makefile
	@echo "Installing onnxruntime-genai into $(OTHERS) ..." >&2
	@$(PYTHON) -m venv $(OTHERS)/genai
	@$(OTHERS)/genai/bin/python $(PIP) install onnxruntime-genai==0.18.0
	@touch $@

# Without install scripts: that of onnxruntime-node fetches CUDA libraries.
$(OTHERS)/node/.setup: Makefile
	@echo "Installing Transformers.js into $(OTHERS) ..." >&2
	@mkdir -p $(OTHERS)/node
	@npm install --silent --no-fund --no-audit --ignore-scripts --prefix $(OTHERS)/node @huggingface/transformers@4.3.2
	@touch $@

# The harness's model hf needs accelerate.
$(OTHERS)/lm-eval/.setup: Makefile $(PINS)
	@echo "Installing lm-evaluation-harness into $(OTHERS) ..." >&2
	@$(PYTHON) -m venv $(OTHERS)/lm-eval
	@$(OTHERS)/lm-eval/bin/python $(PIP) install -c constraints.txt lm-eval==0.4.13 accelerate==1.15.0 -e '.[cpu,export,dev,eval]'
	@touch $@

$(OTHERS)/audit/.setup: $(PINS)
	@echo "Installing pip-audit, and the packages that it looks at, into $(OTHERS) ..." >&2
	@$(PYTHON) -m venv $(OTHERS)/audit
	@$(OTHERS)/audit/bin/python $(PIP) install pip-audit
	@$(OTHERS)/audit/bin/python $(PIP) install -c constraints.txt --target $(OTHERS)/audit/runtime --upgrade '.[cpu,grammar]'
	@touch $@
