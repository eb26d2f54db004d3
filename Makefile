# Needs python3 (3.11 or newer), make and pip; everything else goes into .venv, in the versions of constraints.txt.
# VERSIONS=newest, lowest: into .venv-newest or .venv-lowest, in those of constraints-newest.txt (Python 3.12 or newer)
# or constraints-lowest.txt (Python 3.11).
PYTHON ?= python3
VENV := .venv$(VERSIONS:%=-%)
CONSTRAINTS := constraints$(VERSIONS:%=-%).txt
BIN := $(VENV)/bin

.PHONY: help install docs dist optimizer-settings test test-extended test-slow test-all extended-tests conversion-matrix ctranslate2 text-matrix fine-tuning trajectories scale-test kill-test-hosts trainer decoding-matrix glossary published audit mutations external-pairs external-pairs-flax source-mistakes comparison-cost benchmark-conversion benchmark-verification fuzz benchmark benchmark-translation serve-test screenshots benchmark-startup benchmark-operations benchmark-dropout benchmark-memory benchmark-execution benchmark-gpu corpus-scale plan-sweep plan-compiler multi30k models mistakes kill-test demo settings lint types

# List the targets.
help:
	@awk '/^# / {text = text substr($$0, 2); next} /^[a-z0-9-]+:/ && text {printf "%-24s%s\n", substr($$1, 1, length($$1) - 1), text} \
		!/^[A-Z0-9_]+ / {text = ""}' Makefile

# Create `.venv` and install what is missing.
install: $(VENV)/installed

$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[test]'
	touch $@

PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder --durations 10
# Run the test suite: about eight minutes on two cores. TESTS: arguments of pytest.
test: install
	$(PYTEST) -m 'not slow and not extended' $(TESTS)

# Run the suite and further cases, which take longer, as CI does. Twenty minutes on two cores.
test-extended: install
	$(PYTEST) $(TESTS)

# Run the tests marked `slow`: larger presets, SIGKILL, plans for TPUs, random audits, a sample of the mutations.
test-slow: plan-compiler
	$(BIN)/python -m pytest -m slow

# Run every test: the suite with the extended cases, then the tests marked `slow`; build the site and the wheel.
test-all: test-extended test-slow docs dist

# Time every case but the slow ones, and list those that `make test` leaves to `make test-extended`. Twenty minutes.
extended-tests: install
	$(PYTEST) --junitxml build/suite.xml
	$(BIN)/python -m benchmarks.extended_tests tests/extended.txt build/suite.xml docs/measurements/mutations.md

# Build the site: the docs, and the public names by their docstrings, in build/site/VERSION. A minute.
docs: install
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[docs]'
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env docs \
		build/site/$$($(BIN)/python -c 'import twinax; print(twinax.__version__)')

# Build the sdist, and from it the wheel, in dist/; check what an index shows of them. Half a minute.
dist: install
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dist]'
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m twine check --strict dist/*

# Compare the checkpoint families with the twins. Four minutes.
conversion-matrix: install
	$(BIN)/python -m benchmarks.conversion.conversion_matrix docs/measurements/conversion-matrix.md

# Folders that a target needs, without a default.
data = "$(or $(DATA),$(error make $@: needs DATA=FOLDER, with the files of Multi30k))"
pairs = "$(or $(PAIRS),$(error make $@: needs PAIRS=FOLDER, with the projects to compare))"

# Compare tokenizers and translations with transformers. DATA=FOLDER: Multi30k. Eight minutes.
text-matrix: install
	$(BIN)/python -m benchmarks.conversion.text_matrix docs/measurements/text-matrix.md $(data)

RUN ?= runs/ctranslate2
# Compare beam search in four backends, and its BLEU. DATA=FOLDER: Multi30k. Half an hour; half of it trains RUN.
ctranslate2: install
	$(BIN)/python -m benchmarks.decoding.ctranslate2_matrix docs/measurements/ctranslate2.md $(data) $(RUN)

# Measure how often a model uses the terms of a glossary. DATA=FOLDER: Multi30k. An hour; most of it trains a run.
glossary: install
	$(BIN)/python -m benchmarks.decoding.glossary docs/measurements/glossary.md $(data) runs/glossary

# Fine-tune a Marian directory of OPUS-MT's size and convert it back. Five minutes.
fine-tuning: install
	$(BIN)/python -m benchmarks.training.fine_tuning runs/fine-tuning

# Compare training in both frameworks, update by update. Seven minutes.
trajectories: install
	$(BIN)/python -m benchmarks.training.trajectories docs/measurements/trajectories.md

# Train in twinax, in the Trainer of transformers, and in twinax again. Three minutes.
trainer: install
	$(BIN)/python -m benchmarks.training.trainer docs/measurements/trainer.md

FAST_COMPILATION = $(shell $(BIN)/python -c "from twinax.backend import xla_flags; print(xla_flags.fast_compilation())")
# Train on every mesh of eight virtual devices and in several processes, resume elsewhere, kill. Under 20 minutes.
scale-test: install
	XLA_FLAGS="--xla_force_host_platform_device_count=8 $(FAST_COMPILATION)" $(BIN)/python -m benchmarks.training.meshes docs/measurements/scale-test.md
	XLA_FLAGS="$(FAST_COMPILATION)" $(BIN)/python -m benchmarks.training.processes docs/measurements/scale-test.md

# The kills of scale-test alone: SIGKILL at 25 random moments in a run of two processes. Seven minutes.
kill-test-hosts: install
	XLA_FLAGS="$(FAST_COMPILATION)" $(BIN)/python -m benchmarks.training.processes docs/measurements/scale-test.md kills

# Compare decoding with transformers, token by token. Half an hour.
decoding-matrix: install
	$(BIN)/python -m benchmarks.decoding.decoding_matrix docs/measurements/decoding-matrix.md

# Compare the five published systems with the twins. Eight minutes.
published: install
	$(BIN)/python -m benchmarks.published.published_matrix docs/measurements/published.md

# Audit models with planted mistakes and the encoder-decoders of transformers. Two minutes.
audit: install
	$(BIN)/python -m benchmarks.audit.audit_defects docs/measurements/audit.md
	$(BIN)/python -m benchmarks.audit.audit_transformers docs/measurements/audit.md

# Plant mistakes in the source, one at a time, and list the test that catches each. An hour and a half, estimated.
mutations: install
	$(BIN)/python -m benchmarks.mutations docs/measurements/mutations.md

# Plant defects in pairs of models and diagnose them. PAIRS=FOLDER: the package bonsai.
external-pairs: install
	$(BIN)/python -m benchmarks.external_pairs.measure docs/measurements/external-pairs.md $(pairs)

# Make mistakes in the source files of ports and diagnose them. PAIRS=FOLDER: the projects.
source-mistakes: install
	$(BIN)/python -m benchmarks.external_pairs.source.measure docs/measurements/source-mistakes.md $(pairs)

# Compare every optimizer of torch.optim and optax with itself, one setting changed. Two minutes.
optimizer-settings: install
	$(BIN)/python -m benchmarks.compare.optimizer_settings docs/measurements/optimizer-settings.md

# Measure time and memory of comparing models with 0.1 to 1.5 billion parameters. Needs 20 GB of memory. Half an hour.
comparison-cost: install
	$(BIN)/python -m benchmarks.compare.comparison_cost docs/measurements/comparison-cost.md

OLD := .venv-external-pairs
# Compare the Flax and torch classes of transformers 4.55.4, in an environment of its own.
external-pairs-flax: $(OLD)/.installed
	$(OLD)/bin/python -m benchmarks.external_pairs.flax docs/measurements/external-pairs-flax.md

$(OLD)/.installed: constraints.txt
	test -x $(OLD)/bin/python || $(PYTHON) -m venv $(OLD)
	$(OLD)/bin/python -m pip install --quiet transformers==4.55.4 huggingface_hub==0.34.4 tokenizers==0.21.4 \
		$$(grep -E '^(jax|jaxlib|flax|torch|numpy|scipy|rich)==' constraints.txt)
	$(OLD)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

TMP ?= /tmp
# Measure time and memory of conversions. Needs 20 GB in TMP. 20 minutes.
benchmark-conversion: install
	$(BIN)/python -m benchmarks.conversion.conversion_speed docs/measurements/benchmark-conversion.md $(TMP)

COUNT ?= 1000
# Damage every kind of file that twinax reads COUNT times. KINDS: only these. Findings: runs/fuzz.
fuzz: install
	$(BIN)/python -m benchmarks.conversion.fuzzing docs/measurements/fuzz.md $(COUNT) $(KINDS)

# Measure the cost of comparing checksums. Needs 5 GB in TMP. Two minutes.
benchmark-verification: install
	$(BIN)/python -m benchmarks.conversion.verification docs/measurements/benchmark-verification.md $(TMP)

# Measure the seconds to the first updates, validation and translation: DATA=FOLDER. Five minutes.
benchmark-startup: install
	$(BIN)/python -m benchmarks.training.startup docs/measurements/benchmark-startup.md $(data)

# Measure the cost of dropout in a train step. A minute.
benchmark-dropout: install
	$(BIN)/python -m benchmarks.training.dropout small

# Compare the speed with PyTorch, Linen, transformers and CTranslate2. PARTS: only these. An hour, estimated.
benchmark: install
	$(BIN)/python -m benchmarks.performance.performance docs/measurements/benchmark.md $(PARTS)

# Translate 3,000 sentences with twinax, CTranslate2 and transformers. DATA=FOLDER: Multi30k. An hour; a fifth of it trains RUN.
benchmark-translation: install
	$(BIN)/python -m benchmarks.performance.translation docs/measurements/benchmark.md $(data) $(RUN)

# Load `twinax serve` with 200 clients, beside CTranslate2; kill and restart it. DATA=FOLDER: Multi30k. Half an hour, with RUN.
serve-test: install
	$(BIN)/python -m benchmarks.serving.load docs/serving.md $(data) $(RUN)

# Take the pictures of reports, and of the page of `twinax serve` if there is RUN. Needs Chromium. Four minutes.
screenshots: install
	$(BIN)/python -m benchmarks.screenshots docs $(RUN)

# Measure the time per kind of operation of a train step and of beam search. A few minutes.
benchmark-operations: install
	$(BIN)/python -m benchmarks.performance.operations docs/measurements/benchmark-operations.md

# Measure what keeping freed memory gains in a train step on a CPU. Six minutes.
benchmark-memory: install
	$(BIN)/python -m benchmarks.training.malloc

# Measure rematerialization and scanned layers on a CPU. Four minutes.
benchmark-execution: install
	$(BIN)/python -m benchmarks.training.execution docs/measurements/benchmark-execution.md

# Compile base and big for slices of TPUs, without one. Under 30 minutes.
plan-sweep: plan-compiler
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.planning.plan_sweep docs/measurements/plan-sweep.md docs/measurements/plan.png

# Install libtpu, 209 MB. Without JAX_PLATFORMS=cpu, JAX then looks for a TPU at every start.
plan-compiler: install
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[plan]'

# Measure parity, training and decoding on a GPU or TPU; refuses a CPU. Twenty minutes, estimated.
benchmark-gpu: install
	$(BIN)/python -m benchmarks.gpu docs/measurements/benchmark-gpu.md

# Train both directions, fine-tune, score and prove: DATA=FOLDER SEEDS=3. Hours; resumes.
multi30k: install
	$(BIN)/python -m benchmarks.multi30k.results $(data) $(SEEDS)

# Write the best model per direction as a float16 file to runs/multi30k: DATA=FOLDER. Hours without the runs.
models: install
	$(BIN)/python -m benchmarks.multi30k.models $(data)

# Measure the cost of the mistakes of the published systems: DATA=FOLDER. An hour; resumes.
mistakes: install
	$(BIN)/python -m benchmarks.published.mistakes $(data) $(UPDATES)

# Check style and format with ruff.
lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Check types with pyright.
types: install
	$(BIN)/pyright

# Prepare corpora of 1 and 10 million pairs, and kill a preparation 20 times. 40 minutes.
corpus-scale: install
	$(BIN)/python -m benchmarks.corpus.scale docs/measurements/corpus-scale.md

# Train on a small artificial language, translate, and prove the result. Two minutes.
demo: install
	$(BIN)/twinax demo

# Generate docs/settings.md from the configs; a test compares them.
settings: install
	$(BIN)/python -m benchmarks.settings_page docs/settings.md

# Kill a training twenty times, and fifty conversions to each of nine forms. Ten minutes.
kill-test: install
	$(BIN)/python -m pytest -m slow tests/train/test_kills.py tests/convert/test_killed_conversions.py
