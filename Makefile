# The few commands of this project; CONTRIBUTING.md says more. Each may be run again at any time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL ?= demo
PYTEST_ARGS ?=
# Tests spend half their time waiting for processes to start: more than one file of them runs at once.
TEST_WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# Compute threads that wait must sleep: the processes of a system, and of its tests, share the cores.
export OMP_WAIT_POLICY ?= passive

.PHONY: help install serve test test-fast lint format proto bench clean

help:
	@echo "make serve      install and run the whole system here with the demo model ($(MODEL))"
	@echo "make test       install and run all tests (make test-fast: without the slow ones)"
	@echo "make install    make and fill $(VENV)"
	@echo "make lint       ruff, mypy, import-linter, generated code (make format: let ruff put right what it can)"
	@echo "make proto      generate common/pb from proto/"
	@echo "make bench      measure a running system (URL=http://127.0.0.1:8000)"

install: $(STAMP)

# One installation at a time, and none under a running system: whoever finds the stamp fresh changes nothing.
$(STAMP): pyproject.toml constraints.txt deploy/install.sh
	@PYTHON="$(PYTHON)" deploy/install.sh $(VENV) $(STAMP)

serve: install
	@exec $(BIN)/tandem up --model $(MODEL)

test: install
	$(PYTEST) $(PYTEST_ARGS)

test-fast: install
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python proto/generate.py --check

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: install
	$(BIN)/python proto/generate.py

URL ?= http://127.0.0.1:8000
bench: install
	$(BIN)/tandem bench serve --url $(URL) --concurrency 1,4,16 --prompt-tokens 128 --output-tokens 128

clean:
	rm -rf $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
