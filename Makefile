# make help | tune [SHAPE=MxNxK] | test [SLOW=1] | test-kernels | test-gpu | test-engines | check | format | docs | kernels | wheel | clean
PYTHON ?= python3
VENV ?= .venv
# A product where the project's kernels win, and which is recorded for a machine without a GPU.
SHAPE ?= 8448x9216x256
DTYPE ?= bf16
LAYOUT ?= tn

# Where it is set each process compiles what it imports: a compiler's imports take three times as long.
unexport PYTHONDONTWRITEBYTECODE

comma := ,
# torch's own wheels for GPUs are CUDA 13; without a GPU the DSL's CUDA 13 libraries are not needed.
CUDA := $(if $(shell command -v nvidia-smi 2>/dev/null),$(comma)cu13)
# What tuning needs, and what tests and checks need beside it.
TUNE_EXTRAS ?= tune$(CUDA)
EXTRAS ?= test,dev$(CUDA)

RUN := $(VENV)/bin/python
# Without bytecode, which is made of what is imported: that of all packages takes half as long as installing them.
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# pip first: the one that Python 3.11 brings takes twice the processor's time for the rest.
INSTALL := $(PIP) pip && $(PIP)
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11) and f"Python {sys.version}: too old")
# venv leaves a half of it where it fails.
NEW_ENVIRONMENT = $(PYTHON) -c '$(IS_NEW_ENOUGH)' && $(PYTHON) -m venv $(VENV) || { rm -f $(RUN); false; }
LOG := $(VENV)/setup.log
TUNING := $(VENV)/.tuning
READY := $(VENV)/.ready

# $(call step,what,command,remedy,GB): one line with its seconds; what fails says so, why, and how to go on. A full disk
# keeps no log, and programs may not say that it is full: so what is free is said.
FREE = $$(df -Pm $(1) | awk 'END { printf "%.1f", $$4 / 1024 }') GB
step = @printf '%s ... ' "$(1)"; start=$$(date +%s); mkdir -p $(VENV); \
	if said=$$({ $(2); } 2>&1); then echo "$$(( $$(date +%s) - start )) s"; else echo failed; \
	{ printf '%s\n' "$$said" >>$(LOG); } 2>/dev/null; printf '%s\n' "$$said" | tail -n 12; \
	echo "make: this step failed: $(1). $(3), and that there is room: $(4) GB here ($(call FREE,.) are free) and 4 GB for pip" \
	"in $${TMPDIR:-/tmp} ($(call FREE,$${TMPDIR:-/tmp})); then the same make goes on from here (all output: $(LOG))"; exit 1; fi

.PHONY: help ready tune test test-kernels test-gpu test-engines check format docs kernels wheel clean

tune: $(TUNING)
	@echo "Tuning $(SHAPE) $(DTYPE) $(LAYOUT), with the kernels that this asks for; make kernels compiles all that ship."
	@$(RUN) -m tunegemm tune --shape $(SHAPE) --dtype $(DTYPE) --layout $(LAYOUT)

help:
	@echo "make tune [SHAPE=MxNxK]  set up .venv, tune a product (no GPU: a replay)"
	@echo "make test [SLOW=1]       the tests; SLOW=1: all of them"
	@echo "make test-kernels        compile every kernel of the tests; SLOW=1 takes a half"
	@echo "make test-gpu            the tests that need a GPU"
	@echo "make test-engines        the tests beside vLLM and SGLang, which are downloaded"
	@echo "make check, make format  ruff and mypy; ruff rewrites the sources"
	@echo "make docs                generated tables, and the site in build/site"
	@echo "make kernels             compile the kernels that ship, without a GPU"
	@echo "make wheel               build the wheel with them, in dist/"
	@echo "make clean               delete what was built"

# On a GPU the tests take turns: they want it to themselves. Elsewhere two cores are enough.
PYTEST ?= -q $(if $(shell command -v nvidia-smi 2>/dev/null),,-n 2 --dist worksteal)

# SLOW=1 adds the tests marked slow: compile matrices, the browser, stress, some programs in processes of their own.
SLOW ?=
test: $(READY)
	$(RUN) -m pytest $(PYTEST) $(if $(SLOW),,-m "not slow")

# Whole, the matrices of kernels that must compile clean, and of those that must not: what CI takes a spread of.
test-kernels: $(READY)
	TUNEGEMM_TEST_KERNELS=all $(RUN) -m pytest $(PYTEST) tests/generate/test_conformance.py \
	  tests/generate/test_every_architecture.py tests/describe/test_epilogue.py

# Those of a GPU alone, within GPU_LIMIT_S: first what measures, one at a time, then what only computes, in so many
# processes. What became of them is in build/test-gpu/summary.json and summary.txt, which are written as it goes.
# PYTEST_PYTHON: a Python that has all it takes, in place of .venv, as on a host without network. CASES: a folder of
# programs to run, too, that print PASS or FAIL last.
GPU_WORKERS ?= 9
GPU_LIMIT_S ?= 590
PYTEST_PYTHON ?=
CASES ?=
test-gpu: $(if $(PYTEST_PYTHON),,$(READY))
	$(or $(PYTEST_PYTHON),$(RUN)) -m tests.run_gpu --workers $(GPU_WORKERS) --limit $(GPU_LIMIT_S)$(if $(CASES), --cases $(CASES))

# Beside the real vLLM and SGLang, from the package index into build/engines (some GB), and what pip would install
# beside them.
test-engines: $(READY)
	$(RUN) -m pytest -q -m engines

check: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m mypy

format: $(READY)
	$(RUN) -m ruff format tunegemm tests benchmarks fit db docs  # not the code in README: its comments are aligned
	$(RUN) -m ruff check --fix .

# The generated blocks and figures, then the site in build/site.
docs: $(READY)
	$(RUN) docs/generate.py
	$(RUN) -m sphinx -q -W --keep-going -b html docs build/site

# The kernels of the shipped records and of the lists (db/selector.toml, invariant, grouped, joined, blocks, block_groups),
# compiled without a GPU: a second each, when their sources or the lists changed. They go into the wheel, and serve from the checkout; without them a checkout
# compiles what a call lacks in the background.
kernels: db/kernels/manifest.json
db/kernels/manifest.json: $(TUNING) fit/shipping.py db/selector.toml db/invariant.toml db/grouped.toml db/joined.toml db/blocks.toml db/block_groups.toml $(wildcard db/records/*.json tunegemm/compile/*.py tunegemm/generate/*.py tunegemm/generate/*/*.py tunegemm/generate/*/*/*.py tunegemm/model/*.py)
	$(RUN) -m fit.shipping db/kernels

wheel: $(READY) kernels
	$(RUN) -m hatchling build -t wheel

ready: $(READY)

# Set-up, done again when what is to be installed changes.
$(RUN):
	$(call step,Making $(VENV),$(NEW_ENVIRONMENT),See that Python is 3.11 or later and has venv (Debian: python3-venv)$(comma) or name one by PYTHON=,8)

$(TUNING): pyproject.toml constraints.txt | $(RUN)
	$(call step,Installing what tuning needs: a minute or two,$(INSTALL) -e '.[$(TUNE_EXTRAS)]',See that the package index can be reached,8)
	@touch $@

$(READY): pyproject.toml constraints.txt | $(RUN)
	$(call step,Installing what tuning and tests need: some minutes,$(INSTALL) -e '.[$(EXTRAS)]',See that the package index can be reached,10)
	@touch $@ $(TUNING)

clean:
	rm -rf build dist db/kernels .pytest_cache .ruff_cache .mypy_cache
