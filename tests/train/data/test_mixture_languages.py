"""Several directions of a multilingual model in one run; the oracle is the family's tokenizer of `transformers`."""

from dataclasses import replace

import pytest
from rich.console import Console

import twinax
from parity_tests.support.text import reference_tokenizer, write_files, write_model
from twinax.backend.errors import ConfigError
from twinax.configs.data import BatchConfig, CorpusConfig, TokenizerConfig
from twinax.configs.mixture import Mixture, MixtureCorpus
from twinax.configs.run import LoopConfig, RunConfig
from twinax.train.checkpointing.run_directory import prepare_again
from twinax.train.data.prepare import prepare
from twinax.train.loop.loop import train
from twinax.train.loop.warm_start import read_initial_weights, settings_of
from twinax.train.tracking.metrics import read_metrics

pytestmark = pytest.mark.filterwarnings("ignore")  # `transformers` warns about how it writes
QUIET = Console(quiet=True)
TEXTS = {
    "de": [f"Das {noun} ist {i} mal größer!" for i in range(4) for noun in ("Haus", "Mädchen", "Ufer")],
    "en": [f"The {noun} is {i} times bigger, isn't it?" for i in range(4) for noun in ("house", "girl", "shore")],
    "fr": [f"La {noun} est {i} fois plus grande." for i in range(4) for noun in ("maison", "fille", "rive")],
}
DIRECTIONS = (("de", "en"), ("en", "de"), ("en", "fr"))
CODES = {
    "NLLB": {"de": "deu_Latn", "en": "eng_Latn", "fr": "fra_Latn"},
    "M2M100": {"de": "de", "en": "en", "fr": "fr"},
}


@pytest.fixture(scope="module", params=CODES)
def family(request, tmp_path_factory):
    """(name, folder of a small random model, mixture of three directions)."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    write_files(name, folder / "model", (TEXTS["de"], [*TEXTS["en"], *TEXTS["fr"]]), 200)
    write_model(name, folder / "model")
    for language, texts in TEXTS.items():
        (folder / language).write_text("\n".join(texts) + "\n")
    members = (
        MixtureCorpus(
            name=f"{src}-{tgt}",
            corpus=CorpusConfig(src=str(folder / src), tgt=str(folder / tgt), held_out=2),
            src_lang=CODES[name][src],
            tgt_lang=CODES[name][tgt],
        )
        for src, tgt in DIRECTIONS
    )
    return name, folder / "model", Mixture(corpora=tuple(members))


def run_of(path, model, mixture):
    mixture.write(str(path / "mixture.json"))
    config, _ = settings_of(model)
    return RunConfig(
        corpus=CorpusConfig(mixture=str(path / "mixture.json")),
        init_from=str(model),
        batches=BatchConfig(tokens=200, shapes=1),
        model=config,
        loop=LoopConfig(updates=2, translations=2),
    )


def test_each_direction_has_the_ids_of_transformers(family, tmp_path):
    name, model, mixture = family
    run = run_of(tmp_path, model, mixture)
    weights = read_initial_weights(run)
    from_texts = prepare(run, weights.tokenizers, sizes=weights.config, store=tmp_path / "store")
    stored = replace(run, corpus=CorpusConfig(store=str(tmp_path / "store")))
    from_store = prepare(stored, weights.tokenizers, sizes=weights.config)
    assert from_store.fingerprint() == from_texts.fingerprint()
    assert from_store.tokenizers.digest() == from_texts.tokenizers.digest()
    for data in (from_texts, from_store):
        for (src, tgt), part, train_pairs in zip(DIRECTIONS, data.valid, data.train.corpora, strict=True):
            codes = {"src_lang": CODES[name][src], "tgt_lang": CODES[name][tgt]}
            reference = reference_tokenizer(name, model, **codes)
            expected = {}
            for pair in zip(TEXTS[src], TEXTS[tgt], strict=True):
                encoded = reference(pair[0], text_target=pair[1])
                expected[pair[1]] = encoded["input_ids"], [reference.eos_token_id, *encoded["labels"]]
            kept = [expected.pop(target) for target in part.references]
            for pairs, ids in ((part.pairs, kept), (train_pairs, [*expected.values()])):
                rows = range(len(ids))
                both = zip(pairs.sources(rows), pairs.targets(rows), strict=True)
                assert [(a.tolist(), b.tolist()) for a, b in both] == ids
            assert part.model.forced_bos_id == kept[0][1][1]


@pytest.mark.parametrize("family", ["NLLB"], indirect=True)
def test_validation_decodes_each_direction_as_translate_does(family, tmp_path):
    name, model, mixture = family
    run = run_of(tmp_path, model, mixture)
    train(run, tmp_path / "run", QUIET)
    (record,) = (r["validation"] for r in read_metrics(tmp_path / "run") if "validation" in r)
    # the run's tokenizer has the languages of the first direction
    prepared = prepare_again(tmp_path / "run", run, print)
    translator = twinax.load(tmp_path / "run")
    for (src, tgt), (_, reference, translation), part in zip(
        DIRECTIONS, record["samples"], prepared.valid, strict=True
    ):
        source = TEXTS[src][TEXTS[tgt].index(reference)]
        codes = {"src_lang": CODES[name][src], "tgt_lang": CODES[name][tgt]}
        longest = max(len(ids) for ids in part.pairs.targets(range(2)))
        assert translator.translate([source], framework="torch", beam_size=1, max_length=longest * 3 // 2, **codes) == [
            translation
        ]


@pytest.mark.parametrize("missing", ["src_lang", "tgt_lang"])
def test_a_language_of_some_corpora_only_is_refused(missing, family, tmp_path):
    _, model, mixture = family
    first, *others = mixture.corpora
    run = run_of(tmp_path, model, Mixture(corpora=(replace(first, **{missing: None}), *others)))
    weights = read_initial_weights(run)
    flag = f"--tokenizer.{missing.replace('_', '-')}"
    line = (
        f"^{missing}: some corpora of {run.corpus.mixture} set it; set it for de-en too, or for all others by {flag}$"
    )
    with pytest.raises(ConfigError, match=line):
        prepare(run, weights.tokenizers, sizes=weights.config)
    language = getattr(first, missing)
    prepared = prepare(
        replace(run, tokenizer=TokenizerConfig(**{missing: language})), weights.tokenizers, sizes=weights.config
    )
    expected = prepare(run_of(tmp_path, model, mixture), weights.tokenizers, sizes=weights.config)
    assert prepared.fingerprint() == expected.fingerprint()
