# `make` alone prints the targets and what they do.
PYTHON ?= python3
ROWS ?= 300

# What set-up found on this machine (JAVA_HOME); read when a target runs, since set-up may just have written it.
WITH_ENV = set -a; . ./.millrace/env; set +a;
COMPILE = .venv/bin/uv pip compile -q $(UPGRADE) --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-annotate --custom-compile-command "make lock"
IMAGES = inference_images

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types up down lock clean

help:  ## Print this menu
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## Make both environments, find or get Java, add the demo model; quick when nothing changed
	@$(PYTHON) scripts/setup.py

demo: setup  ## Run the whole graph on real review sentences (ROWS=300, or ROWS=all)
	@$(WITH_ENV) .venv/bin/millrace demo --rows $(ROWS)

test: setup  ## Lint, types, unit, runner, Spark, DAG, vLLM and end-to-end tests (TIERS="unit dags" for some)
	@.venv/bin/python scripts/run_tests.py $(TIERS)

lint: setup  ## Check the style of all code
	@.venv/bin/python scripts/run_tests.py lint

types: setup  ## Check the types of all code
	@.venv/bin/python scripts/run_tests.py types

up: setup  ## Start Airflow and its UI on this machine, for triggering, backfilling and clearing by hand
	@$(WITH_ENV) .venv/bin/millrace up

down:  ## Stop what `make up` started
	@if [ -x .venv/bin/millrace ]; then .venv/bin/millrace down; \
	elif [ -e "$${MILLRACE_STATE:-.millrace}/postgres/postmaster.pid" ]; then \
		echo "the database may be running, and its tools were removed: run make setup, then make down" >&2; exit 1; \
	else echo "nothing is set up here: there is nothing to stop"; fi

lock: setup  ## Pin all that environments and images install again (UPGRADE=--upgrade for newer versions)
	@$(COMPILE) --universal requirements/installer.in -o requirements/installer.lock.txt
	@$(COMPILE) --universal requirements/orchestrator.in -o requirements/orchestrator.lock.txt
	@$(COMPILE) --universal --overrides requirements/inference.overrides.in requirements/inference.in \
		-o requirements/inference.lock.txt
	@$(COMPILE) --universal $(IMAGES)/openai/requirements.in -o $(IMAGES)/openai/requirements.lock.txt
# The GPU image is for x86-64 Linux alone.
	@$(COMPILE) --python-platform x86_64-manylinux_2_28 $(IMAGES)/vllm/requirements.in -o $(IMAGES)/vllm/requirements.lock.txt

clean:  ## Remove the environments, the JDK and the demo model; runs, tables and the database stay
	@$(PYTHON) scripts/setup.py clean
