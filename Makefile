# Everything goes through one environment, .venv, which scripts/environment.py builds on the first use.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() * 2))')

.PHONY: demo test check coverage lowest test-gpu bench format release docs

demo: .venv/ready-demo
	$(BIN)/warpbus demo

# A file's tests run in one process. Files keep their order: by default those with the most tests would come first, and
# the slowest ones last, when other processes have nothing left to do. There are more processes than cores, because a
# part of the time tests wait for processes that they have started.
test: .venv/ready
	$(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder

# The lines that no test of `make test` executes, in the terminal and in htmlcov/.
coverage: .venv/ready
	$(BIN)/python -m pip install --quiet 'coverage>=7.10'
	$(BIN)/python -m coverage run -m pytest
	$(BIN)/python -m coverage combine
	$(BIN)/python -m coverage report
	$(BIN)/python -m coverage html

# The same environment with the lowest version that pyproject.toml allows of each direct dependency. torch stays: its
# lowest version is several gigabytes.
lowest: .venv/ready
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/python -c 'import torch; print("torch==" + torch.__version__)' > .venv/torch.txt
	$(BIN)/uv pip install --python $(BIN)/python --upgrade --resolution lowest-direct --override .venv/torch.txt \
		--requirements pyproject.toml --extra test

test-gpu: .venv/ready
	$(BIN)/python -m pytest tests/gpu tests/multigpu

check: .venv/ready-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Where there is no GPU, what needs one is left out.
bench: .venv/ready
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/cpu_decode.py
	$(BIN)/warpbus bench vector-add
	$(BIN)/warpbus bench matmul
	$(BIN)/warpbus bench linear
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		for name in ladder gemm gemv wna16 w8a8 attention decode quantize train serving parallel pool; do $(BIN)/warpbus bench $$name || exit 1; done; \
	fi

format: .venv/ready-check
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation in build/site, with all links checked: make docs REPOSITORY=https://github.com/OWNER/warpbus
docs: .venv/ready-docs
	$(BIN)/python scripts/documentation_site.py $(if $(REPOSITORY),--repository $(REPOSITORY))

# Builds sdist and wheel of the last commit in dist/, checks them, and tries the wheel in an empty environment:
# make release REPOSITORY=https://github.com/OWNER/warpbus
release: .venv/ready-release
	$(BIN)/python scripts/release.py build $(if $(REPOSITORY),--repository $(REPOSITORY))

.venv/ready-demo: pyproject.toml scripts/environment.py
	$(PYTHON) scripts/environment.py cuda serve
	@touch $@

.venv/ready: .venv/ready-demo
	$(PYTHON) scripts/environment.py test
	@touch $@

.venv/ready-check: .venv/ready
	$(PYTHON) scripts/environment.py test check
	@touch $@

.venv/ready-docs: .venv/ready
	$(PYTHON) scripts/environment.py test docs
	@touch $@

.venv/ready-release: .venv/ready
	$(PYTHON) scripts/environment.py test release
	@touch $@
