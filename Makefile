# `make demo` and `make test` set up what they need in .venv, once, and run. The others: `make help`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input install --constraint constraints.txt
FACTS := constraints.txt settings.ini setup.py pyproject.toml
NB ?= nbs

.DEFAULT_GOAL := help
.PHONY: help demo test lab docs export frame fresh readme clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):[^#]*## /\1\t/p' Makefile | expand -t 10

demo: .venv/runtime ## train a standard GPT, two coupled ones and an uncoupled control side by side (150 seconds), into demo/
	@$(BIN)/coupled-qk compare --max-seconds 150 --out demo

test: .venv/dev ## build the site, then run every notebook and test
	@tools/system.sh
	@$(BIN)/python -W ignore tools/build_site.py; site=$$?; $(BIN)/pytest && exit $$site

lab: .venv/dev ## open the course map in JupyterLab
	@$(BIN)/jupyter lab --notebook-dir=nbs --LabApp.default_url=/lab/tree/course.ipynb $(if $(filter 0,$(shell id -u)),--allow-root)

docs: .venv/dev ## build the site into _docs/
	@$(BIN)/python -W ignore tools/build_site.py

export: .venv/dev ## write coupled_qk/ from the notebooks
	@$(BIN)/nbdev-export

frame: .venv/dev ## write header and footer of each lesson from nbs/lessons.toml
	@$(BIN)/python tools/frame.py

fresh: .venv/dev ## format, export, run and save notebooks: all, or one with NB=nbs/00_attention.ipynb
	@$(BIN)/python tools/frame.py
	@$(BIN)/ruff format --quiet $(NB)
	@$(BIN)/nbdev-export
	@OMP_NUM_THREADS=1 $(BIN)/nbdev-test --save --n-workers 1 $(NB)
	@$(BIN)/nbdev-clean
	@$(BIN)/python -W ignore tools/build_readme.py

readme: .venv/dev ## write README.md from nbs/index.ipynb
	@$(BIN)/python -W ignore tools/build_readme.py

clean: ## remove what the targets made, but not .venv
	rm -rf nbs/nbdev.yml _docs _proc demo build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find coupled_qk nbs tests tools -name __pycache__ -prune -exec rm -rf {} +

# Set-up: done again when one of the files changes that it depends on. torch comes first, so that its version is ours.
$(BIN)/python:
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "This needs Python 3.11 or newer, and none was found: name one with make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || tools/system.sh python3-venv
	@$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

.venv/runtime: $(FACTS) | $(BIN)/python
	@echo "Setting up .venv with torch and what the library needs (once, 1 to 3 minutes) ..."
	@$(PIP) torch
	@$(PIP) --editable .
	@touch $@

.venv/dev: .venv/runtime
	@echo "Adding the tools for notebooks, tests and site to .venv (once, about a minute) ..."
	@$(PIP) --editable '.[dev]'
	@touch $@
