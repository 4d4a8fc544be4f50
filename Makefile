# make train   set up .venv and train the quickstart, or go on where it stopped
# make test    set up .venv and run all tests
# make lint    set up .venv and check the style
#
# PYTHON selects the interpreter that .venv is made from, e.g. PYTHON=python3.12.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: train test lint

train: $(STAMP)
	$(VENV)/bin/python train.py --config configs/quickstart.yaml --resume-or-start

test: $(STAMP)
	$(VENV)/bin/python -m pytest -q

lint: $(STAMP)
	$(VENV)/bin/ruff check .

# The environment follows the pinned versions; one that exists already is kept.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'Python 3.11 or newer is needed and "$(PYTHON)" is none: name one with' \
	    'make PYTHON=python3.11.' >&2; exit 1; }
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo 'Making $(VENV) failed: on Debian, install the package python3-venv.' >&2; \
	  exit 1; }
	$(VENV)/bin/pip install -q -c constraints.txt -e '.[dev]'
	@touch $@
