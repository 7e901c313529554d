# All commands of this project. Each target runs the script of the same name in scripts/.
.DEFAULT_GOAL := help
.PHONY: help lab notebook setup check test test-full test-native test-arm sanitize fuzz fuzz-files bench zoo bundle docs dist format clean

# The environment is installed again only if one of these files has changed.
INSTALLED := .venv/.installed
$(INSTALLED): pyproject.toml constraints.txt $(wildcard requirements-*.lock) CMakeLists.txt $(wildcard csrc/*) scripts/setup
	scripts/setup
	@touch $@ $(RUNNABLE)

# The lab needs no development tools.
RUNNABLE := .venv/.runnable
$(RUNNABLE): pyproject.toml constraints.txt $(wildcard requirements-*.lock) CMakeLists.txt $(wildcard csrc/*) scripts/setup
	scripts/setup lab
	@touch $@

help: ## print this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

lab: $(RUNNABLE) ## start the lab in a browser (OPEN="folder …" opens models, recordings and runs)
	@.venv/bin/regard lab $(OPEN)

notebook: $(RUNNABLE) ## open the notebook of the examples in a browser; the first time, install a server for it
	scripts/notebook $(OPTIONS)

setup: $(INSTALLED) ## create .venv and install regard into it (PYTHON=python3.12 selects another interpreter)

check: setup ## check lint rules, formatting and types
	scripts/check

test: check ## check, then run all tests except the long ones, with coverage
	scripts/test -m "not full"

test-full: check ## check, then run all tests, with long sweeps and real builds
	scripts/test

test-native: ## compare the kernels with plain loops, without Python
	scripts/test-native

test-arm: ## the same for 64-bit ARM, with a cross compiler and qemu
	scripts/test-native arm

sanitize: setup ## run the kernel tests with AddressSanitizer and UBSan
	scripts/sanitize

fuzz: setup ## compare the kernel with float64 on random calls for 10 minutes (SECONDS_TO_RUN=60 changes the time)
	scripts/fuzz

fuzz-files: setup ## damage files of every kind and give them to every reader for 10 minutes (SECONDS_TO_RUN=60 …)
	scripts/fuzz-files

bench: setup ## run all benchmarks against other libraries, about 6 minutes, and write docs/benchmarks.md
	scripts/bench

zoo: setup ## check regard.watch on every architecture of transformers, and write docs/models-supported.md
	scripts/zoo

bundle: setup ## train the bundled model again and copy it into the package, about 8 minutes
	scripts/bundle

docs: setup ## build the documentation site, which opens from disk: site/index.html
	scripts/docs

dist: ## build the sdist and a manylinux wheel of the last commit in dist/ (PYTHON=python3.12 selects another interpreter)
	scripts/dist

format: setup ## format the code and apply the fixes of the linter
	scripts/format

clean: ## remove everything that was built, including .venv
	scripts/clean
