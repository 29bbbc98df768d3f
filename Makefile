# make train: from a fresh clone to a trained model.   make test: the whole CPU suite.   Both install what they need.
PYTHON ?= python3
BIN := .venv/bin
# of TORCH=cpu: on Linux the torch of PyPI is the CUDA build. pip asks every index for every package, and waits
# for one that does not answer, so this index is asked for torch alone
CPU_WHEELS := https://download.pytorch.org/whl/cpu
$(if $(filter-out cpu,$(TORCH)),$(error TORCH=$(TORCH) is unknown: give TORCH=cpu, or leave it out))
export PATH := $(CURDIR)/$(BIN):$(PATH)
# the tests start many processes: none compiles again what another one has compiled
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder

train: .venv/ready
	python prepare.py stdlib
	mpiexec -n 2 python train.py tiny --prompt "def main("
	@echo "before you type one of these commands: source .venv/bin/activate"

# after make train: its losses, curve and texts for the README
picture: .venv/ready
	python bench/first_run.py out/tiny

test: .venv/ready-test
	ruff check .
	$(PYTEST) -m "not long" tests

drills: .venv/ready-test
	python tests/drills/kill.py --count 1000 --out out/drills

# the other cases of long sweeps; and what needs a package that pip builds for ten minutes and more: llama.cpp,
# which runs our GGUF files. where it cannot be built, its tests are skipped. so are those of the pages in a
# browser where playwright finds no Chromium, those that run the notebooks where nbconvert is missing, and those that
# compare adapters with peft's where peft is missing
long: .venv/ready-test
	@$(BIN)/pip install -q playwright || echo "playwright cannot be installed here"
	@$(BIN)/pip install -q -r requirements-notebooks.txt || echo "nbconvert cannot be installed here"
	@$(BIN)/pip install -q peft==0.21.2 || echo "peft cannot be installed here"
	@$(BIN)/python -c "import llama_cpp" 2>/dev/null || CMAKE_ARGS="-DGGML_NATIVE=OFF -DLLAMA_BUILD_TESTS=OFF" \
	  timeout 1800 $(BIN)/pip install -q llama-cpp-python==0.3.36 || echo "llama-cpp-python cannot be built here"
	$(PYTEST) -rs -m long tests

# root gets the packages of Debian, where apt answers
slurm: .venv/ready
	@command -v slurmctld > /dev/null || [ "$$(id -u)" != 0 ] || { timeout 180 apt-get -qq update && \
	  DEBIAN_FRONTEND=noninteractive timeout 180 apt-get -qq install -y --no-install-recommends \
	  slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins; } || echo "SLURM cannot be installed here"
	python tests/slurm/cluster.py

tutorial: .venv/ready-test
	python tutorial/run.py

# the executed copies, with their outputs, are in out/notebooks. they write into data/ and out/
notebooks: .venv/ready
	$(BIN)/pip install -q -r requirements-notebooks.txt
	$(BIN)/jupyter nbconvert --to notebook --execute --output-dir out/notebooks tutorial/*.ipynb

.venv/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  f"nanoshard: $(PYTHON) is {sys.version.split()[0]}, and 3.11 or newer is needed: make PYTHON=python3.11")'
	@echo "pip installs requirements.txt into .venv: one to three minutes, the last of them in silence"
	$(PYTHON) -m venv .venv
	@if [ "$$(uname -s)$(TORCH)" = Linuxcpu ]; then \
	  $(BIN)/pip install --no-deps $$(grep ^torch== requirements.txt) --index-url $(CPU_WHEELS); \
	elif [ "$$(uname -s)" = Linux ] && [ ! -e /proc/driver/nvidia ] && ! $(BIN)/pip show -q torch 2>/dev/null; then \
	  echo "note: PyPI's torch comes with CUDA, 3 GB. On a CPU 0.2 GB do: Ctrl-C, then make with TORCH=cpu"; fi
	$(BIN)/pip install -r requirements.txt
	touch $@

.venv/ready-test: .venv/ready requirements-test.txt
	$(BIN)/pip install -r requirements-test.txt
	touch $@

.PHONY: train picture test drills long slurm tutorial notebooks
