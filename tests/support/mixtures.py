"""Small corpora and mixtures of them for tests."""

import numpy as np

from twinax import TransformerConfig
from twinax.configs.data import BatchConfig, CorpusConfig, TokenizerConfig
from twinax.configs.mixture import MixtureCorpus
from twinax.configs.run import LoopConfig, RunConfig

SIZES = {"genuine": 60, "back": 90, "domain": 20}


def write_corpora(folder):
    """Write corpora whose sentences begin with their name and number."""
    rng = np.random.default_rng(0)
    for name, size in SIZES.items():
        words = [" ".join(rng.choice(list("abcdef"), rng.integers(1, 9))) for _ in range(size + 5)]
        for side in ("src", "tgt"):
            lines = [f"{name}{i} {text}\n" for i, text in enumerate(words)]
            (folder / f"{name}.{side}").write_text("".join(lines[:size]))
            (folder / f"valid.{name}.{side}").write_text("".join(lines[size:]))
    return folder


def member(folder, name, **settings):
    """A corpus of a mixture, with its validation pairs."""
    files = {side: str(folder / f"{name}.{side}") for side in ("src", "tgt")}
    files |= {f"valid_{side}": str(folder / f"valid.{name}.{side}") for side in ("src", "tgt")}
    return MixtureCorpus(name=name, corpus=CorpusConfig(**files), **settings)


def run_of(path, mixture=None, **settings):
    """A small run; of a mixture, whose file is written into a folder."""
    if mixture is not None:
        mixture.write(str(path / "mixture.json"))
        settings["corpus"] = CorpusConfig(mixture=str(path / "mixture.json"))
    model = {"d_model": 8, "num_heads": 2, "d_ff": 16, "num_encoder_layers": 1, "num_decoder_layers": 1}
    defaults = {
        "tokenizer": TokenizerConfig(kind="word", vocab_size=500),
        "batches": BatchConfig(tokens=80, shapes=3),
        "model": TransformerConfig.preset("small", **model, max_length=32),
        "loop": LoopConfig(epochs=2, translations=0),
    }
    return RunConfig(**{**defaults, **settings})


def assert_same_batches(a, b, number=30):
    """Compare the first batches of two prepared runs."""
    batches, expected = a.batches(), b.batches()
    assert len(batches) == len(expected)
    for i in range(min(number, len(batches))):
        assert batches[i][:3] == expected[i][:3]
        assert all(np.array_equal(x, y) for x, y in zip(batches[i].arrays, expected[i].arrays, strict=True))
