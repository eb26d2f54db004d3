"""Training pairs with a glossary: which sources show terms, and that stores and runs keep to one glossary."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.mixtures import assert_same_batches, member, run_of, write_corpora
from twinax.backend.errors import ConfigError, DataError, RunError
from twinax.configs.data import CorpusConfig, TokenizerConfig
from twinax.configs.mixture import Mixture
from twinax.configs.run import RunConfig
from twinax.train.checkpointing.run_directory import locked, prepare_again, prepare_in
from twinax.train.data import encoding, store_writing
from twinax.train.data.prepare import prepare
from twinax.train.data.report import corpus_tables
from twinax.train.processes.process_group import ProcessGroup
from twinax.train.text.glossary import TAGS

TERMS = {"a": "a", "b c": "b c", "f": "q"}  # the target "q" is nowhere


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_corpora(tmp_path_factory.mktemp("corpora"))
    (folder / "terms.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in TERMS.items()))
    (folder / "other.tsv").write_text("d\td\n")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def with_glossary(folder, name="terms.tsv", **settings):
    return run_of(folder, corpus=replace(member(folder, "back").corpus, glossary=str(folder / name)), **settings)


def annotated(line):
    """The source of a pair as text that the tokenizer reads, by replacing words; the target is the same."""
    words = line.replace("b c", "b_c").split()
    marked = (f"<term> {word} </term>" if word in ("a", "b_c") else word for word in words)
    return " ".join(marked).replace("b_c", "b c")


def test_sources_of_pairs_with_an_even_number_show_terms(folder):
    """Those whose target term is in the target; validation sources show none."""
    lines = []
    prepared = prepare(with_glossary(folder), say=lines.append)
    tokenizer = prepared.tokenizers.src
    assert [tokenizer.id_of(tag) for tag in TAGS] == [4, 5]
    assert prepared.run.tokenizer.tags == TAGS
    sources = Path(folder / "back.src").read_text().splitlines()
    shown = [annotated(text) if i % 2 == 0 else text for i, text in enumerate(sources)]
    ids = [row.tolist() for row in prepared.train.sources(range(len(sources)))]
    assert ids == tokenizer.encode_sources(shown)
    number = sum(text != source for text, source in zip(shown, sources, strict=True))
    assert 20 < number == prepared.train.counts.annotated
    assert f"; {number} have terms of the glossary" in next(line for line in lines if line.startswith("train: "))
    assert not any(set(row.tolist()) & {4, 5} for row in prepared.valid[0].pairs.sources(range(5)))
    columns = (column.cells for column in corpus_tables(prepared)[0].columns)
    assert ("with target terms", str(number), "0") in [*zip(*columns, strict=True)]


def test_shards_and_chunks_make_no_difference(folder, tmp_path, monkeypatch):
    expected = prepare(with_glossary(folder)).fingerprint()
    monkeypatch.setattr(store_writing, "_PAIRS", 7)
    monkeypatch.setattr(encoding, "_CHUNK", 3)
    assert prepare(with_glossary(folder), store=tmp_path / "store").fingerprint() == expected


def test_a_source_whose_terms_do_not_fit_stays_as_it_is(folder):
    run = with_glossary(folder)
    run = replace(run, batches=replace(run.batches, max_src_length=10))
    prepared, plain = (prepare(replace(run, corpus=c)) for c in (run.corpus, replace(run.corpus, glossary=None)))
    assert 0 < prepared.train.counts.annotated < 30
    assert prepared.train.counts.kept == plain.train.counts.kept
    assert prepared.train.lengths[:, 0].max() <= 10


def test_cleaning_compares_lengths_without_terms(folder):
    run = with_glossary(folder)
    run = replace(run, cleaning=replace(run.cleaning, max_ratio=1.0))
    assert prepare(run).train.counts.cleaned == (0, 0, 0, 0)


def test_the_cache_and_a_run_keep_to_one_glossary(folder, tmp_path):
    run = with_glossary(folder)
    directory = tmp_path / "run"
    with locked(directory, print):
        first, _ = prepare_in(directory, run, None, print, ProcessGroup())
    again = prepare_again(directory, first.run, print)
    assert again.fingerprint() == first.fingerprint()
    assert prepare_again(directory, run, print).run == first.run
    for other in ("other.tsv", None):
        corpus = replace(run.corpus, glossary=other and str(folder / other))
        with pytest.raises(RunError, match="was started with another corpus: the training pairs have changed"):
            prepare_again(directory, replace(first.run, corpus=corpus), print)


def test_a_changed_file_is_another_glossary(folder, tmp_path):
    path = tmp_path / "terms.tsv"
    path.write_text("a\ta\n")
    run = run_of(tmp_path, corpus=replace(member(folder, "back").corpus, glossary=str(path)))
    first = prepare(run, store=tmp_path / "store")
    path.write_text("d\td\n")
    assert prepare(run).fingerprint() != first.fingerprint()
    with pytest.raises(DataError, match="is the store of another corpus or other settings \\(glossary differ\\)"):
        prepare(run, store=tmp_path / "store")


def test_a_store_has_the_annotated_sources(folder, tmp_path):
    """The flags of the preparation are accepted beside it."""
    run = with_glossary(folder)
    first = prepare(run, store=tmp_path / "store")
    corpus = CorpusConfig(store=str(tmp_path / "store"))
    for tokenizer in (TokenizerConfig(), run.tokenizer):
        prepared = prepare(replace(run, corpus=corpus, tokenizer=tokenizer))
        assert (prepared.fingerprint(), prepared.counts) == (first.fingerprint(), first.counts)
        assert_same_batches(prepared, first)


def test_a_corpus_of_a_mixture_has_its_glossary(folder, tmp_path):
    """Whose path is relative to the mixture, and whose sources may have a tag too."""
    (tmp_path / "terms.tsv").write_text("a\ta\n")
    back = member(folder, "back", tag="<bt>")
    back = replace(back, corpus=replace(back.corpus, glossary=str(tmp_path / "terms.tsv")))
    mixture = Mixture(corpora=(member(folder, "genuine"), back))
    mixture.write(str(tmp_path / "m.json"))
    text = (tmp_path / "m.json").read_text()
    (tmp_path / "m.json").write_text(text.replace(str(tmp_path / "terms.tsv"), "terms.tsv"))
    prepared = prepare(run_of(tmp_path, corpus=CorpusConfig(mixture=str(tmp_path / "m.json"))))
    assert prepared.run.tokenizer.tags == ("<bt>", *TAGS)
    sources = [row.tolist() for row in prepared.train.epoch(0, prepared.buckets).sources(range(150))]
    assert not any(5 in ids for ids in sources[:60])
    assert 10 < sum(5 in ids for ids in sources[60:]) == prepared.train.counts.annotated
    assert {ids[0] for ids in sources[60:]} == {4}


def test_a_glossary_without_a_pair_is_a_warning(folder, tmp_path):
    (tmp_path / "none.tsv").write_text("z\tz\n")
    corpus, lines = replace(member(folder, "back").corpus, glossary=str(tmp_path / "none.tsv")), []
    prepare(run_of(tmp_path, corpus=corpus), say=lines.append)
    assert any("none.tsv: no pair has a term with its target term" in line for line in lines)


def test_what_a_glossary_excludes(folder, tmp_path):
    run = with_glossary(folder)
    with pytest.raises(ConfigError, match=r"^both_directions=True: the glossary .*terms\.tsv has one direction"):
        prepare(replace(run, both_directions=True))
    with pytest.raises(ConfigError, match=r"^bpe_dropout=0\.1: the glossary .* with one segmentation; omit one"):
        prepare(replace(run, tokenizer=TokenizerConfig(vocab_size=60, bpe_dropout=0.1)))
    with pytest.raises(ConfigError, match=r"^glossary='g': store='s' has all pairs; omit one of them"):
        CorpusConfig(store="s", glossary="g")
    prepare(replace(run, corpus=replace(run.corpus, glossary=None))).tokenizers.save(tmp_path)
    load = TokenizerConfig(load=(str(tmp_path / "tokenizer"),))
    with pytest.raises(DataError, match=r"terms\.tsv: the source tokenizer has no token '<term>'; the model has to be"):
        prepare(replace(run, tokenizer=load))


def test_a_run_of_an_earlier_version_has_no_glossary(folder):
    values = with_glossary(folder).to_dict()
    del values["corpus"]["glossary"]
    assert RunConfig.from_dict(values).corpus.glossary is None
