# make install   .venv with everything for the CPU        make demo   a verified dataset of a real model
# make test      every test                               make lint   ruff, mypy, the rules between modules
# make fuzz      the header parser under atheris for three minutes (ARGS="-max_total_time=3600" for longer)
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONSUMERS := $(VENV)/consumers/.installed
# Importing vLLM without stored bytecode costs 45 s in every process; PYTHONPATH would shadow the environment.
unexport PYTHONDONTWRITEBYTECODE
unexport PYTHONPATH
ARGS ?=

.PHONY: help install demo test chaos fuzz lint format bench-cpu bench-packing bench-plan constraints clean

help:
	@sed -n 's/^# //p' Makefile | head -3

install: $(STAMP)
	@echo "installed: $(BIN)/rayhs"

$(STAMP): pyproject.toml constraints.txt .ci/tools/install .ci/tools/uv.sh .ci/tools/excludes.txt
	@.ci/tools/install
	@touch $@

demo: $(STAMP)
	rm -rf demo-output
	$(BIN)/rayhs demo $(ARGS)

# What reads exports, in an environment of its own: tests/consumers runs there.
$(CONSUMERS): constraints-consumers.txt .ci/tools/consumers .ci/tools/consumers.in .ci/tools/uv.sh .ci/tools/excludes.txt | $(STAMP)
	@.ci/tools/consumers
	@touch $@

test: $(STAMP) $(CONSUMERS)
ifeq ($(ARGS),)
	@.ci/tools/test
else
	$(BIN)/python -m pytest $(ARGS)
endif

fuzz: $(STAMP)
	$(VENV)/tools/bin/uv pip install --quiet --python $(BIN)/python "$$(sed -n 's/^fuzz = \["\(.*\)"\].*/\1/p' pyproject.toml)"
	PYTHONPATH=. $(BIN)/python tests/fuzz/header.py -dict=tests/fuzz/header.dict -max_len=4096 -max_total_time=180 $(ARGS)

# Kills and faults until the dataset is done, 20 times; then every byte is checked. About half an hour.
chaos: $(STAMP)
	$(BIN)/python -m pytest --run-chaos tests/test_real_deaths.py
	$(BIN)/python -m tests.chaos --vllm --seeds 1 --samples 60 --kills 5
	$(BIN)/python -m tests.chaos $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-cpu: $(STAMP)
	PYTHONPATH=. $(BIN)/python tests/benchmarks/cpu_extract.py

bench-packing: $(STAMP)
	PYTHONPATH=. $(BIN)/python tests/benchmarks/packing.py /tmp 2048

bench-plan: $(STAMP)
	PYTHONPATH=. $(BIN)/python tests/benchmarks/plan_memory.py 1000000

# Pins every package of the CPU install and of the consumers; run it after a change of pyproject.toml.
constraints: $(STAMP)
	.ci/tools/constraints

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache demo-output bench-output
