"""Greedy and beam search, and sampling, without a cache: each step runs the decoder over the whole hypotheses.

Letters: B sentences, S source length, K beam size.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ...configs.decoding import DecodingConfig
from ...formulas.decoding import Decoded, check_sources, collect, plan
from ...formulas.sampling import draws_of
from ...formulas.sentence_rules import sentence_rules
from ..inputs import check_inputs
from ..model import Transformer
from ..module import at_least_float32
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
    config = config or DecodingConfig()
    steps, settings, beam_size = plan(model.config, config), model.config, config.beam_size
    check_inputs("src", src_tokens, src_mask, settings.src_vocab_size, settings.max_length, None)
    keep = model.source_mask(src_tokens, src_mask)
    check_sources(keep.numpy(force=True))
    rules = torch.from_numpy(sentence_rules(config, settings, keep.numpy(force=True), prefixes)).to(keep.device)
    memory = model.encode(src_tokens, src_mask).repeat_interleave(beam_size, dim=0)
    keep = keep.repeat_interleave(beam_size, dim=0)

    longest, dtype = len(steps.kind) - 1, at_least_float32(memory).dtype
    assert settings.decoder_start_id is not None  # `plan` raises otherwise
    draws = torch.from_numpy(draws_of(config, settings, sentences, len(src_tokens))).to(memory.device)
    search = start(draws, rules, config.beam_groups, longest, settings.decoder_start_id, settings.pad_id, dtype)
    while search.length < longest and not search.done.all():
        prefixes = search.tokens[:, :, : search.length + 1].flatten(0, 1)
        logits = model.decode(prefixes, memory, keep)[:, -1].unflatten(0, (-1, beam_size))
        search = advance(search, at_least_float32(logits).log_softmax(-1), src_tokens, steps, settings.eos_id)
    tokens, scores, margins = (a.numpy(force=True) for a in (search.finished, search.scores, search.margins))
    return collect(tokens, scores, settings, config)._replace(margins=margins)
