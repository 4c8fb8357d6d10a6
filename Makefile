# make run    set up .venv and judge the paged kernels on SmolLM2 (suite `quick`)
# make test   set up .venv with the development tools and run every check CI runs
# On a machine without a GPU, get the small torch build: make run PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
RUN_FLAGS ?=
PYTEST_FLAGS ?= -n auto

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) -c constraints.txt
NEEDS := pyproject.toml constraints.txt

# Two OpenMP threads beside another busy process spin; must be set before torch is imported.
export OMP_WAIT_POLICY ?= passive

.PHONY: run test lint slow clean help
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

run: $(VENV)/.installed
	$(BIN)/pabench run $(RUN_FLAGS)

# One process a core, one thread a process: many small tensors gain nothing from more.
test slow: export OMP_NUM_THREADS ?= 1
test: lint
	$(BIN)/python -m pytest -q $(PYTEST_FLAGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -m slow $(PYTEST_FLAGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache *.egg-info

$(VENV)/.installed: $(NEEDS)
	@echo "installing pabench; the first time takes a few minutes …"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: $(NEEDS)
	@echo "installing pabench and its development tools; the first time takes a few minutes …"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[dev,tasks]"
	@touch $@ $(VENV)/.installed
