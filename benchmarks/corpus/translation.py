"""Lines per second of `twinax translate`, which reads windows, beside a loop that sorts all lines first.

`python -m benchmarks.corpus.translation PAGE MULTI30K` trains a small model for a few minutes, translates the 29,000
sources of the training set greedily in both ways, in turns, and writes the ratio into PAGE.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.pages import write_between
from twinax.cli.text.text_commands import windows
from twinax.configs.data import CorpusConfig, TokenizerConfig
from twinax.configs.run import LoopConfig, RunConfig
from twinax.configs.schema import TransformerConfig
from twinax.inference.translator import Translator, load
from twinax.train.loop.loop import train
from twinax.train.text.corpus import read_lines

TURNS = 3
MODEL = {"d_model": 128, "num_heads": 4, "d_ff": 256, "num_encoder_layers": 1, "num_decoder_layers": 1}


def in_windows(translator: Translator, lines: list[str]) -> list[str]:
    """As the command does."""
    return [text for _, texts in windows(iter(lines)) for text in translator.translate(texts)]


def sorted_first(translator: Translator, lines: list[str]) -> list[str]:
    """All in one call."""
    return translator.translate(lines)


def main(page: Path, corpus: Path) -> None:
    """Measure and write."""
    source = corpus / "train.de.gz"
    with tempfile.TemporaryDirectory() as folder:
        run = RunConfig(
            corpus=CorpusConfig(src=str(source), tgt=str(corpus / "train.en.gz")),
            tokenizer=TokenizerConfig(vocab_size=4000),
            model=TransformerConfig.preset("small", **MODEL, max_length=128),
            loop=LoopConfig(updates=1000, translations=0),
        )
        train(run, Path(folder, "run"), Console(stderr=True))
        translator = load(Path(folder, "run"))
    lines = [*read_lines(str(source))]
    ways: tuple[Callable[[Translator, list[str]], list[str]], ...] = (sorted_first, in_windows)
    translations = [way(translator, lines) for way in ways]  # compiles
    seconds: dict[str, list[float]] = {way.__name__: [] for way in ways}
    for _ in range(TURNS):
        for way in ways:
            begin = time.monotonic()
            way(translator, lines)
            seconds[way.__name__].append(time.monotonic() - begin)
    rates = {name: len(lines) / median(times) for name, times in seconds.items()}
    equal = sum(a == b for a, b in zip(*translations, strict=True))
    words = sum(len(text.split()) for text in translations[0]) / len(lines)
    write_between(
        page,
        "corpus-scale-translation",
        f"{len(lines):,} lines of Multi30k, greedily, {words:.1f} words per translation: "
        f"{rates['in_windows']:,.0f} lines per second in windows, {rates['in_windows'] / rates['sorted_first']:.2f} of "
        f"the speed of a loop that sorts all lines first. {equal:,} translations are the same. Medians of {TURNS} "
        "runs, in turns.",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
