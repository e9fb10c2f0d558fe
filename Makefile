# make demo | test | lint | bench | detector | sanitize | fuzz-engine | faults | soak | mutants | pythons | api | clean.
# Each makes .venv and installs what it needs, once.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)
INSTALL := $(PIP) install -q -C cmake.define.FQVIT_WARNINGS_ARE_ERRORS=ON

.PHONY: demo test lint bench detector sanitize fuzz-engine faults soak mutants pythons api oracles clean

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

# The small detectors of training/README.md, over an hour each; stopped and started again, it goes on.
detector: build/detect/mask_rcnn.safetensors build/detect/cascade.safetensors

build/detect/%.safetensors: .venv/.run build/detect/shapes/instances_val.json
	$(PIP) show -q pycocotools 2>/dev/null || $(PIP) install -q 'pycocotools>=2.0.7'
	$(BIN)/python training/train_detector.py $* --data build/detect/shapes -o $@

build/detect/shapes/instances_val.json: .venv/.run training/make_shapes.py
	$(BIN)/python training/make_shapes.py -o build/detect/shapes

# Small mistakes in ir/ and quant/, one at a time: which would no test notice (docs/mutants.md)? Hours; stopped, it goes on.
MUTANTS := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python scripts/mutants.py
mutants: .venv/.dev
	test -f build/mutants/lines.json || $(MUTANTS) record
	$(MUTANTS) run --jobs 2
	$(MUTANTS) run --jobs 2 --again --seconds 60

# The engine without Python under three sanitizers, on programs that Python wrote: several engines and callers at once.
CORE := $(filter-out native/bind.cpp,$(wildcard native/*.cpp))
HEADERS := $(wildcard native/*.h native/fuzz/*.h)
SANITIZE_CXX ?= $(shell command -v clang++ || echo g++)
CHECKED := $(SANITIZE_CXX) -std=c++20 -O2 -g -fno-sanitize-recover=all -pthread

ALIGN_CHECKED := build/sanitize/roialign-address,undefined build/sanitize/roialign-thread
sanitize: build/sanitize/address build/sanitize/thread build/sanitize/programs $(ALIGN_CHECKED)
	build/sanitize/address native/fuzz/seeds build/sanitize/programs
	build/sanitize/thread native/fuzz/seeds build/sanitize/programs
	for program in $(ALIGN_CHECKED); do $$program || exit 1; done

build/sanitize/roialign-%: native/test/roialign_test.cpp $(CORE) $(HEADERS)
	@mkdir -p $(@D)
	$(CHECKED) -fsanitize=$* native/test/roialign_test.cpp $(CORE) -o $@

build/sanitize/address: native/test/programs_test.cpp $(CORE) $(HEADERS)
	@mkdir -p $(@D)
	$(CHECKED) -fsanitize=address,undefined native/test/programs_test.cpp $(CORE) -o $@

build/sanitize/thread: native/test/programs_test.cpp $(CORE) $(HEADERS)
	@mkdir -p $(@D)
	$(CHECKED) -fsanitize=thread native/test/programs_test.cpp $(CORE) -o $@

build/sanitize/programs: .venv/.dev native/fuzz/make_seeds.py $(wildcard tests/runtime/*.py tests/hostile/*.py)
	rm -rf $@
	$(BIN)/python native/fuzz/make_seeds.py --networks $@

# libFuzzer, hence clang (Debian: clang libclang-rt-14-dev). What it finds is kept in build/fuzz and the run fails.
FUZZ_SECONDS ?= 60
fuzz-engine: build/fuzz/engine
	@mkdir -p build/fuzz/corpus
	build/fuzz/engine -max_total_time=$(FUZZ_SECONDS) -timeout=20 -rss_limit_mb=2048 -max_len=4096 -print_final_stats=1 \
	  -artifact_prefix=build/fuzz/ build/fuzz/corpus native/fuzz/seeds

build/fuzz/engine: native/fuzz/engine_fuzz.cpp $(CORE) $(HEADERS)
	@mkdir -p $(@D)
	clang++ -std=c++20 -O1 -g -fno-sanitize-recover=all -pthread -fsanitize=fuzzer,address,undefined $(filter %.cpp,$^) -o $@

# A wheel from this source for every Python that is there (else: make pythons PYTHONS=...), and the golden files' bits with each.
PYTHONS ?= python3.11 python3.12 python3.13
pythons:
	for python in $(PYTHONS); do \
	  rm -rf build/pythons/$$python && $$python -m venv build/pythons/$$python || exit 1; \
	  build/pythons/$$python/bin/pip -q --disable-pip-version-check install . || exit 1; \
	  (cd build/pythons && $$python/bin/python ../../scripts/check_wheel.py) || exit 1; \
	done

# Pages of every public name, from its docstring: build/api/index.html.
PUBLIC := fqvit fqvit.detect.images fqvit.detect.integer fqvit.export.onnx fqvit.export.qdq fqvit.export.c fqvit.export.vectors
api: .venv/.dev
	$(PIP) show -q pdoc 2>/dev/null || $(PIP) install -q pdoc
	$(BIN)/python -m pdoc --docformat markdown -o build/api $(PUBLIC)

# Commands killed, asked to stop, or losing a worker, at random moments (docs/hardening.md): an hour or less.
FAULTS ?= 100
faults: .venv/.dev
	$(BIN)/python scripts/faults.py kill --times $(FAULTS)
	$(BIN)/python scripts/faults.py stop --times 6
	$(BIN)/python scripts/faults.py lose --times 6

# Engines and detectors under 8 threads in each of 2 processes: the reference's bits, and no growth of memory.
SOAK_SECONDS ?= 600
soak: .venv/.dev
	$(BIN)/python scripts/soak.py --seconds $(SOAK_SECONDS)

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
