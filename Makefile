# make demo | test | lint | bench | detector | clean; to break it: sanitize | fuzz | fuzz-files | faults | soak | mutants;
# pythons | docs. Each makes .venv and installs what it needs, once.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := pyproject.toml constraints.txt CMakeLists.txt native/CMakeLists.txt \
  $(wildcard native/core/* native/include/*/* native/kernels/*.h native/kernels/*/* native/ops/* native/python/*)
INSTALL := $(PIP) install -q -C cmake.define.FQVIT_WARNINGS_ARE_ERRORS=ON

.PHONY: demo test lint bench detector sanitize fuzz fuzz-engine fuzz-readers fuzz-files faults soak mutants pythons docs oracles clean

demo: .venv/.run
	$(BIN)/python scripts/demo.py

# One thread: the arrays of tests are small, and threads that wait for each other cost more than they bring.
test: lint oracles
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files '*.cpp' '*.c' '*.h' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/mypy
	$(BIN)/lint-imports

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

# Small mistakes in ir/ and quant/, one at a time: which would no test notice (docs/measurements/mutants.md)? Hours; stopped, it goes on.
MUTANTS := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python scripts/mutants.py
mutants: .venv/.dev
	test -f build/mutants/lines.json || $(MUTANTS) record
	$(MUTANTS) run --jobs 2
	$(MUTANTS) run --jobs 2 --again --seconds 60

# The engine without Python under three sanitizers, on programs that Python wrote: several engines and callers at once.
CORE := $(wildcard native/core/*.cpp native/ops/*.cpp native/kernels/*/*.cpp)
HEADERS := $(wildcard native/core/*.h native/include/*/*.h native/kernels/*.h native/kernels/*/*.h native/ops/*.h native/fuzz/*.h)
INCLUDES := -Inative -Inative/include
SANITIZE_CXX ?= $(shell command -v clang++ || echo g++)
CHECKED := $(SANITIZE_CXX) -std=c++20 $(INCLUDES) -O2 -g -fno-sanitize-recover=all -pthread

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

build/sanitize/programs: .venv/.dev native/fuzz/make_seeds.py $(wildcard tests/runtime/*.py tests/robustness/hostile/*.py)
	rm -rf $@
	$(BIN)/python native/fuzz/make_seeds.py --networks $@

# The engine's boundary, then every reader of foreign files (docs/explanation/hardening.md), each for so many seconds. What is found is kept in
# build/fuzz and the run fails.
FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= program detector safetensors torch npz image coco results recipe settings classes shard
fuzz: fuzz-engine fuzz-readers

# Atheris has wheels for some platforms only. Without it the rest of `fuzz` runs.
fuzz-readers: .venv/.fuzz
	@if ! $(BIN)/python -c 'import atheris' 2>/dev/null; then \
	  echo 'fuzz-readers: atheris has no wheel for this platform and Python; the readers were NOT fuzzed.'; exit 0; fi; \
	for target in $(FUZZ_TARGETS); do echo "== $$target"; \
	  OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/robustness/fuzz/fuzz.py $$target -max_total_time=$(FUZZ_SECONDS) || exit 1; done

.venv/.fuzz: .venv/.dev
	-$(PIP) install -q 'atheris>=3' && touch $@

# Mutated .fqvit files through the extension built with ASan and UBSan, loaded in the place of the installed one.
COUNT ?= 1000000
SEED ?= 1
WORKERS ?= 1
ASAN_CXX ?= g++
ASAN_FLAGS := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g
fuzz-files: build/sanitize/site
	LD_PRELOAD="$$($(ASAN_CXX) -print-file-name=libasan.so) $$($(ASAN_CXX) -print-file-name=libstdc++.so)" OMP_NUM_THREADS=1 \
	ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:max_allocation_size_mb=1024:quarantine_size_mb=32 UBSAN_OPTIONS=print_stacktrace=1 \
	nice -n 10 $(BIN)/python tests/robustness/fuzz/campaign.py --count $(COUNT) --seed $(SEED) --workers $(WORKERS) --native $</fqvit/_native*.so

build/sanitize/site: .venv/.dev $(SOURCES)
	rm -rf $@
	CXX=$(ASAN_CXX) $(PIP) install -q --no-deps --target $@ -C build-dir=build/sanitize/cmake \
	  -C 'cmake.define.CMAKE_CXX_FLAGS=$(ASAN_FLAGS)' .
	@touch $@

# libFuzzer, hence clang (Debian: clang libclang-rt-14-dev).
fuzz-engine: build/fuzz/engine
	@mkdir -p build/fuzz/corpus
	build/fuzz/engine -max_total_time=$(FUZZ_SECONDS) -timeout=20 -rss_limit_mb=2048 -max_len=4096 -print_final_stats=1 \
	  -artifact_prefix=build/fuzz/ build/fuzz/corpus native/fuzz/seeds

build/fuzz/engine: native/fuzz/engine_fuzz.cpp $(CORE) $(HEADERS)
	@mkdir -p $(@D)
	clang++ -std=c++20 $(INCLUDES) -O1 -g -fno-sanitize-recover=all -pthread -fsanitize=fuzzer,address,undefined $(filter %.cpp,$^) -o $@

# A wheel from this source for every Python that is there (else: make pythons PYTHONS=...), and the golden files' bits with each.
PYTHONS ?= python3.11 python3.12 python3.13
pythons:
	for python in $(PYTHONS); do \
	  rm -rf build/pythons/$$python && $$python -m venv build/pythons/$$python || exit 1; \
	  build/pythons/$$python/bin/pip -q --disable-pip-version-check install . || exit 1; \
	  (cd build/pythons && $$python/bin/python ../../scripts/check_wheel.py) || exit 1; \
	done

# Rewrite the generated pages and build the documentation site, build/site/index.html. Broken links fail.
docs: .venv/.dev
	$(BIN)/python scripts/generate_docs.py
	$(BIN)/python -m mkdocs build -q

# Commands killed, asked to stop, or losing a worker, at random moments (docs/explanation/hardening.md): an hour or less.
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
	$(INSTALL) -e '.[quantize,dev,docs]'
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
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis
