"""The command `twinax`. What a subcommand needs is imported when it runs."""

import sys
from importlib import import_module
from typing import Literal

import tyro

_DESCRIPTION = "Twin encoder-decoder Transformers, one in JAX and one in PyTorch, proven equal."


def parity(
    preset: tyro.conf.Positional[Literal["tiny", "small", "base", "big"]] = "tiny",
    seed: int = 0,
) -> int:
    """Prove on a random model that the Flax and the PyTorch twin are one function.

    Prints the ladder as a table: for every rung the worst float64 difference between the two models, and in float32 and
    bfloat16 the ratio of their errors. Exits with 0 where every rung holds, else with 1.

    Example: twinax parity tiny

    Args:
        preset: size of the model. tiny takes seconds; base and big take minutes and gigabytes.
        seed: seed of the random weights and sentences.
    """
    if seed < 0:
        print(f"twinax: --seed {seed}: must be at least 0", file=sys.stderr)
        return 2
    config = import_module("twinax.configs").TransformerConfig.preset(preset)
    show_ladder = import_module("twinax.parity_tests.report").show_ladder
    return 0 if show_ladder(config, f"twinax parity {preset} --seed {seed}", seed) else 1


def main() -> None:
    """Entry point of the command."""
    sys.exit(tyro.extras.subcommand_cli_from_dict({"parity": parity}, prog="twinax", description=_DESCRIPTION))
