# `make demo` and `make test` work on a fresh machine with Python 3.11 to 3.13, pip and make; `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo install test lint types imports docs printed notebook check golden bench bench-small bench-micro bench-peers gpu-round growth chaos foreign lock clean

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
# The first of these that runs and is new enough; name another one with `make PYTHON=...`.
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell $(p) -c \
    'import sys; print("$(p)" if (3, 11) <= sys.version_info < (3, 14) else "")' 2>/dev/null)))
# Two workers with one torch thread each (tests/conftest.py) beat one worker with two threads.
PYTEST_ARGS ?= -n 2 --dist worksteal

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 13

demo: $(VENV)/.installed-demo ## train PPO-EWMA for about three minutes: a Procgen game, and one task at two batch sizes
	@$(BIN)/python examples/demo.py

install: $(VENV)/.installed-dev ## everything that the tests and checks need, into .venv

test: $(VENV)/.installed-dev ## run all tests
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev ## ruff: rules, docstrings of public names, format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet .

types: $(VENV)/.installed-dev ## mypy, strict on the pure modules
	@$(BIN)/mypy

imports: $(VENV)/.installed-dev ## import-linter: imports point one way
	@$(BIN)/lint-imports

docs: $(VENV)/.installed-dev ## build the documentation site into site/, strictly
	@$(BIN)/zensical build --strict --clean

printed: $(VENV)/.installed-dev ## everything in the documentation that a command printed, and the figures, from the stored results
	@$(BIN)/python tools/printed.py

notebook: $(VENV)/.installed-dev ## run the notebook from top to bottom
	@$(BIN)/python -m pytest --nbmake notebooks -p no:xdist -q

check: test lint types imports docs ## all of it

golden: $(VENV)/.installed-dev ## refresh the golden files (look at the difference before committing it)
	@$(BIN)/python -m pytest tests/golden --refresh-golden

bench: $(VENV)/.installed-dev ## speed of all four algorithms beside what the network allows, in under ten minutes (idle machine)
	@$(BIN)/python benchmarks/bench.py $(ARGS)

bench-small: $(VENV)/.installed-dev ## speed with 256 to 1 environments
	@$(BIN)/python benchmarks/bench_small.py $(ARGS)

bench-micro: $(VENV)/.installed-dev ## GAE, minibatches, EWMA, objectives, sampling, beside the stored baseline
	@set -e; file=$$(mktemp); trap 'rm -f "$$file"' EXIT; \
	$(BIN)/python -m pytest benchmarks/micro -q -p no:xdist --benchmark-enable --benchmark-json "$$file" --benchmark-columns min,median,rounds; \
	$(BIN)/python benchmarks/micro/compare.py "$$file" $(ARGS)

bench-peers: $(VENV)/.installed-dev ## speed of plain PPO beside Stable-Baselines3, TorchRL and CleanRL
	@$(BIN)/python benchmarks/bench_peers.py $(ARGS)

gpu-round: $(VENV)/.installed-dev ## everything that is to be measured on a GPU, in at most ten minutes (ARGS=--dry-run: on the CPU)
	@$(BIN)/python benchmarks/gpu_round.py $(ARGS)

growth: $(VENV)/.installed-dev ## cost and memory as runs get larger; seconds to start
	@$(BIN)/python benchmarks/growth.py $(ARGS)

chaos: $(VENV)/.installed-dev ## kills, signals, full disks, mutated files, odd environments at random for ten minutes (Linux)
	@$(BIN)/python benchmarks/chaos.py $(ARGS)

foreign: $(VENV)/.installed-dev ## test suites of Stable-Baselines3 and rsl_rl with our classes (ARGS="rsl_rl=CHECKOUT")
	@$(BIN)/python tools/foreign.py $(ARGS)

# A venv that is there but broken (an interrupted first run, a Python that was removed) is made again.
define make_venv
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    if [ -z "$(PYTHON)" ]; then \
	        echo "anybatch needs Python 3.11, 3.12 or 3.13, and none was found on PATH: install one, or name it with make PYTHON=/path/to/python." >&2; exit 2; \
	    fi; \
	    echo "creating $(VENV) with $$($(PYTHON) --version)"; \
	    $(PYTHON) -m venv --clear $(VENV) || { echo "$(PYTHON) cannot create virtual environments: install its venv module (Debian and Ubuntu: python3-venv)." >&2; exit 2; }; \
	fi
endef

# setuptools comes first and from the lock too, so that the build of anybatch itself fetches nothing unpinned.
define pip_install
	@echo "installing anybatch[$(1)] into $(VENV) (the first time takes some minutes)"
	@$(PIP) install --quiet -c constraints.txt setuptools torch==$(TORCH)
	@$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[$(1)]'
	@touch $@
endef

$(VENV)/.installed-demo: pyproject.toml constraints.txt
	$(make_venv)
	$(call pip_install,procgen$(,)plot$(,)video)

$(VENV)/.installed-dev: pyproject.toml constraints.txt
	$(make_venv)
	$(call pip_install,procgen$(,)plot$(,)video$(,)wandb$(,)optuna$(,)ray$(,)sb3$(,)trl$(,)torchrl$(,)rsl-rl$(,)docs$(,)dev)
	@touch $(VENV)/.installed-demo

# A literal comma for $(call).
, := ,

lock: ## newest releases into constraints.txt (make lock TORCH=2.14.0 for another torch)
	@[ -n "$(PYTHON)" ] || { echo "anybatch needs Python 3.11, 3.12 or 3.13, and none was found on PATH." >&2; exit 2; }
	@rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	@.venv-lock/bin/python -m pip --disable-pip-version-check install --quiet --upgrade setuptools torch==$(TORCH)
	@.venv-lock/bin/python -m pip --disable-pip-version-check install --quiet --no-build-isolation -e '.[procgen,plot,video,wandb,optuna,ray,sb3,trl,torchrl,rsl-rl,docs,dev]'
	@sed -n '/^#/p' constraints.txt > constraints.new
	@.venv-lock/bin/python -m pip --disable-pip-version-check freeze --all --exclude-editable \
	    | grep -vE '^(pip|wheel|anybatch)( |=)' | sed 's/+cpu$$//' | LC_ALL=C sort -f >> constraints.new
	@mv constraints.new constraints.txt && rm -rf .venv-lock

clean: ## remove the venv and what the tools wrote; runs stay
	@rm -rf $(VENV) .venv-lock .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .cache site build dist src/*.egg-info
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
