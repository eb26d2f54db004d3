"""The command `twinax`. What a subcommand needs is imported when it runs."""

import os
import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from os.path import isdir
from pathlib import Path
from typing import Any

import tyro

from .text_commands import evaluate, score, translate
from .usage import UsageError, one_line_errors

_DESCRIPTION = "Twin encoder-decoder Transformers, one in JAX and one in PyTorch, proven equal."


def parity(model: tyro.conf.Positional[str] = "tiny", seed: int = 0) -> int:
    """Prove that the Flax and the PyTorch twin of a model are one function.

    The model is a random one of a preset's size, or that of a local Hugging Face directory (Marian, BART, mBART,
    M2M100, Pegasus); then both twins are compared with `transformers` too. Prints the ladder as a table: for every rung
    the worst float64 difference, and in float32 and bfloat16 the ratio of the twins' errors. Exits with 0 where every
    rung holds, else with 1.

    Example: twinax parity tiny

    Args:
        model: a preset (tiny, small, base, big), or a directory with config.json and weights. tiny takes seconds; base
            and big take minutes and gigabytes.
        seed: seed of the random sentences, and of a preset's random weights.
    """
    if seed < 0:
        raise UsageError(f"--seed {seed}: must be at least 0")
    show_ladder = import_module("twinax.parity_tests.report").show_ladder
    return 0 if show_ladder(f"twinax parity {model} --seed {seed}", seed=seed, **_model_of(model)) else 1


def _model_of(model: str) -> dict[str, Any]:
    """Arguments of the ladder for a preset's name or a directory."""
    configs, presets = import_module("twinax.configs"), import_module("twinax.configs.presets").PRESETS
    if model in presets:
        return {"config": configs.TransformerConfig.preset(model)}
    if not isdir(model):
        near = get_close_matches(model, presets, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"{model}: is neither a preset ({', '.join(presets)}) nor a directory{hint}")
    convert = import_module("twinax.convert")
    try:
        checkpoint = convert.load(model)
    except convert.ConversionError as error:
        raise UsageError(str(error)) from None
    found = {"config": checkpoint.config, "arrays": checkpoint.arrays}
    if find_spec("transformers") is None:
        print("twinax: transformers is not installed: the twins are compared with each other only", file=sys.stderr)
        return found
    try:
        oracle = import_module("twinax.parity_tests.transformers_oracle").load_oracle(model, checkpoint)
    except Exception as error:  # whatever it is, it says that transformers does not take the directory
        raise UsageError(f"{model}: transformers cannot load it: {' '.join(str(error).split())[:300]}") from None
    return {**found, "oracle": oracle, "oracle_name": "transformers"}


def train() -> int:
    """Train a model: a ready-made run, or your own parallel text in one command; the same command goes on."""
    return import_module("twinax.train_command").main(sys.argv[2:])


def data() -> int:
    """Print what a corpus looks like to a run: pairs, tokens, lengths, unknown words, padding, shapes."""
    return import_module("twinax.data_command").main(sys.argv[2:])


def demo(out: str = "runs/demo", updates: int = 1000, test: int = 500) -> int:
    """Learn a small piece of Italian in a minute, translate what training has not seen, and prove both twins equal.

    Needs no files and no network. Exits with 0 where Flax and PyTorch agree on every token and every rung.

    Example: twinax demo

    Args:
        out: directory for corpus, run, pictures and weights; the same command goes on where it was stopped.
        updates: length of the training.
        test: sentences to translate, of each kind.
    """
    if updates < 2 or test < 1:
        raise UsageError(f"--updates {updates} --test {test}: must be at least 2 and 1")
    with one_line_errors():
        found = import_module("twinax.demo").demo(Path(out), updates, test)
    if found.stopped_by is not None:
        return 128 + found.stopped_by
    return 0 if found.ladder and not found.differing_tokens and len({*found.equal_arrays}) == 1 else 1


# These read their flags themselves: what there is to say depends on the run that they are given.
_OWN_FLAGS = {"train": train, "data": data}


def main() -> None:
    """Entry point of the command."""
    try:
        if len(sys.argv) > 1 and sys.argv[1] in _OWN_FLAGS:
            sys.exit(_OWN_FLAGS[sys.argv[1]]())
        others = {function.__name__: function for function in (translate, evaluate, score, parity, demo)}
        commands = {**_OWN_FLAGS, **others}
        sys.exit(tyro.extras.subcommand_cli_from_dict(commands, prog="twinax", description=_DESCRIPTION))
    except UsageError as error:
        print(f"twinax: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # whoever reads has enough; Python would say so once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print("twinax: interrupted", file=sys.stderr)
        sys.exit(130)
