# Two commands do everything: make lab, make test. `make` alone prints the targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python
INSTALLED := $(VENV)/.installed
COMMA := ,
PROXY := $(BIN)/configurable-http-proxy
WORKERS ?= 2
AUTHORS = @[ -d tests ] || { echo "this is in the authors' repository, not in a learner's archive" >&2; exit 2; }
LAB_FLAGS ?= $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: help lab test setup notebooks data run bench horovod cluster cluster-down hub hub-down course-report release pins clean

help:  ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 15

lab: setup  ## set everything up, then open JupyterLab on the first lesson
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/00_start.ipynb $(LAB_FLAGS)

test: setup  ## set everything up, then run every test: library, lessons through papermill, exercises, jobs
	$(AUTHORS)
	@$(MAKE) --no-print-directory -s $(PROXY) || echo "going on without JupyterHub; its tests are skipped"
	@$(RUN) -m pytest $(or $(TESTS),-n $(WORKERS))

setup: $(INSTALLED) data  ## venv, pinned packages, notebooks, data
	@mkdir -p runs
	@$(RUN) -m compileall -q course_lib lessons
	@$(RUN) -m lessons.build

notebooks: $(INSTALLED)  ## for authors: build notebooks/ from lessons/, whatever is in the way
	@$(RUN) -m lessons.build --force

data: data/.years data/.ncep data/.cells data/.digits data/.questions data/.minilm  ## make and unpack all data of the lessons

run: setup  ## run all lessons through papermill; executed copies under runs/lessons/
	@$(RUN) -m lessons.run

bench: $(INSTALLED)  ## measure the performance claims side by side with their peers
	$(AUTHORS)
	@$(RUN) -m benchmarks.data
	@$(RUN) -m benchmarks.ddp
	@$(RUN) -m benchmarks.scaling
	@$(RUN) -m benchmarks.parallel
	@$(RUN) -m benchmarks.mpi
	@$(RUN) -m benchmarks.horovod

horovod: $(INSTALLED)  ## build Horovod for lesson 10: optional, about five minutes the first time
	@.ci/horovod.sh

cluster:  ## start a real Slurm with two nodes on this machine
	@slurm/local/up.sh

cluster-down:  ## stop it
	@slurm/local/down.sh

hub: setup $(PROXY)  ## start a real JupyterHub on a Slurm of its own, on this machine
	$(AUTHORS)
	@hub/up.sh

hub-down:  ## stop it; learners' files stay
	@hub/down.sh

course-report: setup  ## for who gives the course: run everything here, write a page of times, memory and needs (SMOKE=1: small sizes)
	$(AUTHORS)
	@$(RUN) -m lessons.report $(if $(SMOKE),--smoke)

release: $(INSTALLED)  ## for who gives the course: pack what learners get, without solutions
	$(AUTHORS)
	@$(RUN) -m lessons.release

pins: $(INSTALLED)  ## write constraints.txt anew from what is installed
	@{ head -n 1 constraints.txt; $(BIN)/uv pip freeze -q --python $(BIN)/python --exclude-editable | sed -e 's/+cpu$$//' -e '/ @ /d'; } > constraints.new
	@mv constraints.new constraints.txt

clean:  ## remove the venv and the data; your runs/ stay
	rm -rf $(VENV) data *.egg-info .pytest_cache .ruff_cache

# ---- what the targets stand on --------------------------------------------------------------------------------------

# uv finds the wheels where pip does; bytecode is compiled once, or every import of torch and Lab costs seconds. So does every
# start of Lab with rfc3987-syntax, by which jsonschema would check a kind of address that no notebook has; it does without.
define install
	@UV_FIND_LINKS="$${UV_FIND_LINKS:-$${PIP_FIND_LINKS:-}}" $(BIN)/uv pip install -q --python $(BIN)/python \
		--compile-bytecode -c constraints.txt -e '.[$(1)]'
	@$(BIN)/uv pip uninstall -q --python $(BIN)/python rfc3987-syntax
endef

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) .ci/check_python.py
	@$(BIN)/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing the packages (about a minute)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt uv
	$(call install,dev)
	@mkdir -p $(VENV)/share/jupyter/lab/settings
	@echo '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false}}' \
		> $(VENV)/share/jupyter/lab/settings/overrides.json
	@touch $@

$(PROXY): pyproject.toml constraints.txt | $(INSTALLED)
	@echo "installing JupyterHub"
	$(call install,dev$(COMMA)hub)
	@PATH="$(CURDIR)/$(BIN):$$PATH" npm install --silent --global --prefix $(VENV) configurable-http-proxy@5.3.0 || { \
		echo "the hub needs npm's package configurable-http-proxy, and npm's registry gave none" >&2; exit 2; }
	@touch $@

data/.years: | $(INSTALLED)
	@$(RUN) -m course_lib.data.make && touch $@

data/.cells: | $(INSTALLED)
	@{ $(RUN) -m course_lib.data.make --real cells || $(RUN) -m course_lib.data.make --kind cells; } && touch $@

data/.digits: | $(INSTALLED)
	@{ $(RUN) -m course_lib.data.make --real digits || $(RUN) -m course_lib.data.make --kind digits; } && touch $@

data/.questions: | $(INSTALLED)
	@$(RUN) -m course_lib.data.make --kind questions && touch $@

data/.minilm: | $(INSTALLED)
	@$(RUN) -m course_lib.data.make --real minilm && touch $@ || echo "going on without MiniLM"

data/.ncep: | $(INSTALLED)
	@$(RUN) -m course_lib.data.make --real ncep && touch $@ || echo "going on without the real data"
