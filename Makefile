# Targets for everybody:   demo, test, check, docs, clean
# For developers:          lint, bench, detector, library, wasm, wasm-tests, web, wheels, wheels-windows, pythons, oldest
# Robustness:              nightly = nightly-tests, sanitize, fuzz, fuzz-files, faults, soak, mutants, oldest
# Most targets create .venv and install what they need there, once. wheels, pythons and oldest have environments of their own in build/;
# library needs CMake and a C++ compiler.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := pyproject.toml constraints.txt CMakeLists.txt native/CMakeLists.txt \
  $(wildcard native/capi/* native/cmake/* native/core/* native/detect/* native/image/* native/include/* native/ir/* native/kernels/*.h \
  native/kernels/*/* native/ops/* native/python/* native/tools/*)
INSTALL := $(PIP) install -q -C cmake.define.FQVIT_WARNINGS_ARE_ERRORS=ON

# Test arrays are small: several threads per process would cost more than they save.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q
# One process per core. Idle workers take over tests from busy ones; tests of one file mostly share a worker and its fixtures.
PARALLEL := -n auto --dist worksteal

.PHONY: demo check test nightly nightly-tests lint docs bench detector sanitize fuzz fuzz-loader fuzz-readers fuzz-files fuzz-wasm faults soak \
  mutants pythons oldest oracles library wasm wasm-tests web wheels wheels-windows clean

demo: .venv/.run
	$(BIN)/python scripts/demo.py

# The inner loop: about a minute on 2 cores. Tests marked `slow` run in `make test` only.
CHECKED_TESTS := tests/ir tests/lowering tests/quant tests/golden tests/runtime/test_engine_ops.py tests/cli/test_smoke.py
check: lint
	$(PYTEST) $(PARALLEL) -m 'not slow and not nightly' $(CHECKED_TESTS)

# The full suite, which must pass before a change lands: about half an hour on 2 cores.
test: lint oracles
	$(PYTEST) $(PARALLEL)

# Everything that takes hours or needs tools that few machines have.
nightly: nightly-tests sanitize fuzz faults soak mutants oldest
	$(MAKE) fuzz-files COUNT=200000 WORKERS=2

# Tests with emulators and cross compilers. If a tool is missing, its tests are skipped, and the message names the tool or package.
nightly-tests: .venv/.dev
	$(PYTEST) $(PARALLEL) -m nightly

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files '*.cpp' '*.c' '*.h' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.run
	$(BIN)/python benchmarks/calibration.py
	$(BIN)/python benchmarks/speed.py --quick

# Train the small detectors of training/README.md: over an hour each. An interrupted run resumes.
detector: build/detect/mask_rcnn.safetensors build/detect/cascade.safetensors

build/detect/%.safetensors: .venv/.run build/detect/shapes/instances_val.json
	$(PIP) show -q pycocotools 2>/dev/null || $(PIP) install -q 'pycocotools>=2.0.7'
	$(BIN)/python training/train_detector.py $* --data build/detect/shapes -o $@

build/detect/shapes/instances_val.json: .venv/.run training/make_shapes.py
	$(BIN)/python training/make_shapes.py -o build/detect/shapes

# Mutation testing with cosmic-ray: one small change to MODULE at a time, each of which MUTANT_TESTS should detect. Works on a copy
# of the package. python -S: without .pth files, so that the copy is imported and not the editable installation.
MODULE ?= fqvit/ir/fixed.py
MUTANT_TESTS ?= tests/ir/test_fixed.py
MUTANT_PATH = build/mutants/site:$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mutants: .venv/.dev
	$(PIP) show -q cosmic-ray 2>/dev/null || $(PIP) install -q 'cosmic-ray>=8.3'
	rm -rf build/mutants && mkdir -p build/mutants
	$(PIP) install -q --no-deps --target build/mutants/site .
	printf '[cosmic-ray]\nmodule-path = ["build/mutants/site/%s"]\ntimeout = 120.0\nexcluded-modules = []\ntest-command = "%s"\n' \
	  $(MODULE) "env PYTHONPATH=$(MUTANT_PATH) OMP_NUM_THREADS=1 $(BIN)/python -S -m pytest -q -x -p no:cacheprovider $(MUTANT_TESTS)" \
	  > build/mutants/config.toml
	printf '[cosmic-ray.distributor]\nname = "local"\n' >> build/mutants/config.toml
	$(BIN)/cosmic-ray init build/mutants/config.toml build/mutants/session.sqlite
	$(BIN)/cosmic-ray baseline build/mutants/config.toml
	$(BIN)/cosmic-ray exec build/mutants/config.toml build/mutants/session.sqlite
	$(BIN)/cr-report --surviving-only --show-diff build/mutants/session.sqlite

# Run the C++ engine without Python under ASan, UBSan and TSan, on files written by Python, with several engines and threads at once.
CORE := $(wildcard native/core/*.cpp native/detect/*.cpp native/image/*.cpp native/ir/*.cpp native/ops/*.cpp native/kernels/*/*.cpp)
HEADERS := $(wildcard native/*/*.h native/kernels/*/*.h)
# The headers of nlohmann-json, which the development installation contains as a wheel.
JSON = $(shell $(BIN)/python -c 'from importlib.util import find_spec; print(find_spec("nlohmann_json").submodule_search_locations[0])')/include
INCLUDES = -Inative -isystem $(JSON)
SANITIZE_CXX ?= $(shell command -v clang++ || echo g++)
CHECKED = $(SANITIZE_CXX) -std=c++20 $(INCLUDES) -O2 -g -fno-sanitize-recover=all -pthread

TESTS_CHECKED := build/sanitize/roialign-address,undefined build/sanitize/roialign-thread build/sanitize/preprocess \
  build/sanitize/attention build/sanitize/thread-pool
sanitize: build/sanitize/address build/sanitize/thread build/sanitize/programs $(TESTS_CHECKED)
	build/sanitize/address native/fuzz/seeds build/sanitize/programs
	build/sanitize/thread native/fuzz/seeds build/sanitize/programs
	for program in $(TESTS_CHECKED); do $$program || exit 1; done

build/sanitize/roialign-%: native/test/roialign_test.cpp $(CORE) $(HEADERS) .venv/.dev
	@mkdir -p $(@D)
	$(CHECKED) -fsanitize=$* native/test/roialign_test.cpp $(CORE) -o $@

build/sanitize/thread-pool: native/test/thread_pool_test.cpp native/core/thread_pool.h
	@mkdir -p $(@D)
	$(CHECKED) -fsanitize=thread native/test/thread_pool_test.cpp -o $@

build/sanitize/preprocess: native/test/preprocess_test.cpp $(CORE) $(HEADERS) .venv/.dev
	@mkdir -p $(@D)
	$(CHECKED) -fsanitize=address,undefined native/test/preprocess_test.cpp $(CORE) -o $@

build/sanitize/attention: native/test/attention_test.cpp $(CORE) $(HEADERS) .venv/.dev
	@mkdir -p $(@D)
	for file in native/kernels/avx512/*.cpp; do \
	  $(CHECKED) -fsanitize=address,undefined -DFQVIT_AVX512_SHIM -c $$file -o $(@D)/shim_$$(basename $$file .cpp).o || exit 1; done
	$(CHECKED) -fsanitize=address,undefined native/test/attention_test.cpp $(@D)/shim_*.o $(CORE) -o $@

build/sanitize/address: native/test/programs_test.cpp $(CORE) $(HEADERS) .venv/.dev
	@mkdir -p $(@D)
	$(CHECKED) -fsanitize=address,undefined native/test/programs_test.cpp $(CORE) -o $@

build/sanitize/thread: native/test/programs_test.cpp $(CORE) $(HEADERS) .venv/.dev
	@mkdir -p $(@D)
	$(CHECKED) -fsanitize=thread native/test/programs_test.cpp $(CORE) -o $@

build/sanitize/programs: .venv/.dev native/fuzz/make_seeds.py $(wildcard tests/runtime/*.py tests/robustness/hostile/*.py)
	rm -rf $@
	$(BIN)/python native/fuzz/make_seeds.py --networks $@

# Fuzz the native loader and the engine, then the readers of untrusted files (docs/explanation/hardening.md), FUZZ_SECONDS each. A
# finding is kept in build/fuzz and fails the run.
FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= program detector safetensors embeddings torch npz image coco results recipe settings classes shard
fuzz: fuzz-loader fuzz-readers

# Atheris has wheels for some platforms only. Without it, only the native loader is fuzzed.
fuzz-readers: .venv/.fuzz
	@if ! $(BIN)/python -c 'import atheris' 2>/dev/null; then \
	  echo 'fuzz-readers: atheris has no wheel for this platform and Python; the readers were NOT fuzzed.'; exit 0; fi; \
	for target in $(FUZZ_TARGETS); do echo "== $$target"; \
	  OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/robustness/fuzz/fuzz.py $$target -max_total_time=$(FUZZ_SECONDS) || exit 1; done

.venv/.fuzz: .venv/.dev
	-$(PIP) install -q 'atheris>=3' && touch $@

# Load mutated .fqvit files with both loaders, using an extension built with ASan and UBSan instead of the installed one.
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

# Load mutated .fqvit files with the WebAssembly module in node and with the native library, which must agree.
fuzz-wasm: .venv/.dev wasm
	OMP_NUM_THREADS=1 nice -n 10 $(BIN)/python tests/wasm/campaign.py --count $(COUNT) --seed $(SEED)

# Needs libFuzzer, which comes with clang (Debian: clang libclang-rt-14-dev).
fuzz-loader: build/fuzz/loader
	@mkdir -p build/fuzz/corpus
	build/fuzz/loader -max_total_time=$(FUZZ_SECONDS) -timeout=20 -rss_limit_mb=2048 -max_len=16384 -print_final_stats=1 \
	  -artifact_prefix=build/fuzz/ build/fuzz/corpus native/fuzz/seeds
	@mkdir -p build/fuzz/detectors
	build/fuzz/loader -max_total_time=$(FUZZ_SECONDS) -timeout=20 -rss_limit_mb=2048 -max_len=200000 -print_final_stats=1 \
	  -artifact_prefix=build/fuzz/ build/fuzz/detectors tests/golden/detectors

build/fuzz/loader: native/fuzz/loader_fuzz.cpp $(CORE) $(HEADERS) .venv/.dev
	@mkdir -p $(@D)
	clang++ -std=c++20 $(INCLUDES) -O1 -g -fno-sanitize-recover=all -pthread -fsanitize=fuzzer,address,undefined $(filter %.cpp,$^) -o $@

# Install libfqvit, the engine with a C interface, into build/library (docs/how-to/use-from-c.md). JSON_INCLUDE: the include
# folder with nlohmann/json.hpp; by default the one of the Python package nlohmann-json, or else of the system.
JSON_INCLUDE ?= $(shell $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -c 'import importlib.util as u; s = u.find_spec("nlohmann_json"); print(s.submodule_search_locations[0] + "/include" if s else "")')
library:
	cmake -S native -B build/native $(if $(JSON_INCLUDE),-DFQVIT_JSON_INCLUDE=$(JSON_INCLUDE))
	cmake --build build/native --parallel
	cmake --install build/native --prefix build/library

# Build the WebAssembly modules of the engine, build/wasm/fqvit-*.wasm (docs/explanation/webassembly.md), with Zig from PyPI.
wasm: .venv/.wasm
	$(BIN)/python native/wasm/build.py -o build/wasm

# Also compile programs of native/test to WebAssembly, which tests/wasm runs in node.
wasm-tests: .venv/.wasm
	$(BIN)/python native/wasm/build.py -o build/wasm --tests

.venv/.wasm: native/wasm/requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install -q -r native/wasm/requirements.txt
	@touch $@

# Build the npm package, web/package/dist, and the page of `fqvit web`, src/fqvit/assets/web/index.html, with the modules of `make wasm`.
# Needs node 20 or later.
web: web/node_modules/.package-lock.json .venv/.run | build/wasm/fqvit-simd128.wasm
	$(BIN)/python scripts/web_assets.py -o build/web
	cd web && npm run --silent check && npm run --silent build

web/node_modules/.package-lock.json: web/package-lock.json
	cd web && npm ci --no-audit --no-fund

build/wasm/fqvit-simd128.wasm:
	$(MAKE) wasm

# Build wheels for Linux, macOS and Windows in dist/ on a Linux machine, with Zig from PyPI (docs/how-to/build-wheels.md). Needs Python 3.12
# or later. PLATFORMS: build only for these platforms, such as linux-aarch64.
PYTHON312 ?= python3.12
PLATFORMS ?=
wheels: build/wheels/.tools
	build/wheels/venv/bin/python scripts/build_wheels.py $(PLATFORMS) -o dist

# Test the wheel for Windows in a Python for Windows under Wine. Needs Python 3.12 and wine64.
wheels-windows: build/wheels/.tools
	build/wheels/venv/bin/python scripts/wine_python.py dist/fqvit-*-win_amd64.whl scripts/check_wheel.py

build/wheels/.tools: native/wasm/requirements.txt
	$(PYTHON312) -m venv build/wheels/venv
	build/wheels/venv/bin/pip install -q --disable-pip-version-check -r $< 'scikit-build-core>=0.10' 'nanobind>=2.4' wheel auditwheel abi3audit lief ninja
	@touch $@

# Build a wheel for each of PYTHONS and check the golden files with it.
PYTHONS ?= python3.11 python3.12 python3.13
pythons:
	for python in $(PYTHONS); do \
	  rm -rf build/pythons/$$python && $$python -m venv build/pythons/$$python || exit 1; \
	  build/pythons/$$python/bin/pip -q --disable-pip-version-check install . || exit 1; \
	  (cd build/pythons && $$python/bin/python ../../scripts/check_wheel.py) || exit 1; \
	done

# Capture models with the oldest torch that pyproject.toml allows, and its torchvision. The packages take several gigabytes.
OLDEST := torch==2.6.0 torchvision==0.21.0
oldest:
	rm -rf build/oldest && $(PYTHON) -m venv build/oldest
	build/oldest/bin/pip -q --disable-pip-version-check install $(OLDEST) . timm pytest hypothesis
	OMP_NUM_THREADS=1 build/oldest/bin/python -m pytest -q tests/frontend tests/models

# Rewrite the generated pages and build the documentation site, build/site/index.html. Broken links fail.
docs: .venv/.dev
	$(BIN)/python scripts/generate_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# Kill commands, send them signals, or kill one of their workers, at random moments (docs/explanation/hardening.md): up to an hour.
FAULTS ?= 100
faults: .venv/.dev
	$(BIN)/python scripts/faults.py kill --times $(FAULTS)
	$(BIN)/python scripts/faults.py stop --times 6
	$(BIN)/python scripts/faults.py lose --times 6

# Run engines and detectors from 8 threads in each of 2 processes. Results must match the reference bit for bit, and memory must not grow.
SOAK_SECONDS ?= 600
soak: .venv/.dev
	$(BIN)/python scripts/soak.py --seconds $(SOAK_SECONDS)

# Some tests compare with timm and OpenCV and are skipped without them, so a failed installation is not an error and is
# tried again next time.
# --no-deps: torchvision would replace the installed torch.
# OpenCV is installed separately, because it has wheels for some platforms only.
oracles: .venv/.oracles
.venv/.oracles: .venv/.dev
	-$(PIP) install -q --no-deps --only-binary :all: opencv-python-headless
	-$(PIP) install -q --no-deps timm torchvision && $(PIP) install -q huggingface_hub pyyaml && touch $@

# The development installation also satisfies .run, so that a fresh `make test` compiles once.
.venv/.dev: .venv/.torch $(SOURCES)
	$(INSTALL) -e '.[quantize,dev,docs]'
	@touch .venv/.run $@

.venv/.run: .venv/.torch $(SOURCES)
	$(INSTALL) -e '.[quantize]'
	@touch $@

# Install torch first, so that later installations do not choose another one. An installed torch is kept.
.venv/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) show -q torch 2>/dev/null || $(PIP) install -q -c constraints.txt torch || $(PIP) install -q torch
	@touch $@

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis
