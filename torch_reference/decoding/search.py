"""Greedy and beam search, and sampling, without a cache: each step runs the decoder over the whole hypotheses.

Letters: B sentences, S source length, K beam size.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ...configs.decoding import DecodingConfig
from ...formulas.decoding import Decoded, check_sources, collect, plan, together
from ...formulas.sampling import draws_of
from ...formulas.sentence_rules import sentence_rules
from ..inputs import check_inputs
from ..model import Transformer
from ..module import at_least_float32
from .ensembles import combine
from .state import start
from .steps import advance


@torch.no_grad()
def generate(
    model: Transformer,
    src_tokens: Int[Tensor, "B S"],
    config: DecodingConfig | None = None,
    src_mask: Bool[Tensor, "B S"] | None = None,
    sentences: np.ndarray | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> Decoded:
    """Translate a batch of sentences by beam search or sampling, as `DecodingConfig` defines it.

    `sentences` (B,): their numbers, on which samples depend; by default 0 to B - 1. `prefixes`: ids with which each
    translation begins.
    The result's `margins` are those of each sentence's closest decision: only a numerical error of at least that size
    can change it.

    Raises:
        ValueError: the batch is empty, a sentence is empty or too long, or an id is outside the vocabulary.
        ConfigError: the model cannot be decoded with `config`.
    Source: `transformers`, `generate`.
    """
    return generate_together([model], [src_tokens], config, src_mask, sentences, prefixes)


@torch.no_grad()
def generate_together(
    models: Sequence[Transformer],
    src_tokens: Sequence[Int[Tensor, "B _"]],
    config: DecodingConfig | None = None,
    src_mask: Bool[Tensor, "B S"] | None = None,
    sentences: np.ndarray | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> Decoded:
    """As `generate`, with an ensemble: models of one target vocabulary, each with its own tokens of the sources.

    The probability of a token is the mean over the models (`DecodingConfig.log_linear`: the normalized exponential of
    the mean log-probability). `src_mask` is that of a single model; lengths and n-grams of the source are the first
    model's.

    Raises:
        ValueError, ConfigError: as `generate`; or the models differ in their target vocabulary or special ids.
    """
    settings = models[0].config
    config = together([model.config for model in models], config or DecodingConfig())
    steps, beam_size = plan(settings, config), config.beam_size
    members = []
    for model, tokens in zip(models, src_tokens, strict=True):
        mask = src_mask if len(models) == 1 else None
        check_inputs("src", tokens, mask, model.config.src_vocab_size, model.config.max_length, None)
        keep = model.source_mask(tokens, mask)
        check_sources(keep.numpy(force=True))
        members.append((model, model.encode(tokens, mask), keep))
    _, memory, keep = members[0]
    rules = torch.from_numpy(sentence_rules(config, settings, keep.numpy(force=True), prefixes)).to(keep.device)
    members = [(m, *(a.repeat_interleave(beam_size, dim=0) for a in (memory, keep))) for m, memory, keep in members]

    longest, dtype = len(steps.kind) - 1, at_least_float32(memory).dtype
    assert settings.decoder_start_id is not None  # `plan` raises otherwise
    draws = torch.from_numpy(draws_of(config, settings, sentences, len(keep))).to(memory.device)
    search = start(draws, rules, config.beam_groups, longest, settings.decoder_start_id, settings.pad_id, dtype)
    while search.length < longest and not search.done.all():
        tokens = search.tokens[:, :, : search.length + 1].flatten(0, 1)
        all_logits = [
            model.decode(tokens, memory, keep)[:, -1].unflatten(0, (-1, beam_size)) for model, memory, keep in members
        ]
        log_probs = combine([at_least_float32(logits).log_softmax(-1) for logits in all_logits], config.log_linear)
        search = advance(search, log_probs, src_tokens[0], steps, settings.eos_id)
    tokens, scores, margins = (a.numpy(force=True) for a in (search.finished, search.scores, search.margins))
    return collect(tokens, scores, settings, config)._replace(margins=margins)
