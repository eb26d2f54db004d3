"""A run's config: JSON round trip, errors, and values derived from the corpus."""

import json
from dataclasses import replace

import pytest

from twinax.configs import ConfigError, TransformerConfig
from twinax.configs import run as run_module
from twinax.configs.data import BatchConfig, CorpusConfig, TokenizerConfig
from twinax.configs.run import LoopConfig, RunConfig, differences, fine_tuning_defaults
from twinax.configs.training import TrainingConfig
from twinax.presets.runs import RUNS, run_preset

CORPUS = CorpusConfig(src="a", tgt="b")


@pytest.mark.parametrize("name", RUNS)
def test_ready_made_runs_go_through_json(name):
    run = run_preset(name)
    assert RunConfig.from_dict(json.loads(run.to_json())) == run


def test_a_run_goes_through_json():
    run = RunConfig(
        corpus=CORPUS,
        both_directions=True,
        init_from="x",
        tokenizer=TokenizerConfig(load=("p",)),
        model=TransformerConfig.preset("tiny", mask_value=-1e9),
        loop=LoopConfig(epochs=3, patience=2),
    )
    assert RunConfig.from_dict(json.loads(run.to_json())) == run


def test_json_that_is_no_run():
    document = RunConfig(corpus=CORPUS).to_dict()
    cases = [
        ({**document, "run_schema_version": 9}, "run_schema_version=9: this twinax reads versions 1"),
        ({**document, "run_schema_version": None}, "run_schema_version=None"),
        ({k: v for k, v in document.items() if k != "loop"}, "missing or unknown: loop"),
        ({**document, "lop": 1}, "missing or unknown: lop"),
        ({**document, "loop": 3}, "loop: must be a JSON object, not int"),
        ({**document, "loop": {"update": 3}}, "loop: has unknown fields update; its fields are average"),
        ({**document, "init_from": 3}, "init_from=3"),
        ({**document, "both_directions": 1}, "both_directions=1: must be true or false"),
    ]
    for values, text in cases:
        with pytest.raises(ConfigError, match=text):
            RunConfig.from_dict(values)


@pytest.mark.parametrize(("width", "rate"), [(32, 1e-3), (64, 1e-3), (128, 5e-4), (512, 1.25e-4), (1024, 6.25e-5)])
def test_fine_tuning_lowers_the_rate_of_wide_models(width, rate):
    model = TransformerConfig.preset("small", d_model=width)
    assert fine_tuning_defaults(model).learning_rate == pytest.approx(rate)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LoopConfig(updates=3, epochs=2), "updates=3, epochs=2: give one of them"),
        (lambda: LoopConfig(patience=0), "patience=0: must be at least 1"),
        (lambda: LoopConfig(translations=-1), "translations=-1"),
        (lambda: LoopConfig(metric="bleu", translations=0), "metric='bleu': needs translations"),
        (lambda: BatchConfig(tokens=0), "tokens=0: must be at least 1"),
        (lambda: CorpusConfig(src="a", tgt="b", valid_src="c"), "valid_src='c': needs valid_tgt too"),
        (lambda: CorpusConfig(src="a", tgt="b", valid_split="c"), "valid_split='c': needs dataset"),
        (lambda: CorpusConfig(src="a", tgt="b", valid_src="c", valid_tgt="d", held_out=3), "held_out=3: conflicts"),
        (lambda: CorpusConfig(src="a", tgt="b", held_out=0), "held_out=0: must be at least 1"),
        (lambda: RunConfig(corpus=CORPUS, tokenizer=TokenizerConfig(joint=False)), "shared_embeddings=True: needs one"),
        (
            lambda: RunConfig(
                corpus=CORPUS,
                both_directions=True,
                tokenizer=TokenizerConfig(load=("a", "b")),
                model=TransformerConfig.preset("tiny", shared_embeddings=False),
            ),
            "both_directions=True: .* which a tokenizer per side would keep apart",
        ),
        (
            lambda: RunConfig(
                corpus=CORPUS, both_directions=True, tokenizer=TokenizerConfig(kind="word", languages=("de", "en"))
            ),
            "both_directions=True: .* which tokenizer.languages would keep apart",
        ),
        (lambda: RunConfig(corpus=CORPUS, batches=BatchConfig(max_src_length=999)), "max_src_length=999: must not be"),
        (
            lambda: CorpusConfig(dataset="a.jsonl", split="test"),
            r"dataset='a.jsonl': a single file has no split \(test\)",
        ),
        (lambda: CorpusConfig(dataset="a.tsv", valid_split="test"), "valid_dataset to a separate file for validation"),
        (lambda: CorpusConfig(dataset="x", valid_dataset="b.csv.gz", valid_split="v"), "valid_dataset='b.csv.gz': a s"),
        (lambda: CorpusConfig(src="a", tgt="b", subset="c"), "subset='c': does not apply to text files"),
        (lambda: TokenizerConfig(load=("a",), kind="word"), "kind='word': only affects training a tokenizer"),
        (lambda: TokenizerConfig(split="bytes", vocab_size=99), "vocab_size=99: split='bytes' needs 260"),
        (lambda: run_preset("nope"), "nope: there is no such run; choose one of multi30k_de_en"),
    ],
)
def test_contradictions_are_refused(make, text):
    with pytest.raises(ConfigError, match=text):
        make()


def test_where_validation_is():
    assert CORPUS.validation is None
    assert CorpusConfig(src="a", tgt="b", valid_src="c", valid_tgt="d").validation == CorpusConfig(src="c", tgt="d")
    hub = CorpusConfig(dataset="x", subset="s", src_column="de", tgt_column="en", valid_split="validation")
    assert hub.validation == CorpusConfig(dataset="x", subset="s", split="validation", src_column="de", tgt_column="en")
    assert CorpusConfig(dataset="a.tsv", valid_dataset="b.tsv").validation == CorpusConfig(dataset="b.tsv")


def test_what_follows_from_the_corpus():
    assert LoopConfig().resolved(10) == LoopConfig(updates=2000, validate_every=100)
    assert LoopConfig().resolved(500) == LoopConfig(updates=15_000, validate_every=500)
    assert LoopConfig(epochs=2).resolved(5000) == LoopConfig(updates=10_000, validate_every=2000)
    assert LoopConfig(updates=7, validate_every=3).resolved(5) == LoopConfig(updates=7, validate_every=3)
    sizes = [TokenizerConfig().sized(pairs).vocab_size for pairs in (10, 2000, 29_000, 10**7)]
    assert sizes == [1000, 2000, 7700, 32_000]
    assert TokenizerConfig(vocab_size=300).sized(10**6).vocab_size == 300


@pytest.mark.parametrize(("corpus", "batch"), [(40_000, 1024), (200_000, 2000), (10_000_000, 4096)])
def test_a_small_corpus_has_small_batches(corpus, batch):
    assert BatchConfig().sized(corpus).tokens == batch
    assert BatchConfig(tokens=7).sized(corpus).tokens == 7


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_schedule_with_an_end_ends_with_the_run(schedule):
    corpus, loop = CorpusConfig(src="a", tgt="b"), LoopConfig(epochs=9)
    for total, end in ((None, 900), (300, 300)):
        training = TrainingConfig(schedule=schedule, warmup_updates=100, total_updates=total)
        assert RunConfig(corpus=corpus, training=training, loop=loop).resolved(100).training.total_updates == end
    assert RunConfig(corpus=corpus, loop=loop).resolved(100).training.total_updates is None
    training = TrainingConfig(schedule=schedule, warmup_updates=1000)
    with pytest.raises(ConfigError, match="warmup_updates=1000: the run has 900 updates"):
        RunConfig(corpus=corpus, training=training, loop=loop).resolved(100)


def test_what_cannot_translate_is_refused_when_it_begins():
    """But not when its config is read, because older runs have such configs."""
    model = TransformerConfig.published("leftover", as_published=True)
    run = RunConfig(corpus=CorpusConfig(src="a", tgt="b"), model=model)
    assert RunConfig.from_dict(run.to_dict()) == run
    with pytest.raises(ConfigError, match="translations=200: a model with cross_mask='encoder' cannot translate; set"):
        run.resolved(10)


def test_steps_of_the_rate_are_epochs():
    corpus = CorpusConfig(src="a", tgt="b")
    for step_updates, steps in ((None, 100), (7, 7)):
        training = TrainingConfig(schedule="step", step_updates=step_updates)
        assert RunConfig(corpus=corpus, training=training).resolved(100).training.step_updates == steps
    assert RunConfig(corpus=corpus).resolved(100).training.step_updates is None


def test_older_versions_are_migrated(monkeypatch):
    """As a later version would migrate it, with a field renamed."""

    def rename(values):
        return {**values, "loop": {"updates": values["loop"]["steps"]}}

    monkeypatch.setattr(run_module, "MIGRATIONS", (rename,))
    monkeypatch.setattr(run_module, "RUN_SCHEMA_VERSION", 2)
    document = RunConfig(corpus=CORPUS, loop=LoopConfig(updates=5)).to_dict()
    assert RunConfig.from_dict(document) == RunConfig.from_dict(
        {**document, "run_schema_version": 1, "loop": {"steps": 5}}
    )


def test_differences_name_fields():
    run = RunConfig(corpus=CORPUS, loop=LoopConfig(updates=3))
    other_run = RunConfig(corpus=CorpusConfig(src="a", tgt="c"), loop=LoopConfig(updates=4))
    assert differences(run, other_run) == ["corpus.tgt='b' and not 'c'", "loop.updates=3 and not 4"]


def test_a_separate_file_for_validation_has_no_part_of_the_corpus():
    columns = {"src_column": "de", "tgt_column": "en"}
    corpus = CorpusConfig(dataset="x", subset="de-en", split="train[:90%]", valid_dataset="v.jsonl", **columns)
    assert corpus.validation == CorpusConfig(dataset="v.jsonl", **columns)
    assert replace(corpus, valid_dataset="y").validation == replace(corpus, dataset="y", valid_dataset=None)
    with pytest.raises(ConfigError, match=r"valid_dataset='v.jsonl': a single file has no split .* subset \(de\)"):
        CorpusConfig(src="a", tgt="b", subset="de", valid_dataset="v.jsonl", **columns)
