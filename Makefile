# `make serve [MODEL=...]` and `make test` are all a new machine needs: each creates the virtual environment first.
PYTHON ?= python3
VENV ?= .venv
MODEL ?=
ARGS ?=
STAMP := $(VENV)/.installed

.PHONY: serve test lint install clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt torch
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

serve: $(STAMP)
	$(VENV)/bin/quire serve $(MODEL) $(ARGS)

test: $(STAMP)
	$(VENV)/bin/python -m pytest $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .

clean:
	rm -rf $(VENV) build dist *.egg-info
