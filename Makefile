# Five commands, each of which sets up its own environment on a fresh machine:
#   make demo    the whole trip on this computer: text, tokenizer, training, chat, receipt
#   make test    everything that can be tested here; needs no root
#   make check   format, lint, types, import contracts; lists figures that are older than their code
#   make prove   the long proofs and benchmarks; run manually: about five hours on two cores
#   make docs    the docs site in site/, with its links checked
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# uv does not read pip's find-links; an empty value is harmless.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# Images of containers forbid keeping bytecode. Each `homing` would then compile all its modules anew: twice the time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check prove docs setup clean

demo: $(VENV)/.ready-lm
	@echo "== homing quickstart: text -> tokenizer -> plan -> launch on this computer -> train -> fetch -> sample -> destroy"
	$(BIN)/homing quickstart --yes

test: check
	@echo "== tests (half an hour on 2 cores; 'pytest -m \"not slow\"' is the quick part)"
	@# How many at a time, and in which order: tests/conftest.py.
	$(BIN)/python -m pytest --durations=20

check: $(VENV)/.ready-test
	@echo "== format, lint, types, import contracts"
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@echo "== figures that are older than their code (a list, not a failure)"
	$(BIN)/python benchmarks/stale.py

prove: $(VENV)/.ready-test
	@echo "== proofs and benchmarks; figures go to benchmarks/proofs"
	$(BIN)/python -m pytest -m prove -n 0 || test $$? -eq 5
	@# 77: something that it needs is not installed here, and it has said what.
	@skipped=""; \
	for script in benchmarks/*.py; do \
	  echo "== $$script"; $(BIN)/python $$script; code=$$?; \
	  if [ $$code -eq 77 ]; then skipped="$$skipped $$script"; elif [ $$code -ne 0 ]; then exit 1; fi; \
	done; \
	for cloud in runpod shadeform aws modal; do \
	  echo "== simulate.py on $$cloud"; $(BIN)/python benchmarks/simulate.py --provider $$cloud || exit 1; \
	done; \
	if [ -n "$$skipped" ]; then echo "== SKIPPED, see above for what is missing:$$skipped"; fi

docs: $(VENV)/.ready-docs
	@echo "== docs site"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	$(BIN)/python tools/check_site.py site
	@echo "== read it: $(BIN)/python -m http.server -d site 8000   then http://127.0.0.1:8000"

setup: $(VENV)/.ready-test

# Installs with uv when it can be had (seconds), with pip when not (minutes); the same packages either way.
$(VENV)/.ready-%: pyproject.toml constraints.txt
	@echo "== installing homing[$*] into $(VENV) (a few minutes the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet uv || true
	if $(BIN)/python -m uv --version >/dev/null 2>&1; then \
	  $(BIN)/python -m uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[$*]'; \
	else \
	  $(BIN)/pip install --quiet -c constraints.txt -e '.[$*]'; \
	fi
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache dist build site
