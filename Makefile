# Needs python3 (3.11 or newer), make and pip; everything else goes into .venv, in the versions of constraints.txt.
# VERSIONS=newest: into .venv-newest, in those of constraints-newest.txt, which need Python 3.12.
PYTHON ?= python3
VENV := .venv$(VERSIONS:%=-%)
CONSTRAINTS := constraints$(VERSIONS:%=-%).txt
BIN := $(VENV)/bin

.PHONY: install optimizer-settings test test-slow conversion-matrix ctranslate2 text-matrix fine-tuning trajectories scale-test kill-test-hosts trainer decoding-matrix published audit mutations strangers strangers-flax comparison-cost benchmark-conversion benchmark-verification fuzz benchmark benchmark-startup benchmark-operations benchmark-dropout benchmark-memory benchmark-execution benchmark-gpu plan-sweep plan-compiler multi30k models mistakes kill-test demo settings lint types

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[test]'
	touch $@

# TESTS: only these, as pytest's arguments.
test: install
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal --durations 10 $(TESTS)

# Minutes rather than seconds: larger presets, SIGKILL, plans for TPUs, random audits, some mutations.
test-slow: plan-compiler
	$(BIN)/python -m pytest -m slow

# The families of transformers, fairseq and Marian against the twins; writes the tables. About four minutes.
conversion-matrix: install
	$(BIN)/python -m benchmarks.conversion.conversion_matrix docs/conversion.md

# Text of the families against transformers; writes the table. TEXT: Multi30k. About eight minutes.
TEXT ?= ../shared/data/multi30k
text-matrix: install
	$(BIN)/python -m benchmarks.conversion.text_matrix docs/pretrained.md $(TEXT)

# One beam search in four engines, and their BLEU and speed, into docs/decoding.md. About half an hour, of which the
# training of a small model on TEXT takes half, unless RUN exists: make ctranslate2 RUN=runs/multi30k/de_en-0.
RUN ?= runs/ctranslate2
ctranslate2: install
	$(BIN)/python -m benchmarks.decoding.ctranslate2_matrix docs/decoding.md $(TEXT) $(RUN)

# Fine-tuning of a Marian directory of OPUS-MT's size, and back. About five minutes.
fine-tuning: install
	$(BIN)/python -m benchmarks.training.fine_tuning runs/fine-tuning

# Trainings in both frameworks, update by update; writes the table and the picture. About seven minutes.
trajectories: install
	$(BIN)/python -m benchmarks.training.trajectories docs/parity.md

# Trainings that move to transformers' Trainer and back; writes the table. About three minutes.
trainer: install
	$(BIN)/python -m benchmarks.training.trainer docs/training.md

# Trainings on every mesh of eight virtual devices, in several processes, resumed elsewhere, and killed; writes the tables.
# Under 20 minutes.
FAST_COMPILATION = $(shell $(BIN)/python -c "from twinax.backend import xla_flags; print(xla_flags.fast_compilation())")
scale-test: install
	XLA_FLAGS="--xla_force_host_platform_device_count=8 $(FAST_COMPILATION)" $(BIN)/python -m benchmarks.training.meshes docs/scaling.md
	XLA_FLAGS="$(FAST_COMPILATION)" $(BIN)/python -m benchmarks.training.processes docs/scaling.md

# SIGKILL at 25 random moments in a run of two processes; writes the counts. About seven minutes.
kill-test-hosts: install
	XLA_FLAGS="$(FAST_COMPILATION)" $(BIN)/python -m benchmarks.training.processes docs/scaling.md kills

# Beam search against transformers, token for token; writes the tables into the page. About a minute.
decoding-matrix: install
	$(BIN)/python -m benchmarks.decoding.decoding_matrix docs/decoding.md

# The five published systems against the twins, all variants; writes the table into the page. Eight minutes.
published: install
	$(BIN)/python -m benchmarks.published.published_matrix docs/published_systems.md

# Known mistakes, planted and found, and the encoder-decoders of transformers; writes the tables. Two minutes.
audit: install
	$(BIN)/python -m benchmarks.audit.audit_defects docs/audit.md
	$(BIN)/python -m benchmarks.audit.audit_transformers docs/audit.md

# Mistakes planted in the source, one at a time; writes what caught each into the page. About 35 minutes.
mutations: install
	$(BIN)/python -m benchmarks.mutations docs/mutations.md

# Defects planted in pairs of models, and whether the diagnosis finds them; writes the tables. PAIRS: other projects' models.
PAIRS ?= ../shared/data/pairs
strangers: install
	$(BIN)/python -m benchmarks.external_pairs.measure docs/compare.md $(PAIRS)

# Every optimizer of torch.optim and optax with one setting changed; writes the table. About two minutes.
optimizer-settings: install
	$(BIN)/python -m benchmarks.compare.optimizer_settings docs/compare.md

# Seconds and memory of a comparison of 110 million parameters; writes the table. About five minutes.
comparison-cost: install
	$(BIN)/python -m benchmarks.compare.comparison_cost docs/compare.md

# The Flax classes of the last release of transformers that has them, beside its torch classes; writes the table. It runs
# in an environment of its own, because the project's transformers has none.
OLD := .venv-strangers
strangers-flax: $(OLD)/.installed
	$(OLD)/bin/python -m benchmarks.external_pairs.flax docs/compare.md

$(OLD)/.installed: constraints.txt
	test -x $(OLD)/bin/python || $(PYTHON) -m venv $(OLD)
	$(OLD)/bin/python -m pip install --quiet transformers==4.55.4 huggingface_hub==0.34.4 tokenizers==0.21.4 \
		$$(grep -E '^(jax|jaxlib|flax|torch|numpy|scipy|rich)==' constraints.txt)
	$(OLD)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

# Time and memory of conversions, form by form and of 6 GB; writes the tables. Needs 20 GB in TMP. About 20 minutes.
TMP ?= /tmp
benchmark-conversion: install
	$(BIN)/python -m benchmarks.conversion.conversion_speed docs/conversion.md $(TMP)

# COUNT damaged versions of every kind of file that twinax reads; writes the counts, kind by kind, and keeps
# in runs/fuzz what is neither read nor refused. KINDS: only these.
COUNT ?= 1000
fuzz: install
	$(BIN)/python -m benchmarks.conversion.fuzzing docs/reliability.md $(COUNT) $(KINDS)

# What comparing checksums adds to the time of reading; writes the table. Needs 5 GB in TMP. About two minutes.
benchmark-verification: install
	$(BIN)/python -m benchmarks.conversion.verification docs/reliability.md $(TMP)

# From a command to its first updates, validation and translation: make benchmark-startup DATA=FOLDER; writes the table.
# About five minutes.
benchmark-startup: install
	$(BIN)/python -m benchmarks.training.startup docs/performance.md "$(DATA)"

# What dropout costs in a train step. About a minute.
benchmark-dropout: install
	$(BIN)/python -m benchmarks.training.dropout small

# Train step and beam search against PyTorch, Flax Linen, transformers and CTranslate2; writes the tables, the figures and
# the chart. PARTS: only these. About an hour, estimated.
benchmark: install
	$(BIN)/python -m benchmarks.performance.performance docs/performance.md $(PARTS)

# Where the time of a train step and of beam search goes, by kind of operation; writes the table. A few minutes.
benchmark-operations: install
	$(BIN)/python -m benchmarks.performance.operations docs/performance.md

# What keeping freed memory gains in a train step on a CPU. About six minutes.
benchmark-memory: install
	$(BIN)/python -m benchmarks.training.malloc

# What rematerialization and scanned layers cost on a CPU; writes the tables. About four minutes.
benchmark-execution: install
	$(BIN)/python -m benchmarks.training.execution docs/performance.md

# The base and big model compiled for slices of TPUs, without one; writes the tables and the picture. Under 30 minutes.
plan-sweep: plan-compiler
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.planning.plan_sweep docs/scaling.md docs/plan.png

# libtpu, in the version that JAX needs: 209 MB. Without JAX_PLATFORMS=cpu it looks for a TPU whenever JAX starts.
plan-compiler: install
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[plan]'

# Parity, training and decoding on a GPU or TPU; writes the tables. Refuses a CPU. About twenty minutes, estimated.
benchmark-gpu: install
	$(BIN)/python -m benchmarks.gpu docs/performance.md

# Multi30k both ways, with seeds, fine-tuned, scored and proven, into docs/results.md: make multi30k DATA=FOLDER. Hours.
multi30k: install
	$(BIN)/python -m benchmarks.multi30k.results "$(DATA)" $(SEEDS)

# The two best of these models as float16 files in runs/multi30k, and their SHA-256 into docs/results.md. Hours.
models: install
	$(BIN)/python -m benchmarks.multi30k.models "$(DATA)"

# What the mistakes of the published systems cost, into docs/published_systems.md: make mistakes DATA=FOLDER. An hour.
mistakes: install
	$(BIN)/python -m benchmarks.published.mistakes "$(DATA)" $(UPDATES)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/pyright

# A small language learnt, translated and proven. About two minutes.
demo: install
	$(BIN)/twinax demo

# The page of every setting, from the configs themselves.
settings: install
	$(BIN)/python -m benchmarks.settings_page docs/settings.md

# Twenty kills of a training at random moments, and fifty of each form of conversion; prints their counts. Ten minutes.
kill-test: install
	$(BIN)/python -m pytest -m slow tests/train/test_kills.py tests/convert/test_killed_conversions.py
