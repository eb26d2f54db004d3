"""The short help of `twinax train` and `twinax data`: the settings that matter first."""

from typing import Any

from rich.console import Console
from rich.table import Column, Table

from ...configs.run import RunConfig

# Flag -> description. The defaults come from the run.
FIRST = {
    "--src": "training text, one sentence per line (.gz too)",
    "--tgt": "its translations, line by line",
    "--valid-src": "validation text; by default a part of the training text is held out",
    "--valid-tgt": "its translations",
    "--dataset": "instead of --src and --tgt: .tsv .csv .json .jsonl .parquet, a directory, or a name on the hub",
    "--out": "run directory; an existing one is resumed (default: runs/NAME, or runs/own)",
    "--init-from": "run, checkpoint or Hugging Face directory with the initial weights",
    "--tokenizer.kind": "word, bpe or unigram",
    "--tokenizer.vocab-size": "largest number of tokens; None: 45 · √pairs, 1,000 to 32,000",
    "--batches.tokens": "tokens of a batch on each side, padding included; None: 1,024 to 4,096, by the corpus",
    "--model.d-model": "model width",
    "--model.d-ff": "width of the feed-forward layers",
    "--model.num-encoder-layers": "number of encoder layers",
    "--model.num-decoder-layers": "number of decoder layers",
    "--model.residual-dropout": "dropout rate of the output of each sublayer",
    "--training.learning-rate": "rate after warm-up; in the noam schedule a factor",
    "--training.warmup-updates": "updates in which the rate rises",
    "--training.seed": "seed of weights, data order and dropout",
    "--loop.epochs": "passes over the corpus; None: 30, but at least 2,000 updates",
    "--loop.patience": "validations without a better metric before the run ends; None: never",
}
# Of `twinax data` alone.
DATA = {
    "--plot": "picture of the lengths to write (.png, .pdf, .svg)",
    "--store": "folder to write the encoded pairs to, for --corpus.store of `twinax train`",
}


def show(prog: str, description: str, run: RunConfig, data: bool) -> None:
    """Print the usage, the description and the settings of FIRST with the defaults of a run."""
    console = Console()
    console.print(f"usage: {prog} [-h] [NAME|RUN] [OPTIONS]\n", markup=False, highlight=False)
    for paragraph in description.split("\n\n"):
        console.print(" ".join(paragraph.split()) + "\n", markup=False, highlight=False)
    table = Table(Column(no_wrap=True), Column(), show_header=False, box=None, padding=(0, 2, 0, 0))
    for flag, text in FIRST.items():
        section, dot, name = flag.removeprefix("--").partition(".")
        default = f" (default: {_default(run, section, name)})" if dot else ""
        table.add_row(flag, text + default)
    for flag, text in DATA.items() if data else ():
        table.add_row(flag, text)
    table.add_row("--print-config", "print the run as JSON and exit")
    console.print(table, highlight=False)
    console.print(f"\nall settings: {prog} --help-all, or docs/settings.md", markup=False, highlight=False)


def _default(run: RunConfig, section: str, name: str) -> Any:
    return getattr(getattr(run, section), name.replace("-", "_"))
