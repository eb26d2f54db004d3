"""Two searches compared token for token, and `transformers`' `generate` as a third one that nobody here wrote."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..configs.decoding import Decoded, DecodingConfig, collect
from ..configs.schema import TransformerConfig


@dataclass(frozen=True)
class Agreement:
    """How far two searches agree, a sentence being equal where all its hypotheses are, in their order."""

    equal: int  # sentences
    ties: dict[int, float]  # sentence that differs -> margin of its closest decision, which rounding may turn
    different: dict[int, float]  # the same, where rounding cannot
    score_error: float  # largest difference of the scores of equal sentences

    def __str__(self) -> str:
        """One line."""
        text = f"{self.equal} sentences equal, scores within {self.score_error:.1e}"
        for name, found in (("tied", self.ties), ("different", self.different)):
            listed = ", ".join(f"{sentence} (margin {margin:.1e})" for sentence, margin in found.items())
            text += f"; {len(found)} {name}" + (f": {listed}" if found else "")
        return text


def compare_decoded(found: Decoded, expected: Decoded, rounding: float) -> Agreement:
    """Whether two searches found the same; `expected` is PyTorch's, which says how close its decisions were.

    `rounding` is the largest difference that rounding makes in a sum of log-probabilities, in nats.
    """
    assert expected.margins is not None
    longest = max(found.tokens.shape[-1], expected.tokens.shape[-1])
    mine, other = (np.pad(d.tokens, ((0, 0), (0, 0), (0, longest - d.tokens.shape[-1]))) for d in (found, expected))
    inside = np.arange(longest) < expected.lengths[..., None]
    same = (found.lengths == expected.lengths).all(1) & ((mine == other) | ~inside).all((1, 2))
    apart = [(int(i), float(expected.margins[i])) for i in np.flatnonzero(~same)]
    both = same[:, None] & (expected.lengths > 0)
    errors = np.abs(found.scores[both] - expected.scores[both])
    return Agreement(
        int(same.sum()),
        {i: margin for i, margin in apart if margin <= rounding},
        {i: margin for i, margin in apart if margin > rounding},
        float(errors.max(initial=0)),
    )


def transformers_generate(model: Any, settings: TransformerConfig, src: np.ndarray, config: DecodingConfig) -> Decoded:
    """What `model.generate` makes of a batch. A beam of 1 is its greedy search, which gives no scores: they are 0.

    Its `min_new_tokens` does not count the end, and it forbids padding only when told.
    """
    assert config.length_penalty == "power"
    tokens = torch.from_numpy(src)
    found = model.generate(
        input_ids=tokens,
        attention_mask=(tokens != settings.pad_id).long(),
        do_sample=False,
        early_stopping=False,
        num_beams=config.beam_size,
        num_return_sequences=config.n_best,
        length_penalty=config.length_exponent,
        min_new_tokens=config.min_length - 1,
        max_new_tokens=config.max_length,
        bad_words_ids=[[token] for token in (settings.pad_id, *config.forbidden_ids)],
        forced_bos_token_id=settings.forced_bos_id,
        return_dict_in_generate=True,
        output_scores=True,
    )
    shape = len(src), config.n_best
    scores = np.zeros(shape) if config.beam_size == 1 else found.sequences_scores.numpy().reshape(shape)
    return collect(found.sequences.numpy().reshape(*shape, -1), scores, settings, config)
