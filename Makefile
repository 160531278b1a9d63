# Each target sets up what it needs, in environments inside the checkout. Needed beforehand: Python
# 3.11 or later, a C++17 compiler, make, and a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find shmacc tools/shmacc_inspect -type f -not -name '*.pyc' -not -name '*.so')
SOAK_SECONDS ?= 600

.PHONY: help demo test lint model litmus soak asan tsan aarch64 bench instructions pictures clean

help: ## this list
	@grep -hE '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9]+):.*## /  make \1\t/' | expand -t 22

demo: $(VENV)/.demo ## train word embeddings in several processes, with a live picture
	$(BIN)/python tools/demo.py $(DEMO)

test: $(VENV)/.test lint ## style, types, and all tests against the built wheel
	$(BIN)/pytest $(TESTS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

model: ## check the protocol's model exhaustively (needs the package spin, and gcc)
	$(PYTHON) tools/model/check.py

litmus: ## hold the protocol's memory order against the memory models (needs herd7)
	$(PYTHON) tools/model/litmus/check.py

soak: $(VENV)/.test ## kill workers and takers at random for SOAK_SECONDS, and keep the books
	$(BIN)/python tools/soak.py --seconds $(SOAK_SECONDS)

asan: ## the hazards once more, under AddressSanitizer and UBSan
	bash tools/asan.sh

tsan: ## the tests that have threads once more, under ThreadSanitizer
	bash tools/tsan.sh

aarch64: ## build the wheel for aarch64 and run its tests in an emulator (needs root and Debian)
	bash tools/aarch64.sh

bench: .venv-bench/.installed ## measure against TensorFlow, torch and others; takes a while
	.venv-bench/bin/python tools/bench.py run --output docs/benchmarks $(BENCH)

instructions: .venv-bench/.installed ## compare instruction counts with the recorded ones (needs valgrind)
	.venv-bench/bin/python tools/bench.py instructions --compare

pictures: $(VENV)/.demo ## make the README's pictures of shmacc-inspect from a real run
	$(BIN)/python tools/inspect_pictures.py

clean: ## remove everything that these targets made
	rm -rf .venv .venv-bench .venv-asan .venv-tsan build dist

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

# The wheel is what is installed, and so what is tested: not the tree.
$(VENV)/.installed: $(SOURCES) pyproject.toml CMakeLists.txt README.md | $(BIN)/python
	rm -rf build/wheel
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(BIN)/pip install --quiet --force-reinstall --no-deps build/wheel/shmacc-*.whl
	$(BIN)/pip install --quiet build/wheel/shmacc-*.whl
	touch $@

$(VENV)/.demo: $(VENV)/.installed
	$(BIN)/pip install --quiet --group demo
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(BIN)/pip install --quiet --group test --group lint
	touch $@

.venv-bench/.installed: $(SOURCES) pyproject.toml CMakeLists.txt tools/shmacc_bench/requirements.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --upgrade pip
	.venv-bench/bin/pip install --quiet --requirement tools/shmacc_bench/requirements.txt
	.venv-bench/bin/pip install --quiet --force-reinstall --no-deps .
	.venv-bench/bin/pip install --quiet .
	touch $@
