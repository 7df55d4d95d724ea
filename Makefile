# Everything that is built, installed or tested goes through these targets. Useful variables:
#   PG_CONFIG=/path/to/pg_config   another PostgreSQL than the one tools/pg-config finds
#   PYTHON=/path/to/python3        another Python than the distribution's, which PL/Python uses
#   DESTDIR=/path                  a staging root for install

PYTHON ?= $(firstword $(wildcard /usr/bin/python3) python3)
VENV = .venv/bin
STRESS_SECONDS ?= 180
# Behaviour tests mostly wait, so there may be more at a time than there are cores.
JOBS ?= 3
PARALLEL = -n $(JOBS) --dist loadfile --no-loadscope-reorder
COVERAGE_TESTS ?= test/python

# Parts of a target run one after another, in the order written, also under -j.
.NOTPARALLEL:
.DEFAULT_GOAL = help
.PHONY: help deps script install uninstall demo test unit pgtap behaviour coverage lint verify \
        plpgsql-check pgspot reference format stress bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

deps:  ## install PostgreSQL, its extensions and the Python tools (packages: root on Debian)
	@PYTHON='$(PYTHON)' tools/deps

script:  ## generate the install script in extension/ from sql/
	@$(PYTHON) -B tools/script.py write

install: script  ## install the extension into the server of PG_CONFIG
	@$(PYTHON) -B tools/install.py install

uninstall:  ## remove the extension from the server of PG_CONFIG
	@$(PYTHON) -B tools/install.py uninstall

demo: deps install  ## show it at work on a throwaway cluster
	$(VENV)/python test/demo/demo.py

test: deps install unit pgtap behaviour  ## run all tests; the README's test command

unit:  ## test what needs no server: unit tests, properties, doctests
	$(VENV)/pytest --doctest-modules python/pg_sluice/core $(wildcard test/unit test/fuzz)

pgtap:  ## test the SQL contracts with pgTAP, each file in a database of its own
	$(VENV)/python tools/pgtap.py $(wildcard test/sql/*.sql)

behaviour:  ## test behaviour on real clusters
	timeout --signal=TERM --kill-after=60 3600 $(VENV)/pytest $(PARALLEL) test/python

coverage: deps install  ## measure which lines unit and behaviour tests execute, inside the server too
	$(VENV)/python tools/line_coverage.py $(PARALLEL) $(COVERAGE_TESTS)

lint: verify  ## check style, types, the generated script and PL/pgSQL
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(MAKE) --no-print-directory plpgsql-check
	$(VENV)/python tools/reference.py verify

verify:  ## check that versions agree and the install script is up to date
	$(PYTHON) -B tools/script.py verify

reference: install  ## write docs/reference.md from the extension's comments
	$(VENV)/python tools/reference.py write

plpgsql-check: install  ## check every PL/pgSQL function with plpgsql_check
	$(VENV)/python tools/plpgsql_check.py

pgspot:  ## check the install script for unsafe search paths and grants
	$(VENV)/pgspot --ignore-lang plpython3u extension/pg_sluice--*.sql

format:  ## let ruff lay out the Python code
	$(VENV)/ruff format .
	$(VENV)/ruff check --fix .

stress: deps install  ## kill, freeze and delay for STRESS_SECONDS while limits are sampled; 5,000 runs
	$(VENV)/python test/stress/stress.py --seconds $(STRESS_SECONDS)
	$(VENV)/python test/stress/load.py

bench: deps install  ## measure it on a throwaway cluster
	$(VENV)/python test/bench/bench.py

clean:  ## remove what was built and downloaded
	rm -rf .build .venv .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find python test tools -name __pycache__ -prune -exec rm -rf {} +
