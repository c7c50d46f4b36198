# Each target does its own set-up: a virtual environment in .venv, then the package with what the target needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench findings clean

demo: $(STAMP)-demo
	$(BIN)/diffattn demo --out runs/demo

test: $(STAMP)-test lint
	$(BIN)/python -m pytest

lint: $(STAMP)-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

bench: $(STAMP)-test
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

findings: $(STAMP)-demo
	$(BIN)/diffattn finding first-light --out runs/first_light

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "diffattn needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(STAMP)-demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --quiet --editable .
	touch $@

# torchattacks pins an old requests, so it is installed without its dependencies (it is a parity peer only).
$(STAMP)-test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --quiet --editable '.[test,lint]'
	$(BIN)/python -m pip install --quiet --quiet --no-deps 'torchattacks>=3.5.1'
	touch $@ $(STAMP)-demo

clean:
	rm -rf $(VENV) build dist src/*.egg-info .ruff_cache .pytest_cache
