"""Exporting by `twinax convert`: the file is read back, run and compared with the model before it gets its name."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ...backend.errors import ConversionError
from ...convert import Checkpoint
from ...convert.arrays.dtypes import logit_movement, random_tokens
from ...convert.arrays.verification import compare_checkpoints
from ...convert.io.atomic_io import checked_before_renaming
from ...flax_transformer.module import at_least_float32
from ...inference.export import PLATFORMS
from ...inference.exported_file import ExportedFile, read_exported, write_exported
from .convert_report import Timer, byte_progress, describe_optimizers, describe_tokenizers, describe_weights
from .convert_writing import Outcome

# Largest difference of log-probabilities, relative to the largest one, that is rounding in a dtype: wrong programs
# differ by about 1.
_ROUNDING = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 0.1}
_ROWS = 3  # of the random tokens


class _DifferenceError(ConversionError):
    """What was read back differs."""


def write_and_compare_export(
    checkpoint: Checkpoint, original: Checkpoint, dst: Path, dtype: str | None
) -> tuple[Outcome, dict[str, str]]:
    """Export a model to `dst`, read it back and run it before it gets its name; (outcome, first rows of the report).

    Weights and tokenizers are compared bit for bit, and log-probabilities of random tokens with the model's own.
    Nothing is left at `dst` if something differs. `original` is the checkpoint before its dtype was changed.

    Raises:
        ConversionError, MissingPackageError: as `write_exported`.
    """
    outcomes: list[Outcome] = []
    programs = ""
    saving, checking = Timer(), Timer()

    def check(temporary: Path) -> None:
        nonlocal programs
        with checking:
            begin(f"comparing {dst}")
            file = read_exported(temporary)
            result = file.checkpoint
            comparison = compare_checkpoints(checkpoint, result)
            weights, same_weights = describe_weights(checkpoint, comparison, temporary, "twinax", None)
            optimizer, _ = describe_optimizers(original, checkpoint, result, dtype)
            tokenizers, same_files = describe_tokenizers(checkpoint, result, "twinax")
            error, same_function = _compare_programs(file, checkpoint)
            verdict = "" if same_function else ", DIFFERENT"
            programs = (
                f"encoder and decoder step for {', '.join(PLATFORMS)}; log-probabilities of random tokens within "
                f"{error:.1g} of the model's{verdict}"
            )
            movement = "" if dtype is None else str(logit_movement(original, result))
            same = same_weights and same_files and same_function
            outcomes.append(Outcome(weights, optimizer, tokenizers, movement, same_files, same))
            if not same:
                raise _DifferenceError

    with byte_progress(replace(checkpoint, training=None)) as begin:
        begin(f"writing {dst}")
        try:
            with saving, checked_before_renaming(dst, check):
                write_exported(checkpoint, dst)
        except _DifferenceError:
            rows = {"written": "nothing, because what was read back is DIFFERENT", "programs": programs}
            return outcomes[0], rows
    megabytes, seconds = dst.stat().st_size / 1e6, saving.seconds - checking.seconds
    return outcomes[0], {
        "written": "exported programs, weights and tokenizers; they run without twinax",
        "programs": programs,
        "time": f"written in {seconds:.1f} s ({megabytes:,.1f} MB); read back, run and compared in "
        f"{checking.seconds:.1f} s",
    }


def _compare_programs(file: ExportedFile, checkpoint: Checkpoint) -> tuple[float, bool]:
    """(largest difference of log-probabilities of random tokens, whether it is rounding), on the CPU."""
    config, arrays = checkpoint.config, file.document["arrays"]
    with jax.enable_x64(False), jax.default_device(jax.devices("cpu")[0]):
        model = checkpoint.to_flax()
        src, tgt = (tokens[:_ROWS].astype(np.int32) for tokens in random_tokens(config))
        src[-1, -(src.shape[1] // 3) or src.shape[1] :] = config.pad_id
        expected = np.asarray(jax.nn.log_softmax(at_least_float32(jax.jit(model)(src, tgt))))
        weights = {name: jnp.asarray(array) for name, array in file.checkpoint.arrays.items()}
        step, sizes = jax.jit(file.programs.decoder_step.call), {"b": len(tgt), "t": tgt.shape[1]}
        memory = jax.jit(file.programs.encoder.call)(weights, src)
        cache = {
            name: np.zeros([sizes.get(n, n) for n in spec["shape"]], spec["dtype"])
            for name, spec in arrays["cache"].items()
        }
        rows = []
        for position, tokens in enumerate(tgt.T):
            log_probs, cache = step(weights, tokens, np.int32(position), memory, cache)
            rows.append(np.asarray(log_probs))
    result, finite = np.stack(rows, axis=1), np.isfinite(expected)
    error = float(np.abs(result - expected, where=finite, out=np.zeros_like(expected)).max())
    bound = _ROUNDING[config.compute_dtype] * max(1.0, float(np.abs(expected[finite]).max(initial=0)))
    return error, error <= bound and bool((np.isfinite(result) == finite).all())
