# Every target does its own set-up: nothing has to be done by hand before it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: venv demo test lint clean

venv: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: venv
	$(BIN)/python -m benchmarks.demo

test: venv
	$(BIN)/python -m pytest -q -n 2 -m "not alone"
	$(BIN)/python -m pytest -q -m alone

lint: venv
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy src

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info
