# make tune [SHAPE=MxNxK] | test [SLOW=1] | check | format | docs | kernels | wheel | clean
PYTHON ?= python3
VENV ?= .venv
SHAPE ?= 4096x4096x4096
DTYPE ?= bf16
LAYOUT ?= tn

comma := ,
# torch's own wheels for GPUs are CUDA 13; without a GPU the DSL's CUDA 13 libraries are not needed.
EXTRAS ?= test,dev$(if $(shell command -v nvidia-smi 2>/dev/null),$(comma)cu13)

RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: tune test check format docs kernels wheel clean

tune: $(READY) kernels
	$(RUN) -m tunegemm tune --shape $(SHAPE) --dtype $(DTYPE) --layout $(LAYOUT)

# On a GPU the tests take turns: they want it to themselves. Elsewhere a file of them per process.
PYTEST ?= -q $(if $(shell command -v nvidia-smi 2>/dev/null),,-n 2 --dist worksteal)

# SLOW=1 adds the tests marked slow: compile matrices, the browser, stress.
SLOW ?=
test: $(READY)
	$(RUN) -m pytest $(PYTEST) $(if $(SLOW),,-m "not slow")

check: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m mypy

format: $(READY)
	$(RUN) -m ruff format tunegemm tests benchmarks db docs  # not the code in README: its comments are aligned
	$(RUN) -m ruff check --fix .

# The generated blocks and figures, then the site in build/site.
docs: $(READY)
	$(RUN) docs/generate.py
	$(RUN) -m sphinx -q -W --keep-going -b html docs build/site

# The kernels of the shipped records and of the lists db/selector.toml and db/invariant.toml, compiled without a GPU: a second each, when their
# sources or the lists changed. They go into the wheel, and serve from the checkout.
kernels: db/kernels/manifest.json
db/kernels/manifest.json: $(READY) db/selector.toml db/invariant.toml $(wildcard db/records/*.json tunegemm/generate/*.py tunegemm/generate/*/*.py tunegemm/generate/*/*/*.py)
	$(RUN) -m tunegemm.store.packing db/kernels

wheel: $(READY) kernels
	$(RUN) -m hatchling build -t wheel

# Set-up, done again when what is to be installed changes.
$(READY): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf build dist db/kernels .pytest_cache .ruff_cache .mypy_cache
