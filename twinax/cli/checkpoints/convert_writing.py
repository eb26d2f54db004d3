"""Writing of `twinax convert`: what has the final name was read back and compared before."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ... import convert
from ...backend.errors import ConversionError
from ...convert import Checkpoint
from ...convert.arrays.dtypes import logit_movement
from ...convert.arrays.verification import compare_checkpoints
from ...convert.formats.registry import describe
from ...convert.io.atomic_io import checked_before_renaming
from .convert_report import Timer, byte_progress, describe_optimizers, describe_tokenizers, describe_weights
from .model_card import CARD
from .trainer_command import read_back


class Outcome(NamedTuple):
    """What the report says of a file or directory that was read back, and whether it is as it was written."""

    weights: str
    optimizer: str
    files: str  # of tokenizers
    movement: str  # of the logits, with another dtype
    same_files: bool
    same: bool  # weights, optimizer and files


class _DifferenceError(ConversionError):
    """What was read back differs."""


def write_and_compare(
    checkpoint: Checkpoint,
    original: Checkpoint,
    dst: Path,
    *,
    layout: str,
    dtype: str | None,
    max_shard_size: int | None,
    quantization: str | None,
    card: Callable[[Checkpoint, str], str] | None,
) -> tuple[Outcome, dict[str, str]]:
    """Write `dst`, read it back and compare it before it gets its name; (outcome, first rows of the report).

    Nothing is left at `dst` if something differs. `original` is the checkpoint before its dtype was changed; `card`
    computes the model card of a directory from what was read back and the checksum of its weights.

    Raises:
        ConversionError: the layout has no such model or format, the path exists and is not an empty directory, or
            writing fails.
    """
    outcomes: list[Outcome] = []
    saving, checking, comparing = Timer(), Timer(), Timer()

    def check(temporary: Path) -> None:
        with checking:
            begin(f"comparing {dst}")
            with comparing:
                result = read_back(temporary, checkpoint)
                comparison = compare_checkpoints(checkpoint, result)
                weights, same = describe_weights(checkpoint, comparison, temporary, layout, quantization)
            optimizer, same_optimizer = describe_optimizers(original, checkpoint, result, dtype)
            files, same_files = describe_tokenizers(checkpoint, result, layout)
            movement = "" if dtype is None else str(logit_movement(original, result))
            same = same and same_optimizer and same_files
            outcomes.append(Outcome(weights, optimizer, files, movement, same_files, same))
            if not same:
                raise _DifferenceError
            if card is not None:
                (temporary / CARD).write_text(card(result, comparison.checksum), encoding="utf-8")

    with byte_progress(checkpoint) as begin:
        begin(f"writing {dst}")
        try:
            with saving, checked_before_renaming(dst, check):
                convert.save(checkpoint, dst, layout=layout, max_shard_size=max_shard_size, quantization=quantization)
        except _DifferenceError:
            return outcomes[0], {"written": "nothing, because what was read back is DIFFERENT"}
    rate = saving.rate(dst, without=checking)
    return outcomes[0], {
        "written": f"{describe(dst)}, layout {layout}",
        "time": f"written in {rate}; read back and compared in {comparing.seconds:.1f} s",
    }
