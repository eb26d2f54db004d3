"""The parts of beam search that both frameworks share: its per-step tables and its result.

n is the length of a hypothesis in tokens: EOS counts, the start token does not. K is the beam size, V the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..backend.errors import ConfigError, NotFiniteError
from ..configs.decoding import DecodingConfig, Ended, SamplingConfig
from ..configs.schema import TransformerConfig


class Decoded(NamedTuple):
    """Hypotheses for B sentences, best first; N is `n_best`."""

    tokens: np.ndarray  # (B, N, longest n); padding after EOS
    lengths: np.ndarray  # (B, N); 0 for a missing hypothesis: with few allowed tokens there may be fewer than N
    scores: np.ndarray  # (B, N) sum of log-probabilities in nats, over the penalty; -inf for a missing hypothesis
    ended: np.ndarray  # (B, N) whether the last token is EOS; False: truncated at the maximum length
    margins: np.ndarray | None = None  # (B,) smallest error of a sum, in nats, that changes a decision; PyTorch only

    def sentences(self) -> list[list[list[int]]]:
        """The tokens of each hypothesis of each sentence, without EOS and padding."""
        rows = zip(self.tokens, self.lengths, self.ended, strict=True)
        return [[t[: n - e].tolist() for t, n, e in zip(*row, strict=True) if n] for row in rows]


NAN_LOGITS = "the model's logits are NaN; its weights are too large or not finite"

# n -> divisor of a sum of log-probabilities
LENGTH_PENALTIES = {
    "power": lambda n, a: n**a,
    "power_with_start": lambda n, a: (n + 1) ** a,
    "gnmt": lambda n, a: ((5 + n) / 6) ** a,
}


class Steps(NamedTuple):
    """Per-step tables of a beam search. Element n is for the n-th token; element 0 is not used."""

    kind: np.ndarray  # (longest n + 1,) row of `allowed`
    allowed: np.ndarray  # (kinds, V)
    forced: np.ndarray  # (longest n + 1,) whether the token is forced; its log-probability then counts as 0
    penalty: np.ndarray  # (longest n + 1,) float64
    ended: Ended  # the rule for finished hypotheses
    early_stopping: bool  # whether K finished hypotheses finish a sentence
    renormalize: bool  # whether the log-probabilities of the allowed tokens are normalized again
    ngram: int  # size of n-grams that may not repeat; 0: any may
    source_ngram: int  # size of n-grams that may not be those of the source; 0: any may
    sequences: tuple[tuple[int, ...], ...]  # of tokens, that are never generated
    groups: int  # of the beam
    diversity: float  # nats that a token loses for each hypothesis of an earlier group that has just taken it
    sampling: SamplingConfig | None  # the filters of what tokens are drawn from; None: beam search


def plan(model: TransformerConfig, config: DecodingConfig) -> Steps:
    """The per-step tables of a model with decoding settings; `sentence_rules` has its forced first token.

    Raises:
        ConfigError: the model cannot be decoded with these settings.
    """
    check(model, config)
    longest, eos = config.max_length or model.max_length, model.eos_id
    ordinary = np.ones(model.tgt_vocab_size, bool)
    ordinary[[*config.forbidden_ids, *([] if config.allow_padding else [model.pad_id])]] = False
    ordinary[eos] = True
    without_end = ordinary & (np.arange(len(ordinary)) != eos)
    if not without_end.any() and config.min_length > 1:
        raise ConfigError(f"min_length={config.min_length}: forbidden_ids allow no token but EOS")
    kind = np.where(np.arange(longest + 1) < config.min_length, 1, 0)
    forced = np.zeros(longest + 1, bool)
    allowed = [ordinary, without_end]
    if config.force_end:
        kind[longest], forced[longest] = len(allowed), True
        allowed.append(np.arange(len(ordinary)) == (eos if model.forced_eos_id is None else model.forced_eos_id))
    with np.errstate(over="ignore", under="ignore"):
        lengths = np.maximum(np.arange(longest + 1), 1.0)
        penalty = LENGTH_PENALTIES[config.length_penalty](lengths, config.length_exponent)
    if not (penalty > 1e-30).all() or not (penalty < 1e30).all():  # the scores must fit into float32
        raise ConfigError(
            f"length_exponent={config.length_exponent}: penalties of up to {longest} tokens are outside 1e-30 to "
            "1e30; choose a value nearer 0"
        )
    rules = config.ended, config.early_stopping, config.renormalize
    groups = config.beam_groups, config.diversity_penalty
    sizes = config.no_repeat_ngram_size, config.encoder_no_repeat_ngram_size
    return Steps(
        kind, np.stack(allowed), forced, penalty, *rules, *sizes, config.forbidden_sequences, *groups, config.sampling
    )


def together(models: Sequence[TransformerConfig], config: DecodingConfig) -> DecodingConfig:
    """The settings with which all models of an ensemble are decoded: the shortest of their maximum lengths.

    Raises:
        ConfigError: one cannot be decoded with the settings, or they differ in what a target consists of.
    """
    if not models:
        raise ConfigError("an ensemble needs a model")
    for model in models:
        check(model, config)
        for name in ("tgt_vocab_size", "pad_id", "eos_id", "decoder_start_id", "forced_bos_id", "forced_eos_id"):
            values = getattr(models[0], name), getattr(model, name)
            if values[0] != values[1]:
                raise ConfigError(f"an ensemble's models must have one {name}, not {values[0]} and {values[1]}")
    if len(models) > 1 and config.max_length is None:
        return replace(config, max_length=min(model.max_length for model in models))
    return config


def check(model: TransformerConfig, config: DecodingConfig) -> None:
    """Raises: ConfigError if a model cannot be decoded with these settings."""
    vocab = model.tgt_vocab_size
    if model.decoder_start_id is None:
        raise ConfigError("decoder_start_id=None: the model has no decoder start token; set it")
    if vocab < 2:
        raise ConfigError(f"tgt_vocab_size={vocab}: decoding needs at least 2 tokens")
    if config.beam_size > vocab and config.sampling is None:
        raise ConfigError(f"beam_size={config.beam_size}: must not be above the target vocabulary of {vocab} tokens")
    if config.max_length is not None and config.max_length > model.max_length:
        raise ConfigError(f"max_length={config.max_length}: the model's positions end at {model.max_length}")
    if config.min_length > model.max_length:
        raise ConfigError(f"min_length={config.min_length}: the model's positions end at {model.max_length}")
    if model.cross_mask == "encoder":
        raise ConfigError(
            "cross_mask='encoder': needs as many target as source tokens, so the model cannot be decoded; "
            "set cross_mask='source'"
        )
    for token in (*config.forbidden_ids, *(i for sequence in config.forbidden_sequences for i in sequence)):
        if not 0 <= token < vocab:
            name = "forbidden_ids" if token in config.forbidden_ids else "forbidden_sequences"
            raise ConfigError(f"{name}: {token} is outside the target vocabulary, 0 to {vocab - 1}")
        if token == model.eos_id and token in config.forbidden_ids:
            raise ConfigError(f"forbidden_ids: {token} is eos_id, without which decoding cannot finish; see min_length")
    if config.allow_padding and "padding" in model.decoder_mask:
        raise ConfigError(
            f"allow_padding=True: decoder_mask={model.decoder_mask!r} masks generated padding; set "
            "decoder_mask='causal'"
        )
    if config.cache and (reason := without_cache(model)):
        raise ConfigError(f"cache=True: {reason}; omit it to recompute all positions at each step")


# Scores stay within ±1e3, so a masked key has exactly zero weight only if its score is below this.
_MASKING_THRESHOLD = -1e4


def without_cache(model: TransformerConfig) -> str | None:
    """The reason why a model cannot use a key-value cache: its later tokens change earlier positions. None: it can."""
    if model.mask_value != "exact" and model.mask_value > _MASKING_THRESHOLD:
        return f"mask_value={model.mask_value} gives masked keys weight, so every position depends on later ones"
    if model.norm == "layer_norm_over_length":
        return "norm='layer_norm_over_length' mixes all positions, so every position depends on later ones"
    if model.decoder_mask == "causal_in_training":
        return "decoder_mask='causal_in_training' is not causal in evaluation, so every position depends on later ones"
    if "padding" in model.decoder_mask and model.decoder_start_id == model.pad_id:
        return f"decoder_mask={model.decoder_mask!r} masks the start token, which has the pad id"
    return None


def check_sources(mask: np.ndarray) -> None:
    """Raises: ValueError if `mask` (B, S) has no sentence, or one without a token."""
    if not mask.shape[0]:
        raise ValueError("src_tokens: there is no sentence in the batch")
    empty = np.flatnonzero(~mask.any(1))
    if len(empty):
        suffix = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise ValueError(
            f"src_tokens[{empty[0]}]{suffix}: the sentence is empty, or all its tokens are padding or masked; omit it"
        )


def collect(tokens: np.ndarray, scores: np.ndarray, model: TransformerConfig, config: DecodingConfig) -> Decoded:
    """The result of a beam search with these final hypotheses (B, K, longest n + 1), start token included.

    Raises:
        NotFiniteError: a score is NaN.
    """
    rows = np.flatnonzero(np.isnan(scores).any(1))
    if len(rows):
        raise NotFiniteError(f"src_tokens[{rows[0]}]: {NAN_LOGITS}", int(rows[0]))
    if config.beam_groups > 1:  # within a group they are in order
        order = np.argsort(-scores, axis=1, kind="stable")
        tokens, scores = (np.take_along_axis(a, i, 1) for a, i in ((tokens, order[..., None]), (scores, order)))
    tokens, scores = tokens[:, : config.n_best, 1:], scores[:, : config.n_best]
    ends, valid = tokens == model.eos_id, np.isfinite(scores)
    ended = ends.any(-1) & valid
    lengths = np.where(valid, np.where(ended, ends.argmax(-1) + 1, tokens.shape[-1]), 0)
    tokens = np.where(np.arange(tokens.shape[-1]) < lengths[..., None], tokens, model.pad_id)
    return Decoded(tokens[..., : max(1, lengths.max())], lengths, scores, ended)


class Scored(NamedTuple):
    """log p(target | source) in nats of B sentences."""

    totals: np.ndarray  # (B,)
    tokens: np.ndarray  # (B, T) log-probability of each token given its prefix; 0 for padding


class AttentionMaps(NamedTuple):
    """Attention weights by sentence, layer and head; a row sums to 1, or to 0 if fully masked. N heads, L layers."""

    encoder: np.ndarray  # (B, L, N, S, S)
    decoder: np.ndarray  # (B, L, N, T, T); row t predicts target token t, column u is the decoder's u-th input token
    cross: np.ndarray  # (B, L, N, T, S)


def decoder_inputs(tgt_tokens: np.ndarray, model: TransformerConfig) -> np.ndarray:
    """The decoder inputs for these targets (B, T): the start token, then all targets but the last.

    Raises:
        ConfigError: the model has no start token.
        ValueError: a sentence has no token.
    """
    if model.decoder_start_id is None:
        raise ConfigError("decoder_start_id=None: the model has no decoder start token; set it")
    empty = np.flatnonzero(~target_mask(tgt_tokens, model).any(1))
    if len(empty):
        raise ValueError(f"tgt_tokens[{empty[0]}]: the sentence has no token, not even eos_id={model.eos_id}")
    start = np.full_like(tgt_tokens[:, :1], model.decoder_start_id)
    return np.concatenate([start, tgt_tokens[:, :-1]], axis=1)


def target_mask(tgt_tokens: np.ndarray, model: TransformerConfig) -> np.ndarray:
    """The mask (B, T) of targets that count: all but padding. If EOS and padding share an id, the first one counts."""
    padding = tgt_tokens == model.pad_id
    first = padding & (padding.cumsum(1) == 1)
    return ~padding | (first & (model.pad_id == model.eos_id))


def map_names(model: TransformerConfig) -> tuple[list[str], list[str], list[str]]:
    """Paths of the attention weights per layer: encoder, decoder, cross-attention."""
    encoder = [f"encoder.layers.{i}.self_attention.weights" for i in range(model.num_encoder_layers)]
    decoder = [f"decoder.layers.{i}.self_attention.weights" for i in range(model.num_decoder_layers)]
    return encoder, decoder, [name.replace("self", "cross") for name in decoder]
