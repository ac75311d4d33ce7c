# Every target brings what it needs: tools/setup.sh installs and builds what is missing and is quick when
# nothing is. TORCH=2.11 picks another torch release (2.11 to 2.15), TENSORFLOW=2.16 another one of TensorFlow.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Steps share build folders, and each of them uses all cores already.
.NOTPARALLEL:

DEFAULT_TORCH := 2.15
OTHER_TORCHES ?= 2.11 2.12 2.13 2.14
TORCH ?= $(DEFAULT_TORCH)
DEFAULT_TENSORFLOW := 2.21
OTHER_TENSORFLOWS ?= 2.16 2.18
TENSORFLOW ?= $(DEFAULT_TENSORFLOW)
VENV := .venv$(if $(filter-out $(DEFAULT_TORCH),$(TORCH)),-$(TORCH))
BUILD := build/torch-$(TORCH)
PYTHON := $(VENV)/bin/python
export TORCH TENSORFLOW
# pip leaves out compiling the modules of torch, TensorFlow and others (tools/setup.sh). Where this is set, each new
# interpreter would compile all that it imports, which takes as long as the import itself.
unexport PYTHONDONTWRITEBYTECODE

CTEST := ctest --output-on-failure --no-tests=error
PYTEST := $(PYTHON) -m pytest -q
# Several tests at a time: many wait for something, or start a program.
WORKERS := -n 3 --dist worksteal
# Which share of the costly tests and of random cases runs: always the same one, so that the verdict on a commit
# does not depend on the day. A workflow takes another one each day, and `make test-all` takes all of them.
TEST_TURN ?= 0
export TEST_TURN
FUZZ_SECONDS ?= 10
CXX_SOURCES = $$(git ls-files '*.h' '*.cc' '*.cu' '*.cuh')

.PHONY: help
help:  ## show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 22

.PHONY: setup
setup:  ## install what is missing, build, make `import smddp` work in the environment
	@tools/setup.sh

.PHONY: build
build:  ## compile the C++ core, its tests and the module
	@tools/setup.sh build

.PHONY: test
test:  ## all kinds of test in 25 to 30 minutes: C++, Python, C++ again under sanitizers, fuzzers
	@tools/stages.sh prepare test-optimized test-tensorflow-core+test-python sanitize-address,undefined fuzz sanitize-thread

.PHONY: prepare
prepare:  ## install, and build most of what `make test` runs
	@tools/setup.sh prepare-tests

.PHONY: test-all
test-all: export ALL_SEEDS := 1
test-all: export FUZZ_SECONDS := 120
test-all:  ## everything, for hours: every case and seed, torch's own tests, fuzzers for minutes, all releases of torch
	@tools/stages.sh build test-cpp test-python-all test-libfabric test-torch test-tensorflow test-frameworks \
	  sanitize-address,undefined fuzz fuzz-check sanitize-thread
	for release in $(OTHER_TENSORFLOWS); do TENSORFLOW=$$release tools/stages.sh test-tensorflow || exit 1; done
	for release in $(OTHER_TORCHES); do TORCH=$$release tools/stages.sh test-python || exit 1; done

.PHONY: test-fast
test-fast: build setup  ## the tests that take less than three minutes together
	$(CTEST) -j2 --test-dir $(BUILD) --label-exclude 'slow|exhaustive'
	$(PYTEST) $(WORKERS) -m "not slow and not exhaustive"

# Tests that do as much under sanitizers run there only.
.PHONY: test-optimized
test-optimized:  ## the C++ tests that do more without sanitizers than with them
	@tools/setup.sh build optimized_tests
	$(CTEST) -j2 --test-dir $(BUILD) --label-regex optimized --label-exclude exhaustive

.PHONY: test-cpp
test-cpp: build  ## the C++ tests
	$(CTEST) -j2 --test-dir $(BUILD) $(if $(ALL_SEEDS),,--label-exclude exhaustive)

.PHONY: test-python
test-python:  ## the Python tests
	@tools/setup.sh python-tests
	$(PYTEST) $(WORKERS) -m "not exhaustive"

.PHONY: test-python-all
test-python-all: mpi  ## the Python tests with all their cases
	@tools/setup.sh python-tests
	TEST_PROVIDER=sockets $(PYTEST) $(WORKERS) --durations=30

.PHONY: mpi
mpi: setup  ## Open MPI and MPICH in .venv-mpi, without which tests that start mpirun are skipped
	@tools/setup.sh mpi

.PHONY: test-libfabric
test-libfabric:  ## the Python tests of several ranks, with libfabric's tcp between nodes
	@tools/setup.sh python-tests
	TEST_PROVIDER=tcp $(PYTEST) $(WORKERS) -m "multiprocess and not exhaustive"

.PHONY: test-torch
test-torch: setup  ## torch's own tests of a backend, in every configuration (docs/torch-suite.md)
	for each in cpu-2 cpu-3 cpu-4 mapped-2 mapped-3 mapped-4; do \
	  PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(PYTHON) -m torch_suite $$each || exit 1; \
	done

TENSORFLOW_PYTHON := build/tensorflow$(if $(filter-out $(DEFAULT_TENSORFLOW),$(TENSORFLOW)),-$(TENSORFLOW))/bin/python
TENSORFLOW_PYTEST := PYTHONPATH=$(CURDIR) $(TENSORFLOW_PYTHON) -m pytest -q -c /dev/null --rootdir tests/tf \
  -p no:cacheprovider tests/tf

.PHONY: test-tensorflow
test-tensorflow: setup  ## TensorFlow and Keras over smddp (installs them in build/tensorflow)
	@tools/setup.sh tensorflow
	$(TENSORFLOW_PYTEST) $(if $(ALL_SEEDS),,-m "not exhaustive")

.PHONY: test-tensorflow-core
test-tensorflow-core: setup  ## the part of it that `make test` runs
	@tools/setup.sh tensorflow
	$(TENSORFLOW_PYTEST) -m "not slow and not exhaustive"

.PHONY: test-frameworks
test-frameworks: setup  ## Lightning, Accelerate, transformers, Ray, DeepSpeed over smddp (installs them in build/frameworks)
	@tools/setup.sh frameworks
	@tools/setup.sh transformers-4.27
	@ls dist/smddp-*.whl >/dev/null 2>&1 || echo "test_pages.py will be skipped: it needs the wheel of make wheels"
	build/frameworks/bin/python -m pytest -q -s tests/frameworks
	PYTHONPATH=$(CURDIR)/build/transformers-4.27 build/frameworks/bin/python -m pytest -q -s tests/frameworks/test_hugging_face.py

.PHONY: sanitize
sanitize: sanitize-address,undefined sanitize-thread  ## the C++ tests under ASan with UBSan, and under TSan

# setarch -R: sanitizers cannot lay out their shadow memory where the kernel randomises addresses with more than
# 28 bits. Tests with one thread have nothing for ThreadSanitizer to find. -j3: the longest tests wait.
sanitize-%:
	@tools/setup.sh sanitized $* $(if $(filter thread,$*),threaded_tests,all)
	setarch -R $(CTEST) -j3 --test-dir build/$* \
	  --label-exclude '$(if $(filter thread,$*),sequential|)$(if $(ALL_SEEDS),none,exhaustive)'

.PHONY: fuzz
fuzz:  ## each parser of bytes from peers or the store under libFuzzer, FUZZ_SECONDS=10 each
	@tools/setup.sh sanitized address,undefined fuzzers
	setarch -R tests/fuzz/run.sh build/address,undefined $(FUZZ_SECONDS)

.PHONY: fuzz-check
fuzz-check:  ## do the fuzzers reach the parsers, and find the bugs that are planted for them?
	setarch -R python3 tests/fuzz/check.py

.PHONY: demo
demo: setup  ## train a real model over smddp and over gloo, and measure both by turns
	@$(PYTHON) examples/demo.py

.PHONY: bench
bench: setup  ## allreduce from 8 B to 64 MiB, beside gloo
	$(PYTHON) -m smddp.bench

.PHONY: docs
docs: setup  ## the documentation as a site, in build/site
	$(PYTHON) -m sphinx -q --fail-on-warning --keep-going -c docs/site -d build/site-pages . build/site
	@echo "open build/site/index.html"

.PHONY: lint
lint:  ## check format, style and types
	@tools/setup.sh lint
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	clang-format --dry-run -Werror $(CXX_SOURCES)

.PHONY: tidy
tidy:  ## run clang-tidy over the core (minutes)
	@tools/setup.sh lint
	@# Without the precompiled headers of g++, which clang cannot read.
	cmake -S . -B build/tidy -G Ninja -DSMDDP_BUILD_TESTS=OFF
	@# absent.cc is for builds without libfabric.
	git ls-files 'csrc/*.cc' ':!csrc/process_group' ':!csrc/bindings' ':!csrc/transport/fabric/absent.cc' | \
	  xargs -P $$(nproc) -n 8 clang-tidy --quiet -p build/tidy

.PHONY: format
format:  ## rewrite the sources in the project's format
	@tools/setup.sh lint
	$(PYTHON) -m ruff check --fix --select I .
	$(PYTHON) -m ruff format .
	clang-format -i $(CXX_SOURCES)

.PHONY: wheels
wheels:  ## build dist/smddp-*.whl for torch 2.11 to 2.15, and the source distribution (minutes, downloads 3 GB)
	@tools/wheels.sh

.PHONY: test-wheels
test-wheels: wheels  ## is the wheel enough, on new environments with three releases of torch, and TensorFlow? (downloads some GB)
	tests/wheels/run.sh torch==2.11 torch==2.13 torch==2.15 tensorflow-cpu==2.21

.PHONY: clean
clean:  ## remove what was built; environments stay
	rm -rf build dist *.egg-info smddp/lib
