"""Checks of the model's inputs: a clear error instead of an index error or a broadcast shape."""

import torch
from torch import Tensor

from .dropout import DropoutKey

_INTEGERS = (torch.int64, torch.int32)


def check_inputs(
    side: str,
    tokens: Tensor,
    mask: Tensor | None,
    vocab_size: int,
    max_length: int,
    dropout_key: DropoutKey | None,
) -> None:
    """Check tokens, mask and dropout rows of one side, "src" or "tgt", against the model and each other.

    Raises:
        ValueError: names the argument, what it is, and what it must be.
    """
    name = f"{side}_tokens"
    for argument, value in ((name, tokens), (f"{side}_mask", mask)):
        present = value is not None or argument == name
        if present and not isinstance(value, Tensor):
            raise ValueError(f"{argument}: must be a torch tensor, not a {type(value).__name__}")
    shape = list(tokens.shape)
    if tokens.ndim != 2 or tokens.dtype not in _INTEGERS:
        raise ValueError(f"{name}: must be int64 or int32 of shape (batch, length), not {tokens.dtype}{shape}")
    if not 1 <= tokens.shape[1] <= max_length:
        raise ValueError(f"{name}: length {tokens.shape[1]} is not between 1 and the config's max_length={max_length}")
    if mask is not None and (mask.shape != tokens.shape or mask.dtype != torch.bool):
        raise ValueError(
            f"{side}_mask: must be booleans of shape {shape}, as {name}, "
            f"not {mask.dtype}{list(mask.shape)}; True = attend"
        )
    if dropout_key is not None and dropout_key.rows.shape != tokens.shape[:1]:
        raise ValueError(
            f"dropout_key.rows: must be {tokens.shape[0]} row numbers, one per sentence, "
            f"not of shape {list(dropout_key.rows.shape)}"
        )
    outside = ((tokens < 0) | (tokens >= vocab_size)).nonzero().tolist()
    if outside:
        row, column = outside[0]
        raise ValueError(
            f"{name}[{row}, {column}] is {tokens[row, column]}: {len(outside)} ids are outside the vocabulary, "
            f"0 to {vocab_size - 1}"
        )


def check_memory(tgt_tokens: Tensor, memory: Tensor, src_mask: Tensor) -> None:
    """Raises: ValueError if target, encoder output and source mask have different batch sizes or source lengths."""
    if not tgt_tokens.shape[0] == memory.shape[0] == src_mask.shape[0]:
        raise ValueError(
            f"src_tokens and tgt_tokens: must have the same batch size, "
            f"not {memory.shape[0]} and {tgt_tokens.shape[0]} sentences; src_mask has {src_mask.shape[0]}"
        )
    if src_mask.dtype != torch.bool:
        raise ValueError(f"src_mask: must be booleans, not {src_mask.dtype}; True = attend")
    if memory.shape[1] != src_mask.shape[1]:
        raise ValueError(f"src_mask: must have the encoder output's length {memory.shape[1]}, not {src_mask.shape[1]}")
