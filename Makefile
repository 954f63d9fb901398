# Every target makes its own virtual environment with plain pip. Only Python 3.11+ and make are needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install demo docs test test-integration test-slow check format clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[report]'
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

install: $(VENV)/installed ## install the package into .venv

demo: $(VENV)/installed ## train on handwritten digits with 8 learners, one of them 10 times slower
	$(BIN)/adp2sgd demo

docs: $(VENV)/installed-dev ## build the documentation into site/
	$(BIN)/mkdocs build --strict --quiet

test: $(VENV)/installed-dev ## run the tests (under 10 minutes)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow and not processes and not integration'
	$(BIN)/python -m pytest -m 'processes and not slow and not integration'

test-integration: $(VENV)/installed-dev ## run the tests that need servers, a browser or many sites
	$(BIN)/python -m pytest -m 'integration and not slow'

test-slow: $(VENV)/installed-dev ## run the long studies and soak tests too
	$(BIN)/python -m pytest -m ''

check: $(VENV)/installed-dev ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-dev ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove what the targets made
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
