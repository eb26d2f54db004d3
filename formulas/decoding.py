"""What follows from a model and its decoding settings for both frameworks: the plan of a beam search, and its result.

n is the length of a hypothesis: its tokens, the end counted, the start not. K is the beam size, V the vocabulary.
"""

from typing import NamedTuple

import numpy as np

from ..configs.decoding import DecodingConfig, Ended
from ..configs.errors import ConfigError
from ..configs.schema import TransformerConfig


class Decoded(NamedTuple):
    """Hypotheses for B sentences, best first; N is `n_best`."""

    tokens: np.ndarray  # (B, N, longest n); padding after the end
    lengths: np.ndarray  # (B, N); 0 where a sentence has fewer hypotheses, which happens where few tokens are allowed
    scores: np.ndarray  # (B, N) sum of log-probabilities in nats, over the penalty; -inf where there is none
    ended: np.ndarray  # (B, N) whether the last token is the end; False: it was cut at the largest length
    margins: np.ndarray | None = None  # (B,) smallest error of a sum, in nats, that turns a decision; PyTorch's alone

    def sentences(self) -> list[list[list[int]]]:
        """Tokens of each hypothesis of each sentence, without the end and what follows it."""
        rows = zip(self.tokens, self.lengths, self.ended, strict=True)
        return [[t[: n - e].tolist() for t, n, e in zip(*row, strict=True) if n] for row in rows]


# n -> what a sum of log-probabilities is divided by
LENGTH_PENALTIES = {
    "power": lambda n, a: n**a,
    "power_with_start": lambda n, a: (n + 1) ** a,
    "gnmt": lambda n, a: ((5 + n) / 6) ** a,
}


class Steps(NamedTuple):
    """What is allowed where, as tables; row or element n is about the n-th token, and there is none for n = 0."""

    kind: np.ndarray  # (longest n + 1,) row of `allowed`
    allowed: np.ndarray  # (kinds, V)
    forced: np.ndarray  # (longest n + 1,) whether the token is given: then its log-probability counts as 0
    penalty: np.ndarray  # (longest n + 1,) float64
    ended: Ended  # the rule for hypotheses that ended


def plan(model: TransformerConfig, config: DecodingConfig) -> Steps:
    """The tables of a model and a way to decode.

    Raises:
        ConfigError: the two do not go together.
    """
    check(model, config)
    longest, eos = config.max_length or model.max_length, model.eos_id
    ordinary = np.ones(model.tgt_vocab_size, bool)
    ordinary[[*config.forbidden_ids, *([] if config.allow_padding else [model.pad_id])]] = False
    ordinary[eos] = True
    without_end = ordinary & (np.arange(len(ordinary)) != eos)
    if not without_end.any() and config.min_length > 1:
        raise ConfigError(f"min_length={config.min_length}: forbidden_ids leave no token but the end")
    forced_ids = {1: model.forced_bos_id}
    forced_ids |= {longest: eos if model.forced_eos_id is None else model.forced_eos_id} if config.force_end else {}
    forced_ids = {n: token for n, token in forced_ids.items() if token is not None}
    kind = np.where(np.arange(longest + 1) < config.min_length, 1, 0)
    forced = np.zeros(longest + 1, bool)
    allowed = [ordinary, without_end]
    for n, token in forced_ids.items():
        kind[n], forced[n] = len(allowed), True
        allowed.append(np.arange(len(ordinary)) == token)
    with np.errstate(over="ignore", under="ignore"):
        lengths = np.maximum(np.arange(longest + 1), 1.0)
        penalty = LENGTH_PENALTIES[config.length_penalty](lengths, config.length_exponent)
    if not (penalty > 1e-30).all() or not (penalty < 1e30).all():  # float32 has to hold what is divided by it
        raise ConfigError(
            f"length_exponent={config.length_exponent}: penalties of up to {longest} tokens are beyond 1e-30 to 1e30; "
            "choose it nearer 0"
        )
    return Steps(kind, np.stack(allowed), forced, penalty, config.ended)


def check(model: TransformerConfig, config: DecodingConfig) -> None:
    """Raises: ConfigError where a model cannot be decoded so."""
    vocab = model.tgt_vocab_size
    if model.decoder_start_id is None:
        raise ConfigError("decoder_start_id=None: the model does not say with which token its decoder starts; set it")
    if vocab < 2:
        raise ConfigError(f"tgt_vocab_size={vocab}: there is nothing to choose from")
    if config.beam_size > vocab:
        raise ConfigError(f"beam_size={config.beam_size}: must not be above the target vocabulary of {vocab} tokens")
    if config.max_length is not None and config.max_length > model.max_length:
        raise ConfigError(f"max_length={config.max_length}: the model's positions end at {model.max_length}")
    if config.min_length > model.max_length:
        raise ConfigError(f"min_length={config.min_length}: the model's positions end at {model.max_length}")
    if model.cross_mask == "encoder":
        raise ConfigError(
            "cross_mask='encoder': needs as many target as source tokens, which a translation has by chance only; "
            "set cross_mask='source'"
        )
    for token in config.forbidden_ids:
        if not 0 <= token < vocab:
            raise ConfigError(f"forbidden_ids: {token} is outside the target vocabulary, 0 to {vocab - 1}")
        if token == model.eos_id:
            raise ConfigError(f"forbidden_ids: {token} is eos_id, without which nothing ends; see min_length")
    if config.allow_padding and "padding" in model.decoder_mask:
        raise ConfigError(
            f"allow_padding=True: decoder_mask={model.decoder_mask!r} hides padding that was chosen; set "
            "decoder_mask='causal'"
        )
    if config.cache and (reason := without_cache(model)):
        raise ConfigError(f"cache=True: {reason}; leave it away, and all positions are computed again at each step")


# A masked key with a score above this has a share in the softmax, if a small one: scores stay below ±1e3.
HIDES = -1e4


def without_cache(model: TransformerConfig) -> str | None:
    """Why earlier positions cannot be kept, because later ones change them; None where they can."""
    if model.mask_value != "exact" and model.mask_value > HIDES:
        return f"mask_value={model.mask_value} does not hide masked keys, so that every position sees later ones"
    if model.norm == "layer_norm_over_length":
        return "norm='layer_norm_over_length' mixes all positions, so that every position sees later ones"
    if model.decoder_mask == "causal_in_training":
        return "decoder_mask='causal_in_training' lets every position see later ones"
    if "padding" in model.decoder_mask and model.decoder_start_id == model.pad_id:
        return f"decoder_mask={model.decoder_mask!r} hides the start token, which has padding's id"
    return None


def check_sources(keep: np.ndarray) -> None:
    """Raises: ValueError where there is no sentence (B, S) to translate, or one without a token."""
    if not keep.shape[0]:
        raise ValueError("src_tokens: there is no sentence in the batch")
    empty = np.flatnonzero(~keep.any(1))
    if len(empty):
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise ValueError(
            f"src_tokens[{empty[0]}]{more}: a sentence has no token, or all are padding or masked; leave it out"
        )


def collect(tokens: np.ndarray, scores: np.ndarray, model: TransformerConfig, config: DecodingConfig) -> Decoded:
    """The result of a search that ended with these hypotheses (B, K, longest n + 1), start token included.

    Raises:
        ValueError: a score is NaN.
    """
    wrong = np.flatnonzero(np.isnan(scores).any(1))
    if len(wrong):
        raise ValueError(f"src_tokens[{wrong[0]}]: the model's logits are NaN; its weights are not finite, most likely")
    tokens, scores = tokens[:, : config.n_best, 1:], scores[:, : config.n_best]
    ends, there = tokens == model.eos_id, np.isfinite(scores)
    ended = ends.any(-1) & there
    lengths = np.where(there, np.where(ended, ends.argmax(-1) + 1, tokens.shape[-1]), 0)
    tokens = np.where(np.arange(tokens.shape[-1]) < lengths[..., None], tokens, model.pad_id)
    return Decoded(tokens[..., : max(1, lengths.max())], lengths, scores, ended)


class Scored(NamedTuple):
    """log p(target | source) in nats of B sentences."""

    totals: np.ndarray  # (B,)
    tokens: np.ndarray  # (B, T) of each token, given those before it; 0 where there is padding


class AttentionMaps(NamedTuple):
    """Attention weights by sentence, layer and head; a row's weights add up to 1. N heads, L layers."""

    encoder: np.ndarray  # (B, L, N, S, S)
    decoder: np.ndarray  # (B, L, N, T, T); row t is where target token t is chosen, column u is what stands before u
    cross: np.ndarray  # (B, L, N, T, S)


def decoder_inputs(tgt_tokens: np.ndarray, model: TransformerConfig) -> np.ndarray:
    """What the decoder reads to say these tokens (B, T): the start token and all but the last.

    Raises:
        ConfigError: the model has no start token.
        ValueError: a sentence has no token.
    """
    if model.decoder_start_id is None:
        raise ConfigError("decoder_start_id=None: the model does not say with which token its decoder starts; set it")
    empty = np.flatnonzero(~counted(tgt_tokens, model).any(1))
    if len(empty):
        raise ValueError(f"tgt_tokens[{empty[0]}]: a sentence has no token, not even its end, eos_id={model.eos_id}")
    start = np.full_like(tgt_tokens[:, :1], model.decoder_start_id)
    return np.concatenate([start, tgt_tokens[:, :-1]], axis=1)


def counted(tgt_tokens: np.ndarray, model: TransformerConfig) -> np.ndarray:
    """Which target tokens (B, T) count: all but padding; where the end has padding's id, the first of them does."""
    padding = tgt_tokens == model.pad_id
    first = padding & (padding.cumsum(1) == 1)
    return ~padding | (first & (model.pad_id == model.eos_id))


def map_names(model: TransformerConfig) -> tuple[list[str], list[str], list[str]]:
    """Paths of the attention weights in encoder, decoder and between the two, by layer."""
    encoder = [f"encoder.layers.{i}.self_attention.weights" for i in range(model.num_encoder_layers)]
    decoder = [f"decoder.layers.{i}.self_attention.weights" for i in range(model.num_decoder_layers)]
    return encoder, decoder, [name.replace("self", "cross") for name in decoder]
