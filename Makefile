# Two commands on a fresh machine: `make demo` and `make test`. Both make their own virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tests wait for processes to start as much as they compute: one worker more than there are cores.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# With every core taken, a second thread of a process waits more than it computes.
quick-tests all-tests durations: export OMP_NUM_THREADS = 1
# They start some hundred processes, each of which would compile every module again if it may not keep the result.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-frameworks durations quick-tests all-tests lint style types format golden docs bench image release-check clean

demo: $(READY)
	@$(BIN)/python examples/demo.py

# Types are checked beside the tests, by a processor that would else wait; both must pass.
test: $(READY) style
	@$(MAKE) --no-print-directory -j 2 types quick-tests

test-all: $(READY) style
	@$(MAKE) --no-print-directory -j 2 types all-tests

QUICK_TESTS := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=20 -m "not slow and not frameworks"
quick-tests: $(READY)
	$(QUICK_TESTS)

# On an idle machine: what each quick test takes, by which later runs are judged.
durations: $(READY)
	$(QUICK_TESTS) --write-durations

# Hours on two cores: `make test-all PART=1/4` runs a quarter of the files, and prints each test as it ends.
all-tests: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --hypothesis-profile=searching -m "not frameworks" \
		$(if $(PART),-vv --part $(PART))

# The frameworks whose own parsers read what `export` writes; they bring torch, hence an environment of their own.
test-frameworks: .venv-frameworks/.ready
	.venv-frameworks/bin/python -m pytest -m frameworks tests/interop tests/integrations/test_deepspeed.py \
		tests/training/convert/test_deepspeed_checkpoints.py

.venv-frameworks/.ready: pyproject.toml constraints.txt
	test -x .venv-frameworks/bin/python || $(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/python -m pip install --quiet -c constraints.txt torch -e ".[dev]"
	.venv-frameworks/bin/python -m pip install --quiet --no-build-isolation -c constraints.txt \
		setuptools wheel accelerate==1.15.0 deepspeed==0.19.8 torchtitan==0.2.2 tyro
	touch .venv-frameworks/.ready

lint: style types

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation as a site that opens from disk: site/index.html.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

golden: $(READY)
	$(BIN)/python tests/cli/golden.py

image: $(READY)
	docker build --tag "$$($(BIN)/python -c 'from shardwise.launch.targets.manifest import IMAGE; print(IMAGE)')" .

bench: $(READY)
	$(BIN)/python bench/startup.py
	$(BIN)/python bench/search.py
	$(BIN)/python bench/engine.py
	$(BIN)/python bench/loop.py
	$(BIN)/python bench/data.py
	$(BIN)/python bench/checkpoint.py
	$(BIN)/python bench/recovery.py
	$(BIN)/python bench/emulation.py
	$(BIN)/python bench/recut.py
	$(BIN)/python bench/mixed.py
	$(BIN)/python bench/generation.py
	$(BIN)/python bench/page.py
	$(BIN)/python bench/less_communication.py compression
	$(BIN)/python bench/less_communication.py diloco --emulate 2x1,200Mbit,1ms
	$(BIN)/python -m shardwise validate collectives

# The wheel in an empty environment: without extras, then with `train`.
release-check:
	@PYTHON=$(PYTHON) .ci/release-check

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,train,ray,ui,docs]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
