# `make serve [MODEL=...]` and `make test` create the virtual environment first.
# pip's PIP_* variables apply, e.g. for another package index or another build of PyTorch.
PYTHON ?= python3
VENV ?= .venv
MODEL ?=
ARGS ?=
SERVE_STAMP := $(VENV)/.installed-serve
DEV_STAMP := $(VENV)/.installed-dev

JOBS ?= 2

.PHONY: serve test quick soak faults lint docs constraints wheel install install-dev clean no-interpreter

install: $(SERVE_STAMP)

install-dev: $(DEV_STAMP)

$(SERVE_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) tools/install.py $(VENV)
	@touch $@

# after an upgrade removed its interpreter, the environment is made again
ifeq ($(realpath $(VENV)/bin/python),)
$(SERVE_STAMP) $(DEV_STAMP): no-interpreter
endif

# Additional packages for tests and lint: pytest, ray, triton and others, over a gigabyte; real models, 440 MB.
$(DEV_STAMP): $(SERVE_STAMP)
	@$(PYTHON) tools/install.py $(VENV) dev,clients,otel,audio,video
	@$(VENV)/bin/python tools/fetch_models.py
	@touch $@

serve: $(SERVE_STAMP)
	$(VENV)/bin/quire serve $(MODEL) $(ARGS)

# a file at a time in each of $(JOBS) processes, in the order of tests/conftest.py (pytest-xdist's own puts files of few,
# long tests last); after one that died, pytest-xdist waits for ever for the rest of its file
PYTEST := $(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: $(DEV_STAMP)
	$(PYTEST) $(ARGS)

quick: $(DEV_STAMP)
	$(PYTEST) -m "not slow" $(ARGS)

lint: $(DEV_STAMP)
	$(VENV)/bin/ruff check .

# half an hour of mixed traffic: whether memory grows, blocks are lost or a request fails; `ARGS="--minutes 5"`
soak: $(DEV_STAMP)
	$(VENV)/bin/python -m benchmarks.soak $(ARGS)

# what clients see when processes are killed or stopped, and when disks, memory or descriptors run out
faults: $(DEV_STAMP)
	$(VENV)/bin/python -m benchmarks.faults $(ARGS)

# docs/ as pages in site/; building and reading them needs no network
docs: $(SERVE_STAMP)
	@$(PYTHON) tools/install.py $(VENV) docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet

# wheels with the kernels of every level in dist/, one for each kind of machine that a compiler in $(COMPILERS) compiles
# for (g++-aarch64-linux-gnu of Debian and Ubuntu compiles for the other kind)
COMPILERS ?= g++ aarch64-linux-gnu-g++
wheel: $(SERVE_STAMP)
	@for cxx in $(COMPILERS); do \
	    command -v $$cxx >/dev/null || { echo "make wheel: $$cxx is not installed; COMPILERS=g++ builds for this machine only" >&2; exit 1; }; \
	done
	@for cxx in $(COMPILERS); do \
	    rm -rf build && CXX=$$cxx $(PYTHON) -m pip wheel --quiet --no-deps -w dist . || exit 1; \
	done
	@ls dist/*.whl

# resolve the pins anew: `make constraints`, and `make constraints ARGS=--upgrade` for the newest versions
constraints:
	$(PYTHON) tools/constraints.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info

no-interpreter:
