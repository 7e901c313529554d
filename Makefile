# Every command of this project, once. Each calls a script of the same name in scripts/.
.DEFAULT_GOAL := help
.PHONY: help lab setup check test test-full sanitize fuzz bench bundle docs dist format clean

# The environment is made anew only when something it was built from has changed.
INSTALLED := .venv/.installed
$(INSTALLED): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*) scripts/setup
	scripts/setup
	@touch $@ $(RUNNABLE)

# The lab alone needs none of the development tools.
RUNNABLE := .venv/.runnable
$(RUNNABLE): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*) scripts/setup
	scripts/setup lab
	@touch $@

help: ## print this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

lab: $(RUNNABLE) ## the lab in a browser: see, count, prove and change attention (OPEN="folder …" opens models, recordings, runs)
	@.venv/bin/regard lab $(OPEN)

setup: $(INSTALLED) ## make .venv and install regard into it (PYTHON=python3.12 chooses another interpreter)

check: setup ## lint, formatting and types
	scripts/check

test: check ## check, then every test but the long ones, with coverage
	scripts/test -m "not full"

test-full: check ## check, then every test, the long sweeps and real builds too
	scripts/test

sanitize: setup ## the kernel's tests with a native module under AddressSanitizer and UBSan
	scripts/sanitize

fuzz: setup ## random shapes and options against float64 for 10 minutes (SECONDS_TO_RUN=60 changes that)
	scripts/fuzz

bench: setup ## race everything against what people use, about 6 minutes, and write docs/benchmarks.md
	scripts/bench

bundle: setup ## train the model that comes with the package anew, and put it there: about 8 minutes
	scripts/bundle

docs: setup ## the documents as a site that opens from disk: site/index.html
	scripts/docs

dist: ## the sdist and a manylinux wheel of what is committed, in dist/ (PYTHON=python3.12 for another interpreter)
	scripts/dist

format: setup ## format the code and mend what the linter can mend
	scripts/format

clean: ## remove everything that was built, .venv included
	scripts/clean
