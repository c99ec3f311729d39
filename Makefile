# The first target lists the targets: the line behind `##` is their help.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python files in the checkout are used in place; what is compiled or declared needs a new install when it changes.
INSTALLED := $(VENV)/.installed-spipe
BUILD_INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*.cpp native/*.hpp)
CPP_FILES := $(wildcard native/*.cpp native/*.hpp)
NOTEBOOKS := $(wildcard notebooks/*.py)
# With their outputs, for `make docs`.
NOTEBOOK_FLAGS := --executed build/notebooks

.PHONY: help setup demo test test-all test-docs lint format notebooks docs sanitize sanitize-address sanitize-thread wheel clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

setup: $(INSTALLED)  ## set up .venv: dependencies, tools and the compiled extension

$(INSTALLED): $(BUILD_INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "spipe needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,docs]'
	@touch $@

demo: $(INSTALLED)  ## search, train, calibrate and predict on this machine's CPU, in a few minutes
	$(BIN)/spipe demo

test: $(INSTALLED)  ## the fast tests
	$(BIN)/python -m pytest

test-all: $(INSTALLED)  ## all tests that this machine can run, slow ones and GPU ones included
	$(BIN)/python -m pytest -m ''

lint: $(INSTALLED)  ## ruff, mypy and clang-format, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

format: $(INSTALLED)  ## rewrite Python and C++ files in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

notebooks: $(INSTALLED)  ## execute the notebooks, refresh their .ipynb, keep them with outputs for `make docs`
	$(BIN)/python scripts/execute_notebooks.py $(NOTEBOOK_FLAGS) $(NOTEBOOKS)

docs: $(INSTALLED)  ## build the documentation into build/site, without warnings; `make notebooks` first for pages with outputs
	$(BIN)/python scripts/docs_pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

test-docs: $(INSTALLED)  ## run every page of the documentation, all figures, and the report in a browser if there is one
	$(BIN)/python -m pytest -m 'not gpu' tests/cli/test_docs.py tests/cli/test_plot.py tests/cli/test_report.py

sanitize: sanitize-address sanitize-thread  ## the native tests under the address, undefined-behaviour and thread sanitizers

sanitize-address: SANITIZERS := address,undefined
sanitize-address: LIBRARIES := libasan.so libubsan.so
sanitize-thread: SANITIZERS := thread
sanitize-thread: LIBRARIES := libtsan.so
# The import hook of an editable install comes before PYTHONPATH: without this it would give the checkout's extension.
NO_EDITABLE := import sys; sys.meta_path = [f for f in sys.meta_path if "editable" not in type(f).__module__]
# A copy of the tree with an extension built for it; torch's OpenMP threads, which the sanitizer cannot see, stay off.
sanitize-address sanitize-thread: export PATH := $(abspath $(BIN)):$(PATH)
sanitize-address sanitize-thread: $(INSTALLED)
	cmake -S . -B build/$@ -G Ninja -DCMAKE_BUILD_TYPE=Debug -DSPIPE_SANITIZE=$(SANITIZERS)
	cmake --build build/$@
	rm -rf build/$@/tree && mkdir build/$@/tree && cp -a spipe sim runtime tests pyproject.toml build/$@/tree
	rm -f build/$@/tree/spipe/_native*.so && cmake --install build/$@ --prefix build/$@/tree
	echo '$(NO_EDITABLE)' >build/$@/tree/sitecustomize.py
	cd build/$@/tree && PYTHONPATH=. python -c 'import spipe; assert spipe.__file__.startswith("$(abspath build/$@)"), spipe'
	cd build/$@/tree && OMP_NUM_THREADS=1 PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 \
	  TSAN_OPTIONS=halt_on_error=1 LD_PRELOAD="$(foreach library,$(LIBRARIES),$(shell g++ -print-file-name=$(library)))" \
	  PYTHONPATH=. setarch -R python -m pytest -p no:cacheprovider -s tests/native $(SANITIZE_FLAGS)

wheel: $(INSTALLED)  ## build a wheel into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps -w dist .

clean:  ## remove what was built, .venv included
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
