# Everything runs in .venv, which the first command of any kind sets up (CPU stack).  STACK=1.9 takes
# TorchRec 1.9 instead of 1.8, in .venv-1.9.
PYTHON ?= python3.11
STACK ?= 1.8
ifeq ($(filter $(STACK),1.8 1.9),)
$(error STACK is "$(STACK)", must be 1.8 or 1.9)
endif
VENV := $(if $(filter 1.8,$(STACK)),.venv,.venv-$(STACK))
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo test test-1.9 test-stacks test-all test-faults test-cuda test-gpu check format docs figures quality bench mlperf \
	performance hot grid planner compression papers clean

help:
	@echo "make demo      train a small DLRM on 2 local ranks with the fused sharder"
	@echo "make test      the tests (minutes)"
	@echo "make test STACK=1.9  the same with TorchRec 1.9, as every other command, in .venv-1.9"
	@echo "make test-1.9  what matters most of it: parity, pipelines, checkpoints, planner"
	@echo "make test-stacks  checkpoints from one TorchRec to the other and back"
	@echo "make test-all  the tests and the slow matrix, with both"
	@echo "make test-faults  killed ranks, full disks, hangs, bad batches (a quarter of an hour)"
	@echo "make test-cuda  the GPU tests on an emulated GPU, in .venv-cuda (8 GB)"
	@echo "make test-gpu  the same on the GPUs of this machine, with benchmarks, into runs/gpu_report; in .venv-gpu"
	@echo "make check     ruff and mypy"
	@echo "make docs      the documentation, into site/"
	@echo "make figures   draws the figures of README and docs anew"
	@echo "make bench     speed against stock shardings, five minutes: make bench DATA=train.txt"
	@echo "make mlperf    the shape of MLPerf's DLRM DCNv2: make mlperf DATA=train.txt"
	@echo "make performance  all of docs/performance.md and its details, hours: make performance DATA=train.txt"
	@echo "make hot       all of docs/hot_rows_results.md, an hour: make hot DATA=train.txt"
	@echo "make grid      all of docs/2d.md, half an hour: make grid DATA=train.txt"
	@echo "make planner   all of docs/predictions.md, docs/scaling.md, half an hour: make planner DATA=train.txt"
	@echo "make compression  all of docs/compression_results.md, an hour: make compression DATA=train.txt.gz"
	@echo "make papers    all of docs/papers.md, half an hour: make papers DATA=train.txt.gz TAOBAO=UserBehavior.csv.gz"
	@echo "make quality   compares shardings on Criteo data: make quality DATA=train.txt"

# torchrec's metadata asks for the CUDA build of fbgemm; on CPU it goes in without dependencies.
.venv/.ready: pyproject.toml requirements-common.txt requirements-cpu.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet -r requirements-cpu.txt
	.venv/bin/python -m pip install --quiet --no-deps torchrec==1.8.0
	.venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# So does torch 2.14, which would bring 1 GB more than it loads.
.venv-1.9/.ready: pyproject.toml requirements-common.txt requirements-cpu-1.9.txt
	$(PYTHON) -m venv .venv-1.9
	.venv-1.9/bin/python -m pip install --quiet --upgrade pip
	.venv-1.9/bin/python -m pip install --quiet -r requirements-common.txt
	.venv-1.9/bin/python -m pip install --quiet --no-deps -r requirements-cpu-1.9.txt
	.venv-1.9/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# The CUDA builds, with an emulated GPU (tests/emulated_cuda).
EMULATOR := $(wildcard tests/emulated_cuda/runtime/*) tests/emulated_cuda/setup.sh
.venv-cuda/.ready: pyproject.toml requirements-common.txt $(EMULATOR)
	tests/emulated_cuda/setup.sh .venv-cuda $(PYTHON)
	touch $@

setup: $(READY)

demo: $(READY)
	$(BIN)/fusedrec train --config configs/tiny.yaml --overwrite

# Tests side by side, each process with ranks of its own.
SIDE_BY_SIDE := --numprocesses auto --maxprocesses 8 --dist worksteal

test: $(READY)
	$(BIN)/python -m pytest -m "not slow" $(SIDE_BY_SIDE)

# Killed ranks, full disks, hangs: all of it, a quarter of an hour.
test-faults: $(READY)
	$(BIN)/python -m pytest tests/faults

# One after another: every test has two ranks.  Not part of `make test`.
test-cuda: .venv-cuda/.ready
	.venv-cuda/bin/emulated python -m pytest -m gpu

# The CUDA builds, for GPUs.
.venv-gpu/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet --upgrade pip
	.venv-gpu/bin/python -m pip install --quiet 'torch==2.13.*' 'torchrec==1.8.*' 'fbgemm-gpu==1.8.*' \
		--editable '.[train,test]'
	touch $@

# On real GPUs: doctor, tests, compute-sanitizer, benchmarks, and one report of all of it.
test-gpu:
	@nvidia-smi -L > /dev/null 2>&1 || \
		(echo "make test-gpu needs a GPU: nvidia-smi finds none (make test-cuda emulates one)" && exit 2)
	$(MAKE) .venv-gpu/.ready
	.venv-gpu/bin/python -m tests.gpu_report --output runs/gpu_report

# What CI has time for on the second stack.
SELECTION := tests/compat \
	tests/sharding/modules/test_ebc_parity.py tests/sharding/modules/test_ec_parity.py \
	tests/sharding/modules/test_mixed_parity.py tests/sharding/modules/test_owner_pooling.py \
	tests/sharding/modules/test_feature_processors.py \
	tests/sharding/modules/test_pipelines.py tests/sharding/modules/test_state.py \
	tests/hot/test_parity.py tests/hot/test_pipelines.py tests/hot/test_checkpoints.py \
	tests/grid/test_pipelines.py tests/grid/test_checkpoints.py tests/grid/test_gradients.py \
	tests/checkpoint/test_round_trips.py tests/checkpoint/test_interop.py \
	tests/planner/test_planner.py tests/planner/test_cost_planner.py

test-1.9: .venv-1.9/.ready
	.venv-1.9/bin/python -m pytest -m "not slow" $(SIDE_BY_SIDE) $(SELECTION)

# Checkpoints from each stack to the other.
test-stacks: .venv/.ready .venv-1.9/.ready
	.venv/bin/python -m pytest tests/checkpoint/test_stacks.py

test-all: .venv/.ready .venv-1.9/.ready
	.venv/bin/python -m pytest
	.venv-1.9/bin/python -m pytest --ignore tests/checkpoint/test_stacks.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs  # not --quiet, with which mkdocs does not count warnings
	$(BIN)/mkdocs build --strict

$(VENV)/.docs: $(READY) requirements-docs.txt
	$(BIN)/python -m pip install --quiet -r requirements-docs.txt
	touch $(VENV)/.docs

figures: $(READY)
	$(BIN)/python docs/figures/data_path.py
	$(BIN)/python docs/figures/parts.py

# Without DATA, workloads on Criteo ids are left out; without root, those on emulated links.
bench: $(READY)
	$(BIN)/fusedrec bench benchmarks/quick.yaml $(if $(DATA),--data $(DATA)) --output runs/bench

# The benchmark that the field uses: MLPerf's multi-hot sizes, with and without memory kept.
mlperf: $(READY)
	@test -n "$(DATA)" || (echo "make mlperf DATA=train.txt.gz, as root" && exit 2)
	$(BIN)/fusedrec bench benchmarks/mlperf.yaml --data $(DATA) --output benchmarks/results/mlperf

performance: $(READY)
	@test -n "$(DATA)" || (echo "make performance DATA=train.txt.gz, as root" && exit 2)
	for suite in targets links workloads growth crossover mlperf; do \
		$(BIN)/fusedrec bench benchmarks/$$suite.yaml --data $(DATA) \
			--output benchmarks/results/$$suite || exit 1; \
	done
	FUSEDREC_NATIVE=0 $(BIN)/fusedrec bench benchmarks/targets.yaml --data $(DATA) \
		--set pairs=5 --set "allocators=[default]" --output benchmarks/results/without_native
	$(BIN)/python benchmarks/bag_dedup.py --document docs/performance_details.md
	$(BIN)/python docs/performance.py

hot: $(READY)
	@test -n "$(DATA)" || (echo "make hot DATA=train.txt.gz, as root" && exit 2)
	for suite in hot hot_overhead; do \
		$(BIN)/fusedrec bench benchmarks/$$suite.yaml --data $(DATA) \
			--output benchmarks/results/$$suite || exit 1; \
	done
	$(BIN)/python benchmarks/hot_bytes.py $(DATA) --document docs/hot_rows_results.md
	$(BIN)/python benchmarks/hot_drift.py --document docs/hot_rows_results.md
	$(BIN)/python benchmarks/hot_quality.py $(DATA) --seeds 8 --document docs/hot_rows_results.md
	$(BIN)/python docs/performance.py

grid: $(READY)
	@test -n "$(DATA)" || (echo "make grid DATA=train.txt.gz" && exit 2)
	$(BIN)/python benchmarks/grid_bytes.py $(DATA) --document docs/2d.md
	$(BIN)/python benchmarks/grid_quality.py $(DATA) --document docs/2d.md

planner: $(READY)
	@test -n "$(DATA)" || (echo "make planner DATA=train.txt.gz, as root" && exit 2)
	rm -f benchmarks/results/planner/cluster_*.yaml  # or they would be used again
	$(BIN)/fusedrec bench benchmarks/validate.yaml --validate-planner --data $(DATA) \
		--output benchmarks/results/planner
	$(BIN)/python benchmarks/plan_scale.py --document docs/cost_model.md
	$(BIN)/python benchmarks/planner_docs.py

compression: $(READY)
	@test -n "$(DATA)" || (echo "make compression DATA=train.txt.gz, as root" && exit 2)
	$(BIN)/fusedrec bench benchmarks/compression.yaml --data $(DATA) \
		--output benchmarks/results/compression
	$(BIN)/python docs/performance.py
	$(BIN)/python benchmarks/compression_quality.py $(DATA) --document docs/compression_results.md

# The papers' tables.  Taobao's sample may be shorter than a day, so its end is what is held out.
papers: $(READY)
	@test -n "$(DATA)" -a -n "$(TAOBAO)" || \
		(echo "make papers DATA=train.txt.gz TAOBAO=UserBehavior.csv.gz, as root" && exit 2)
	$(BIN)/fusedrec prepare $(DATA) --output runs/papers/criteo --on-bad-line skip
	$(BIN)/fusedrec prepare --config configs/taobao.yaml --set "data.table.files=[$(TAOBAO)]" \
		--set data.table.prepared=runs/papers/taobao --set "data.table.split={by: end}" \
		--set "data.table.tables={}"
	$(BIN)/fusedrec bench benchmarks/papers.yaml --data runs/papers/criteo --table runs/papers/taobao \
		--output benchmarks/results/papers
	$(BIN)/python benchmarks/papers.py p2res runs/papers/criteo runs/papers/taobao
	$(BIN)/python benchmarks/papers.py fae runs/papers/criteo runs/papers/taobao
	$(BIN)/python benchmarks/papers.py dct $(DATA)
	$(BIN)/python benchmarks/papers.py simulated
	$(BIN)/python benchmarks/papers.py page

quality: $(READY)
	$(BIN)/python benchmarks/quality.py $(DATA)

clean:
	rm -rf .venv .venv-1.9 .venv-cuda .venv-gpu site
