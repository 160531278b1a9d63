# Each target sets up what it needs, in environments inside the checkout, with the versions pinned in
# constraints/. Needed beforehand: Python 3.11 or later, a C++17 compiler, make, and a package index.
#
# `make TARGET PYTHON=python3.12` does it with another Python, in an environment of its own: .venv is
# that of python3, .venv-3.12 that of a Python 3.12 which is not python3.

PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(VERSION),$(shell python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])'))
VENV := .venv
else
VENV := .venv-$(VERSION)
endif
BIN := $(VENV)/bin

PINS := constraints/newest.txt
BUILD_PINS := $(PINS)
ALL_PINS := --constraint constraints/newest.txt --constraint constraints/home.txt
STRICT := --config-settings cmake.define.SHMACC_WARNINGS_ARE_ERRORS=ON
SOURCES := $(shell find shmacc tools/inspect/shmacc_inspect -type f -not -name '*.pyc' -not -name '*.so')
# An environment with other build options has a wheel of its own.
BUILT := build/$(VENV)
WHEELS := $(BUILT)/wheel
# From Python 3.13 on one wheel is for all.
ifeq ($(filter 3.11 3.12,$(VERSION)),)
ifneq ($(filter .venv .venv-$(VERSION),$(VENV)),)
WHEELS := build/abi3/wheel
endif
endif

# About 300 tests that use everything once: processes, deaths, dtypes, the command, the programs in the pages.
SMOKE := $(addprefix tests/accumulators/test_,processes.py steps_and_integers.py against_numpy_model.py \
		rounds.py groups.py steps.py ends_of_waits.py) tests/values/test_plain_gradients.py \
	tests/parameters/test_parameters.py tests/segment/test_process_pools.py tests/inspection/test_verbs.py \
	$(addprefix tests/hazards/test_,killed_at_system_calls.py exit_without_close.py memory_errors.py) \
	tests/package/test_start_methods.py tests/package/test_interpreter_modes.py
# What the packages that shmacc needs are used for.
NEEDS := $(addprefix tests/accumulators/test_,processes.py steps_and_integers.py against_numpy_model.py) \
	tests/values/test_arrays_in.py tests/parameters $(addprefix tests/inspection/test_,verbs.py habits.py metrics.py terminal.py) \
	tests/hazards/test_damaged_semaphores.py
LOWEST = VENV=$(VENV)-lowest PINS=constraints/lowest.txt BUILD_PINS=$(BUILD_PINS) WHEELS=$(WHEELS)
SOAK_SECONDS ?= 600
# Which upper floors `make floors` takes off, one after the other; `upper` is all of them.
FLOORS ?= each

.PHONY: help demo editable test smoke test-lowest environment-lowest test-home test-ray lint floors floors-smoke coverage dist docs model \
	litmus simulate bench-ray soak soak-ray asan tsan aarch64 compare bench reference pins clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 22

demo: $(VENV)/.installed ## train word embeddings in several processes, with a live curve
	$(BIN)/python tools/demo/demo.py $(DEMO)

editable: ## install the tree itself, in .venv-editable; again after a change of C++, which compiles what changed
	$(MAKE) --no-print-directory .venv-editable/.needed VENV=.venv-editable
	.venv-editable/bin/pip install --quiet --constraint $(PINS) --no-build-isolation --editable . \
		--config-settings build-dir=build/.venv-editable $(STRICT) \
		--config-settings cmake.define.SHMACC_QUICK_BUILD=ON

test: $(VENV)/.lint lint ## style, types, and the tests that need no other packages, against the built wheel
	$(BIN)/pytest --numprocesses 2 --dist worksteal $(TESTS)

smoke: $(VENV)/.tested ## about 300 of the tests
	$(BIN)/pytest --numprocesses 2 --dist worksteal $(SMOKE)

test-lowest: ## tests with the lowest versions of other packages that pyproject.toml allows
	$(MAKE) --no-print-directory smoke $(LOWEST) SMOKE='$(NEEDS)'

environment-lowest:
	$(MAKE) --no-print-directory $(VENV)-lowest/.tested $(LOWEST)

test-home: .venv-home/.installed ## tests with torch, JAX, SciPy and others, in an environment of their own
	.venv-home/bin/pytest --numprocesses 2 --dist worksteal $(or $(TESTS),tests/other_packages)

lint: $(VENV)/.lint ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(shell find shmacc/native -name "*.?pp")
	$(BIN)/mypy
	$(BIN)/zizmor --offline --quiet .github

floors: $(VENV)/.lint ## take off each upper floor of the tree in a copy, and all: the rest is type-checked and tested
	$(BIN)/python tools/chores/floors.py $(FLOORS) -- $(TESTS)

floors-smoke: ## the core alone, and all without hosts, with a few of the tests
	$(MAKE) --no-print-directory floors FLOORS='upper hosts' TESTS='$(filter-out tests/hazards/%,$(SMOKE))'

coverage: ## count the lines that the tests reach, into build/coverage and docs/testing.md; ten minutes
	$(MAKE) --no-print-directory .venv-coverage/.coverage VENV=.venv-coverage \
		BUILD_OPTIONS='-C cmake.define.SHMACC_COVERAGE=ON -C install.strip=false'
	bash tools/chores/coverage.sh $(TESTS)

dist: $(VENV)/.dist $(VENV)/.lint ## build what is published, into dist/, and use it under every Python that is found
	rm -rf dist $(BUILT)/dist
	PIP_CONSTRAINT=$(CURDIR)/$(PINS) $(BIN)/python -m build --sdist --outdir $(BUILT)/dist
	set -e; found=$$($(PYTHON) tools/chores/interpreters.py); for python in $$found; do \
		$(BIN)/pip --python $$python wheel --quiet --no-deps --build-constraint $(BUILD_PINS) $(STRICT) \
			--wheel-dir $(BUILT)/dist $(BUILT)/dist/*.tar.gz; done
	$(BIN)/check-wheel-contents $(BUILT)/dist
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel repair --wheel-dir dist $(BUILT)/dist/*.whl
	cp $(BUILT)/dist/*.tar.gz dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/pytest -m installs -o faulthandler_timeout=0

docs: .venv-docs/.installed ## build the documentation site into build/docs; every warning is an error
	rm -rf build/docs
	.venv-docs/bin/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env \
		--doctree-dir build/.venv-docs/doctrees --conf-dir docs/site --builder html . build/docs
	.venv-docs/bin/python tools/chores/links.py build/docs

model: $(VENV)/.installed ## check the protocol's models, and the world of hosts, exhaustively (needs spin, and gcc)
	$(PYTHON) tools/model/check.py
	$(BIN)/python tools/multihost/search.py

litmus: ## hold the protocol's memory order against the memory models (needs herd7)
	$(PYTHON) tools/model/litmus/check.py --record

test-ray: .venv-ray/.installed ## tests of shmacc.ray on a cluster of several nodes on this machine
	.venv-ray/bin/pytest -o timeout=300 -o faulthandler_timeout=280 tests/on_ray $(TESTS_RAY)

simulate: $(VENV)/.installed ## simulate rounds with updates over up to 300 hosts, and print a table
	$(BIN)/python tools/multihost/simulate.py

bench-ray: .venv-ray/.installed ## time a round over two Ray nodes beside bare Ray calls
	.venv-ray/bin/python -P tools/multihost/ray_bench.py $(BENCH_RAY)

soak: $(VENV)/.tested ## kill workers and takers at random for SOAK_SECONDS, and keep the books
	OPENBLAS_NUM_THREADS=1 SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/pytest -s -o timeout=0 -o faulthandler_timeout=0 tests/hazards/test_soak.py

soak-ray: .venv-ray/.installed ## kill, freeze, cut off and replace parts of a Ray cluster for SOAK_SECONDS, and keep the books
	SOAK_SECONDS=$(SOAK_SECONDS) .venv-ray/bin/pytest -s -o timeout=0 -o faulthandler_timeout=0 tests/on_ray/test_chaos.py -k soak

asan: ## the hazards once more, under AddressSanitizer and UBSan
	CXX=$(CXX) $(MAKE) --no-print-directory .venv-asan/.tested VENV=.venv-asan \
		BUILD_OPTIONS='-C cmake.define.SHMACC_SANITIZE=address,undefined -C install.strip=false'
	CXX=$(CXX) bash tools/chores/sanitize.sh address $(TESTS)

tsan: ## the tests that have threads once more, under ThreadSanitizer
	CXX=$(CXX) $(MAKE) --no-print-directory .venv-tsan/.tested VENV=.venv-tsan \
		BUILD_OPTIONS='-C cmake.define.SHMACC_SANITIZE=thread -C install.strip=false'
	CXX=$(CXX) bash tools/chores/sanitize.sh thread $(TESTS)

aarch64: ## build the wheel for aarch64 and run its tests in an emulator (needs root and Debian)
	bash tools/chores/aarch64.sh

compare: .venv-bench/.installed ## train a model by each way that one chooses between, with deaths; ten minutes
	.venv-bench/bin/python tools/bench/bench.py compare $(COMPARE)

bench: .venv-bench/.installed ## measure beside TensorFlow, torch and others; ten minutes, BENCH=--quick: two
	bash -o pipefail -c '.venv-bench/bin/python tools/bench/bench.py run $(BENCH) | tee build/bench.md'

reference: $(VENV)/.lint ## write the manual pages, and the JSON schema of shmacc-inspect anew
	$(BIN)/python tools/inspect/reference.py

pins: $(VENV)/.pip ## pin the newest and the lowest versions anew, in constraints/
	$(BIN)/pip install --quiet --constraint $(PINS) uv
	$(BIN)/python tools/chores/pins.py

clean: ## remove everything that these targets made
	rm -rf .venv .venv-* build dist

$(VENV)/.pip: constraints/newest.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints/newest.txt pip
	touch $@

$(WHEELS)/.made: $(SOURCES) pyproject.toml CMakeLists.txt README.md $(BUILD_PINS) | $(VENV)/.pip
	rm -rf $(WHEELS)
	$(BIN)/pip wheel --quiet --no-deps --build-constraint $(BUILD_PINS) --wheel-dir $(WHEELS) \
		--config-settings build-dir=$(dir $(WHEELS))cmake $(STRICT) $(BUILD_OPTIONS) .
	touch $@

# The wheel is what is installed, and so what is tested: not the tree.
$(VENV)/.installed: $(WHEELS)/.made $(VENV)/.pip
	$(BIN)/pip install --quiet --force-reinstall --no-deps $(WHEELS)/shmacc-*.whl
	$(BIN)/pip install --quiet --constraint $(PINS) $(WHEELS)/shmacc-*.whl
	touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint $(PINS) --group test
	touch $@

$(VENV)/.lint $(VENV)/.coverage $(VENV)/.dist: $(VENV)/.%: $(VENV)/.tested
	$(BIN)/pip install --quiet --constraint $(PINS) --group $*
	touch $@

# What builds the extension stays there: a build environment of pip's own is a new one each time, so all would be compiled.
$(VENV)/.needed: $(VENV)/.pip
	$(BIN)/pip install --quiet --constraint $(PINS) scikit-build-core nanobind numpy cmake ninja \
		--group test --group lint
	touch $@

# The wheel that is built for tests, in environments of their own: each has the dependency group of its name.
.venv-docs/.installed .venv-ray/.installed .venv-home/.installed .venv-bench/.installed: \
		.venv-%/.installed: constraints/newest.txt constraints/home.txt $(VENV)/.installed
	test -e .venv-$*/bin/pip || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --upgrade $(ALL_PINS) pip
	.venv-$*/bin/pip install --quiet $(ALL_PINS) --group $*
	.venv-$*/bin/pip install --quiet --force-reinstall --no-deps $(WHEELS)/shmacc-*.whl
	.venv-$*/bin/pip install --quiet $(ALL_PINS) $(WHEELS)/shmacc-*.whl
	touch $@
