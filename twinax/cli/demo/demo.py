"""`twinax demo`: learns a small language in minutes, translates it, and proves both frameworks equal."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from ... import convert
from ...configs import TransformerConfig
from ...configs.data import BatchConfig, CorpusConfig, TokenizerConfig
from ...configs.decoding import DecodingConfig
from ...configs.run import LoopConfig, RunConfig
from ...configs.training import TrainingConfig
from ...inference.attention_plot import attention_blocks, attention_plot
from ...inference.scores import corpus_scores
from ...inference.translator import Translator, load
from ...parity.report import show_ladder
from ...train.checkpointing.run_directory import has_begun
from ...train.loop.loop import train
from .demo_language import Corpus, Pair, make_corpus

_EXAMPLES = (
    "the old women do not see our white cat.",
    "does the student open the big window?",
    "where are these eggs?",
)


class Results(NamedTuple):
    """The results of the demo."""

    stopped_by: int | None  # signal that ended the training; the other fields are then empty
    exact: dict[str, float]  # share of exact translations, by test set
    differing_tokens: int  # that differ between the two frameworks
    equal_arrays: tuple[int, int]  # bit-identical after a round trip through PyTorch's file, and all
    ladder: bool


def run_config(folder: Path, updates: int) -> RunConfig:
    """The run: 2 + 2 layers of width 64, no dropout, batches of one shape with 72 sentences."""
    corpus = {
        f"{part}{side}": str(folder / f"{name}.{end}")
        for part, name in (("", "train"), ("valid_", "valid"))
        for side, end in (("src", "en"), ("tgt", "it"))
    }
    return RunConfig(
        corpus=CorpusConfig(**corpus),
        tokenizer=TokenizerConfig(vocab_size=600, split="punctuation"),
        batches=BatchConfig(tokens=1600, shapes=1),
        model=TransformerConfig.preset(
            "small",
            d_model=64,
            num_heads=4,
            d_ff=128,
            num_encoder_layers=2,
            num_decoder_layers=2,
            max_length=48,
            embedding_dropout=0.0,
            residual_dropout=0.0,
        ),
        training=TrainingConfig(
            schedule="cosine",
            learning_rate=4e-3,
            warmup_updates=min(50, updates // 2),
            total_updates=updates,
            label_smoothing=0.05,
            clip_norm=1.0,
        ),
        loop=LoopConfig(updates=updates, validate_every=updates, translations=0),
    )


def demo(out: Path, updates: int, test: int) -> Results:
    """Make a corpus, train, translate unseen sentences and run the ladder; write everything to `out`.

    Raises:
        RunError, DataError, CheckpointError: as `train`.
    """
    console = Console()
    start = time.monotonic()
    corpus = make_corpus(test=test)
    _write(corpus, out / "corpus")
    console.print(f"{len(corpus.train):,} pairs; the first: {corpus.train[0].english} | {corpus.train[0].italian}")
    resumed = has_begun(out / "run")
    outcome = train(run_config(out / "corpus", updates), out / "run")
    if outcome.stopped_by is not None:
        return Results(outcome.stopped_by, {}, 0, (0, 0), False)
    seconds = time.monotonic() - start
    translator = load(out / "run")
    exact, bleu = {}, {}
    different_tokens, all_tokens = 0, 0
    test_sets = {"new sentences": corpus.unseen_sentences, "new word combinations": corpus.unseen_pairs}
    for name, pairs in test_sets.items():
        texts, different, count = _translate(translator, pairs)
        references = [pair.italian for pair in pairs]
        exact[name] = sum(map(str.__eq__, texts, references)) / len(pairs)
        bleu[name] = corpus_scores(texts, [references])[0].value
        different_tokens, all_tokens = different_tokens + different, all_tokens + count
    _show(translator, out, console)
    arrays = _through_pytorch(out / "run", out / "model.pt")
    ladder = show_ladder("the trained model", config=translator.config, arrays=translator.checkpoint.arrays).ok
    table = Table("", "", title="twinax demo", show_header=False)
    duration = "resumed" if resumed else f"{seconds:.0f} s with compilation"
    table.add_row("training", f"{updates} updates, {duration}")
    for name, share in exact.items():
        table.add_row(name, f"{share:.1%} of {test} translated exactly, BLEU {bleu[name]:.2f}")
    table.add_row("Flax and PyTorch", f"{different_tokens} of {all_tokens:,} translated tokens differ")
    table.add_row("round trip through model.pt", f"{arrays[0]} of {arrays[1]} arrays bit-identical, optimizer included")
    table.add_row("proof (table above)", "equal on every rung" if ladder else "DIFFERENT")
    table.add_row("total time", f"{time.monotonic() - start:.0f} s")
    console.print(table)
    console.print(f"results: {out}; next: twinax translate {out / 'run'}", highlight=False)
    return Results(None, exact, different_tokens, arrays, ladder)


def _write(corpus: Corpus, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in (("train", corpus.train), ("valid", corpus.unseen_sentences)):
        for side, end in enumerate(("en", "it")):
            lines = [f"{pair[side]}\n" for pair in pairs]
            (folder / f"{name}.{end}").write_text("".join(lines), encoding="utf-8")


def _translate(translator: Translator, pairs: Sequence[Pair]) -> tuple[list[str], int, int]:
    """(greedy translations, number of tokens that differ between the frameworks, number of tokens)."""
    sources = [pair.english for pair in pairs]
    flax, pytorch = (
        [h[0] for h in translator.hypotheses(sources, DecodingConfig(), framework)] for framework in ("flax", "torch")
    )
    different_tokens = sum(
        sum(map(int.__ne__, a.tokens, b.tokens)) + abs(len(a.tokens) - len(b.tokens))
        for a, b in zip(flax, pytorch, strict=True)
    )
    return [h.text for h in flax], different_tokens, sum(len(h.tokens) for h in flax)


def _show(translator: Translator, out: Path, console: Console) -> None:
    """Print example translations and the attention weights of the first, which are also saved as a picture."""
    texts = translator.translate(_EXAMPLES)
    for source, text in zip(_EXAMPLES, texts, strict=True):
        console.print(f"  {source}\n  [bold]{text}[/]", highlight=False)
    attention = translator.attention(_EXAMPLES[0], texts[0])
    attention_plot(attention.weights, attention.targets, attention.sources, out / "attention.png")
    console.print(
        attention_blocks(attention.weights, attention.targets, attention.sources), markup=False, highlight=False
    )
    console.print(f"attention weights as a picture: {out / 'attention.png'}", highlight=False)


def _through_pytorch(run: Path, path: Path) -> tuple[int, int]:
    """(number of arrays that are bit-identical after a round trip through a PyTorch file, number of arrays)."""
    path.unlink(missing_ok=True)  # of an earlier demo
    checkpoint = convert.load(run)
    convert.save(checkpoint, path)
    arrays, loaded = checkpoint.tensors, convert.load(path).tensors
    same = (name in loaded and loaded[name].tobytes() == array.tobytes() for name, array in arrays.items())
    return sum(same), len(arrays)
