"""Cleaning of training pairs, against plain loops over their texts."""

import unicodedata
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinax.backend.errors import ConfigError
from twinax.configs.data import CleaningConfig, CorpusConfig, TokenizerConfig
from twinax.configs.run import RunConfig
from twinax.train.data import cleaning
from twinax.train.data.prepare import prepare

SENTENCES = st.lists(st.sampled_from(["a", "bc", "DE", "да", "мир", "日本", "7", "!"]), min_size=1, max_size=4).map(
    " ".join
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def prepared(folder, pairs, config, **settings):
    for side, name in enumerate(("src", "tgt")):
        (folder / name).write_text("".join(f"{pair[side]}\n" for pair in pairs))
        (folder / f"valid_{name}").write_text("a\n")
    files = {name: str(folder / name) for name in ("src", "tgt", "valid_src", "valid_tgt")}
    run = RunConfig(corpus=CorpusConfig(**files), cleaning=config, tokenizer=TokenizerConfig(kind="word"))
    lines = []
    data = prepare(replace(run, **settings), say=lines.append)
    src = data.tokenizers.src.decode([ids[:-1] for ids in data.train.sources(range(len(data.train)))])
    tgt = data.tokenizers.tgt.decode([ids[1:-1] for ids in data.train.targets(range(len(data.train)))])
    return list(zip(src, tgt, strict=True)), data.counts["train"], lines


def is_latin(text):
    letters = [c for c in text if unicodedata.category(c).startswith("L")]
    return 2 * sum("LATIN" in unicodedata.name(c) for c in letters) >= len(letters)


def loop(pairs, config):
    """What is kept, and how many pairs each reason drops."""
    kept, seen, dropped = [], set(), [0, 0, 0, 0]
    for pair in pairs:
        lengths = [len(text.split()) for text in pair]
        if config.duplicates and pair in seen:
            dropped[0] += 1
        elif config.identical and pair[0] == pair[1]:
            dropped[1] += 1
        elif config.max_ratio and max(lengths) / min(lengths) > config.max_ratio:
            dropped[2] += 1
        elif config.src_script and not is_latin(pair[0]):
            dropped[3] += 1
        else:
            kept.append(pair)
        seen.add(pair)
    return kept, tuple(dropped)


@pytest.mark.usefixtures("cache")
@given(
    pairs=st.lists(st.tuples(SENTENCES, SENTENCES), min_size=1, max_size=30),
    config=st.builds(
        CleaningConfig,
        duplicates=st.booleans(),
        identical=st.booleans(),
        max_ratio=st.sampled_from([None, 1, 2.0]),
        src_script=st.sampled_from([None, "Latin"]),
    ),
)
@settings(max_examples=25)
def test_what_is_dropped_is_what_a_loop_drops(pairs, config, tmp_path_factory):
    pairs.append(("x", "y"))  # is kept
    texts, counts, lines = prepared(tmp_path_factory.mktemp("pairs"), pairs, config)
    kept, dropped = loop(pairs, config)
    assert (texts, counts.cleaned) == (kept, dropped)
    (line,) = (line for line in lines if line.startswith("train: "))
    assert [f", {n} {reason}" in line for n, reason in zip(dropped, cleaning.REASONS, strict=True)] == [
        *map(bool, dropped)
    ]


@pytest.mark.usefixtures("cache")
def test_pairs_that_are_held_out_are_not_trained_on_elsewhere(tmp_path):
    """Each pair occurs three times; what is held out once is not trained on at all, in neither direction."""
    pairs = [(f"a{i % 20}", f"b{i % 20}") for i in range(60)]
    for side, name in enumerate(("src", "tgt")):
        (tmp_path / name).write_text("".join(f"{pair[side]}\n" for pair in pairs))
    corpus = CorpusConfig(src=str(tmp_path / "src"), tgt=str(tmp_path / "tgt"), held_out=6)
    run = RunConfig(
        corpus=corpus,
        both_directions=True,
        cleaning=CleaningConfig(duplicates=True),
        tokenizer=TokenizerConfig(kind="word"),
    )
    data = prepare(run)
    decode = data.tokenizers.src.decode
    sources = decode([ids[:-1] for ids in data.train.sources(range(len(data.train)))])
    held_out = {target.replace("b", "a") for target in data.valid[0].references}
    expected = sorted({pair[0] for pair in pairs} - held_out)
    half = len(sources) // 2
    assert sorted(sources[:half]) == expected
    assert [source.replace("b", "a") for source in sources[half:]] == sources[:half]


def test_a_script_that_does_not_exist_is_named(tmp_path, cache):
    with pytest.raises(ConfigError, match=r"^tgt_script='Latinn': is no script of Unicode; such are Latin, Cyrillic"):
        prepared(tmp_path, [("a", "b")], CleaningConfig(tgt_script="Latinn"))
    with pytest.raises(ConfigError, match=r"^max_ratio=0.5: must be at least 1"):
        CleaningConfig(max_ratio=0.5)
