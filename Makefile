# The commands the README names. Everything is installed into .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test bench

$(VENV)/.installed: pyproject.toml requirements.txt patches/series patches/UPSTREAM
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --progress-bar off -r requirements.txt
	$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(BIN)/fp4kv patch apply
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m launcher.demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not interpreter and not e2e"
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m interpreter
	$(BIN)/python -m pytest -n 2 --dist loadfile -m e2e

bench: $(VENV)/.installed
	$(BIN)/python tests/bench/run.py
	$(BIN)/python tests/bench/readme_table.py
