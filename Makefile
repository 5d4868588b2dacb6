# The words of the house; .ci/run uses the same ones.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: install demo test lint types floors schemas scoreboard notebook clean

install: $(VENV)/installed

$(VENV)/installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip setuptools wheel
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[torch,hf,dev]'
	touch $@

demo: install
	$(BIN)/autopar plan examples/llama3_8b.py --cluster a100x64.yaml --global-batch 512 -o plan.json
	$(BIN)/autopar simulate plan.json --trace trace.json --picture pipeline.png
	$(BIN)/autopar calibrate --quick --ranks 4 -o local-cpu-x4.yaml
	$(BIN)/autopar plan examples/tiny_llama.py --cluster local-cpu-x4.yaml --global-batch 32 --dtype fp32 -o tiny_plan.json
	$(BIN)/autopar run tiny_plan.json --steps 20 --metrics tiny_run.jsonl
	$(BIN)/autopar compare tiny_plan.json tiny_run.jsonl

test: install
	$(BIN)/python -m pytest -n 2

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: install
	$(BIN)/mypy

floors: install
	$(BIN)/lint-imports setup.cfg

schemas: install
	$(BIN)/python docs/schemas/generate.py

scoreboard: install
	$(BIN)/python benchmarks/published_runs.py --runs benchmarks/runs --page docs/accuracy.md

notebook: install
	$(BIN)/python notebooks/execute.py

clean:
	rm -rf $(VENV) build dist *.egg-info plan.json trace.json pipeline.png local-cpu-x4.yaml tiny_plan.json tiny_run.jsonl
