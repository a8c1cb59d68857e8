# From nothing but Python >= 3.11: `make demo`, `make test`, `make check`, `make bench`, `make table`,
# `make soak`, `make faults`, `make fuzz`.
# Options: make demo DEMO_ARGS="--regions 3 --verify", make test PYTEST_ARGS="-k link -x",
# make fuzz FUZZ_SECONDS=7200, make faults FAULT_SEEDS=5, FAULT_TLS=1 make faults.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test check bench table soak faults fuzz clean

help:
	@head -n 4 Makefile

$(STAMP): pyproject.toml deploy/constraints.txt
	@test -n "$(PYTHON)" || { echo "geotrain needs Python 3.11 or later: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "installing torch and the rest into $(VENV): one to five minutes, by your network" >&2
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c deploy/constraints.txt \
		--config-settings editable_mode=compat -e '.[test]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/geotrain demo $(DEMO_ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Tables of many minutes, each run by itself: see its first lines.
LONG_BENCHMARKS := %/step_table.py %/auto_windows.py %/simulator_check.py %/planner_grid.py %/real_model.py \
	%/simulator_real_model.py

# Each prints one JSON object; run alone on the machine.
bench: $(STAMP)
	@set -e; for script in $(filter-out $(LONG_BENCHMARKS),$(sort $(wildcard tests/benchmarks/*.py))); do \
		echo "# $$script" >&2; $(BIN)/python $$script $(BENCH_ARGS); done

# Steps over emulated links against torch's own pipelining, as markdown; as root, about an hour.
table: $(STAMP)
	@$(BIN)/python tests/benchmarks/step_table.py $(TABLE_ARGS)

# Random faults for an hour: make soak SOAK_ARGS="--minutes 5 --seed 3".
soak: $(STAMP)
	@$(BIN)/python -m tests.faults.soak $(SOAK_ARGS)

# Faults at their full length, each under load with many seeds: most of an hour.
faults: $(STAMP)
	FAULT_LENGTH=full FAULT_SEEDS=$(or $(FAULT_SEEDS),20) \
		$(BIN)/python -m pytest tests/faults -n 4 --dist=load $(PYTEST_ARGS)

# New inputs for everything that reads a peer's bytes; make test runs a fixed few.
fuzz: $(STAMP)
	FUZZ_SECONDS=$(or $(FUZZ_SECONDS),3600) $(BIN)/python -m pytest tests/fuzz $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
