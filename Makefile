# Each target builds .venv from constraints.txt first; `make demo PYTHON=python3.12` picks the interpreter.
PYTHON ?= python3
BIN := .venv/bin
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: demo smoke test test-quick test-all test-lab test-vllm wheel check format static tables docs torture mutants clean gpu-check gpu-day gpu-bundle
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/pytest -n logical --dist worksteal

demo: .venv/.ready
	@$(BIN)/python recipes/demo.py

test: .venv/.ready
	@$(PYTEST) -m "not slow" tests

# 15 to 25 seconds: one hash a part of the house, compared with tests/smoke.json. `make smoke RECORD=1` writes it.
smoke: .venv/.ready
	@$(BIN)/python tests/smoke.py $(if $(RECORD),--record)

# Layout, model, ops, rules, data: about a minute on 2 cores.
QUICK = test_layout.py $(patsubst %,model/test_%.py,feature_maps mixers mixer_properties ops soft) kernels/test_rules.py data/test_data.py
test-quick: .venv/.ready
	@$(PYTEST) -m "not slow" $(addprefix tests/,$(QUICK))

# After `make test`, the slow ones.
test-all: test
	@$(PYTEST) -m slow tests

# What measures and studies: lab/ and the tool for a day with a card.
test-lab: .venv/.ready
	@$(PYTEST) -c lab/pyproject.toml lab/tests tools/gpu/tests

# The plugin in vLLM, in an environment of 3.4 GB: vLLM pins another transformers.
VLLM = .venv-vllm/bin
test-vllm: .venv-vllm/.ready
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VLLM)/python -m pytest --confcutdir tests/vllm tests/vllm

.venv-vllm/.ready: tests/vllm/requirements.txt pyproject.toml
	@$(PYTHON) -m venv .venv-vllm
	@$(VLLM)/python -m pip install -q --disable-pip-version-check $(TORCH)
	@$(VLLM)/python -m pip install -q --disable-pip-version-check --no-deps -r tests/vllm/requirements.txt -e .
	@touch $@

# The product alone: its wheel in an empty environment trains two steps and generates.
WHEEL = env -u PYTHONPATH HF_HUB_OFFLINE=1 env/bin/nalanda
wheel:
	@rm -rf dist && $(PYTHON) -m venv dist/env
	@dist/env/bin/python -m pip install -q --disable-pip-version-check $(TORCH)
	@dist/env/bin/python -m pip wheel -q --disable-pip-version-check --no-deps -w dist .
	@dist/env/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt dist/nalanda-*.whl
	@cd dist && $(WHEEL) train demo train.steps=2 output_dir=run
	@cd dist && $(WHEEL) generate run "def main(" --max-new-tokens 8

check: .venv/.ready
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyrefly check

format: .venv/.ready
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# Without a .venv too: a machine with a card brings its own torch. tools/gpu/README.md.
GPU_CHECK = $(or $(wildcard $(BIN)/python),$(PYTHON)) tools/gpu/gpu_check.py
GPU_OPTIONS = $(if $(OUTPUT),--output $(OUTPUT)) $(if $(FORMER),--former $(FORMER)) $(if $(MINUTES),--minutes $(MINUTES))
gpu-check:
	@$(GPU_CHECK) $(PART) $(if $(BUNDLE),--bundle $(BUNDLE)) $(GPU_OPTIONS)

gpu-day:
	@$(GPU_CHECK) day --bundle $(BUNDLE) $(if $(CALL),--call $(CALL)) $(GPU_OPTIONS)

# With the card's Python and Triton: make gpu-bundle PYTHON=python3.12. Called again, it goes on. TEXT="web=FOLDER small=FOLDER"
gpu-bundle:
	@$(PYTHON) tools/gpu/gpu_check.py bundle --bundle $(or $(BUNDLE),gpu-bundle) $(if $(MINUTES),--minutes $(MINUTES)) $(TEXT:%=--text %)

static: .venv/.ready
	@OMP_NUM_THREADS=1 $(BIN)/python -m nalanda_lab.kernels.static --check

# Rewrites the generated tables of docs/, and that of `nalanda recipes`.
tables: .venv/.ready
	@$(BIN)/python -m nalanda.report.tables

# The pages as a site, site/index.html. A broken link or any warning fails. Writes the tutorial's notebook, too.
docs: .venv/.ready
	@$(BIN)/python docs/build.py

# Kills, full disks, poisoned steps, failing servers: tests/TORTURE.md has what came of it. 17 to 70 minutes.
torture: .venv/.ready
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python tests/torture/run.py --report tests/TORTURE.md

# Faults put into a copy of the product, one at a time: tests/MUTANTS.md has what no test saw. Hours; goes on.
mutants: .venv/.mutants
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python tests/mutants/run.py $(if $(MINUTES),--minutes $(MINUTES))

.venv/.mutants: .venv/.ready
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[mutants]'
	@touch $@

clean:
	rm -rf .venv .venv-vllm .mutants site dist

TITAN = examples/torchtitan/requirements.txt
.venv/.ready: pyproject.toml lab/pyproject.toml constraints.txt $(TITAN)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else "Nalanda needs Python 3.11 to 3.13, this is %d.%d: make PYTHON=python3.12 …" % v[:2])'
	@echo "Building .venv (a few minutes the first time) …"
	@$(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]' -e lab
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r $(TITAN)
	@touch $@
