# `make help` lists the targets. Nothing but Python 3.11 or newer and make is needed:
# the first target that you run builds .venv, and later ones use it again while it is up to date. The demo needs only the
# command line in it; every other target adds what it takes to develop.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CLI    := $(VENV)/.cli
READY  := $(VENV)/.ready
# Other libraries are compared in an environment of their own.
BENCH  := .venv-bench
# They share their servers, and wait for them half of the time.
PARALLEL ?= --numprocesses 6 --dist loadfile --no-loadscope-reorder
# Who is not root installs Debian's packages by sudo; Homebrew refuses root.
SUDO ?= $(if $(shell command -v apt-get),$(if $(filter-out 0,$(shell id -u)),sudo))
# The tests start hundreds of Pythons. Each of them would compile the package anew, which takes longer than most tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint types services services-down services-install simulate soak mutate bench-quick bench bench-scale docs format wheel dist clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(CLI)  ## watch a double charge happen: without a guard, and with one
	$(BIN)/onefold demo $(ARGS)

test: $(READY)  ## all everyday tests, the simulator among them (ARGS=tests/delivery/test_decide.py for a part)
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-all: $(READY)  ## and each promise on every server, driver and framework
	$(BIN)/python -m pytest -m 'not soak' $(PARALLEL) $(ARGS)

lint: $(READY)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## mypy --strict on all code; pyright, strict, on the examples and the typed uses in tests/typing
	$(BIN)/mypy
	$(BIN)/mypy examples
	$(BIN)/basedpyright --pythonpath $(BIN)/python

services: $(READY)  ## start private servers for the tests (`make test` starts what it needs by itself)
	$(BIN)/python -m services up $(ARGS)

services-down: $(READY)  ## stop them
	$(BIN)/python -m services down

services-install: $(READY)  ## install the servers that do not come as wheels: from Debian (with sudo), or from Homebrew
	$(SUDO) $(BIN)/python -B -m services install

simulate: $(READY)  ## every interleaving, deeper than in `make test`, with progress
	$(BIN)/onefold simulate --deep $(ARGS)

soak: $(READY)  ## the long checks: every combination, the deep simulator, and soaks with random kills (SHORT=1: what CI runs)
	$(if $(SHORT),,$(BIN)/python -m pytest -m 'more or soak' $(PARALLEL))
	$(if $(SHORT),,$(BIN)/onefold simulate --deep $(ARGS))
	$(BIN)/python -m bench.soak --store all $(if $(SHORT),--short --strike-server)
	$(BIN)/python -m bench.soak --cancel $(if $(SHORT),--short)
	$(BIN)/python -m bench.soak_http $(if $(SHORT),--megabytes 8)
	$(BIN)/python -m bench.soak_rabbitmq $(if $(SHORT),--short)
	$(BIN)/python -m bench.soak_nats $(if $(SHORT),--short)
	$(BIN)/python -m bench.soak_redis_streams $(if $(SHORT),--short)
	$(if $(SHORT),,$(BIN)/python -m bench.soak --store postgres --store mariadb --store redis --strike-server)
	$(if $(SHORT),,$(BIN)/python -m bench.soak --store patroni --store patroni-async)
	$(if $(SHORT),,$(BIN)/python -m bench.mutate)

mutate: $(READY)  ## break the library in fifty places, one at a time: which breaks does no test notice?
	$(BIN)/python -m bench.mutate $(ARGS)

bench-quick: $(READY)  ## what a guard costs on each store, against the raw driver: ratios, in a minute
	$(BIN)/python -m bench.quick $(ARGS)

bench-scale: $(READY)  ## the cost at 10 thousand to 10 million records, of waiting duplicates, and of a purge (ARGS=--quick; --save)
	$(BIN)/python -m bench.scale $(ARGS)
	$(BIN)/python -m bench.scale.partitions $(filter --quick,$(ARGS))

bench: $(BENCH)/.ready  ## the whole comparison: raw drivers, other libraries, each bar with its verdict, in five minutes
	$(BENCH)/bin/python -m bench.compare $(ARGS)

docs: $(READY)  ## regenerate the parts of the documentation that come from the source
	$(BIN)/python docs/generate.py

format: $(READY)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(READY)  ## build the wheel and test it in an environment of its own
	$(BIN)/python -m tests.wheel

dist: $(READY)  ## build the wheel and the source distribution into dist/ (TAG=v0.2.0: only if this is that version)
	$(if $(TAG),test "$(TAG)" = "v$$($(BIN)/python -c 'import onefold; print(onefold.__version__)')")
	rm -rf dist
	$(BIN)/python -m build --outdir dist

clean:  ## remove what the other targets made
	test ! -x $(BIN)/python || $(BIN)/python -m services down
	rm -rf $(VENV) .venv-* .services build dist .mypy_cache .ruff_cache .pytest_cache

# What the demo imports is compiled when it runs; the rest is not worth waiting for. The build backend is installed here
# and used by both stages: in isolation, pip would fetch it for each. The pip of $(PYTHON), if it has one, installs a new
# one into .venv in half the time that Python takes to unpack its own.
INSTALL   := install --quiet --constraint constraints.txt
PIP       := $(BIN)/python -m pip $(INSTALL)
BOOTSTRAP := $(INSTALL) --no-compile --upgrade 'pip>=25.1' 'hatchling>=1.26' editables

$(CLI): pyproject.toml constraints.txt Makefile
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "onefold needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python $(BOOTSTRAP) 2>/dev/null \
		|| { $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip $(BOOTSTRAP); }
	$(PIP) --no-compile --no-build-isolation --editable '.[cli]'
	@touch $@

$(READY): $(CLI)
	$(PIP) --no-build-isolation --editable '.[all]' --group dev
	@touch $@

$(BENCH)/.ready: bench/requirements.txt bench/install.py pyproject.toml
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python bench/install.py
	@touch $@
