# Every target makes the environment it needs, once, in .venv.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
OUT := out
TESTS := $(BIN)/python -m pytest --dist loadgroup -m "not long"
# Installed without what it requires: that includes a torchvision which does not fit torch for CPUs.
LITDATA := litdata lightning-utilities obstore tifffile
# Only its schemas are used; it requires older versions of what is installed here, and 459 MB.
SKYPILOT := skypilot
# Tests of packages, models by the hundred, and parts of packages that are not used here: two fifths of all code.
SELDOM := /(tests?|transformers/models|torch/testing|ray/(air|data|llm|rllib|serve|train|tune)|sky|databricks|mypy|pip)/
# Processes that may not keep what they compile would compile the package anew, each of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: chromium gpu help setup demo demo-text test test-long coverage durations chaos experiments check lint types quick format s3-server s3-server-stop redis-server redis-server-stop cloud-aws cloud-aliyun docs clean

help:
	@echo "make demo       train a residual network on handwritten digits over local functions"
	@echo "make demo-text  the same with a character-level transformer on English text"
	@echo "make check      format, lint, types and the tests that take less than 0.2 s of processor"
	@echo "make test       all tests that prove something in reasonable time"
	@echo "make test-long  those that take many minutes: hundreds of seeds, every combination, what oracles say"
	@echo "make coverage   make test, and how much of every room of the package it reaches"
	@echo "make durations  measure all tests again: which of them are quick, and what each folder takes"
	@echo "make chaos      two hundred and thirty runs in which things go wrong, and how they ended"
	@echo "make experiments  the paper's evaluation: figures and findings in $(OUT)/experiments/index.html"
	@echo "make s3-server  install and start a real S3 server (Ceph's) on this machine, for the tests that want one"
	@echo "make redis-server  the same with a Redis or Valkey server"
	@echo "make chromium   install a browser, for the tests that open reports in one"
	@echo "make cloud-aws REGION=…                   whether it works on your account, for 0.50 dollars at most"
	@echo "make cloud-aliyun REGION=… REPOSITORY=…   the same on Alibaba Cloud"
	@echo "make gpu        whether stages on this machine's GPU, or a stand-in, have plain PyTorch's bits, and planned memory and speed"
	@echo "make docs       the documentation as a site, in out/site; any warning is an error"
	@echo "make format     put the code in the house format"
	@echo "make clean      remove everything that was made"

setup: $(READY)

# All processors compile what was installed, which pip does on one, but for what hardly anything imports: that is compiled
# when it is. A few files, for a newer Python, cannot be compiled.
$(READY): setup.cfg setup.py pyproject.toml constraints.txt $(wildcard funcpipe/*/*.c)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[gurobi,scip,bayesian,sweep,aws,aliyun,redis,ray,parquet,webdataset,report,examples,docs,dev]'
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --no-deps $(LITDATA) $(SKYPILOT)
	$(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM)' .venv/lib || true
	touch $@

demo: $(READY)
	$(BIN)/python -m experiments.demo digits --output $(OUT)/digits

demo-text: $(READY)
	$(BIN)/python -m experiments.demo characters --output $(OUT)/characters

test: $(READY)
	$(TESTS) -n 4

test-long: $(READY)
	$(BIN)/python -m pytest -m long --hypothesis-profile=long

coverage: $(READY)
	$(TESTS) -n 2 --cov --cov-report=json:$(OUT)/coverage/report.json $(if $(CONTEXTS),--cov-context=test)
	$(BIN)/python scripts/coverage_by_room.py $(OUT)/coverage/report.json

durations: $(READY)
	$(TESTS) -n 2 --record-durations=$(OUT)/durations.json
	$(BIN)/python -m tests.support.durations

chaos: $(READY)
	$(BIN)/python -m experiments.studies.chaos --runs 200
	$(BIN)/python -m experiments.studies.chaos_processes --runs 30

experiments: $(READY)
	$(BIN)/python -m experiments.paper --output $(OUT)/experiments

check: $(READY)
	@$(MAKE) --jobs 3 --output-sync=target lint types quick

lint: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check

types: $(READY)
	$(BIN)/mypy

quick: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not long" --hypothesis-profile=quick

format: $(READY)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open $(OUT)/site/index.html"

s3-server:
	$(PYTHON) scripts/s3_server.py install
	$(PYTHON) scripts/s3_server.py start $(OUT)/s3-server

s3-server-stop:
	$(PYTHON) scripts/s3_server.py stop $(OUT)/s3-server

redis-server:
	$(PYTHON) scripts/redis_server.py install
	$(PYTHON) scripts/redis_server.py start $(OUT)/redis-server

redis-server-stop:
	$(PYTHON) scripts/redis_server.py stop $(OUT)/redis-server

chromium:
	$(PYTHON) scripts/chromium.py

gpu: $(READY)
	$(BIN)/python -m experiments.studies.gpu --json $(OUT)/gpu.json

cloud-aws: $(READY)
	$(BIN)/python -m experiments.studies.cloud_check aws $(if $(REGION),--region $(REGION)) --max-usd 0.50

cloud-aliyun: $(READY)
	$(BIN)/python -m experiments.studies.cloud_check aliyun $(if $(REGION),--region $(REGION)) \
		$(if $(REPOSITORY),--repository $(REPOSITORY)) --max-usd 0.50

clean:
	rm -rf .venv $(OUT) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
