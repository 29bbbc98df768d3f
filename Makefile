# make train: from a fresh clone to a trained model.   make test: the whole CPU suite.   Both install what they need.
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

train: .venv/ready
	python prepare.py stdlib
	mpiexec -n 2 python train.py tiny --prompt "def main("

test: .venv/ready-test
	ruff check .
	python -m pytest -q tests

drills: .venv/ready-test
	python tests/drills/kill.py --count 1000 --workers 2 --out out/drills

slurm: .venv/ready
	python tests/slurm/cluster.py

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -r requirements.txt
	touch $@

.venv/ready-test: .venv/ready requirements-test.txt
	$(BIN)/pip install -q -r requirements-test.txt
	touch $@

.PHONY: train test drills slurm
