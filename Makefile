# make demo | test | lint | bench | clean. Each makes .venv and installs what it needs, once.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)
INSTALL := $(PIP) install -q -C cmake.define.FQVIT_WARNINGS_ARE_ERRORS=ON

.PHONY: demo test lint bench oracles clean

demo: .venv/.run
	$(BIN)/python scripts/demo.py

# One thread: the arrays of tests are small, and threads that wait for each other cost more than they bring.
test: lint oracles
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.run
	$(BIN)/python benchmarks/calibration.py
	$(BIN)/python benchmarks/speed.py --quick

# timm is compared with in tests, which skip without it: an install that fails is no failure, and is tried again next time.
# No dependencies: torchvision would ask for its own torch.
oracles: .venv/.oracles
.venv/.oracles: .venv/.dev
	-$(PIP) install -q --no-deps timm torchvision && $(PIP) install -q huggingface_hub pyyaml && touch $@

# The larger install serves the smaller one too, so that a fresh `make test` compiles once.
.venv/.dev: .venv/.torch $(SOURCES)
	$(INSTALL) -e '.[quantize,dev]'
	@touch .venv/.run $@

.venv/.run: .venv/.torch $(SOURCES)
	$(INSTALL) -e '.[quantize]'
	@touch $@

# First and alone, so that what follows finds a torch and takes no other. One that is there already stays.
.venv/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) show -q torch 2>/dev/null || $(PIP) install -q -c constraints.txt torch || $(PIP) install -q torch
	@touch $@

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
