# Two commands do all the set-up on a machine with Python 3.11.2 or newer: `make demo` and `make test`.
# Each makes .venv and fetches what it needs; what it cannot fetch (Java, Maven, Node), it names.

PYTHON ?= python3
BROKER ?= none
BENCH ?= upload
WORKERS ?= 2
BIN := .venv/bin
# With it set, as in many images, each process that the tests start compiles all of tieringd anew.
unexport PYTHONDONTWRITEBYTECODE
# The order of sets is a part of a simulated history: with another seed of hashes it is another history.
export PYTHONHASHSEED := 0

.PHONY: help install install-dev parts kafka azurite promtool libfaketime chromium clients dashboards metrics-reference lock audit class-data prepared demo components test durations quick quick-tests affected sim mutants hypothesis soak drill fuzz swarm nightly coverage-map figures check format bench clean

help: ## Say what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11, 2) else f"tieringd needs Python 3.11.2 or newer, and $(PYTHON) is {sys.version.split()[0]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.installed: .venv/.made pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

# uv takes a third of pip's time. It does not read pip's configuration, so pip goes on where uv reaches no index.
.venv/.installed-dev: .venv/.made pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[dev,spark]' \
		|| $(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev,spark]'
	@touch .venv/.installed $@

# Workers that begin at the same time would each compile every module of the tests and of the packages.
.venv/.compiled: .venv/.installed-dev
	$(BIN)/pytest --collect-only --quiet > /dev/null
	@touch $@

# Compiling the modules and making the archives take longest before the tests, so they run side by side.
prepared: .venv/.installed-dev
	+$(MAKE) --no-print-directory --jobs 2 .venv/.compiled class-data

install: .venv/.installed ## Make .venv with tieringd in it

install-dev: .venv/.installed-dev ## Add what tests, checks and benchmarks need

kafka: .venv/.installed-dev ## Fetch Kafka's jars through Maven (into ~/.cache/tieringd)
	$(BIN)/python -m tests.support.kafka_jars

parts: ## Fetch and build what tests need and no Python package helps with: Kafka, Prometheus, Chromium, clients
	for part in kafka_jars promtool chromium foreign_clients; do $(PYTHON) -m tests.support.$$part || exit 1; done

azurite: .venv/.installed-dev ## Fetch Azurite through npm (into ~/.cache/tieringd)
	$(BIN)/python -m tests.support.azurite

libfaketime: .venv/.installed-dev ## Fetch libfaketime from Debian's package (into ~/.cache/tieringd)
	$(BIN)/python -m tests.support.stepped_clock

promtool: .venv/.installed-dev ## Fetch Prometheus and promtool from Debian's package (into ~/.cache/tieringd)
	$(BIN)/python -m tests.support.promtool

metrics-reference: .venv/.installed-dev ## Write docs/metrics_reference.md from the code
	$(BIN)/python -m deploy.metrics_reference

chromium: .venv/.installed-dev ## Fetch Chromium from Debian's packages (into ~/.cache/tieringd)
	$(BIN)/python -m tests.support.chromium

clients: .venv/.installed-dev ## Build the clients in Go and JavaScript that tests read with (into ~/.cache/tieringd)
	$(BIN)/python -m tests.support.foreign_clients

dashboards: .venv/.installed-dev ## Write deploy/grafana from its definition
	$(BIN)/python -m deploy.grafana_dashboards

lock: .venv/.installed-dev ## Write the locks of the container's packages from pyproject.toml (deploy/container), and their licences (docs/licences.md)
	$(BIN)/python -m deploy.container_locks
	$(BIN)/python -m deploy.licences

audit: .venv/.installed-dev ## Look up known vulnerabilities of all locked packages of the images (asks a service over the network; OSV_URL= names one of your own)
	$(BIN)/python -m venv .venv/audit
	.venv/audit/bin/pip install --quiet --disable-pip-version-check pip-audit
	failed=0; for lock in requirements.lock requirements-spark.lock requirements-build.lock; do \
		.venv/audit/bin/pip-audit --strict --progress-spinner off --require-hashes --disable-pip $(if $(OSV_URL),--vulnerability-service osv --osv-url $(OSV_URL)) \
			--requirement deploy/container/$$lock || failed=1; done; exit $$failed

class-data: kafka ## Make the archives that JVMs of tests start from in half the time (in ~/.cache/tieringd and .venv)
	$(BIN)/python -m tests.support.make_class_data

ifeq ($(BROKER),kafka)
demo: kafka
DEMO := python -m tests.support.kafka_demo
else
demo: .venv/.installed
DEMO := tieringd demo --config config/embedded.yaml
endif
demo: ## Upload, trim, read back and compare (BROKER=kafka: with a real broker and SeaweedFS)
	$(BIN)/$(DEMO)

components: ## Say what the machine lacks for the tests, before anything is installed
	@$(PYTHON) -m tests.support.components

# Two for tests with brokers and daemons, and four at a lower priority that take the others first.
test durations: WORKERS = 6
test: components prepared azurite promtool libfaketime chromium clients ## Run every test, on real components (TESTS=tests/unit: some; WORKERS=1: one at a time; ARGS="--shuffle 7": files in random order)
	$(BIN)/pytest --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder $(ARGS) $(TESTS)

durations: ## Run every test and write tests/durations.json, which orders the files of later runs
	$(MAKE) test ARGS=--record-durations

quick: .venv/.installed-dev ## The inner loop, under two minutes: formatting, types, layers, and the tests that need no process
	+$(MAKE) --no-print-directory --jobs 2 check quick-tests

# Two workers leave a fifth of two cores idle: some tests wait for processes and threads.
quick-tests: WORKERS = 4
quick-tests: .venv/.installed-dev
	TIERINGD_SEEDS=20 TIERINGD_PROFILE=quick $(BIN)/pytest --without-long-tests --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder \
		tests/unit/policies tests/unit/model tests/unit/formats tests/unit/config tests/unit/archive \
		tests/unit/topics tests/unit/reading tests/unit/archiving tests/unit/gateway \
		tests/unit/space tests/unit/housekeeping tests/unit/recovery tests/unit/endpoint \
		tests/unit/broker tests/unit/cache tests/unit/daemon tests/unit/test_errors.py tests/unit/test_metrics.py tests/simulation

affected: .venv/.installed-dev ## Run the tests that a change can touch, and say what is left out (BASE=HEAD~3)
	$(BIN)/python -m tests.support.affected $(if $(BASE),--base $(BASE)) -- --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder

sim: .venv/.installed-dev ## Run more simulated histories (SEEDS=2000)
	TIERINGD_SEEDS=$(or $(SEEDS),2000) $(BIN)/pytest --timeout 7200 --numprocesses $(WORKERS) tests/simulation

mutants: .venv/.installed-dev ## Take each guard out in turn, and see that the simulation notices (ARGS="--only NAME")
	$(BIN)/python -m tests.mutants.run --write --jobs $(WORKERS) $(ARGS)

hypothesis: .venv/.installed-dev ## Run the tests of Hypothesis with twenty times as many examples
	TIERINGD_PROFILE=nightly $(BIN)/pytest -m hypothesis --timeout 7200 --numprocesses $(WORKERS) --dist loadgroup \
		--no-loadscope-reorder tests/unit

soak: .venv/.installed-dev azurite ## Run a daemon before a failing store for a while (STORE=s3, gcs or azure; MINUTES=30)
	$(BIN)/python -m tests.support.soak --store $(or $(STORE),s3) --minutes $(or $(MINUTES),30)

drill: kafka promtool ## An outage, a full disk, a failover, an upgrade and a recovery on real parts; writes docs/operator_drill.md
	$(BIN)/python -m tests.support.operator_drill $(ARGS)

fuzz: .venv/.installed-dev ## Give wrong bytes to every parser, and then wrong frames to both listeners (MINUTES=10 each, SEED=0)
	$(BIN)/python -m tests.fuzz.run --seconds $$(( $(or $(MINUTES),10) * 60 )) --seed $(or $(SEED),0)
	TIERINGD_FUZZ_MINUTES=$(or $(MINUTES),10) $(BIN)/pytest --timeout 100000 tests/unit/endpoint/test_fuzz.py

swarm: .venv/.installed-dev kafka azurite libfaketime ## Let faults of every kind come over three brokers, daemons, gateways and a store (MINUTES=10, SEED=1, STORE=s3; ARGS=--write)
	$(BIN)/python -m tests.swarm.run --minutes $(or $(MINUTES),10) --seed $(or $(SEED),1) --store $(or $(STORE),s3) $(ARGS)

coverage-map: components kafka azurite promtool libfaketime chromium clients ## Record what each test file runs, for make affected (TESTS=tests/unit: some)
	$(BIN)/python -m tests.support.coverage_map --workers $(WORKERS) $(TESTS)

nightly: components kafka azurite promtool libfaketime chromium clients ## The long runs, one after the other: seeds, mutants, examples, soak, fuzzing, a swarm, coverage map (SEEDS=5000 MINUTES=10)
	$(MAKE) --keep-going --jobs 1 sim mutants hypothesis soak fuzz swarm coverage-map SEEDS=$(or $(SEEDS),5000) MINUTES=$(or $(MINUTES),10)

check: .venv/.installed-dev ## Format, lint, types, layers, test docstrings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/interrogate --quiet --exclude tests/support --exclude tests/golden tests

format: .venv/.installed-dev ## Format and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/.installed-dev ## Measure the upload path beside its peers (BENCH=partitions, BENCH=backlog; ARGS=--quick)
	$(BIN)/python -m benchmarks.$(BENCH) $(ARGS)

figures: .venv/.installed-dev ## Measure what a change can touch, before and after; a loss fails (BASE=HEAD~3; ARGS="--only space --record")
	$(BIN)/python -m benchmarks.figures $(if $(BASE),--base $(BASE)) $(ARGS)

clean: ## Remove .venv and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
