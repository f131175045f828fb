# `make demo` and `make test` work on a fresh machine with Python 3.10 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_SLOW := $(VENV)/.installed-slow
INSTALLED_DOCS := $(VENV)/.installed-docs
# two processes of one thread each: tests are too small for more threads; files in their order, as those with few tests are
# long ones, and would come last
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
PYTEST_TRITON := OMP_NUM_THREADS=1 $(BIN)/python tests/triton/run.py -n 2

.PHONY: demo test test-fast test-slow test-tail test-oldest test-range test-transformers test-engines test-trainers test-quantised evidence bench-check fuzz sweep docs dist lint types style clean

demo: $(INSTALLED)
	$(BIN)/hf-hyperconn demo

test: lint test-fast

test-fast: $(INSTALLED)
	$(PYTEST) -m "not slow"
	$(PYTEST_TRITON) -m "not slow"

test-slow: $(INSTALLED_SLOW)
	$(PYTEST) -m "slow and not tail"
	$(PYTEST_TRITON) -m "slow and not tail"

# the slow tests that others stand for, an hour
test-tail: $(INSTALLED_SLOW)
	$(PYTEST) -m tail
	$(PYTEST_TRITON) -m tail

# Transformers' own tests of models, on ten families or those of FAMILIES; their source is downloaded once
test-transformers: $(INSTALLED_SLOW)
	$(BIN)/python tests/campaigns/transformers_suite/run.py $(FAMILIES)

# vLLM and SGLang, in environments of their own, 9 GB; writes docs/engines.json and the tables of docs/serving.md
test-engines: $(INSTALLED)
	$(BIN)/python -m tests.campaigns.engines --write

# DeepSpeed, TRL and other training tools, in environments of their own, 1 GB; writes the tables of docs/trainers.md
test-trainers: $(INSTALLED)
	$(BIN)/python -m tests.campaigns.trainers --write

# quantisation as docs/quantised.md says, llmcompressor's in an environment of its own, 1.5 GB; writes the page's table
test-quantised: $(INSTALLED_SLOW)
	$(BIN)/python -m tests.campaigns.quantised --write

# new models of 24 layers, with connections and without, in 20 minutes on two cores
evidence: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.depth.evidence

# a few ratios of time against those of benchmarks/results/check.json, on the CPU: what became slower
bench-check: $(INSTALLED)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m benchmarks.check

# mutated checkpoints, signals and full disks against the commands; writes docs/reliability.json and the page's tables
fuzz: $(INSTALLED)
	$(BIN)/python -m tests.campaigns.fuzz --cases 10000 --write
	$(BIN)/python -m tests.campaigns.fuzz.signals --count 1000 --write
	$(BIN)/python -m tests.campaigns.fuzz.disks --write || test $$? = 77  # where none may be mounted

# a tiny model of every model type of Transformers; writes docs/model_types.json and its page
sweep: $(INSTALLED)
	$(BIN)/python -m tests.campaigns.sweep --write

# what loads, converts and saves every family, on the oldest supported release of Transformers
test-oldest: $(INSTALLED)
	$(BIN)/python -m tests.campaigns.range transformers==5.16.1 --shared --tests $(addprefix tests/test_,golden_folders.py \
		layer_source.py transformers_seam.py families.py other_families.py exactness.py remote_code.py)

# the fast tests on every minor release of Transformers and torch that is supported, and folders made on one release and
# run on another; hours, and 3 GB a release of torch
test-range: $(INSTALLED)
	$(BIN)/python -m tests.campaigns.range --write
	$(BIN)/python -m tests.campaigns.releases --write

# the documentation as a site, in build/site; a warning is an error
docs: $(INSTALLED_DOCS)
	$(BIN)/python -m tests.stub
	$(BIN)/mkdocs build --strict

# the sdist and the wheel, in dist, as PyPI gets them
dist: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m tests.stub
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# a minute, where mypy has not read torch and Transformers before
types: $(INSTALLED)
	$(BIN)/python -m tests.stub
	$(BIN)/mypy

style: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

# evaluation, exports, quantisation and the site, 1.1 GB that only slow tests need
$(INSTALLED_SLOW): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
		--editable ".[dev,docs,eval,onnx,openvino,quantization]"
	touch $@

$(INSTALLED_DOCS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
