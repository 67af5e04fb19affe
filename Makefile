# What people do with a checkout. `make help` lists it.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
SIZE ?= 1G
DIR ?= target/quickstart

RUST_SOURCES := $(shell find crates/forebay crates/forebay-cli crates/forebay-io crates/forebay-python -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock
PACKAGE_SOURCES := $(RUST_SOURCES) $(shell find python -name '*.py' -o -name '*.pyi') pyproject.toml

.PHONY: help run test test-rust test-python test-deepspeed check bench bench-python \
	bench-checkpoints fuzz clean tools

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 22

run: $(VENV)/.package $(VENV)/.model ## install into .venv, store and load real tensors, show what it buys
	mkdir -p $(DIR)
	$(BIN)/forebay quickstart --dir $(DIR) --size $(SIZE)

test: test-rust test-python test-deepspeed ## everything that must pass, after installing what it needs

test-rust: tools
	PYTHON='$(PYTHON)' scripts/test-tools.sh
	if cargo nextest --version >/dev/null 2>&1; then cargo nextest run --workspace; \
	else cargo test --workspace --all-targets; fi
	cargo test --workspace --doc --quiet

test-python: $(VENV)/.package $(VENV)/.test-requirements $(VENV)/.model
	PYTHON='$(PYTHON)' scripts/test-tools.sh
	cargo build --quiet -p forebay-testkit --bins
	cargo build --quiet -p forebay-standin
	$(BIN)/python -m pytest
	$(BIN)/python -m pytest tests/gpu --gpu-device cpu

test-deepspeed: $(VENV)/.package $(VENV)/.deepspeed-requirements ## DeepSpeed on Forebay, end to end, on the CPU
	$(BIN)/python -m pytest tests/deepspeed \
	  tests/python/test_tune.py::test_the_block_is_what_deepspeed_reads

check: tools $(VENV)/.package $(VENV)/.check-requirements ## formats, lints, types, house rules
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --quiet
	cargo xtask tidy
	$(BIN)/typos
	$(BIN)/shellcheck scripts/*.sh
	$(BIN)/ruff check python tests crates scripts
	$(BIN)/ruff format --check python tests crates scripts
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest forebay._forebay

bench: tools ## beside fio on this drive and on memory; BENCH='--help' lists the options
	cargo run --release --quiet -p forebay-bench -- $(BENCH)

bench-python: $(VENV)/.package ## small loads and submissions through Python; beside DeepNVMe where it is installed
	$(BIN)/python crates/forebay-bench/python/through_python.py

bench-checkpoints: $(VENV)/.package ## what saving checkpoints costs a training loop
	mkdir -p target/bench
	$(BIN)/python crates/forebay-bench/python/checkpoints.py --dir target/bench

fuzz: tools ## a minute of each fuzz target; needs cargo-fuzz
	@cargo fuzz --version >/dev/null 2>&1 || { echo 'cargo-fuzz is missing: cargo install cargo-fuzz' >&2; exit 1; }
	for target in $$(cargo fuzz list); do RUSTC_BOOTSTRAP=1 cargo fuzz run $$target -- -max_total_time=60; done

clean: ## remove what was built and installed here
	rm -rf target $(VENV) fuzz/target

tools:
	@PYTHON='$(PYTHON)' scripts/tools.sh

# Stamps: each is made anew when what it stands for has changed.

$(VENV)/.made:
	@PYTHON='$(PYTHON)' scripts/tools.sh
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.package: $(VENV)/.made $(PACKAGE_SOURCES)
	$(PIP) install .
	touch $@

$(VENV)/.model: $(VENV)/.made requirements/run.txt
	$(PIP) install --no-deps -r requirements/run.txt
	touch $@

$(VENV)/.test-requirements: $(VENV)/.made requirements/test.txt
	$(PIP) install -r requirements/test.txt
	touch $@

$(VENV)/.deepspeed-requirements: $(VENV)/.test-requirements requirements/deepspeed.txt
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) install -r requirements/deepspeed.txt
	touch $@

$(VENV)/.check-requirements: $(VENV)/.made requirements/check.txt requirements/test.txt
	$(PIP) install -r requirements/check.txt
	touch $@
