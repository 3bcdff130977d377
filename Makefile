# Everything runs in .venv, which `make setup` builds. Another interpreter: make PYTHON=python3.12 setup
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The stamp's name holds a checksum of what the installation follows from: touched files change nothing, edited ones do.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | tr -s ' \t' '-')

# For the tests that need torchvision, whose builds belong to builds of torch: other tests cannot import it.
VISION := torchvision num2words docopt

.PHONY: help setup demo browser test test-gpu test-lowest test-newest soak docs lint format bench bench-network clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Make .venv and install Paceline with everything it needs

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Paceline needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -1)." \
	       "To fix: install one and name it, as in: make PYTHON=python3.12 setup" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "The virtual environment could not be made." \
	       "To fix: install your system's venv package (on Debian and Ubuntu: apt install python3-venv)." >&2; exit 2; }
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --upgrade --no-deps --target $(VENV)/vision-only $(VISION)
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: setup  ## Train the built-in model on two ranks, then ask it one question of each kind
	$(BIN)/paceline sft --config examples/demo.yaml
	@echo
	@echo "The report: output/demo/report.html"
	@echo "Asking the trained model three questions that are not in its training data:"
	$(BIN)/paceline generate output/demo "What is 48 + 37?" "What is 11:38 pm in 24-hour time?" \
	  "How many milliliters are 283 l?"

# The tests of the panel take the machine's Chromium, or else Playwright's own.
browser: setup
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	  command -v $$name >/dev/null && exit 0; done; \
	$(BIN)/playwright install chromium || \
	  echo "NO BROWSER: the tests in a real one are not run. To fix: install Chromium (on Debian: apt install chromium)." >&2

# Most of a test is waiting for processes that start: two run side by side, those marked `alone` by themselves.
test: browser  ## Run the tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-gpu: setup  ## Run the tests that need a GPU; `make test` hides GPUs
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

# Torch's build for CUDA is large: make test-lowest LOWEST_ARGS='torch==2.11.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu'
LOWEST := build/lowest
# The generated pages follow from the version of pydantic that constraints.txt names.
LOWEST_TESTS := --ignore=tests/config/test_config_docs.py tests/config tests/distributed/test_torch_compat.py tests/models/test_builtin.py tests/models/test_trace.py \
  tests/strategies/test_sharded.py tests/strategies/test_pipeline.py tests/strategies/test_deepspeed.py
LOWEST_FAST_TESTS := tests/checkpoint tests/parallel tests/strategies tests/train tests/verify
test-lowest:  ## Run a smoke set with the lowest supported versions, in an environment of its own
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --disable-pip-version-check --quiet uv
	$(LOWEST)/bin/uv pip install --python $(LOWEST)/bin/python --resolution lowest-direct \
	  -r pyproject.toml --extra deepspeed --extra tensorboard --extra bitsandbytes --extra torchao --extra schedulefree \
	  --extra metrics --extra lm-eval 'pytest>=8.4' $(LOWEST_ARGS)
	PYTHONPATH=src $(LOWEST)/bin/python -m pytest $(LOWEST_TESTS)
	PYTHONPATH=src $(LOWEST)/bin/python -m pytest -m 'not slow' $(LOWEST_FAST_TESTS)

NEWEST := build/newest
test-newest: browser  ## Run the tests with the newest supported versions, in an environment of its own
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --quiet --upgrade '.[dev]'
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --quiet --upgrade --no-deps --target $(NEWEST)/vision-only $(VISION)
	PYTHONPATH=src $(NEWEST)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
	  --ignore=tests/config/test_config_docs.py $(PYTEST_ARGS)

soak: browser  ## Run the long tests that `make test` leaves out
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m soak $(PYTEST_ARGS)

lint: setup  ## Style, types, layers, and whether the generated docs are fresh
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m paceline.config.reference --check
	$(BIN)/python -m paceline.messages.reference --check

format: setup  ## Let ruff put the style right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup  ## Build the documentation sites: build/docs/index.html, and build/docs/zh/index.html in Chinese
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs
	$(BIN)/sphinx-build -W --keep-going -q -b html -t zh -c docs docs/zh build/docs/zh

bench: setup  ## Measure against a hand-written loop and the transformers Trainer, and print the ratios
	$(BIN)/python benchmarks/run.py

bench-network: setup  ## Measure compression and DiLoCo against plain DDP over a slow network of namespaces (root)
	$(BIN)/python benchmarks/slow_network.py

clean:  ## Remove .venv, caches and the demo's output
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache output/demo
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
