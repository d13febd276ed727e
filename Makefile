# `make test` on a fresh machine: an environment, lint, tests. `make help` lists the rest.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Written last, so that an interrupted install is done again and a finished one needs no network.
STAMP  := $(VENV)/.installed
LAUNCH := $(VENV)/.installed-launch
KERNELS := $(VENV)/.installed-kernels
# Processes that share the test files out, in the order of tests/conftest.py. Two more than CI has cores: many tests wait.
WORKERS ?= 4
SHARED  := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help install debian test pytest test-fast test-kernels test-extra test-chaos test-launch test-gpu docs-test lint format clean train

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

install: $(STAMP) ## make .venv with the pinned versions

$(STAMP): requirements/torch.txt requirements/test.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than 3.11: try make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements/torch.txt
	$(BIN)/python -m pip install --quiet -r requirements/test.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(LAUNCH): $(STAMP) requirements/launch.txt
	$(BIN)/python -m pip install --quiet -r requirements/launch.txt
	@touch $@

# Beside the environment, not in it: with Triton there some tests would find another machine than users of torch's CPU build have.
$(KERNELS): $(STAMP) requirements/kernels.txt
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/kernels -r requirements/kernels.txt
	@touch $@

debian: ## install the Debian packages that some tests use, as root
	@packages=$$(cat requirements/debian.txt); \
	if dpkg-query -W -f '$${db:Status-Status}\n' $$packages 2>&1 | grep -qvx installed; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -qq --no-install-recommends $$packages; \
	fi

test: lint pytest ## lint, then every test this machine can run

pytest: $(STAMP) ## every test this machine can run (tests/gpu only where a GPU is)
	$(BIN)/python -m pytest -q $(SHARED)

test-fast: $(STAMP) ## the tests that are not marked slow
	$(BIN)/python -m pytest -q $(SHARED) -m "not slow and not extra"

test-kernels: $(KERNELS) ## what a GPU would launch, interpreted and compiled without one: kernels, modules, training steps
	PYTHONPATH=$(VENV)/kernels TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 tests/interpreted
	PYTHONPATH=$(VENV)/kernels $(BIN)/python -m pytest -q -n 2 tests/compiled tests/kernels/test_launch.py

test-extra: $(STAMP) ## tests that take many minutes and show little more than the others
	$(BIN)/python -m pytest -q -m extra

test-chaos: $(STAMP) ## 300 faults of all kinds on 2 and 4 ranks, ottava train and torchrun: hours on two cores
	$(BIN)/python -m ottava chaos benchmarks/chaos.toml --count 300 --ranks 2,4 --launcher ottava,torchrun \
	  --output benchmarks/results/chaos-$$(uname -m)-$$(nproc)cpu.json

test-launch: $(LAUNCH) ## launchers, on a real Slurm (make debian, as root), a real Ray and with the schemas of Kubernetes
	$(BIN)/python -m pytest -q -m "extra or not extra" tests/launch

test-gpu: $(STAMP) ## the tests that need a CUDA device
	PYTHON=$(BIN)/python bash tests/gpu/run.sh

docs-test: $(STAMP) ## run every python block of the docs and check their links
	$(BIN)/python -m pytest -q tests/docs

lint: $(STAMP) ## ruff, mypy, the import contract and the walls
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/walls.py

format: $(STAMP) ## sort imports and format
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

clean: ## remove the environment and every cache
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

train: $(STAMP) ## train a small FP8 Llama on this machine: about 2 minutes on 2 cores; again: resumes
	$(BIN)/ottava train
