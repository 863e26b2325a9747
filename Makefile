# Two commands: `make demo` and `make test`. Both make the environment when it is not there yet, and
# install nothing when it is.

PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo

.PHONY: demo test test-all bench lint format clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	$(BIN)/mechicl train he2025-two-head-quick --out $(DEMO) --overwrite
	$(BIN)/mechicl analyze $(DEMO)
	@echo
	@echo "Figures are in $(DEMO)/figures, results in $(DEMO)/analyses. Look first at:"
	@ls $(DEMO)/figures/circuits-*.png $(DEMO)/figures/solution_manifold-*.png
	@echo "Try next: $(BIN)/mechicl analyze $(DEMO) --probe sign_matching"

# Two workers share the cores: a library that takes them all for itself makes both wait.
test: export OMP_NUM_THREADS = 1
test: $(VENV)/installed-test
	$(BIN)/pytest -m "not slow" -n 2 --dist loadfile $(ARGS)

test-all: $(VENV)/installed-test
	$(BIN)/pytest $(ARGS)

bench: $(VENV)/installed-test
	$(BIN)/python -m pytest benchmarks --benchmark-json=build/bench.json -p no:cacheprovider $(ARGS); \
	missed=$$?; $(BIN)/python -m benchmarks.report build/bench.json && exit $$missed

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/basedpyright

format: $(VENV)/installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info

build:
	mkdir -p build

bench: | build

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "mechicl needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/installed-test: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	@touch $@ $(VENV)/installed
