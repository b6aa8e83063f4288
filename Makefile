# `make train` runs the default recipe, `make test` runs everything CI runs. Both make .venv first if it is missing.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# Several processes share the cores: one thread each is faster than two that fight.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: train test lint types unit bench clean

train: $(STAMP)
	$(BIN)/brace train recipes/calculator.toml

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/pytest -n 2

bench: $(STAMP)
	$(BIN)/brace bench

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
