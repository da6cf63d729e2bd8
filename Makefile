# make run   trains the tiny model on four processes (make run ARGS="--steps 20 --data my.txt")
# make test  lint, types, import rules and every test but the slow ones, which make test-slow runs (ARGS="-k router")
# Both set up what they need in .venv, once. Another interpreter: make run PYTHON=python3.12
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help run test test-slow lint format clean

PYTHON ?= python3
RANKS ?= 4
CONFIG ?= examples/configs/tiny_cpu.yaml
ARGS ?=
# Test files run side by side; a test of several processes mostly waits for one of them.
PARALLEL ?= -n 3 --dist loadfile

VENV := .venv
BIN := $(VENV)/bin
# The second Megatron that the tests cover; pip gives 0.16.1 on Python 3.11, which this one's metadata excludes.
MEGATRON := .megatron-0.19
MEGATRON_VERSION := 0.19.2
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install

# On a failure torchrun repeats, in a screenful, that its processes failed. What failed they have said themselves: the
# screenful becomes one line, and none where they all ended with 2, which is a user's mistake in one line already.
define QUIET
/^[EW][0-9]{4} .*torch\/distributed\/elastic\//d
/^Traceback \(most recent call last\):$$/{
  N
  /\/torchrun"/!b
  :more
  N
  /Root Cause.*\n={20,}$$/!b more
  /Root Cause.*exitcode *: 2 /d
  s/.*Root Cause.*\n +rank +: ([0-9]+) [^\n]*\n +exitcode +: (-?[0-9]+) .*/torchrun: rank \1 failed first, with exit code \2/
}
endef
export QUIET

help:
	@sed -n 's/^# //;1,3p' Makefile

run: $(VENV)/.run
	@echo "torchrun --nproc-per-node $(RANKS) examples/pretrain_deepseek_v3.py --config $(CONFIG) $(ARGS)"
	@{ OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node $(RANKS) examples/pretrain_deepseek_v3.py \
	    --config $(CONFIG) $(ARGS) 2>&1 1>&3 | (trap "" INT; exec sed -uE "$$QUIET" >&2); } 3>&1

test: lint $(MEGATRON)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m "not slow" $(ARGS)
	OMP_NUM_THREADS=1 PYTHONPATH=$(MEGATRON) $(BIN)/python -m pytest $(PARALLEL) -m "megatron and not slow" $(ARGS)$(if $(ARGS), || [ $$? = 5 ])

test-slow: $(VENV)/.dev $(MEGATRON)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m slow $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/python -m tests.file_map

clean:
	rm -rf $(VENV) $(MEGATRON) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# Stamps: a step runs again only when what it depends on has changed.
FOUND = $(shell $(PYTHON) -c 'import sys; print("Python %d.%d.%d" % sys.version_info[:3])' 2>/dev/null || echo not there)
USABLE = $(shell $(PYTHON) -c 'import sys; print("yes" if sys.version_info >= (3, 11) else "")' 2>/dev/null)

$(VENV)/.made:
	$(if $(USABLE),,$(error $(PYTHON) is $(FOUND); 3.11 or newer is needed; name one: make PYTHON=python3.12))
	@echo "creating $(VENV) with $(PYTHON) ($(FOUND))"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# First and alone, with its pin: whatever is installed after it finds it there and leaves it as it is.
$(VENV)/.torch: constraints.txt | $(VENV)/.made
	@echo "installing torch (this takes a while)"
	@$(PIP) -c constraints.txt torch
	@touch $@

$(VENV)/.run: $(VENV)/.torch setup.py
	@echo "installing mt-moe with Megatron-core"
	@$(PIP) -c constraints.txt -e '.[megatron]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch setup.py
	@echo "installing mt-moe with Megatron-core and the tools of the tests"
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.run

$(MEGATRON)/.installed: $(VENV)/.dev
	@echo "installing megatron-core $(MEGATRON_VERSION) into $(MEGATRON)"
	@rm -rf $(MEGATRON)
	@$(PIP) --ignore-requires-python --no-deps --target $(MEGATRON) megatron-core==$(MEGATRON_VERSION)
	@touch $@
