# Every target makes its own virtual environment in .venv first; nothing needs to be installed before.
# `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH ?= library_time

# Where an environment forbids bytecode, each process of a test would compile torch anew: 10 seconds.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv test demo study lint types docs unit oldest format bench dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile
	@echo "  PYTHON=python3.12 chooses the interpreter of .venv, BENCH=step_cost another benchmark"

test: lint types docs unit ## format, lint, types, documentation and every test: before a change is merged

demo: $(STAMP) ## show in about a minute what rescaling does to training, with a figure in pathsgd-demo/
	@$(BIN)/python -m study demo

study: $(STAMP) ## run the paper's whole study in small: two to four minutes, into pathsgd-small/
	@$(BIN)/python -m study reproduce

lint: $(STAMP) ## check formatting and lint
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "==> ruff check"
	@$(BIN)/ruff check .

types: $(STAMP) ## check types, strictly
	@echo "==> mypy"
	@$(BIN)/mypy

docs: $(STAMP) ## build the documentation into site/; warnings are errors
	@echo "==> zensical build"
	@$(BIN)/python docs/stage_pages.py
	@$(BIN)/zensical build --clean --strict

unit: $(STAMP) ## run the tests, the doctests and the import-direction check
	@echo "==> pytest"
	@$(BIN)/python -m pytest

oldest: ## run the tests of the library with the oldest torch that pyproject.toml allows, in .venv-oldest: half an hour
	@test -x .venv-oldest/bin/pytest || { $(PYTHON) -m venv --clear .venv-oldest && .venv-oldest/bin/python -m pip install -qq \
	  --disable-pip-version-check -c constraints-oldest.txt \
	  -e . triton numpy pytest pytest-xdist hypothesis expecttest matplotlib scikit-learn transformers peft; }
	@.venv-oldest/bin/python -m pytest \
	  tests/balancing tests/geometry tests/graph tests/muon tests/paths tests/training tests/uses tests/tools

format: $(STAMP) ## rewrite the sources into the house format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(STAMP) ## run the benchmark named by BENCH: library_time, step_cost
	@$(BIN)/python -m benchmarks.$(BENCH)

dist: $(STAMP) ## build wheel and source distribution into dist/, install each in an empty environment and use it: minutes
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist
	@$(BIN)/python release/check.py dist --constraint constraints.txt

venv: $(STAMP) ## make .venv, again when pyproject.toml or constraints.txt has changed

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "pathsgd needs Python 3.10 or newer and '$(PYTHON)' is not: name one that is, as in 'make PYTHON=python3.12 $(MAKECMDGOALS)'" >&2; \
	  exit 1; }
	@echo "==> making $(VENV) with $(PYTHON)"
	@log=$$($(PYTHON) -m venv --clear $(VENV) 2>&1) || { \
	  echo "could not make $(VENV): install Python's venv module (Debian, Ubuntu: apt install python3-venv) or name another Python with PYTHON=... ($$(echo "$$log" | tail -n 1))" >&2; \
	  exit 1; }
	@echo "==> installing pathsgd and its development tools (torch is large: the first time takes minutes)"
# torch by pip, which finds builds that uv does not; the rest by uv, in a fifth of pip's time.
	@{ $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt torch uv && \
	  $(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt -e '.[dev]'; } || { \
	  echo "could not install the versions named in constraints.txt: see the message above" >&2; \
	  exit 1; }
	@touch $@

clean: ## delete .venv, caches and build outputs
	rm -rf $(VENV) .venv-oldest build dist site .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src study tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
