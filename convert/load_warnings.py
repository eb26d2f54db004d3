"""What is doubtful about a checkpoint: its weights, or whether the program that wrote it computed something else."""

import re
from collections.abc import Mapping

import numpy as np

from .checkpoint import CONFIG, MARIAN_OPTIONS, Checkpoint

_PRE_NORM_VERSION = (1, 10)  # the first release of marian-dev whose pre-norm normalizes keys and values


def load_warning(checkpoint: Checkpoint) -> str | None:
    """One line on what the checkpoint's own program may compute differently; None if there is no doubt.

    Source: marian-dev issue 699; `modeling_umt5.py` of these versions of `transformers`.
    """
    documents, config = checkpoint.documents, checkpoint.config
    if MARIAN_OPTIONS in documents and config.norm_placement == "pre":
        version = str(documents[MARIAN_OPTIONS].get("version") or "")
        numbers = re.match(r"v?(\d+)\.(\d+)", version)
        if numbers is None or (int(numbers[1]), int(numbers[2])) < _PRE_NORM_VERSION:
            return (
                f"version={version or None!r}: before v1.10, marian-dev did not normalize the keys and values of "
                "pre-norm self-attention; twinax does, so this model may compute something else"
            )
    if checkpoint.layout == "umt5" and documents.get(CONFIG, {}).get("tie_word_embeddings") is False:
        return (
            "tie_word_embeddings=False: transformers 5.0 to 5.23 scale the logits of UMT5 nevertheless; twinax, and "
            "transformers 4 and 5.24, do not (docs/families.md)"
        )
    return None


def describe_not_finite(arrays: Mapping[str, np.ndarray]) -> str | None:
    """One line on the arrays that hold NaN or infinite numbers; None if there are none."""
    names = [name for name in arrays if not np.isfinite(arrays[name]).all()]
    if not names:
        return None
    return f"{len(names)} of {len(arrays)} arrays hold NaN or infinite numbers, first {names[0]}"
