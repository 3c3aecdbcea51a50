# Everything here does its own set-up: a machine with Python >= 3.11, make and a C compiler is enough.
#   make PYTHON=python3.12 install    picks the interpreter
#   make bench BENCH_ARGS="--json"    passes arguments on

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
FAST := .venv/fast-tests-passed
MODEL := smollm2-135m-instruct
PACKAGES := pdserve router prefill_node decode_node kv_transfer
FUZZ_FACTOR ?= 40
NOT_FAST := ray or model or gpu or multigpu or slow or faults
NOT_HERE := gpu or multigpu or slow or faults
SOURCES := $(shell find $(PACKAGES) docs examples proto scripts tests -type f ! -name '*.pyc') $(wildcard *.md *.toml *.yaml Makefile)

.PHONY: help install demo test test-faults soak simulate test-security fuzz check fix docs proto bench accept lock clean
.NOTPARALLEL:

help:
	@echo "make install   .venv with the pdserve command"
	@echo "make demo      serve a small model on this machine and ask it three questions"
	@echo "make test      every test this machine can run"
	@echo "make test-faults  each part of a cluster killed, stopped or cut off at each stage; two hosts (long)"
	@echo "make soak      half an hour of mixed load while a process is killed every minute"
	@echo "make simulate  thousands of random schedules of faults over whole clusters in virtual time (long); SEED=7: those of a seed"
	@echo "make fuzz      generated input over HTTP, gRPC, sessions and KV links, many thousands (long)"
	@echo "make test-security  strangers at every door, slow ones too; a whole cluster with all locks on"
	@echo "make check     format, lint, types, layers, fresh stubs, fast tests"
	@echo "make fix       repair what check can repair"
	@echo "make docs      write the tables of docs/configuration.md from the configuration's classes"
	@echo "make proto     generate pdserve/rpc/v1 from proto/"
	@echo "make bench     engine latency against transformers, side by side"
	@echo "make accept    end-to-end checks over every transport and TP pairing (long)"
	@echo "make lock      write what .venv holds into requirements.lock"
	@echo "make clean     remove all that make made here; downloaded models stay in the cache"

install: $(READY)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "pdserve needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
	    echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making .venv"; $(PYTHON) -m venv .venv; }
	@echo "installing requirements.lock into .venv (minutes the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(READY)

demo: install
	$(BIN)/pdserve demo

test: install $(FAST)
	$(BIN)/pdserve models fetch $(MODEL)
	$(BIN)/python -m pytest -m "(ray or model) and not ($(NOT_HERE))"

# Not run again on the files that they passed on: after `make check`, `make test` runs the others alone.
$(FAST): $(READY) $(SOURCES)
	@touch $(FAST).begun
	$(BIN)/python -m pytest -m "not ($(NOT_FAST))"
	@mv $(FAST).begun $(FAST)

test-faults: install
	$(BIN)/python -m pytest tests/faults tests/hosts

fuzz: install
	PDSERVE_FUZZ_FACTOR=$(FUZZ_FACTOR) $(BIN)/python -m pytest -m fuzz -o timeout=3600 tests/router tests/nodes \
	    tests/kv_transfer $(FUZZ_ARGS)

test-security: install
	$(BIN)/pdserve models fetch $(MODEL)
	$(BIN)/python -m pytest tests/security

soak: install
	$(BIN)/pdserve models fetch $(MODEL)
	$(BIN)/pdserve bench soak $(SOAK_ARGS)

simulate: install
	$(BIN)/python -m pytest tests/simulation -m slow $(if $(SEED),--hypothesis-seed=$(SEED))

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/proto.py --check
	$(BIN)/python scripts/config_doc.py --check
	$(MAKE) $(FAST)

fix: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install
	$(BIN)/python scripts/config_doc.py

proto: install
	$(BIN)/python scripts/proto.py

bench: install
	$(BIN)/pdserve models fetch $(MODEL)
	$(BIN)/pdserve bench engine --model $(MODEL) --against transformers $(BENCH_ARGS)

accept: install
	$(BIN)/pdserve models fetch $(MODEL)
	$(BIN)/python -m tests.accept $(ACCEPT_ARGS)

lock: install
	$(BIN)/python scripts/lock.py

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(PACKAGES) scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
