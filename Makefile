# make run: the quickstart.  make test: the whole suite.  Both set up .venv first; the second time at once.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test setup lint clean

run: $(VENV)/.installed
	PYTHON=$(BIN)/python examples/quickstart/run.sh

test: $(VENV)/.installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "miles needs Python 3.11: install it, or name it with make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) runs
