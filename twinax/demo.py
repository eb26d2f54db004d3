"""`twinax demo`: a small language learnt in a minute, translated, and proven equal in both frameworks."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from twinax import convert
from twinax.configs import TransformerConfig
from twinax.configs.data import BatchConfig, CorpusConfig, TokenizerConfig
from twinax.configs.decoding import DecodingConfig
from twinax.configs.run import LoopConfig, RunConfig
from twinax.configs.training import TrainingConfig
from twinax.parity.report import show_ladder
from twinax.train.checkpointing.run_directory import has_begun
from twinax.train.loop import train
from twinax.train.scores import corpus_scores
from twinax.train.translator import Translator, load

from .attention_plot import attention_blocks, attention_plot
from .demo_language import Corpus, Pair, make_corpus

_SHOWN = ("the old women do not see our white cat.", "does the student open the big window?", "where are these eggs?")


class Results(NamedTuple):
    """What the demo found."""

    stopped_by: int | None  # signal that ended the training; there are no results then
    exact: dict[str, float]  # share of sentences that are translated word for word, by set
    differing_tokens: int  # between the two frameworks
    equal_arrays: tuple[int, int]  # bit-identical when they came back from PyTorch's file, and all
    ladder: bool


def run_config(folder: Path, updates: int) -> RunConfig:
    """The training: 2 + 2 layers of width 64, no dropout, batches of 72 sentences of one shape."""
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
    """Makes a corpus, trains, translates what training has not seen, and proves; everything is kept in `out`.

    Raises:
        RunError, DataError, CheckpointError: as `train`.
    """
    console, began = Console(), time.monotonic()
    corpus = make_corpus(test=test)
    _write(corpus, out / "corpus")
    console.print(f"{len(corpus.train):,} pairs, as: {corpus.train[0].english} | {corpus.train[0].italian}")
    again = has_begun(out / "run")
    outcome = train(run_config(out / "corpus", updates), out / "run")
    if outcome.stopped_by is not None:
        return Results(outcome.stopped_by, {}, 0, (0, 0), False)
    trained = time.monotonic() - began
    translator = load(out / "run")
    exact, bleu, differing, tokens = {}, {}, 0, 0
    for name, pairs in (("unseen sentences", corpus.unseen_sentences), ("unseen word pairs", corpus.unseen_pairs)):
        texts, differ, count = _translate(translator, pairs)
        references = [pair.italian for pair in pairs]
        exact[name] = sum(map(str.__eq__, texts, references)) / len(pairs)
        bleu[name] = corpus_scores(texts, references)[0].value
        differing, tokens = differing + differ, tokens + count
    _show(translator, out, console)
    arrays = _through_pytorch(translator, out / "model.pt")
    ladder = show_ladder("the trained model", config=translator.config, arrays=translator.checkpoint.arrays).ok
    table = Table("", "", title="twinax demo", show_header=False)
    table.add_row(
        "trained", f"{updates} updates" + (", begun before" if again else f" in {trained:.0f} s, with compiling")
    )
    for name, share in exact.items():
        table.add_row(name, f"{share:.1%} of {test} word for word, BLEU {bleu[name]:.2f}")
    table.add_row("Flax and PyTorch", f"{differing} of {tokens:,} tokens differ")
    table.add_row("through PyTorch's file", f"{arrays[0]} of {arrays[1]} arrays bit-identical, optimiser too")
    table.add_row("the ladder", "every rung equal" if ladder else "DIFFERENT, see above")
    table.add_row("all", f"{time.monotonic() - began:.0f} s")
    console.print(table)
    console.print(f"everything is in {out}; now try: twinax translate {out / 'run'}", highlight=False)
    return Results(None, exact, differing, arrays, ladder)


def _write(corpus: Corpus, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in (("train", corpus.train), ("valid", corpus.unseen_sentences)):
        for side, end in enumerate(("en", "it")):
            lines = [f"{pair[side]}\n" for pair in pairs]
            (folder / f"{name}.{end}").write_text("".join(lines), encoding="utf-8")


def _translate(translator: Translator, pairs: Sequence[Pair]) -> tuple[list[str], int, int]:
    """(greedy translations, tokens that differ between the frameworks, tokens)."""
    sources = [pair.english for pair in pairs]
    flax, pytorch = (
        [h[0] for h in translator.hypotheses(sources, DecodingConfig(), framework)] for framework in ("flax", "torch")
    )
    differing = sum(
        sum(map(int.__ne__, a.tokens, b.tokens)) + abs(len(a.tokens) - len(b.tokens))
        for a, b in zip(flax, pytorch, strict=True)
    )
    return [h.text for h in flax], differing, sum(len(h.tokens) for h in flax)


def _show(translator: Translator, out: Path, console: Console) -> None:
    """Some translations, and where the first looks: in the terminal, and as a picture."""
    texts = translator.translate(_SHOWN)
    for source, text in zip(_SHOWN, texts, strict=True):
        console.print(f"  {source}\n  [bold]{text}[/]", highlight=False)
    looked = translator.attention(_SHOWN[0], texts[0])
    attention_plot(looked.weights, looked.targets, looked.sources, out / "attention.png")
    console.print(attention_blocks(looked.weights, looked.targets, looked.sources), markup=False, highlight=False)
    console.print(f"the same as a picture: {out / 'attention.png'}", highlight=False)


def _through_pytorch(translator: Translator, path: Path) -> tuple[int, int]:
    """(arrays that are bit-identical after PyTorch has saved and loaded them, all)."""
    path.unlink(missing_ok=True)  # of an earlier demo
    convert.save(translator.checkpoint, path)
    ours, back = translator.checkpoint.tensors, convert.load(path).tensors
    return sum(name in back and back[name].tobytes() == array.tobytes() for name, array in ours.items()), len(ours)
