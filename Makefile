# `make bench` and `make test` do all their own set-up on a machine that has only Python and make.
#
#   make bench                        the main job: attention on this machine's device, beside PyTorch's own
#   make bench ARGS="--suite fa"      the same with arguments of `tileattn bench`
#   make check                        what a commit needs, in under a minute: lint, types, tests of the tree's structure
#   make test                         lint, types and tests
#   make test ARGS=tests/api          a part of the tests: a folder, a file, or any arguments of pytest
#   make test-all                     the tests marked slow as well
#   make test-torches                 the tests on each torch of TORCHES, in virtual environments of their own
#   make mutants                      named wrong edits, each of which some test must see (by hand, some 20 minutes)
#   make fuzz                         random calls beside an independent oracle, ten minutes (ARGS: CONTRIBUTING.md)
#   make docs                         the site, in site/ (pages, tutorial, API)
#   make pages                        the package's code that the pages in docs/ show, and predictions, written again
#   make pictures                     the pictures of README and docs/, drawn again from benchmarks/results
#   make lint | format | clean
#
# Settings, each as NAME=value behind the target:
#   PYTHON        which Python makes .venv (an existing .venv is kept unless this names another version)
#   ARGS          passed on to `tileattn bench`, to pytest or to the fuzzer
#   EXTRAS        extras installed besides; `cuda`, nvcc from pip, is chosen for a GPU without a CUDA toolkit
#   TORCH         another torch than that of constraints.txt, in .venv-torch-<version>: make test TORCH=2.11.0
#   TORCHES       those of `make test-torches`: the oldest that pyproject.toml allows, and the newest that was tested
#   TORCH_INDEX   a PyTorch package index to ask besides PyPI, such as https://download.pytorch.org/whl/rocm7.1

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: help bench check test test-all test-torch test-torches mutants fuzz docs pages pictures lint format clean

PINNED_TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
OTHER_TORCH := $(filter-out $(PINNED_TORCH),$(TORCH))
TORCHES ?= 2.11.0 2.14.1
VENV := .venv$(addprefix -torch-,$(OTHER_TORCH))
CONSTRAINTS := $(if $(OTHER_TORCH),$(VENV)/)constraints.txt
RUN := $(VENV)/bin/python -m
PYTHON ?= $(if $(wildcard $(VENV)/.python-*),$(VENV)/bin/python,python3)
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)

NVIDIA := $(shell command -v nvidia-smi 2>/dev/null)
NVCC := $(shell command -v nvcc 2>/dev/null || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
EXTRAS ?= $(if $(NVIDIA),$(if $(NVCC),,cuda))

# PyPI's torch for Linux brings gigabytes of CUDA. A Linux machine without a GPU asks PyTorch's own index for the CPU
# build. Where that index cannot be reached, pip says so and PyPI's torch works as well.
LINUX_WITHOUT_GPU := $(if $(NVIDIA)$(wildcard /dev/kfd),,$(filter Linux,$(shell uname -s)))
TORCH_INDEX ?= $(if $(LINUX_WITHOUT_GPU),https://download.pytorch.org/whl/cpu)

comma := ,
AND_EXTRAS := $(if $(EXTRAS),$(comma)$(EXTRAS))

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

bench: $(VENV)/.installed-compile,plot$(AND_EXTRAS)
	$(VENV)/bin/tileattn bench $(ARGS)

# One worker per core, so one thread per worker. The time limit ends a kernel that hangs.
PYTEST = OMP_NUM_THREADS=1 $(RUN) pytest -n logical --maxprocesses 8 --dist worksteal --timeout 600

# What another file's name or import can break: tests of layout, imports, packaging, documents and mutants. Not what a
# user's mypy says, which takes as long as all of them.
STRUCTURE = tests/package tests/docs tests/mutants --ignore tests/package/test_typing.py

check: lint
	$(PYTEST) -m "not slow" $(STRUCTURE) $(ARGS)

test: lint
	$(PYTEST) -m "not slow" $(ARGS)

test-all: lint
	$(PYTEST) $(ARGS)

# One torch, without lint. The last line of the log says how many tests passed.
test-torch: $(VENV)/.installed-test$(AND_EXTRAS)
	@$(RUN) pip list 2>/dev/null | grep -E '^(torch|triton|tilelang|transformers) '
	@{ $(PYTEST) -m "not slow" $(ARGS); echo $$? > $(VENV)/test.status; } 2>&1 | tee $(VENV)/test.log
	@exit $$(cat $(VENV)/test.status)

test-torches:
	@rm -f $(TORCHES:%=.venv-torch-%/test.log)
	@failed=0; for torch in $(TORCHES); do $(MAKE) --no-print-directory test-torch TORCH=$$torch || failed=1; done; \
	for torch in $(TORCHES); do log=.venv-torch-$$torch/test.log; \
	printf 'torch %-8s %s\n' $$torch "$$(if [ -f $$log ]; then tail -n 1 $$log; else echo 'was not tested'; fi)"; done; exit $$failed

mutants: $(VENV)/.installed-dev$(AND_EXTRAS)
	$(VENV)/bin/python tests/mutants/run.py $(ARGS)

fuzz: $(VENV)/.installed-dev$(AND_EXTRAS)
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(RUN) fuzz $(ARGS)

docs: $(VENV)/.installed-docs$(AND_EXTRAS)
	PATH="$(VENV)/bin:$$PATH" NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build $(ARGS)

# Writes included code and the table of what runs where into the pages, for those who read them in the repository.
pages: $(VENV)/.installed-docs$(AND_EXTRAS)
	$(VENV)/bin/python docs/hooks/fill.py
	$(VENV)/bin/python benchmarks/make_scale_page.py

pictures: $(VENV)/.installed-plot$(AND_EXTRAS)
	$(VENV)/bin/python benchmarks/make_pictures.py

lint: $(VENV)/.installed-dev$(AND_EXTRAS)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: $(VENV)/.installed-dev$(AND_EXTRAS)
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

clean:
	rm -rf .venv .venv-torch-* dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp names the extras, so that another choice of them installs again.
$(VENV)/.installed-%: $(VENV)/.python-$(PYTHON_VERSION) pyproject.toml $(CONSTRAINTS)
	$(if $(TORCH_INDEX),$(RUN) pip install --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) -c $(CONSTRAINTS) torch)
	$(RUN) pip install --disable-pip-version-check -c $(CONSTRAINTS) -e ".[$*]"
	@touch $@

# Torch's builds for GPUs ask for the Triton that they were made for: an older torch for one up to the pinned Triton, a
# newer torch for that or a newer one. The interpreter of Triton 3.6 fails with NumPy 2.4: "only 0-dimensional arrays can
# be converted to Python scalars".
ifneq ($(OTHER_TORCH),)
$(CONSTRAINTS): constraints.txt $(VENV)/.python-$(PYTHON_VERSION)
	case $$(printf '%s\n' $(PINNED_TORCH) $(OTHER_TORCH) | sort -V | head -n 1) in \
	$(OTHER_TORCH)) fit='s/^triton==/triton<=/; s/^numpy==2\.4[.0-9]*/numpy<2.4/';; *) fit='s/^triton==/triton>=/';; esac; \
	sed "s/^torch==.*/torch==$(OTHER_TORCH)/; $$fit" constraints.txt > $@
endif

# Written last: a venv that could not be finished is made again.
$(VENV)/.python-$(PYTHON_VERSION):
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not here. Name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 14) else "tileattn needs Python 3.10 to 3.14, and $(PYTHON) is %d.%d. Name another: make $(MAKECMDGOALS) PYTHON=python3.12" % v)'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@
