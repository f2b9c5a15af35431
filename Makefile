# Everything runs in .venv, which `make install` creates; `make test` does so itself. The demos have an environment of
# their own, with what they need and no more.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# Most of what is installed is never imported, so pip compiles nothing. What the tests import is compiled once, by
# `install`: else all of their processes begin with that at the same time.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(PIP) install --quiet --no-compile -c constraints.txt
# The extra torchtitan is missing: its data sets want an older fsspec. `make servers` gets what its tests need.
EXTRAS := dev,s3,gcs,azure,fsspec-clouds,ray,lightning,transformers,torch-checkpointing,otel,mlflow,wandb,serve
STAMP  := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest --durations=20
# Some tests wait, for a stalled server or a dead rank, so two processors carry four. Files keep the order of their
# names: by number of tests the few that take long would be the last.
AT_ONCE := -n 4 --dist loadfile --no-loadscope-reorder
QUICK := -m "not slow and not long and not ceph"
OTHERS := -m "(slow or hypothesis) and not long and not ceph"

.PHONY: install demo demo-ray test test-all test-profile test-long simulate states soak matrix test-ceph check format docs site pictures bench bench-check servers clean

install: $(STAMP)

# torch comes first, so that no later package chooses another build of it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) pip setuptools
	$(INSTALL) torch
	$(INSTALL) --no-build-isolation -e ".[$(EXTRAS)]"
	$(PYTEST) --collect-only -q $(QUICK) > /dev/null || true
	touch $@

# pip shows its progress here, since somebody waits for it.
DEMOS := .venv-demo
DEMO_PIP := $(DEMOS)/bin/python -m pip --disable-pip-version-check install --no-compile -c constraints.txt
DEMO_EXTRAS := demo

$(DEMOS)/.%: pyproject.toml constraints.txt
	test -x $(DEMOS)/bin/python || $(PYTHON) -m venv $(DEMOS)
	$(DEMO_PIP) pip setuptools
	$(DEMO_PIP) torch
	$(DEMO_PIP) --no-build-isolation -e ".[$(DEMO_EXTRAS)]"
	touch $@

demo: $(DEMOS)/.demo
	$(DEMOS)/bin/ckptstore demo

demo-ray: DEMO_EXTRAS := demo,ray
demo-ray: $(DEMOS)/.demo-ray
	$(DEMOS)/bin/ckptstore demo --engine ray

# The servers that the object-store tests talk to, on 127.0.0.1 alone, and the browser that the tests of pages look with.
# Where one cannot be installed, its tests are skipped and say so; with CI set that is a failure.
servers:
	$(PYTHON) tests/servers/install.py || test -z "$$CI"
	$(PYTHON) tests/browser/install.py || test -z "$$CI"

test: install servers
	$(PYTEST) $(AT_ONCE) $(QUICK)

# The rest of what CI runs, with more examples of each property. The benchmarks run too, at a small size: that shows that
# they work, and no more.
test-all: install servers
	$(PYTEST) $(AT_ONCE) $(OTHERS)
	$(PYTEST) benchmarks -q -m "not long"

# What each of these tests costs, in seconds of processors with all children: a line each, and tables.
test-profile: install servers
	PYTHONPATH=tests $(PYTEST) $(AT_ONCE) -c pyproject.toml -p profiling --profile-to=profile-quick.jsonl $(QUICK)
	PYTHONPATH=tests $(PYTEST) $(AT_ONCE) -c pyproject.toml -p profiling --profile-to=profile-all.jsonl $(OTHERS)

# What takes longer than CI has: every trainer, every layout, the demo, the judge. Installs the trainers' packages.
test-long: install servers
	$(PYTHON) tests/servers/install.py --all
	$(PYTEST) $(AT_ONCE) -m long
	$(PYTEST) benchmarks -q -m long

# Seeds of the simulation that no test has run yet, for as long as one likes.
simulate: install
	PYTHONPATH=tests $(BIN)/python -m kit.simulation --seed $(or $(SEED),10000000) --seconds $(or $(SECONDS),600)

# Seeds of states that no test has run yet, for as long as one likes.
states: install
	PYTHONPATH=tests $(BIN)/python -m kit.states --seed $(or $(SEED),10000000) --seconds $(or $(SECONDS),600)

# A day of use, every kill and the simulation; ends with a table.
soak: install
	$(BIN)/python tests/soak/soak.py --seconds $(or $(SECONDS),600)

# The quick tests with the lowest, a middle and the newest torch, on three versions of Python; fetches gigabytes.
matrix: install
	$(BIN)/python tests/environments/matrix.py

test-ceph: install
	$(BIN)/python tests/servers/install_ceph.py
	$(PYTEST) -m ceph

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The parts of pages that follow from the code; a test fails when they are not up to date.
docs: install
	$(BIN)/python docs/generate.py

# The pictures of the docs, taken by the tests of pages.
pictures: install servers
	PICTURES=$(CURDIR)/docs/pictures $(PYTEST) tests/browser/test_pictures.py

# The pages with search and the whole reference, in site/.
site: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html; with the search: $(PYTHON) -m http.server --bind 127.0.0.1 --directory site 8000"

bench: install servers
	CKPTSTORE_BENCH=full $(PYTEST) benchmarks --timeout 0

# Every claim of the README, and small sizes beside the peers, without fsync, whose time is the disk's: fails when a
# ratio is below its floor.
bench-check: install
	$(BIN)/ckptstore bench readme --floors benchmarks/floors-readme.json
	for what in save load async directory node-cache ls; do \
	  $(BIN)/ckptstore bench $$what --size 256MiB --shape tensors --no-durable --repeat 7 --peers dcp,ray,cp \
	    --floors benchmarks/floors.json || exit 1; \
	done
	$(BIN)/ckptstore bench save --size 256MiB --shape tensors --repeat 7 --peers dcp \
	  --floors benchmarks/floors-disk.json
	$(BIN)/ckptstore bench tier --size 512MiB --shape tensors --repeat 5 --peers none \
	  --floors benchmarks/floors-tier.json
	for what in save load; do \
	  $(BIN)/ckptstore bench $$what --to s3-test --size 128MiB --shape tensors --repeat 7 \
	    --peers dcp,s3torchconnector --floors benchmarks/floors-s3.json || exit 1; \
	done
	CKPTSTORE_BENCH=full CKPTSTORE_BENCH_ROUNDS=1 $(PYTEST) benchmarks/test_ray_train.py -k "ten_saves and s3 and busy" \
	  --floors benchmarks/floors-ray.json --timeout 0

clean:
	rm -rf $(VENV) $(DEMOS) build dist .servers .mypy_cache .ruff_cache .hypothesis .benchmarks
