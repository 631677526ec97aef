# Two virtual environments: .venv holds what a user has (no torch), .venv-test what the checks need.
# A stamp in each says that it is up to date, so the second call is quick.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-arm64 bench clean

BENCH ?= decode --shape tiny --peers 2 --threads 1 --dtype int4 --plan tensor

help: ## Show these lines
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' Makefile | expand -t 16

demo: .venv/installed ## One small model over three peers on this machine, in under a minute
	@.venv/bin/edge demo split

test: .venv-test/installed ## Every check: format, lint, types, imports, then the tests
	@scripts/lint
	@scripts/test

test-all: test ## The same, then cases that show once more what others show
	@scripts/test slow

test-arm64: .venv-test/installed ## An emulated ARM64 peer beside this machine's, as root on Debian
	@scripts/test -m arm64 -s tests/arm64

bench: .venv/installed ## Run a bench: make bench BENCH="decode --shape W --peers 2"
	@.venv/bin/python -m edge.demos.bench $(BENCH)

clean: ## Remove the environments, builds and tool caches
	rm -rf .venv .venv-test build dist *.egg-info
	rm -rf .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/installed: pyproject.toml scripts/install-cpu
	@scripts/install-cpu .venv --editable .
	@touch $@

.venv-test/installed: pyproject.toml constraints.txt scripts/install-test $(wildcard kernels/native/*.* kernels/native/*/*.[chp]*)
	@scripts/install-test .venv-test
	@touch $@
