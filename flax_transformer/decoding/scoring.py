"""Log-probabilities and attention weights of existing translations.

Letters: B sentences, S source length, T target length.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from ...configs.schema import TransformerConfig
from ...formulas.decoding import AttentionMaps, Scored, decoder_inputs, map_names, target_mask, without_cache
from ..inputs import check_inputs
from ..model import Transformer
from ..module import activations, at_least_float32, named_arrays
from ..xla_cpu.maxima import log_softmax
from .programs import lengthen
from .search import prepare_sources


def score(
    model: Transformer, src_tokens: ArrayLike, tgt_tokens: ArrayLike, src_mask: ArrayLike | None = None
) -> Scored:
    """log p(target | source) of target sentences (B, T): without the start token, with EOS, padded at the end.

    Compiles once per batch size and pair of lengths, which are rounded up as in `generate`.

    Raises:
        ValueError: shapes do not fit, a sentence is empty, or an id is outside the vocabulary.
    """
    lengths, inputs = _prepare(model.config, src_tokens, tgt_tokens, src_mask)
    tokens = np.asarray(_compiled(model.config.replace(forced_bos_id=None))[0](named_arrays(model), *inputs))[
        :, : lengths[1]
    ]
    tokens = np.where(target_mask(np.asarray(tgt_tokens), model.config), tokens, 0)
    return Scored(tokens.sum(1), tokens)


def attention_maps(
    model: Transformer, src_tokens: ArrayLike, tgt_tokens: ArrayLike, src_mask: ArrayLike | None = None
) -> AttentionMaps:
    """All attention weights of a forward pass with these targets; arguments and exceptions as of `score`."""
    (source, target), inputs = _prepare(model.config, src_tokens, tgt_tokens, src_mask)
    encoder, decoder, cross = map(
        np.asarray, _compiled(model.config.replace(forced_bos_id=None))[1](named_arrays(model), *inputs[:3])
    )
    return AttentionMaps(encoder[..., :source, :source], decoder[..., :target, :target], cross[..., :target, :source])


def _prepare(
    config: TransformerConfig, src_tokens: ArrayLike, tgt_tokens: ArrayLike, src_mask: ArrayLike | None
) -> tuple[tuple[int, int], tuple[np.ndarray, ...]]:
    """((S, T), (sources, their mask, decoder inputs, targets)), padded to the compiled lengths."""
    (src, keep), tgt = prepare_sources(config, src_tokens, src_mask), np.asarray(tgt_tokens)
    check_inputs("tgt", tgt, None, config.tgt_vocab_size, config.max_length, None)
    if len(src) != len(tgt):
        raise ValueError(
            f"src_tokens and tgt_tokens: must have the same batch size, not {len(src)} and {len(tgt)} sentences"
        )
    tgt = tgt.astype(np.int32)
    lengths, tgt_inputs = (src.shape[1], tgt.shape[1]), decoder_inputs(tgt, config)
    if without_cache(config):  # positions depend on later ones, so padding would change them
        return lengths, (src, keep, tgt_inputs, tgt)
    src, keep = lengthen(src, config, config.pad_id), lengthen(keep, config, False)
    return lengths, (src, keep, lengthen(tgt_inputs, config, config.pad_id), lengthen(tgt, config, config.pad_id))


@lru_cache(maxsize=16)
def _compiled(config: TransformerConfig) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Two compiled functions: log-probabilities of the targets; attention weights of encoder, decoder and cross."""

    def log_probs(
        arrays: Mapping[str, Array],
        src: Int[Array, "B S"],
        keep: Bool[Array, "B S"],
        tgt_inputs: Int[Array, "B T"],
        tgt: Int[Array, "B T"],
    ) -> Float[Array, "B T"]:
        logits = Transformer.from_arrays(config, arrays)(src, tgt_inputs, keep)
        return jnp.take_along_axis(log_softmax(at_least_float32(logits)), tgt[..., None], axis=-1)[..., 0]

    def maps(
        arrays: Mapping[str, Array], src: Int[Array, "B S"], keep: Bool[Array, "B S"], tgt_inputs: Int[Array, "B T"]
    ) -> list[Float[Array, "B L N T S"]]:
        _, captures = activations(Transformer.from_arrays(config, arrays), src, tgt_inputs, keep)
        return [jnp.stack([captures[name] for name in names], axis=1) for names in map_names(config)]

    return jax.jit(log_probs), jax.jit(maps)
