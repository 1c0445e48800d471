# Two commands on a fresh machine: `make demo` and `make test`. Both make their own virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all lint format golden bench clean

demo: $(READY)
	@$(BIN)/python examples/demo.py

test: $(READY) lint
	$(BIN)/python -m pytest -n auto -m "not slow"

test-all: $(READY) lint
	$(BIN)/python -m pytest -n auto

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: $(READY)
	$(BIN)/python tests/cli/golden.py

bench: $(READY)
	$(BIN)/python bench/startup.py
	$(BIN)/python bench/collectives_accuracy.py

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
