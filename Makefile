# A fresh machine needs python3, pip and make; gcc is optional.
# Everything goes into .venv. Stamps in it remember what is installed, so a second run starts at once.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MSPROBE := .venv-msprobe
# More than cores: a test that waits for a process, for the disk, or for a second to pass, leaves its core idle.
WORKERS ?= 6
MINUTES ?= 10
# pip compiles its 18,000 files one after the other, compileall on all cores.
PIP := $(BIN)/python -m pip install --quiet --no-compile
COMPILE := $(BIN)/python -m compileall -qq -x '/tests?/|/transformers/models/|/moto/|/mypyc?/|/pygments/(lexers|styles)/|/pip/'
LARGE := paddlepaddle tensorflow-cpu transformers onnxruntime duckdb
# Files stay whole, for their tests share captures; tests/conftest.py says which come first, tests/workers.py how
# workers start.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Per cent of lines and branches of foundation; 84.8 on 2026-11-23. What only adapters and trainings reach of it is not counted.
FLOOR := 84
GROUND := tests/facts tests/kernels tests/redaction tests/sentences tests/store tests/test_toml.py
QUICK := tests/cli/test_commands.py tests/cli/test_cost.py tests/end_to_end/test_tour.py tests/facts tests/redaction tests/report \
	tests/sentences tests/store tests/test_repository.py tests/test_toml.py tests/verdict/test_criteria.py

export OMP_NUM_THREADS := 1
# Each of the two hundred processes that the tests start would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE
# transformers 4 is to leave TensorFlow alone: beside Keras 3 it does not import its Trainer otherwise.
export USE_TF := 0

.DEFAULT_GOAL := help
.PHONY: help demo test lint check coverage bench bench-quick bench-kernel bench-compare bench-locate bench-locate-paddle bench-align bench-locate-tensorflow bench-noise bench-overflow bench-replay bench-replay-paddle bench-reproduce bench-reproduce-paddle bench-settings bench-shadow bench-silent bench-startup bench-strangers fuzz goldens soak docs picture wheels clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

demo: $(VENV)/.runtime  ## Find the operator that makes a detector's loss converge worse (2 minutes)
	$(BIN)/python examples/centernet/demo.py

# The checks run beside the tests: two minutes on a core that a worker does not always need.
test:  ## Lint, type-check and run all tests
	$(MAKE) --no-print-directory --jobs 2 $(VENV)/.dev
	$(MAKE) --no-print-directory --jobs 2 tests lint

.PHONY: rules types tests
rules: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/lint-imports --no-cache

types: $(VENV)/.dev
	$(BIN)/mypy

# They call make, too, and this one's jobs are none of theirs.
tests: $(VENV)/.dev
	env -u MAKEFLAGS $(PYTEST)

lint: rules types  ## ruff, codespell, import-linter and mypy --strict

check: lint  ## Lint, and the tests that need no training: for daily work (2 minutes)
	$(PYTEST) $(QUICK)

coverage: $(VENV)/.dev  ## How much of the ground floor its own tests execute, with a floor
	$(BIN)/python -m pytest -n 0 --cov --cov-report=term-missing:skip-covered --cov-fail-under=$(FLOOR) $(GROUND)

bench: $(VENV)/.dev $(MSPROBE)/.tried  ## Measure what capture and compare cost, beside msprobe (10 minutes)
	$(BIN)/python benchmarks/cost.py

bench-quick: $(VENV)/.dev $(MSPROBE)/.tried  ## The same for three modes, one round (2 minutes)
	$(BIN)/python benchmarks/cost.py --models gpt resnet --modes idle 'api stats' 'api tensor' \
		--rounds 1 --rival-rounds 1 --patience 3 --no-compare --no-shadow --no-replay --no-paddle --no-tensorflow

bench-kernel: $(VENV)/.dev  ## GB/s of the statistics kernel on the CPU (3 minutes)
	$(BIN)/python benchmarks/kernel.py

bench-locate: $(VENV)/.dev  ## Plant every fault in every model and print who was blamed; compare other implementations, wrong and right
	$(BIN)/python benchmarks/locate.py
	$(BIN)/python benchmarks/implementations.py

bench-locate-paddle: $(VENV)/.dev  ## The same for faults in PaddlePaddle's kernels (3 minutes)
	$(BIN)/python benchmarks/locate_paddle.py

bench-locate-tensorflow: $(VENV)/.dev  ## The same for faults in TensorFlow (3 minutes)
	$(BIN)/python benchmarks/locate_tensorflow.py

bench-align: $(VENV)/.dev  ## Align models in PyTorch with ports to PaddlePaddle and Keras, and ports with planted differences (2 minutes)
	$(BIN)/python benchmarks/align_frameworks.py
	$(BIN)/python benchmarks/align_frameworks.py --other keras

goldens: $(VENV)/.dev  ## Print each line in which a verdict differs from tests/verdict/goldens (10 minutes)
	$(BIN)/python benchmarks/goldens.py --check

bench-noise: $(VENV)/.dev  ## The same with HF32 products and other orders of sums switched on in the candidate (20 minutes)
	$(BIN)/python benchmarks/locate_noise.py

bench-replay: $(VENV)/.dev  ## Replay every call of every model on the broken device and print who was blamed (40 minutes)
	$(BIN)/python benchmarks/replay_faults.py

bench-replay-paddle: $(VENV)/.dev  ## The same for faults in PaddlePaddle's kernels (10 minutes)
	$(BIN)/python benchmarks/replay_paddle.py

bench-reproduce: $(VENV)/.dev  ## Write a test for each fault of the broken device and run it on both (10 minutes)
	$(BIN)/python benchmarks/reproduce_faults.py

bench-reproduce-paddle: $(VENV)/.dev  ## The same for PaddlePaddle (2 minutes)
	$(BIN)/python benchmarks/reproduce_paddle.py

bench-overflow: $(VENV)/.dev  ## Plant every overflow in every training and print who was blamed (2 minutes)
	$(BIN)/python benchmarks/overflow_faults.py

bench-shadow: $(VENV)/.dev  ## What a shadow costs a step, then every fault in every model through one (15 minutes)
	$(BIN)/python benchmarks/shadow_cost.py
	$(BIN)/python benchmarks/shadow_faults.py

bench-settings: $(VENV)/.dev  ## Change settings in six trainings and print where a verdict names them (25 minutes)
	$(BIN)/python benchmarks/settings.py

bench-silent: $(VENV)/.dev  ## Rebuild public silent bugs and print where each was found (4 minutes)
	$(BIN)/python benchmarks/silent_bugs.py

bench-strangers: $(VENV)/.dev  ## Plant faults in models that nobody ran before and print who was blamed (18 minutes)
	$(BIN)/python benchmarks/strangers.py

bench-compare: $(VENV)/.dev $(MSPROBE)/.tried  ## How fast captures are compared, beside msprobe (5 minutes and 6 GB in /tmp)
	$(BIN)/python benchmarks/compare.py

fuzz: $(VENV)/.dev  ## Read and compare damaged captures for MINUTES (10)
	$(BIN)/python tests/fuzz/run.py --minutes $(MINUTES)

soak: $(VENV)/.dev  ## Train for long under capture and tell whether memory stays flat
	$(BIN)/python benchmarks/soak.py

bench-startup: $(VENV)/.dev  ## Measure what it costs to begin a capture
	$(BIN)/python benchmarks/startup.py

wheels: $(VENV)/.torch  ## Build the wheels of trueup and of trueup-compat into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist . ./compat-packages

docs: $(VENV)/.docs  ## Build the pages as a site, site/index.html, links checked, and check the commands on them
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python -m pytest tests/test_repository.py tests/test_documentation.py -k 'page or link or reference or command'

picture: $(VENV)/.runtime  ## Photograph the demo's report for the README, docs/report.png, where Chromium is installed
	$(BIN)/python tools/picture.py

clean:  ## Delete the environment, caches and what the demo left
	rm -rf $(VENV) $(MSPROBE) build dist runs/cpu runs/npu report src/*.egg-info compat-packages/build compat-packages/src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find src compat-packages tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# torch comes first and by its exact version. Asked for in any other way, pip takes the newest build, which on Linux
# brings gigabytes of CUDA along. The largest of the rest need none of it, and are unpacked and compiled beside (`make --jobs 2`).
$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.torch: constraints.txt | $(VENV)/.made
	$(PIP) torch==2.13.0 -c constraints.txt
	touch $@

$(VENV)/.runtime: $(VENV)/.torch pyproject.toml
	$(PIP) -c constraints.txt -e '.[torch,report,examples]'
	touch $@

$(VENV)/.large: constraints.txt | $(VENV)/.made
	-$(PIP) --no-deps -c constraints.txt $(LARGE)
	-$(COMPILE) $(VENV)/lib
	touch $@

# What .runtime installed is not built again: pip finds it, and adds what its extra needs.
$(VENV)/.dev: $(VENV)/.runtime $(VENV)/.large compat-packages/pyproject.toml
	$(PIP) -c constraints.txt 'trueup[dev]' -e ./compat-packages
	-$(COMPILE) -j 0 $(VENV)/lib
	touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(PIP) -c constraints.txt 'trueup[docs]'
	touch $@

# msprobe, the tool that `make bench` measures beside, has an environment of its own: its dependencies are none of ours.
# Where it cannot be installed, the bench says so and goes on; remove $(MSPROBE) to try again.
$(MSPROBE)/.tried: constraints.txt
	$(PYTHON) -m venv $(MSPROBE)
	$(MSPROBE)/bin/python -m pip install --quiet torch==2.13.0 -c constraints.txt && \
	$(MSPROBE)/bin/python -m pip install --quiet mindstudio-probe==26.2.0 transformers -c constraints.txt || \
		{ echo "msprobe could not be installed: it is left out of the bench"; rm -f $(MSPROBE)/bin/python; }
	touch $@
