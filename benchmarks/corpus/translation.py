"""Lines per second of `twinax translate`, which reads windows, beside a loop that sorts all lines first.

`python -m benchmarks.corpus.translation PAGE` trains a small model on a generated corpus for a few minutes, translates
LINES lines greedily in both ways, in turns, and writes the ratio into PAGE.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.corpus.text import write_corpus
from benchmarks.pages import write_between
from twinax.cli.text.text_commands import windows
from twinax.configs.data import CorpusConfig, TokenizerConfig
from twinax.configs.run import LoopConfig, RunConfig
from twinax.configs.schema import TransformerConfig
from twinax.inference.translator import Translator, load
from twinax.train.loop.loop import train

PAIRS, LINES, TURNS = 100_000, 20_000, 3
MODEL = {"d_model": 64, "num_heads": 4, "d_ff": 128, "num_encoder_layers": 1, "num_decoder_layers": 1}


def in_windows(translator: Translator, lines: list[str]) -> list[str]:
    """As the command does."""
    return [text for _, texts in windows(iter(lines)) for text in translator.translate(texts)]


def sorted_first(translator: Translator, lines: list[str]) -> list[str]:
    """All in one call."""
    return translator.translate(lines)


def main(page: Path) -> None:
    """Measure and write."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder, PAIRS)
        run = RunConfig(
            corpus=CorpusConfig(src=str(folder / "src"), tgt=str(folder / "tgt")),
            tokenizer=TokenizerConfig(vocab_size=8000),
            model=TransformerConfig.preset("small", **MODEL, max_length=128),
            loop=LoopConfig(updates=600, translations=0),
        )
        train(run, folder / "run", Console(stderr=True))
        translator = load(folder / "run")
        lines = (folder / "src").read_text().splitlines()[:LINES]
    ways: tuple[Callable[[Translator, list[str]], list[str]], ...] = (sorted_first, in_windows)
    translations = [way(translator, lines) for way in ways]  # compiles
    seconds: dict[str, list[float]] = {way.__name__: [] for way in ways}
    for _ in range(TURNS):
        for way in ways:
            begin = time.monotonic()
            way(translator, lines)
            seconds[way.__name__].append(time.monotonic() - begin)
    rates = {name: LINES / median(times) for name, times in seconds.items()}
    equal = sum(a == b for a, b in zip(*translations, strict=True))
    text = (
        f"{LINES:,} lines, greedily, by a small model: {rates['in_windows']:,.0f} lines per second in windows, "
        f"{rates['in_windows'] / rates['sorted_first']:.2f} of the speed of a loop that sorts all lines first; "
        f"{equal:,} translations are the same. Medians of {TURNS} runs, in turns."
    )
    write_between(page, "corpus-scale-translation", text)
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
